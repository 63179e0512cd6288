"""The handshake: two frames of the dialer, two answers of the listener.

::

    dialer                                             listener
    HELLO     {version, identity, incarnation,         →
               limits, nonce}
                                                       ←  CHALLENGE {the same, least incarnation}
    AUTH      {incarnation, least incarnation, HMAC}   →
                                                       ←  WELCOME   {incarnation, session, HMAC}

Each side proves that it has the run's key with an HMAC-SHA256 over everything exchanged so far, so
no message can be altered on the way and no earlier handshake can be replayed. The session key is
derived from the run's key and both nonces with HKDF (RFC 5869).

Incarnations order the processes that have used a node id. No process counts its own starts: each
side replies with the least incarnation that the other one may have according to what it knows about
that node id, and a process takes the largest of these numbers.

Without a key, which is allowed on loopback only, the same four messages agree on the session
without signatures. Nonces and session numbers are passed in.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused
from dmiddleware.router.wire.frame import VERSION, read_metadata

__all__ = [
    "Identity",
    "PeerLimits",
    "Session",
    "Refusal",
    "DialerHandshake",
    "KnownPeers",
    "ListenerHandshake",
    "check_incarnation",
    "hkdf",
    "INSTANCE_SIZE",
    "MAX_HANDSHAKE_BYTES",
    "MAX_IDENTITY_BYTES",
    "MIN_EVENT_BYTES",
]

MAX_HANDSHAKE_BYTES: Final = 4096
"""The largest handshake message that either side reads."""

MAX_IDENTITY_BYTES: Final = MAX_HANDSHAKE_BYTES - 256
"""The largest encoded identity; the rest of a handshake message holds its other fields."""

INSTANCE_SIZE: Final = 16
"""Bytes of a process's random name."""

MAX_INCARNATION: Final = 1 << 48

MAX_UNKNOWN: Final = 1 << 20
"""How many processes may have used a node id without this node knowing. A larger number would use
up the incarnations that are left for those to come."""

MIN_EVENT_BYTES: Final = 8192
"""The smallest limit for events that a node may announce."""

MAX_NAMES: Final = 64
"""The most roles, and the most labels, of a node."""

MAX_NAME: Final = 256
"""The most characters in a run id, a role or a label."""

MAX_REASON: Final = 500
"""The most characters of a refusal that are shown; anyone may have written it."""

NONCE_SIZE: Final = 32

