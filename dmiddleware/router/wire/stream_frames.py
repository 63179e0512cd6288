"""Frames in a stream of bytes: large ones travel in chunks, between which urgent ones go.

::

    offset  size  field
         0     4  magic "DMWS"
         4     4  length of this chunk
         8     8  length of the whole frame
        16     …  the chunk

A frame of up to :data:`SMALL_BYTES` is one chunk. Only one larger frame at a time is under way.
Neither class owns a stream: :class:`FrameWriter` decides what is sent next, and
:class:`FrameReader` where the next bytes are received.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from dmiddleware.errors import FrameError
from dmiddleware.router.wire.byte_pieces import BytePieces, WireBytes, new_memory

__all__ = ["CHUNK_BYTES", "HEAD_BYTES", "SMALL_BYTES", "FrameReader", "FrameWriter", "Piece"]

CHUNK_BYTES: Final = 512 * 1024
"""The longest chunk: an urgent frame waits for no more than this."""

SMALL_BYTES: Final = 16 * 1024
"""Longer frames travel in chunks, and cannot be urgent."""

_HEAD: Final = struct.Struct("<4sIQ")
HEAD_BYTES: Final = _HEAD.size
_MAGIC: Final = b"DMWS"

_FRAME_BYTES: Final = 1024
"""About how much memory a frame takes in addition to its bytes, while it waits to be sent."""

Piece: TypeAlias = bytes | bytearray | memoryview


class FrameReader:
    """Finds the frames in received bytes. Large frames are received into their own memory.

    Args:
        max_frame_bytes: a longer frame is an error, and nothing is allocated for it.

    Attributes:
        targets: where to receive the next bytes.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._filled = 0
        self._large: memoryview | None = None
        self._large_filled = 0
        # How many bytes of the current chunk of the large frame are missing. If there are any,
        # the buffer is empty.
        self._missing = 0
        self._buffer = memoryview(b"")
        self.allow(max_frame_bytes)

    def allow(self, max_frame_bytes: int) -> None:
        """Change the longest frame that is accepted; it must not become shorter."""
        self._max_frame_bytes = max_frame_bytes
        buffer = memoryview(bytearray(HEAD_BYTES + min(max_frame_bytes, SMALL_BYTES)))
        buffer[: self._filled] = self._buffer[: self._filled]
        self._buffer = buffer
        self.targets = [buffer[self._filled :]]

    def add(self, n_bytes: int) -> Iterator[memoryview]:
        """Process bytes that have been received into the targets.

        Args:
            n_bytes: how many there are.

        Yields:
            The frames that are complete now; their memory is writable, and not used again. All of
            them must be taken before more is received.

        Raises:
            FrameError: after the frames before it, if the bytes are not frames, or one is too long.
        """
        in_large = min(n_bytes, self._missing)
        self._large_filled += in_large
        self._missing -= in_large
        self._filled += n_bytes - in_large
        start = 0
        while not self._missing:
            if self._large is not None and self._large_filled == len(self._large):
                large, self._large = self._large, None
                yield large
            if start == self._filled:
                break
            small, end = self._next(start)
            if small is not None:
                yield small
            if end == start:
                break
            start = end
        rest = self._filled - start
        if start and rest:
            self._buffer[:rest] = bytes(self._buffer[start : self._filled])
        self._filled = rest
        if self._large is None or not self._missing:
            self.targets = [self._buffer[rest:]]
        else:
            self.targets = [self._large[self._large_filled :][: self._missing], self._buffer]

    def _next(self, start: int) -> tuple[memoryview | None, int]:
        """Process one chunk in the buffer.

        Returns:
            The frame, if it is a small one, and the end of the chunk, or its start if it has not
            arrived yet.
        """
        content = start + HEAD_BYTES
        if self._filled < content:
            return None, start
        magic, size, total = _HEAD.unpack_from(self._buffer, start)
        if magic != _MAGIC:
            raise FrameError("got bytes that are not a frame")
        if total > self._max_frame_bytes:
            raise FrameError(
                f"got a frame of {total} bytes, but at most {self._max_frame_bytes} are accepted"
            )
        if total > SMALL_BYTES:
            return None, self._start_chunk(content, size, total)
        if size != total:
            raise FrameError(f"got a chunk of {size} bytes of a frame of {total} bytes")
        if self._filled < content + size:
            return None, start
        end = content + size
        return memoryview(bytearray(self._buffer[content:end])), end

    def _start_chunk(self, content: int, size: int, total: int) -> int:
        if self._large is None:
            # The system provides the memory as it is filled.
            self._large, self._large_filled = new_memory(total), 0
        if total != len(self._large) or not 0 < size <= total - self._large_filled:
            raise FrameError(
                f"got a chunk of {size} bytes of a frame of {total} bytes, but "
                f"{self._large_filled} bytes of one with {len(self._large)} bytes have arrived"
            )
        here = min(size, self._filled - content)
        end = self._large_filled + here
        self._large[self._large_filled : end] = self._buffer[content : content + here]
        self._large_filled, self._missing = end, size - here
        return content + here


