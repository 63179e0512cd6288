"""A peer that writes the transports' bytes by hand, and so can break their protocols."""

from __future__ import annotations

import os
import socket
import struct
import time
from types import TracebackType
from typing import Self

import msgspec

from dmiddleware.router.protocol.handshake import Identity, ListenerHandshake, PeerLimits
from dmiddleware.router.protocol.membership import Membership
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.transport.nng.parts import HEAD, PART
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import encode_event, pack_events
from dmiddleware.router.wire.frame import Frame, FrameType, decode_frame, encode_frame

__all__ = ["RawPeer", "Stranger", "valid_frames"]

_REQUESTER = b"\x00SP\x00\x00\x30\x00\x00"
_GREETING_SIZE = 8
_UNIX_HEAD = struct.Struct("<4sB3xQQ")


class RawPeer:
    """A raw connection to a listener: a Unix socket over ipc, or nng's protocol over tcp.

    Args:
        address: the listener's address, ipc or tcp.
        greet: whether to send nng's greeting; Unix sockets have none.
        timeout_s: timeout of each call.
    """

    def __init__(self, address: str, *, greet: bool = True, timeout_s: float = 2.0) -> None:
        self._ipc = address.startswith("ipc://")
        if self._ipc:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout_s)
            self._socket.connect(address.removeprefix("ipc://"))
        else:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._requests = 0
        if greet and not self._ipc:
            self.write(_REQUESTER)
            self._read(_GREETING_SIZE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def write(self, raw: bytes) -> bool:
        """Write raw bytes, and return whether the connection accepted them."""
        try:
            self._socket.sendall(raw)
        except OSError:
            return False
        return True

    def head(self, length: int) -> bytes:
        """Return the header of a message that claims this length."""
        if self._ipc:
            return _UNIX_HEAD.pack(b"DMWU", 1, length, self._requests)
        return struct.pack(">Q", length)

    def send(self, frame: WireBytes) -> bool:
        """Send a frame as a request."""
        self._requests += 1
        body = bytes(frame)
        if not self._ipc:
            part = HEAD.pack(PART, self._requests, len(body), 0)
            body = struct.pack(">I", 0x8000_0000 | self._requests) + part + body
        return self.write(self.head(len(body)) + body)

    def answer(self) -> bytes | None:
        """Return the next answer; None: the connection was closed.

        Raises:
            TimeoutError: if neither happens in time.
        """
        head = self._read(_UNIX_HEAD.size if self._ipc else 8)
        if head is None:
            return None
        length = _UNIX_HEAD.unpack(head)[2] if self._ipc else struct.unpack(">Q", head)[0]
        body = self._read(length)
        return body if body is None or self._ipc else body[4 + HEAD.size :]

    def closed_after(self) -> float | None:
        """Wait until the other side closes, and return the seconds; None: it did not close."""
        started_at = time.monotonic()
        try:
            while self._socket.recv(4096):
                pass
        except TimeoutError:
            return None
        except OSError:
            pass
        return time.monotonic() - started_at

    def _read(self, size: int) -> bytes | None:
        parts = b""
        try:
            while len(parts) < size:
                part = self._socket.recv(size - len(parts))
                if not part:
                    return None
                parts += part
        except (ConnectionError, BrokenPipeError):
            return None
        return parts


class Stranger:
    """A node without threads, which makes frames of any kind.

    Args:
        node_id: the node id that it claims.
        key: the run's key.
    """

    def __init__(self, node_id: int, key: bytes | None) -> None:
        numbers = iter(range(1, 1 << 30))
        self.node = NodeProtocol(
            Identity("run", str(node_id), os.urandom(16), ("collector",)),
            key,
            options=NodeOptions(),
            nonce=lambda: os.urandom(32),
            session_number=lambda: next(numbers),
        )

    def join(self, peer: RawPeer) -> str:
        """Shake hands over a raw connection; return the listener's node id."""
        handshake, hello = self.node.hello()
        peer.send(hello)
        auth = self.node.on_challenge(handshake, _whole(peer.answer()))
        peer.send(auth)
        peer = self.node.on_welcome(handshake, _whole(peer.answer()), 0.0, cover_body=True)
        return peer.node_id

    def data(self, to: str, event: str, value: object) -> bytes:
        """Return a signed frame with an event."""
        self.node.offer(to, encode_event(event, [[value], {}], Codec()))
        request = self.node.data_request(self.node.peers[to], 0.0)
        assert request is not None
        return bytes(request.raw)


def _whole(answer: bytes | None) -> bytes:
    assert answer is not None, "the listener closed the connection instead of answering"
    return answer


def valid_frames() -> list[bytes]:
    """Return one valid frame of each kind that a dialer sends, of an unknown session."""
    session = 12345
    identity = Identity("run", "7", os.urandom(16))
    listener = ListenerHandshake(
        identity,
        None,
        limits=PeerLimits(1 << 20, 1 << 20, 8),
        nonce=lambda: os.urandom(32),
        session_number=lambda: session,
        incarnation=lambda: 1,
        known=Membership(identity),
    )
    dialer = Stranger(8, None)
    handshake, hello = dialer.node.hello()
    challenge = listener.on_hello(decode_frame(hello).metadata, 0.0)
    auth = handshake.on_challenge(challenge)
    assert handshake.on_welcome(listener.on_auth(auth, 0.0)[0])
    metadata, buffers, flags = pack_events([encode_event("e", [[bytes(300)], {}], Codec())])
    answers = msgspec.msgpack.encode(((), ()))
    frames = [
        Frame(FrameType.HELLO, metadata=handshake.hello()),
        Frame(FrameType.AUTH, metadata=auth),
        Frame(FrameType.DATA, session, metadata=metadata, buffers=buffers, flags=flags),
        *(
            Frame(kind, session, sequence=1, metadata=answers)
            for kind in (FrameType.POLL, FrameType.HEARTBEAT, FrameType.BYE)
        ),
    ]
    return [bytes(encode_frame(frame, max_size=1 << 20)) for frame in frames]
