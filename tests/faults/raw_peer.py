"""A peer that speaks the transports' own protocols by hand, so that it can speak them wrongly."""

from __future__ import annotations

import socket
import struct
import time
from types import TracebackType
from typing import Self

import msgspec

from dmiddleware.router.protocol.handshake import (
    DialerHandshake,
    Identity,
    ListenerHandshake,
    PeerLimits,
    Session,
)
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import encode_event, pack_events
from dmiddleware.router.wire.frame import Frame, FrameType, encode_frame

__all__ = ["RawPeer", "Stranger", "valid_frames"]

_REQUESTER = b"\x00SP\x00\x00\x30\x00\x00"
_GREETING_SIZE = 8
_UNIX_HEAD = struct.Struct("<4sB3xQQ")


class RawPeer:
    """A connection to a listener: over ipc to one of plain sockets, over tcp to one of nng's.

    Args:
        address: of the listener, ipc or tcp.
        greet: whether it begins as it must; on plain sockets there is no greeting.
        timeout_s: how long each call waits.
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
        """Write bytes as they are; tell whether the connection took them."""
        try:
            self._socket.sendall(raw)
        except OSError:
            return False
        return True

    def head(self, length: int) -> bytes:
        """Return what comes before a message that claims to be so long."""
        if self._ipc:
            return _UNIX_HEAD.pack(b"DMWU", 1, length, self._requests)
        return struct.pack(">Q", length)

    def send(self, frame: WireBytes) -> bool:
        """Send a frame as a request."""
        self._requests += 1
        number = b"" if self._ipc else struct.pack(">I", 0x8000_0000 | self._requests)
        body = number + bytes(frame)
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
        return body if body is None or self._ipc else body[4:]

    def closed_after(self) -> float | None:
        """Wait until the other side closes; return the seconds that took, None: it did not."""
        began = time.monotonic()
        try:
            while self._socket.recv(4096):
                pass
        except TimeoutError:
            return None
        except OSError:
            pass
        return time.monotonic() - began

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
    """A node without threads, to make frames of any kind with.

    Args:
        node_id: who it claims to be.
        key: of the run.
    """

    def __init__(self, node_id: int, key: bytes | None) -> None:
        numbers = iter(range(1, 1 << 30))
        self.node = NodeProtocol(
            Identity("run", str(node_id), time.time_ns(), ("collector",)),
            key,
            options=NodeOptions(),
            nonce=lambda: bytes(32),
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
        """Make a signed frame that carries an event."""
        self.node.offer(to, encode_event(event, [[value], {}], Codec()))
        made = self.node.data_request(self.node.peers[to], 0.0)
        assert made is not None
        return bytes(made[1])


def _whole(answer: bytes | None) -> bytes:
    assert answer is not None, "the listener closed the connection instead of answering"
    return answer


def valid_frames() -> list[bytes]:
    """One good frame of each kind that a dialer sends, of a session of its own."""
    identity = Identity("run", "7", 1)
    session = 12345
    listener = ListenerHandshake(
        identity,
        None,
        limits=PeerLimits(1 << 20, 1 << 20, 8),
        nonce=lambda: bytes(32),
        session_number=lambda: session,
        admit=lambda _: None,
    )
    dialer = DialerHandshake(
        Identity("run", "8", 1), None, nonce=bytes(32), max_frame_bytes=1 << 20
    )
    auth = dialer.on_challenge(listener.on_hello(dialer.hello(), 0.0))
    assert isinstance(dialer.on_welcome(listener.on_auth(auth, 0.0)[0]), Session)
    metadata, buffers, flags = pack_events([encode_event("e", [[bytes(300)], {}], Codec())])
    answers = msgspec.msgpack.encode(((), ()))
    frames = [
        Frame(FrameType.HELLO, metadata=dialer.hello()),
        Frame(FrameType.AUTH, metadata=auth),
        Frame(FrameType.DATA, session, metadata=metadata, buffers=buffers, flags=flags),
        *(
            Frame(kind, session, sequence=1, metadata=answers)
            for kind in (FrameType.POLL, FrameType.HEARTBEAT, FrameType.BYE)
        ),
    ]
    return [bytes(encode_frame(frame, max_size=1 << 20)) for frame in frames]