_Incarnation: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_INCARNATION)]
_Name: TypeAlias = Annotated[
    str, Meta(max_length=MAX_NAME, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*\Z")
]
_Nonce: TypeAlias = Annotated[bytes, Meta(min_length=NONCE_SIZE, max_length=NONCE_SIZE)]
_Proof: TypeAlias = Annotated[bytes, Meta(max_length=32)]


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a node.

    Attributes:
        run_id: the run that it belongs to; nodes of different runs refuse each other.
        node_id: a decimal number, unique in the run.
        instance: random bytes, which distinguish the processes that use a node id.
        roles: the node's roles, for example ``("collector",)``.
        labels: arbitrary labels for ``match_labels``.
    """

    run_id: _Name
    node_id: Annotated[str, Meta(pattern=r"\A(0|[1-9][0-9]{0,17})\Z")]
    instance: Annotated[bytes, Meta(min_length=INSTANCE_SIZE, max_length=INSTANCE_SIZE)]
    roles: Annotated[tuple[_Name, ...], Meta(max_length=MAX_NAMES)] = ()
    labels: Annotated[tuple[_Name, ...], Meta(max_length=MAX_NAMES)] = ()

    def check(self) -> None:
        """Check that peers accept this identity.

        Raises:
            ValueError: if they do not.
        """
        raw = _encode(self)
        try:
            msgspec.msgpack.decode(raw, type=Identity)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{error}; run ids, roles and labels have at most {MAX_NAME} characters, none of "
                f"them a control character, and there are at most {MAX_NAMES} of each"
            ) from error
        if len(raw) > MAX_IDENTITY_BYTES:
            raise ValueError(
                f"the run id, roles and labels have {len(raw)} bytes, but at most "
                f"{MAX_IDENTITY_BYTES} fit into a handshake; use shorter ones"
            )


class PeerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits that a node announces to its peer.

    Attributes:
        max_event_bytes: the largest event that it accepts.
        inbox_bytes: how many bytes of each reliable stream it accepts when it has none.
        outbox_bytes: how many unacknowledged bytes of each reliable stream it keeps.
        max_event_names: how many event names it accepts from one peer.
    """

    max_event_bytes: Annotated[int, Meta(ge=MIN_EVENT_BYTES, le=1 << 48)]
    inbox_bytes: Annotated[int, Meta(ge=1, le=1 << 60)]
    outbox_bytes: Annotated[int, Meta(ge=1, le=1 << 60)]
    max_event_names: Annotated[int, Meta(ge=1, le=1 << 32)]


@dataclass(frozen=True, slots=True)
class Session:
    """The result of a handshake.

    Attributes:
        number: chosen by the listener; every frame carries it.
        identity: identity of the other side.
        incarnation: incarnation of the other side.
        own_incarnation: incarnation of this side.
        key: 32 bytes to sign frames with; None without a run key.
        limits: limits of the other side.
    """

    number: int
    identity: Identity
    incarnation: int
    own_incarnation: int
    key: bytes | None
    limits: PeerLimits


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a listener refuses a dialer.

    Attributes:
        code: the kind of reason.
        reason: the reason in words.
        proof: HMAC over the refused frame and both of them; empty without a key.
    """

    code: str
    reason: str
    proof: _Proof = b""


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    identity: Identity
    incarnation: _Incarnation
    nonce: _Nonce
    keyed: bool
    limits: PeerLimits


class _Challenge(_Hello, frozen=True, forbid_unknown_fields=True):
    least_incarnation: _Incarnation


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class _Auth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    incarnation: _Incarnation
    least_incarnation: _Incarnation
    proof: _Proof


class _Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session: Annotated[int, Meta(ge=1)]
    incarnation: _Incarnation
    proof: _Proof


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_version_decoder = msgspec.msgpack.Decoder(_Versioned)
_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_challenge_decoder = msgspec.msgpack.Decoder(_Challenge)
_auth_decoder = msgspec.msgpack.Decoder(_Auth)
_welcome_decoder = msgspec.msgpack.Decoder(_Welcome)
_refusal_decoder = msgspec.msgpack.Decoder(Refusal)


def hkdf(key: bytes, *, salt: bytes, info: bytes) -> bytes:
    """Derive 32 bytes from a key (RFC 5869 with SHA-256, one block)."""
    extracted = hmac.digest(salt, key, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def check_incarnation(incarnation: int, least: int) -> None:
    """Check that an incarnation may be what it claims.

    Args:
        incarnation: the incarnation.
        least: the least that it may be, as far as this node knows.

    Raises:
        FrameError: if more processes than any run has must have been there.
    """
    if incarnation > least + MAX_UNKNOWN:
        raise FrameError(
            f"the peer claims incarnation {incarnation}, but this node knows of {least}; the peer "
            "does not follow the protocol"
        )


class KnownPeers(Protocol):
    """What a node knows about the processes that have used each node id."""

    def least_incarnation(self, identity: Identity) -> int:
        """Return the least incarnation that a process may have."""
        ...

    def admit(self, identity: Identity, incarnation: int, *, dialed: bool) -> Refusal | None:
        """Return why a process may not join, or None if it may.

        Args:
            identity: identity of the process.
            incarnation: its incarnation before this handshake.
            dialed: whether this node has dialed it.
        """
        ...


class DialerHandshake:
    """The dialer's side of one attempt.

    Args:
        identity: identity of the dialer.
        key: the run's key; None without one.
        incarnation: incarnation of the dialer so far.
        nonce: 32 fresh random bytes.
        limits: limits of the dialer.
        known: decides about the listener.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes | None,
        *,
        incarnation: int,
        nonce: bytes,
        limits: PeerLimits,
        known: KnownPeers,
    ) -> None:
        self._key = key
        self._run_id = identity.run_id
        self._incarnation = incarnation
        self._known = known
        hello = _Hello(VERSION, identity, incarnation, nonce, key is not None, limits)
        self._hello = _encode(hello)
        self._challenge = b""
        self._auth = b""
        self._peer: _Challenge | None = None

    @property
    def listener(self) -> Identity | None:
        """The identity that the listener claims; None before its first answer."""
        return None if self._peer is None else self._peer.identity

    def hello(self) -> bytes:
        """Return the first frame."""
        return self._hello

    @property
    def awaits_welcome(self) -> bool:
        """Whether the listener may already have accepted this node."""
        return bool(self._auth)

    def on_challenge(self, raw: bytes | memoryview) -> bytes:
        """Process the listener's first answer; return the next frame.

        Raises:
            HandshakeRefused: if the listener has another protocol version or run id, if only one
                side has a key, or if ``known`` refuses the listener.
            FrameError: if it is not a valid CHALLENGE.
        """
        peer = _read_hello(_challenge_decoder, raw, "CHALLENGE")
        _check_run(peer, run_id=self._run_id, keyed=self._key is not None)
        self._check_listener(peer)
        check_incarnation(peer.least_incarnation, self._incarnation)
        self._peer, self._challenge = peer, bytes(raw)
        self._incarnation = max(self._incarnation, peer.least_incarnation)
        auth = _Auth(self._incarnation, self._known.least_incarnation(peer.identity), b"")
        proof = _proof(self._key, b"dialer", self._transcript() + _encode(auth))
        self._auth = _encode(msgspec.structs.replace(auth, proof=proof))
        return self._auth

    def on_welcome(self, raw: bytes | memoryview) -> Session:
        """Process the listener's second answer.

        Raises:
            AuthError: if the listener does not have the run's key.
            HandshakeRefused: if ``known`` refuses the listener by now.
            FrameError: if it is not a valid WELCOME.
        """
        if self._peer is None:
            raise FrameError("got WELCOME before CHALLENGE; start a new handshake")
        welcome = _read(_welcome_decoder, raw, "WELCOME")
        _check_proof(
            self._key,
            b"listener",
            self._transcript() + self._auth + _unsigned(welcome),
            welcome.proof,
        )
        check_incarnation(welcome.incarnation, self._known.least_incarnation(self._peer.identity))
        self._check_listener(self._peer)
        return Session(
            number=welcome.session,
            identity=self._peer.identity,
            incarnation=welcome.incarnation,
            own_incarnation=self._incarnation,
            key=_session_key(self._key, self._transcript()),
            limits=self._peer.limits,
        )

    def on_refused(self, raw: bytes | memoryview) -> HandshakeRefused:
        """Read a refusal of the latest frame; return the error to raise.

        It is ``verified`` if the listener has signed it with the run's key. Anyone can forge or
        replay others, so they end one attempt only.

        Raises:
            FrameError: if it is not a valid REFUSED.
        """
        refusal = _read(_refusal_decoder, raw, "REFUSED")
        expected = _refusal_proof(self._key, self._auth or self._hello, refusal)
        verified = hmac.compare_digest(expected, refusal.proof)
        reason = _printable(refusal.reason, MAX_REASON)
        return HandshakeRefused(reason, code=_printable(refusal.code, MAX_NAME), verified=verified)

    def _check_listener(self, peer: _Challenge) -> None:
        check_incarnation(peer.incarnation, self._known.least_incarnation(peer.identity))
        refusal = self._known.admit(peer.identity, peer.incarnation, dialed=True)
        if refusal is not None:
            raise HandshakeRefused(f"the listener is refused: {refusal.reason}", code=refusal.code)

    def _transcript(self) -> bytes:
        return _transcript(self._hello, self._challenge)


