"""Frames in a stream of bytes: large ones travel in fragments, between which urgent ones go.

Both classes own no socket. A fragment has a head, followed by its bytes; frames of up to
:data:`SMALL_BYTES` have only one. Only one large frame at a time is under way.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from dmiddleware.router.wire.byte_pieces import BytePieces, WireBytes

__all__ = [
    "FRAGMENT_BYTES",
    "HEAD_BYTES",
    "REPLY",
    "REQUEST",
    "SMALL_BYTES",
    "FrameReader",
    "FrameWriter",
    "NotAFrame",
    "Piece",
]

REQUEST: Final = 1
REPLY: Final = 2

FRAGMENT_BYTES: Final = 256 * 1024
"""The longest fragment: an urgent frame waits for no more than this."""

SMALL_BYTES: Final = 16 * 1024
"""Longer frames may be fragmented, and cannot be urgent."""

_HEAD: Final = struct.Struct("<4sB3xIQQ")
"""Magic, kind, length of the fragment, number of the request, length of the frame."""

HEAD_BYTES: Final = _HEAD.size

_MAGIC: Final = b"DMWU"

_FRAME_BYTES: Final = 1024
"""About how much memory a frame takes in addition to its bytes, while it waits to be sent."""

Piece: TypeAlias = bytes | bytearray | memoryview


class NotAFrame(Exception):
    """The received bytes are not a frame, or the frame is too long."""


class FrameReader:
    """Finds the frames in received bytes.

    Args:
        kind: the kind of the frames.
        max_frame_bytes: a longer frame is an error.

    Attributes:
        max_frame_bytes: may be changed at any time.
    """

    def __init__(self, kind: int, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._kind = kind
        self._kept = b""
        self._window = memoryview(b"")
        self._start = 0
        self._frame: memoryview | None = None
        self._number = 0
        self._filled = 0
        self._left = 0

    def targets(self, buffer: memoryview) -> list[memoryview]:
        """Return where to receive the next bytes.

        If a fragment is open, these are the rest of it and the head of the next one, so all of the
        targets will be filled. Otherwise it is the buffer.
        """
        if self._frame is None or not self._left:
            return [buffer[len(self._kept) :]]
        end = self._filled + self._left
        rest = self._frame[self._filled : end]
        return [rest] if end == len(self._frame) else [rest, buffer[:HEAD_BYTES]]

    @property
    def is_in_fragment(self) -> bool:
        """Whether the next bytes belong to an open fragment."""
        return self._left > 0

    def add(self, n_bytes: int, buffer: memoryview) -> None:
        """Note that bytes were received into the targets; then call :meth:`next`."""
        if self._left:
            n_filled = min(n_bytes, self._left)
            self._filled += n_filled
            self._left -= n_filled
            self._window, self._start = buffer[: n_bytes - n_filled], 0
            return
        n_kept = len(self._kept)
        buffer[:n_kept] = self._kept
        self._window, self._start = buffer[: n_kept + n_bytes], 0

    def next(self) -> tuple[int, memoryview] | None:
        """Return the number and the content of the next frame, or None.

        Raises:
            NotAFrame: if the received bytes are not a frame, or the frame is too long.
        """
        while True:
            if self._left:
                self._fill()
            if self._left:
                return None
            if self._frame is not None and self._filled == len(self._frame):
                frame, self._frame = self._frame, None
                return self._number, frame
            if len(self._window) - self._start < HEAD_BYTES:
                return None
            magic, kind, size, number, total = _HEAD.unpack_from(self._window, self._start)
            if magic != _MAGIC or kind != self._kind or total > self.max_frame_bytes:
                raise NotAFrame
            if total > SMALL_BYTES:
                self._open_fragment(size, number, total)
                continue
            if size != total:
                raise NotAFrame
            start = self._start + HEAD_BYTES
            if len(self._window) - start < size:
                return None
            self._start = start + size
            return number, memoryview(bytearray(self._window[start : self._start]))

    def keep(self) -> None:
        """Keep the bytes after the last frame, so that the buffer can be used for others."""
        self._kept = bytes(self._window[self._start :])
        self._window, self._start = memoryview(self._kept), 0

    def _open_fragment(self, size: int, number: int, total: int) -> None:
        if self._frame is None:
            # Loaded with the first large frame, as in :mod:`~dmiddleware.router.wire.arrays`.
            import numpy as np

            # The system provides the memory as it is filled.
            self._frame = np.empty(total, np.uint8).data
            self._number, self._filled = number, 0
        elif number != self._number or total != len(self._frame):
            raise NotAFrame
        if not 0 < size <= total - self._filled:
            raise NotAFrame
        self._left = size
        self._start += HEAD_BYTES

    def _fill(self) -> None:
        """Copy bytes from the window into the open fragment."""
        assert self._frame is not None
        n_bytes = min(self._left, len(self._window) - self._start)
        self._frame[self._filled : self._filled + n_bytes] = self._window[
            self._start : self._start + n_bytes
        ]
        self._start += n_bytes
        self._filled += n_bytes
        self._left -= n_bytes


@dataclass(slots=True)
class _Frame:
    """A frame that is not completely sent: the rest of it."""

    number: int
    size: int
    pieces: deque[Piece]
    left: int


class FrameWriter:
    """Puts frames in order and cuts them into fragments.

    Args:
        kind: the kind of the frames.

    Attributes:
        unsent_bytes: how much memory the frames take that are not sent yet.
    """

    def __init__(self, kind: int) -> None:
        self.unsent_bytes = 0
        self._kind = kind
        self._urgent: deque[_Frame] = deque()
        self._bulk: deque[_Frame] = deque()
        self._current: list[Piece] = []
        self._current_bytes = 0

    def put(self, number: int, raw: WireBytes, *, urgent: bool) -> None:
        """Add a frame; an urgent one overtakes the others if it is small enough."""
        size = len(raw)
        if size <= SMALL_BYTES and not (self._current or self._urgent or self._bulk):
            head = _HEAD.pack(_MAGIC, self._kind, size, number, size)
            self._current = [head, *(raw.pieces if isinstance(raw, BytePieces) else (raw,))]
            self._current_bytes = size + _FRAME_BYTES
            self.unsent_bytes += self._current_bytes
            return
        pieces: deque[Piece] = deque(raw.pieces if isinstance(raw, BytePieces) else (raw,))
        queue = self._urgent if urgent and size <= SMALL_BYTES else self._bulk
        queue.append(_Frame(number, size, pieces, size))
        self.unsent_bytes += size + _FRAME_BYTES

    def pieces(self) -> list[Piece]:
        """Return what to send next; an empty list if there is nothing."""
        if not self._current and (queue := self._urgent or self._bulk):
            self._cut(queue)
        return self._current

    def sent(self, n_bytes: int) -> None:
        """Note that the first bytes of :meth:`pieces` were sent."""
        for index, piece in enumerate(self._current):
            if n_bytes < len(piece):
                self._current[: index + 1] = [memoryview(piece)[n_bytes:]]
                return
            n_bytes -= len(piece)
        self._current.clear()
        self.unsent_bytes -= self._current_bytes

    def forget(self, number: int) -> None:
        """Do not send a frame, unless part of it is sent."""
        for queue in (self._urgent, self._bulk):
            for frame in queue:
                if frame.number == number and frame.left == frame.size:
                    queue.remove(frame)
                    self.unsent_bytes -= frame.size + _FRAME_BYTES
                    return

    def clear(self) -> None:
        """Forget everything."""
        self._urgent.clear()
        self._bulk.clear()
        self._current.clear()
        self.unsent_bytes = 0

    def _cut(self, queue: deque[_Frame]) -> None:
        """Make the next fragment of a queue's first frame the current one."""
        frame = queue[0]
        need = size = min(frame.left, FRAGMENT_BYTES) if frame.size > SMALL_BYTES else frame.size
        self._current = [_HEAD.pack(_MAGIC, self._kind, size, frame.number, frame.size)]
        self._current_bytes = size
        while need:
            piece = frame.pieces[0]
            if len(piece) <= need:
                self._current.append(frame.pieces.popleft())
                need -= len(piece)
            else:
                view = memoryview(piece)
                self._current.append(view[:need])
                frame.pieces[0] = view[need:]
                need = 0
        frame.left -= size
        if not frame.left:
            queue.popleft()
            self._current_bytes += _FRAME_BYTES
