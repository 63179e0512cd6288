"""Requests and replies in parts: nng's messages are small.

nng limits the length of messages for all connections of a listener alike, and strangers may send
messages as long as those of authenticated peers. A longer request is therefore sent in several
messages, each of which the listener acknowledges; the dialer fetches a longer reply with one
message for each of its parts.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Final

import pynng

from dmiddleware.errors import TransportError
from dmiddleware.router.wire.byte_pieces import BytePieces, WireBytes

__all__ = [
    "ACKNOWLEDGED",
    "FETCH",
    "HEAD",
    "PART",
    "PART_BYTES",
    "Joined",
    "limit_messages",
    "part_of",
    "translated",
]

PART_BYTES: Final = 128 * 1024
"""The longest part of a request or reply."""

_MAX_MESSAGE_BYTES: Final = PART_BYTES + 64

HEAD: Final = struct.Struct("<B7xIQQ")
"""Kind, number of the request, total length, start of this part.

With the four bytes that nng adds to a request, it keeps contents aligned.
"""

PART: Final = 1
"""A part of a request or reply."""

ACKNOWLEDGED: Final = 2
"""The listener's answer to a part that does not complete its request."""

FETCH: Final = 3
"""The dialer's request for a part of a reply."""


class Joined:
    """Bytes that arrive in parts.

    Args:
        size: their number.

    Attributes:
        size: their number.
        received: how many have arrived.
    """

    __slots__ = ("_bytes", "received", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.received = 0
        self._bytes = memoryview(bytearray(size))

    def add(self, start: int, part: memoryview) -> bool:
        """Add a part; return whether all bytes have arrived."""
        self._bytes[start : start + len(part)] = part
        self.received += len(part)
        return self.received >= self.size

    def view(self) -> memoryview:
        """Return all bytes."""
        return self._bytes


def part_of(content: WireBytes, start: int) -> WireBytes:
    """Return the part of a request or reply that starts there."""
    if not start and len(content) <= PART_BYTES:
        return content
    pieces = []
    left = PART_BYTES
    for piece in content.pieces if isinstance(content, BytePieces) else (content,):
        taken = memoryview(piece)[start : start + left]
        start = max(0, start - len(piece))
        if taken:
            pieces.append(taken)
            left -= len(taken)
        if not left:
            break
    return BytePieces(pieces)


def limit_messages(socket: pynng.Socket) -> None:
    """Make a socket refuse messages that are longer than a part; called before it listens."""
    socket.recv_max_size = _MAX_MESSAGE_BYTES
    if socket.recv_max_size != _MAX_MESSAGE_BYTES:
        raise TransportError(
            f"nng limits messages to {socket.recv_max_size} bytes instead of {_MAX_MESSAGE_BYTES}"
        )


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise nng's errors as transport errors."""
    try:
        yield
    except pynng.NNGException as error:
        raise TransportError(f"could not {doing}: {error}") from error
