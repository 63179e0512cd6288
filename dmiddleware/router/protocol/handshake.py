"""The handshake: two requests of the dialer, two replies of the listener.

::

    dialer                                             listener
    HELLO     {version, identity, nonce}           →
                                                   ←   CHALLENGE {version, identity, nonce}
    AUTH      {HMAC over both}                     →
                                                   ←   WELCOME   {HMAC over all, session, limits}

Each side proves that it has the run's key with an HMAC-SHA256 over everything exchanged so far, so
no message can be altered on the way and no earlier handshake can be replayed. The session key is
derived from the run's key and both nonces with HKDF (RFC 5869).

Without a key, which is allowed on loopback only, the same four messages agree on the session
without signatures. Nonces and session numbers are passed in.
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
    "PeerLimits",
    "Session",
    "Refusal",
    "DialerHandshake",
    "ListenerHandshake",
    "hkdf",
    "MAX_HANDSHAKE_BYTES",
    "MAX_IDENTITY_BYTES",
]

MAX_HANDSHAKE_BYTES: Final = 4096
"""The largest handshake message that either side reads."""

MAX_IDENTITY_BYTES: Final = MAX_HANDSHAKE_BYTES - 256
"""The largest encoded identity; the rest of a handshake message holds its other fields."""

NONCE_SIZE: Final = 32
PENDING_LIMIT: Final = 1024
PENDING_S: Final = 5.0


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a node.

    Attributes:
        run_id: the run that it belongs to; nodes of different runs refuse each other.
        node_id: unique in the run.
        incarnation: increases with each start of the node's process.
        roles: the node's roles, for example ``("collector",)``.
        labels: arbitrary labels for ``match_labels``.
    """

    run_id: str
    node_id: str
    incarnation: int
    roles: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Encoded size in bytes; at most :data:`MAX_IDENTITY_BYTES` fit into a handshake."""
        return len(_encode(self))


class PeerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits that a node announces to its peer.

    Attributes:
        max_frame_bytes: the largest frame that it accepts.
        credit_bytes: how many bytes it accepts before an acknowledgement grants more.
        window: how many frames may be unacknowledged.
        data_address: address for data; empty: the same as for control.
    """

    max_frame_bytes: int
    credit_bytes: int
    window: int
    data_address: str = ""


@dataclass(frozen=True, slots=True)
class Session:
    """The result of a handshake.

    Attributes:
        number: chosen by the listener; every frame carries it.
        identity: identity of the other side.
        key: 32 bytes to sign frames with; None without a run key.
        limits: limits of the other side. Of a dialer only ``max_frame_bytes`` is known, because
            data for it travels in replies.
    """

    number: int
    identity: Identity
    key: bytes | None
    limits: PeerLimits


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a listener refuses a dialer.

    Attributes:
        code: the kind of reason.
        reason: the reason in words.
        proof: HMAC over the refused request and both of them; empty without a key.
    """

    code: str
    reason: str
    proof: bytes = b""


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
    limits: PeerLimits
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
    """The dialer's side of one attempt.

    Args:
        identity: identity of the dialer.
        key: the run's key; None without one.
        nonce: 32 fresh random bytes.
        max_frame_bytes: the largest frame that the dialer accepts.
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
        """Return the first request."""
        return self._hello

    def on_challenge(self, raw: bytes | memoryview) -> bytes:
        """Process the listener's first reply; return the next request.

        Raises:
            HandshakeRefused: if the listener has another protocol version, or only one side has a
                key.
            FrameError: if it is not a valid CHALLENGE.
        """
        peer = _read_hello(raw, "CHALLENGE")
        if peer.keyed != (self._key is not None):
            raise HandshakeRefused(_KEY_MISMATCH, code="key")
        self._peer, self._challenge = peer, bytes(raw)
        self._auth = _encode(
            _Auth(_name_of(self._challenge), _proof(self._key, b"dialer", self._transcript()))
        )
        return self._auth

    def on_welcome(self, raw: bytes | memoryview) -> Session:
        """Process the listener's second reply.

        Raises:
            AuthError: if the listener does not have the run's key.
            FrameError: if it is not a valid WELCOME.
        """
        if self._peer is None:
            raise FrameError("got WELCOME before CHALLENGE; start a new handshake")
        welcome = _read(_welcome_decoder, raw, "WELCOME")
        _check_proof(
            self._key,
            b"listener",
            self._transcript() + self._auth + _promise(welcome),
            welcome.proof,
        )
        return Session(
            number=welcome.session,
            identity=self._peer.identity,
            key=_session_key(self._key, self._transcript()),
            limits=welcome.limits,
        )

    def on_refused(self, raw: bytes | memoryview) -> HandshakeRefused:
        """Read a refusal of the latest request; return the error to raise.

        It is ``verified`` if the listener has signed it with the run's key. Anyone can forge or
        replay others, so they end one attempt only.

        Raises:
            FrameError: if it is not a valid REFUSED.
        """
        refusal = _read(_refusal_decoder, raw, "REFUSED")
        expected = _refusal_proof(self._key, self._auth or self._hello, refusal)
        verified = hmac.compare_digest(expected, refusal.proof)
        return HandshakeRefused(refusal.reason, code=refusal.code, verified=verified)

    def _transcript(self) -> bytes:
        return _transcript(self._hello, self._challenge)


