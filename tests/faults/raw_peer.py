"""A peer that writes the bytes of a connection by hand, and so can break the protocol."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
import time

from dmiddleware.errors import RouterError
from dmiddleware.process.closing import Closing
from dmiddleware.router.protocol.handshake import Identity
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.peer import PeerConnection
from dmiddleware.router.transport.stream import exposes_bytes
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import encode_event, frame_contents
from dmiddleware.router.wire.frame import Frame, FrameType, OutgoingFrame, encode_frame, type_of
from tests.waiting import wait_until

__all__ = ["RawPeer", "Stranger", "valid_frames"]

_HEAD = struct.Struct("<4sIQ")
_MAX_CHUNK = (1 << 32) - 1


class RawPeer(Closing):
    """A bare socket that is connected to a listener.

    Args:
        address: the listener's address, ipc, tcp or tls+tcp.
        tls: how to secure the connection; None: not at all.
        timeout_s: timeout of each call.

    Attributes:
        covers_body: whether the arrays of frames have to be signed.
    """

    def __init__(
        self, address: str, *, tls: ssl.SSLContext | None = None, timeout_s: float = 2.0
    ) -> None:
        self.covers_body = exposes_bytes(address)
        if address.startswith("ipc://"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout_s)
            path = address.removeprefix("ipc://")
            wait_until(
                lambda: self._socket.connect_ex(path) != errno.EAGAIN,
                f"room in the queue of {address}",
                deadline_s=timeout_s,
            )
        else:
            host, _, port = address.partition("://")[2].rpartition(":")
            self._socket = socket.create_connection((host, int(port)), timeout_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")

    def close(self) -> None:
        """Close the connection."""
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
        return _HEAD.pack(b"DMWS", min(length, _MAX_CHUNK), length)

    def send(self, frame: WireBytes) -> bool:
        """Send a frame as a whole."""
        return self.write(self.head(len(frame)) + bytes(frame))

    def answer(self, kind: FrameType | None = None) -> bytes | None:
        """Return the next frame; None: the connection was closed.

        Args:
            kind: the kind to wait for; None: any.

        Raises:
            TimeoutError: if neither happens in time.
        """
        while (head := self._read(_HEAD.size)) is not None:
            frame = self._read(_HEAD.unpack(head)[2])
            if frame is None or kind is None or type_of(frame) is kind:
                return frame
        return None

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
        except (ConnectionError, ssl.SSLError):
            return None
        return parts


class _Frames:
    """A route that keeps the frames."""

    has_room = True
    n_moved = 0

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def put(self, frame: WireBytes, *, urgent: bool = False) -> None:
        self.frames.append(bytes(frame))

    def flush(self) -> bool:
        return True

    def allow(self, max_frame_bytes: int) -> None:
        """Accept longer frames."""

    def close(self, error: RouterError | None = None) -> None:
        """Keep the frames."""


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
        self.connection = PeerConnection(_Frames(), dialed=True, covers_body=True)

    def hello(self, *, covers_body: bool = True) -> bytes:
        """Start a handshake; return its first frame."""
        self.node.on_end(self.connection, "a new connection takes its place", 0.0)
        self.connection = PeerConnection(_Frames(), dialed=True, covers_body=covers_body)
        self.node.dial(self.connection)
        return self.made()[0]

    def made(self) -> list[bytes]:
        """Return the frames that the node has made since the last call."""
        route = self.connection.route
        assert isinstance(route, _Frames)
        self.node.fill(self.connection)
        made, route.frames = route.frames, []
        return made

    def take(self, frame: bytes | None) -> None:
        """Pass a frame to the node."""
        assert frame is not None, "the listener closed the connection instead of answering"
        self.node.on_frame(self.connection, memoryview(bytearray(frame)), 0.0)

    def join(self, peer: RawPeer) -> str:
        """Shake hands over a raw connection; return the listener's node id."""
        peer.send(self.hello(covers_body=peer.covers_body))
        self.take(peer.answer())
        peer.send(self.made()[0])
        self.take(peer.answer())
        # The listener's first states let this node send.
        self.take(peer.answer())
        for frame in self.made():
            peer.send(frame)
        assert self.connection.peer is not None
        return self.connection.peer.node_id

    def data(self, to: str, event: str, value: object) -> bytes:
        """Return a signed frame with an event."""
        self.node.offer(to, encode_event(event, [[value], {}], Codec()))
        (frame,) = (one for one in self.made() if type_of(one) is FrameType.DATA)
        return frame


def valid_frames() -> list[bytes]:
    """Return one valid frame of each kind that a dialer sends, of an unknown session."""
    session = 12345
    dialer, listener = Stranger(8, None), Stranger(7, None)
    listener.connection = PeerConnection(_Frames(), dialed=False, covers_body=True)
    hello = dialer.hello()
    listener.take(hello)
    dialer.take(listener.made()[0])
    (auth,) = dialer.made()
    listener.take(auth)
    _, states = listener.made()
    data = OutgoingFrame(
        FrameType.DATA,
        frame_contents([encode_event("e", [[bytes(300)], {}], Codec())]),
        None,
        max_size=1 << 20,
        session=session,
    )
    others = (
        encode_frame(Frame(kind, session, sequence=1), max_size=1 << 20)
        for kind in (FrameType.ASK, FrameType.HEARTBEAT, FrameType.BYE)
    )
    return [hello, auth, states, bytes(data), *others]
