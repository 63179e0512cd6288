"""Bytes in several pieces, so that each byte is copied once, to its final place in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

__all__ = ["ALIGNMENT", "BytePieces", "WireBytes", "copy_bytes", "view_with_release", "write_into"]

ALIGNMENT: Final = 64
"""The alignment of arrays in a frame, in bytes."""

_LARGE: Final = 64 * 1024


class BytePieces:
    """Several pieces that are sent as one; ``bytes()`` joins them.

    Args:
        pieces: the pieces, in order.
    """

    __slots__ = ("_pieces", "_size")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces: Sequence[bytes | memoryview] = pieces
        self._size = sum(map(len, pieces))

    @property
    def pieces(self) -> Sequence[bytes | memoryview]:
        """The pieces, in order."""
        return self._pieces

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


WireBytes: TypeAlias = bytes | bytearray | BytePieces
"""Bytes that a transport sends."""


def copy_bytes(view: memoryview) -> bytes | memoryview:
    """Copy the bytes of an array; a large copy releases the GIL."""
    if len(view) < _LARGE:
        return view.tobytes()
    return np.frombuffer(view, np.uint8).copy().data


def write_into(target: memoryview, content: WireBytes) -> None:
    """Copy content to the start of a target; releases the GIL."""
    offset = 0
    into = np.frombuffer(target, np.uint8)
    for piece in content.pieces if isinstance(content, BytePieces) else (content,):
        end = offset + len(piece)
        into[offset:end] = np.frombuffer(piece, np.uint8)
        offset = end


def view_with_release(memory: Any, release: Callable[[], object]) -> memoryview:
    """Return a view of foreign memory that is released when no view of it is alive.

    Args:
        memory: a buffer of bytes.
        release: called once, on the thread that drops the last view.
    """
    view = np.frombuffer(memory, np.uint8).view(_ReleasingView)
    view.release = release
    return view.data


class _ReleasingView(np.ndarray):
    """A view that releases its memory when it is deleted."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()