class ListenerHandshake:
    """The listener's side, for all dialers; it keeps the state between a dialer's two requests.

    Args:
        identity: identity of the listener.
        key: the run's key; None without one.
        limits: announced to each dialer.
        nonce: returns 32 fresh random bytes.
        session_number: returns a fresh, non-zero number that was never returned before.
        admit: returns why an authenticated dialer may not join, or None if it may.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes | None,
        *,
        limits: PeerLimits,
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
        """How many dialers are between HELLO and AUTH."""
        return len(self._pending)

    def on_hello(self, raw: bytes | memoryview, now: float) -> bytes:
        """Return the CHALLENGE that replies to a HELLO.

        Args:
            raw: the received message.
            now: time in seconds of a monotonic clock.

        Raises:
            HandshakeRefused: if the dialer is refused; send it the reason in a REFUSED.
            FrameError: if it is not a valid HELLO.
        """
        hello = _read_hello(raw, "HELLO")
        if hello.keyed != (self._key is not None):
            raise HandshakeRefused(_KEY_MISMATCH, code="key")
        if hello.identity.run_id != self._identity.run_id:
            raise HandshakeRefused(
                f"the listener belongs to run {self._identity.run_id!r}, but the dialer to run "
                f"{hello.identity.run_id!r}; check the address, or give both the same run id",
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
        """Return the WELCOME that replies to an AUTH, and the session that starts with it.

        Raises:
            AuthError: if the dialer does not have the run's key.
            HandshakeRefused: if ``admit`` refuses it, or if its challenge is unknown, used or older
                than 5 seconds (``stale``).
            FrameError: if it is not a valid AUTH.
        """
        auth = _read(_auth_decoder, raw, "AUTH")
        self._forget(now)
        known = self._pending.pop(auth.challenge, None)
        if known is None:
            # The key is not the cause: the dialer was too slow, or too many dialed at once.
            raise HandshakeRefused(
                f"the challenge is unknown, used or older than {PENDING_S:g} s; start a new "
                "handshake",
                code="stale",
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
            identity=hello.identity,
            key=_session_key(self._key, transcript),
            limits=msgspec.structs.replace(self._limits, max_frame_bytes=hello.max_frame_bytes),
        )
        return _encode(_Welcome(number, self._limits, proof)), session

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

    def _forget(self, now: float) -> None:
        while self._pending:
            name, (since, *_) = next(iter(self._pending.items()))
            if now - since <= PENDING_S and len(self._pending) < PENDING_LIMIT:
                break
            del self._pending[name]


def _read(decoder: msgspec.msgpack.Decoder[T], raw: bytes | memoryview, what: str) -> T:
    if len(raw) > MAX_HANDSHAKE_BYTES:
        raise FrameError(
            f"got a {what} of {len(raw)} bytes, at most {MAX_HANDSHAKE_BYTES} are read"
        )
    return read_metadata(decoder, raw, what)


def _read_hello(raw: bytes | memoryview, what: str) -> _Hello:
    # The version first: other versions may encode the rest differently.
    version = _read(_version_decoder, raw, what).version
    if version != VERSION:
        raise HandshakeRefused(
            f"the two sides have protocol versions {version} and {VERSION}; install the same "
            "version of dmiddleware on all hosts",
            code="version",
        )
    hello = _read(_hello_decoder, raw, what)
    if len(hello.nonce) != NONCE_SIZE:
        raise FrameError(f"got a nonce of {len(hello.nonce)} bytes, expected {NONCE_SIZE}")
    return hello


_KEY_MISMATCH: Final = (
    "one of the two nodes has a key and the other does not; give all nodes of the run the same key"
)


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    return hashlib.sha256(hello).digest() + hashlib.sha256(challenge).digest()


def _name_of(challenge: bytes) -> bytes:
    return hashlib.sha256(challenge).digest()[:16]


def _promise(welcome: _Welcome) -> bytes:
    return _encode((welcome.session, welcome.limits))


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