class ListenerHandshake:
    """The listener's side of one attempt.

    Args:
        identity: identity of the listener.
        key: the run's key; None without one.
        limits: limits of the listener.
        nonce: returns 32 fresh random bytes.
        session_number: returns a fresh, non-zero number that was never returned before.
        incarnation: returns the incarnation of the listener so far.
        known: decides about the dialer.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes | None,
        *,
        limits: PeerLimits,
        nonce: Callable[[], bytes],
        session_number: Callable[[], int],
        incarnation: Callable[[], int],
        known: KnownPeers,
    ) -> None:
        self._identity = identity
        self._key = key
        self._limits = limits
        self._nonce = nonce
        self._session_number = session_number
        self._incarnation = incarnation
        self._known = known
        self._hello: _Hello | None = None
        self._transcript = b""

    def on_hello(self, raw: bytes | memoryview) -> bytes:
        """Return the CHALLENGE that replies to a HELLO.

        Raises:
            HandshakeRefused: if the dialer is refused; send it the reason in a REFUSED.
            FrameError: if it is not a valid HELLO, or not the first.
        """
        if self._hello is not None:
            raise FrameError("got a second HELLO over one connection")
        hello = _read_hello(_hello_decoder, raw, "HELLO")
        _check_run(hello, run_id=self._identity.run_id, keyed=self._key is not None)
        challenge = _encode(
            _Challenge(
                version=VERSION,
                identity=self._identity,
                incarnation=self._incarnation(),
                nonce=self._nonce(),
                keyed=self._key is not None,
                limits=self._limits,
                least_incarnation=self._known.least_incarnation(hello.identity),
            )
        )
        self._hello, self._transcript = hello, _transcript(raw, challenge)
        return challenge

    def on_auth(self, raw: bytes | memoryview) -> tuple[bytes, Session]:
        """Return the WELCOME that replies to an AUTH, and the session that starts with it.

        Raises:
            AuthError: if the dialer does not have the run's key.
            HandshakeRefused: if ``known`` refuses it by now.
            FrameError: if it is not a valid AUTH, or does not follow a HELLO.
        """
        auth = _read(_auth_decoder, raw, "AUTH")
        hello, transcript = self._hello, self._transcript
        if hello is None or not transcript:
            raise FrameError("got AUTH before HELLO, or a second time")
        self._transcript = b""
        _check_proof(self._key, b"dialer", transcript + _unsigned(auth), auth.proof)
        check_incarnation(auth.incarnation, self._known.least_incarnation(hello.identity))
        check_incarnation(auth.least_incarnation, self._incarnation())
        refusal = self._known.admit(hello.identity, hello.incarnation, dialed=False)
        if refusal is not None:
            raise HandshakeRefused(refusal.reason, code=refusal.code)
        if auth.incarnation < self._known.least_incarnation(hello.identity):
            raise HandshakeRefused(
                f"another process has joined as node {hello.identity.node_id} during the "
                "handshake; start a new one",
                code="stale",
            )
        number = self._session_number()
        incarnation = max(self._incarnation(), auth.least_incarnation)
        welcome = _Welcome(number, incarnation, b"")
        proof = _proof(self._key, b"listener", transcript + bytes(raw) + _encode(welcome))
        session = Session(
            number=number,
            identity=hello.identity,
            incarnation=auth.incarnation,
            own_incarnation=incarnation,
            key=_session_key(self._key, transcript),
            limits=hello.limits,
        )
        return _encode(msgspec.structs.replace(welcome, proof=proof)), session

    def refusal(self, error: HandshakeRefused | AuthError, request: bytes | memoryview) -> bytes:
        """Return the REFUSED that gives the dialer the reason.

        Args:
            error: the reason.
            request: the refused HELLO or AUTH. Both depend on fresh nonces, so the signature is
                valid for this attempt only.
        """
        code = error.code if isinstance(error, HandshakeRefused) else "key"
        refusal = Refusal(code, str(error))
        proof = _refusal_proof(self._key, request, refusal)
        return _encode(msgspec.structs.replace(refusal, proof=proof))


def _read(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    if len(raw) > MAX_HANDSHAKE_BYTES:
        raise FrameError(
            f"got a {what} of {len(raw)} bytes, at most {MAX_HANDSHAKE_BYTES} are read"
        )
    return read_metadata(decoder, raw, what)


def _read_hello(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    # The version first: other versions may encode the rest differently.
    version = _read(_version_decoder, raw, what).version
    if version != VERSION:
        raise HandshakeRefused(
            f"the two sides have protocol versions {version} and {VERSION}; install the same "
            "version of dmiddleware on all hosts",
            code="version",
        )
    return _read(decoder, raw, what)


def _check_run(peer: _Hello, *, run_id: str, keyed: bool) -> None:
    if peer.keyed != keyed:
        raise HandshakeRefused(
            "one of the two nodes has a key and the other does not; give all nodes of the run the "
            "same key",
            code="key",
        )
    if peer.identity.run_id != run_id:
        raise HandshakeRefused(
            f"one of the two nodes belongs to run {run_id!r}, and the other to run "
            f"{peer.identity.run_id!r}; check the address, or give both the same run id",
            code="run",
        )


def _printable(text: str, most: int) -> str:
    """Return a text of a stranger, so that it is one line, and changes nothing on a terminal."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text[:most])


def _transcript(hello: bytes | memoryview, challenge: bytes) -> bytes:
    return hashlib.sha256(hello).digest() + hashlib.sha256(challenge).digest()


def _unsigned(message: _Auth | _Welcome) -> bytes:
    return _encode(msgspec.structs.replace(message, proof=b""))


def _proof(key: bytes | None, side: bytes, said: bytes) -> bytes:
    return b"" if key is None else hmac.digest(key, b"dmw " + side + b"\x00" + said, "sha256")


def _refusal_proof(key: bytes | None, request: bytes | memoryview, refusal: Refusal) -> bytes:
    said = hashlib.sha256(request).digest() + _encode((refusal.code, refusal.reason))
    return _proof(key, b"refusal", said)


def _check_proof(key: bytes | None, side: bytes, said: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(_proof(key, side, said), proof):
        raise AuthError(
            "the peer does not have this run's key; give all nodes of the run the same key"
        )


def _session_key(key: bytes | None, transcript: bytes) -> bytes | None:
    return None if key is None else hkdf(key, salt=transcript, info=b"dmw session")
