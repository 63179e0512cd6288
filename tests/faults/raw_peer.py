"""A peer that writes the transports' bytes by hand, and so can break their protocols."""

from __future__ import annotations

import os
import socket
import struct
import time

import msgspec

from dmiddleware.closing import Closing
from dmiddleware.router.protocol.handshake import Identity, ListenerHandshake, PeerLimits
from dmiddleware.router.protocol.membership import Membership
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import encode_event, pack_events
from dmiddleware.router.wire.frame import Frame, FrameType, decode_frame, encode_frame

__all__ = ["RawPeer", "Stranger", "valid_frames"]

_HEAD = struct.Struct("<4sB3xIQQ")
_MAX_FRAGMENT = (1 << 32) - 1


class RawPeer(Closing):
    """A bare socket that is connected to a listener.

    Args:
        address: the listener's address, ipc or tcp.
        timeout_s: timeout of each call.
    """

    def __init__(self, address: str, *, timeout_s: float = 2.0) -> None:
        if address.startswith("ipc://"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout_s)
            self._socket.connect(address.removeprefix("ipc://"))
        else:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._requests = 0

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
        return _HEAD.pack(b"DMWU", 1, min(length, _MAX_FRAGMENT), self._requests, length)

    def send(self, frame: WireBytes) -> bool:
        """Send a frame as a request."""
        self._requests += 1
        return self.write(self.head(len(frame)) + bytes(frame))

    def answer(self) -> bytes | None:
        """Return the next answer; None: the connection was closed.

        Raises:
            TimeoutError: if neither happens in time.
        """
        head = self._read(_HEAD.size)
        return None if head is None else self._read(_HEAD.unpack(head)[2])

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
