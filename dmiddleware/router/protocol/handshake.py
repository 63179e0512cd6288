"""How two nodes get to trust each other: two requests of the dialer, two answers of the listener.

::

    dialer                                             listener
    HELLO     {versions, run, node, roles, nonce}  →
                                                   ←   CHALLENGE {the same of its own}
    AUTH      {HMAC over both}                     →
                                                   ←   WELCOME   {HMAC over all, session, limits}

Each side proves that it has the run's key by an HMAC-SHA256 over everything said so far, so that
nothing said can have been changed on the way, and no old conversation can be played again. The
session key comes from the run's key and both nonces by HKDF (RFC 5869).

Without a key (allowed on loopback only) the same four messages agree on the session, unsigned.

Nothing here owns a socket, a thread or a clock; nonces and session numbers are given from outside.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused
from dmiddleware.router.wire.frame import VERSION, read_metadata

__all__ = [
    "Identity",
    "Limits",
    "Session",
    "Refusal",
    "DialerHandshake",
    "ListenerHandshake",
    "hkdf",
    "MAX_HANDSHAKE_BYTES",
    "MAX_IDENTITY_BYTES",
]

MAX_HANDSHAKE_BYTES: Final = 4096
"""What either side reads of a peer that has not proved itself yet."""

MAX_IDENTITY_BYTES: Final = MAX_HANDSHAKE_BYTES - 256
"""What a node may say of itself, encoded; the rest is for what a handshake needs beside it."""

NONCE_SIZE: Final = 32
PENDING_LIMIT: Final = 1024
PENDING_S: Final = 5.0


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a node is.

    Attributes:
        run_id: the run that it belongs to; nodes of different runs refuse each other.
        node_id: unique in the run.
        incarnation: grows with each start of the node's process.
        roles: what it does, for example ``("collector",)``.
        labels: free words for ``match_labels``.
    """

    run_id: str
    node_id: str
    incarnation: int
    roles: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Its bytes on the wire; a handshake has room for :data:`MAX_IDENTITY_BYTES`."""
        return len(_encode(self))


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a listener takes.

    Attributes:
        max_frame_bytes: the largest frame.
        credit_bytes: how much may be under way before an acknowledgement grants more.
        window: how many frames may be unacknowledged.
        data_address: where data goes; empty: the address that control uses.
    """

    max_frame_bytes: int
    credit_bytes: int
    window: int
    data_address: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """What both sides hold after the handshake.

    Attributes:
        number: chosen by the listener; every frame carries it.
        peer: who the other side is.
        key: 32 bytes to sign frames with; None without a run key.
        limits: what the peer takes. A dialer says how large its frames may be, and no more: what
            goes to it rides on answers.
    """

    number: int
    peer: Identity
    key: bytes | None
    limits: Limits


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a listener does not let a dialer in."""

    code: str
    reason: str


class _Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    identity: Identity
    nonce: bytes
    keyed: bool
    max_frame_bytes: int


class _Versioned(msgspec.Struct, frozen=True):
    version: int


class _Auth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    challenge: bytes
    proof: bytes


class _Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    session: int
    limits: Limits
    proof: bytes


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_version_decoder = msgspec.msgpack.Decoder(_Versioned)
_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_auth_decoder = msgspec.msgpack.Decoder(_Auth)
_welcome_decoder = msgspec.msgpack.Decoder(_Welcome)
_refusal_decoder = msgspec.msgpack.Decoder(Refusal)


def hkdf(key: bytes, *, salt: bytes, info: bytes) -> bytes:
    """Derive 32 bytes from a key (RFC 5869 with SHA-256, one block)."""
    extracted = hmac.digest(salt, key, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


class DialerHandshake:
    """The dialer's side; one object a try.

    Args:
        identity: who dials.
        key: the run's key; None without one.
        nonce: 32 fresh random bytes.
        max_frame_bytes: the largest frame that it takes.
    """

    def __init__(
        self, identity: Identity, key: bytes | None, *, nonce: bytes, max_frame_bytes: int
    ) -> None:
        self._key = key
        self._hello = _encode(_Hello(VERSION, identity, nonce, key is not None, max_frame_bytes))
        self._challenge = b""
        self._auth = b""
        self._peer: _Hello | None = None

    def hello(self) -> bytes:
        """Return what to send first."""
        return self._hello

    def on_challenge(self, raw: bytes | memoryview) -> bytes:
        """Take the listener's first answer; return what to send next.

        Raises:
            HandshakeRefused: if the listener speaks another version, or one side has a key and the
                other has none.
            FrameError: if the answer is none.
        """
        peer = _read_hello(raw, "CHALLENGE")
        if peer.keyed != (self._key is not None):
            raise HandshakeRefused(_key_mismatch(peer.keyed), code="key")
        self._peer, self._challenge = peer, bytes(raw)
        self._auth = _encode(
            _Auth(_name_of(self._challenge), _proof(self._key, b"dialer", self._transcript()))
        )
        return self._auth

    def on_welcome(self, raw: bytes | memoryview) -> Session:
        """Take the listener's second answer.

        Raises:
            AuthError: if the listener does not have the run's key.
            FrameError: if the answer is none.
        """
        if self._peer is None:
            raise FrameError("WELCOME came before CHALLENGE; dial anew")
        welcome = _read(_welcome_decoder, raw, "WELCOME")
        _check_proof(
            self._key,
            b"listener",
            self._transcript() + self._auth + _promise(welcome),
            welcome.proof,
        )
        return Session(
            number=welcome.session,
            peer=self._peer.identity,
            key=_session_key(self._key, self._transcript()),
            limits=welcome.limits,
        )

    @staticmethod
    def on_refused(raw: bytes | memoryview) -> HandshakeRefused:
        """Read a refusal; return the error to raise. It is unsigned: believe it for one try."""
        refusal = _read(_refusal_decoder, raw, "REFUSED")
        return HandshakeRefused(refusal.reason, code=refusal.code)

    def _transcript(self) -> bytes:
        return _transcript(self._hello, self._challenge)


class ListenerHandshake:
    """The listener's side, for all dialers; it remembers each one between its two requests.

    Args:
        identity: who listens.
        key: the run's key; None without one.
        limits: told to each dialer.
        nonce: returns 32 fresh random bytes.
        session_number: returns a fresh number that was never given before, not 0.
        admit: decides whether a proven dialer may join; returns None or why not.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes | None,
        *,
        limits: Limits,
        nonce: Callable[[], bytes],
        session_number: Callable[[], int],
        admit: Callable[[Identity], Refusal | None],
    ) -> None:
        self._identity = identity
        self._key = key
        self._limits = limits
        self._nonce = nonce
        self._session_number = session_number
        self._admit = admit
        self._pending: OrderedDict[bytes, tuple[float, _Hello, bytes, bytes]] = OrderedDict()

    @property
    def pending(self) -> int:
        """How many dialers have said hello and not proved themselves yet."""
        return len(self._pending)

    def on_hello(self, raw: bytes | memoryview, now: float) -> bytes:
        """Answer a HELLO with a CHALLENGE.

        Args:
            raw: what came.
            now: time in seconds, of any clock that does not go back.

        Raises:
            HandshakeRefused: the reason goes to the dialer in a REFUSED.
            FrameError: if it is no HELLO.
        """
        hello = _read_hello(raw, "HELLO")
        if hello.keyed != (self._key is not None):
            raise HandshakeRefused(_key_mismatch(hello.keyed), code="key")
        if hello.identity.run_id != self._identity.run_id:
            raise HandshakeRefused(
                f"this node belongs to run {self._identity.run_id!r}, the dialer to "
                f"{hello.identity.run_id!r}; check the address, or give both one run id",
                code="run",
            )
        self._forget(now)
        challenge = _encode(
            _Hello(
                VERSION,
                self._identity,
                self._nonce(),
                self._key is not None,
                self._limits.max_frame_bytes,
            )
        )
        self._pending[_name_of(challenge)] = (now, hello, bytes(raw), challenge)
        return challenge

    def on_auth(self, raw: bytes | memoryview, now: float) -> tuple[bytes, Session]:
        """Answer an AUTH with a WELCOME.

        Returns:
            What to send, and the session that begins with it.

        Raises:
            AuthError: if the dialer does not have the run's key.
            HandshakeRefused: if ``admit`` does not let it in, or if it answers a challenge that is
                unknown, used or older than 5 seconds (``stale``).
            FrameError: if it is no AUTH.
        """
        auth = _read(_auth_decoder, raw, "AUTH")
        self._forget(now)
        known = self._pending.pop(auth.challenge, None)
        if known is None:
            # Not of a wrong key: the dialer stood still for too long, or too many dialed at once.
            raise HandshakeRefused(
                "the answer is to no challenge of this node; dial anew", code="stale"
            )
        _, hello, hello_raw, challenge = known
        transcript = _transcript(hello_raw, challenge)
        _check_proof(self._key, b"dialer", transcript, auth.proof)
        refusal = self._admit(hello.identity)
        if refusal is not None:
            raise HandshakeRefused(refusal.reason, code=refusal.code)
        number = self._session_number()
        promise = _Welcome(number, self._limits, b"")
        proof = _proof(self._key, b"listener", transcript + bytes(raw) + _promise(promise))
        session = Session(
            number=number,
            peer=hello.identity,
            key=_session_key(self._key, transcript),
            limits=msgspec.structs.replace(self._limits, max_frame_bytes=hello.max_frame_bytes),
        )
        return _encode(_Welcome(number, self._limits, proof)), session

    @staticmethod
    def refusal(error: HandshakeRefused | AuthError) -> bytes:
        """Return the bytes of a REFUSED that tell the dialer why."""
        code = error.code if isinstance(error, HandshakeRefused) else "key"
        return _encode(Refusal(code, str(error)))

    def _forget(self, now: float) -> None:
        while self._pending:
            name, (since, *_) = next(iter(self._pending.items()))
            if now - since <= PENDING_S and len(self._pending) < PENDING_LIMIT:
                break
            del self._pending[name]