@dataclass(slots=True)
class _Frame:
    """A frame that is not completely sent: the rest of it."""

    size: int
    pieces: deque[Piece]
    left: int


class FrameWriter:
    """Puts frames in order and cuts large ones into chunks.

    One thread may call :meth:`put` while another calls :meth:`next`.

    Attributes:
        replace: called with each large frame when it is about to be sent; returns it, or a small
            one to send instead.
    """

    def __init__(self) -> None:
        # Each is changed by one of the two threads.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._urgent: deque[BytePieces] = deque()
        self._bulk: deque[BytePieces] = deque()
        self._large: _Frame | None = None
        self.replace: Callable[[WireBytes], WireBytes] | None = None

    @property
    def unsent_bytes(self) -> int:
        """How much memory the frames take that :meth:`next` has not returned yet."""
        return self._put_bytes - self._taken_bytes

    def put(self, frame: WireBytes, *, urgent: bool = False) -> None:
        """Add a frame; an urgent one overtakes the others if it is small.

        Args:
            frame: the frame; its bytes must not change until they have been sent.
            urgent: whether it may overtake.
        """
        frame = frame if isinstance(frame, BytePieces) else BytePieces([frame])
        is_urgent = urgent and frame.size <= SMALL_BYTES
        self._put_bytes += frame.size + _FRAME_BYTES
        (self._urgent if is_urgent else self._bulk).append(frame)

    def next(self) -> list[Piece]:
        """Remove and return what to send next; an empty list if there is nothing.

        Small frames are sent together, as one piece. At most one chunk of a large frame follows.
        """
        small: list[Piece] = []
        n_bytes = 0
        while self._urgent or (self._bulk and self._large is None and n_bytes < CHUNK_BYTES):
            frame = self._urgent.popleft() if self._urgent else self._bulk.popleft()
            size = frame.size
            if size > SMALL_BYTES and self.replace is not None:
                replaced = self.replace(frame)
                frame = replaced if isinstance(replaced, BytePieces) else BytePieces([replaced])
                # Making the replacement takes as long as sending the frame.
                n_bytes += size - frame.size
                self._taken_bytes += size - frame.size
                size = frame.size
            if size <= SMALL_BYTES:
                small.append(_HEAD.pack(_MAGIC, size, size))
                small += frame.pieces
                n_bytes += size + HEAD_BYTES
                self._taken_bytes += size + _FRAME_BYTES
            else:
                self._large = _Frame(size, deque(frame.pieces), size)
        if self._large is not None and n_bytes < CHUNK_BYTES:
            return _joined([*small, *self._next_chunk(self._large)])
        return [b"".join(small)] if small else []

    def clear(self) -> None:
        """Forget everything."""
        self._urgent.clear()
        self._bulk.clear()
        self._large = None
        self._taken_bytes = self._put_bytes

    def _next_chunk(self, frame: _Frame) -> list[Piece]:
        need = size = min(frame.left, CHUNK_BYTES)
        pieces: list[Piece] = [_HEAD.pack(_MAGIC, size, frame.size)]
        while need:
            piece = frame.pieces[0]
            if len(piece) <= need:
                pieces.append(frame.pieces.popleft())
                need -= len(piece)
            else:
                view = memoryview(piece)
                pieces.append(view[:need])
                frame.pieces[0] = view[need:]
                need = 0
        frame.left -= size
        self._taken_bytes += size
        if not frame.left:
            self._large = None
            self._taken_bytes += _FRAME_BYTES
        return pieces


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbors that are short, because streams take a few pieces at a time."""
    joined: list[Piece] = []
    short: list[Piece] = []
    for piece in pieces:
        if len(piece) < SMALL_BYTES:
            short.append(piece)
            continue
        if short:
            joined.append(b"".join(short))
            short = []
        joined.append(piece)
    if short:
        joined.append(b"".join(short))
    return joined