def _read(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    if len(raw) > MAX_HANDSHAKE_BYTES:
        raise FrameError(f"a {what} has at most {MAX_HANDSHAKE_BYTES} bytes, {len(raw)} came")
    return read_metadata(decoder, raw, what)


def _read_hello(raw: bytes | memoryview, what: str) -> _Hello:
    # The version first: what else another version says cannot be known.
    version = _read(_version_decoder, raw, what).version
    if version != VERSION:
        raise HandshakeRefused(
            f"one side speaks version {version}, the other {VERSION}; install one version of "
            "dmiddleware on all hosts",
            code="version",
        )
    hello = _read(_hello_decoder, raw, what)
    if len(hello.nonce) != NONCE_SIZE:
        raise FrameError(f"a nonce has {NONCE_SIZE} bytes, {len(hello.nonce)} came")
    return hello


def _key_mismatch(peer_keyed: bool) -> str:
    have, lack = ("the peer", "this side") if peer_keyed else ("this side", "the peer")
    return f"{have} has a key and {lack} has none; give all nodes of the run the same key"


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    return hashlib.sha256(hello).digest() + hashlib.sha256(challenge).digest()


def _name_of(challenge: bytes) -> bytes:
    return hashlib.sha256(challenge).digest()[:16]


def _promise(welcome: _Welcome) -> bytes:
    return _encode((welcome.session, welcome.limits))


def _proof(key: bytes | None, side: bytes, said: bytes) -> bytes:
    return b"" if key is None else hmac.digest(key, b"dmw " + side + b"\x00" + said, "sha256")


def _check_proof(key: bytes | None, side: bytes, said: bytes, proof: bytes) -> None:
    if not hmac.compare_digest(_proof(key, side, said), proof):
        raise AuthError("the peer does not have this run's key; give all nodes the same key")


def _session_key(key: bytes | None, transcript: bytes) -> bytes | None:
    return None if key is None else hkdf(key, salt=transcript, info=b"dmw session")
