"""Bytes in several pieces, so that each byte is copied once, to where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

__all__ = ["ALIGNMENT", "BytePieces", "WireBytes", "copy_bytes", "view_with_release", "write_into"]

ALIGNMENT: Final = 64
"""Arrays begin at a multiple of this in a frame."""

_LARGE: Final = 64 * 1024


class BytePieces:
    """What is sent as one, in the pieces that it is made of; ``bytes()`` joins them.

    Args:
        pieces: in order.
    """

    __slots__ = ("_size", "pieces")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.pieces = pieces
        self._size = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


WireBytes: TypeAlias = bytes | bytearray | BytePieces
"""What a transport sends."""


def copy_bytes(view: memoryview) -> bytes | memoryview:
    """Copy the bytes of an array; other threads run meanwhile if they are many."""
    if len(view) < _LARGE:
        return view.tobytes()
    return np.frombuffer(view, np.uint8).copy().data


def write_into(target: memoryview, content: WireBytes) -> None:
    """Copy content to the beginning of a target; other threads run meanwhile."""
    place = 0
    into = np.frombuffer(target, np.uint8)
    for piece in content.pieces if isinstance(content, BytePieces) else (content,):
        end = place + len(piece)
        into[place:end] = np.frombuffer(piece, np.uint8)
        place = end


def view_with_release(memory: Any, release: Callable[[], object]) -> memoryview:
    """Return a view of foreign memory, and give that back when no view of it is alive.

    Args:
        memory: a buffer of bytes.
        release: called once, on whichever thread lets go of the last view.
    """
    lent = np.frombuffer(memory, np.uint8).view(_Lent)
    lent.release = release
    return lent.data


class _Lent(np.ndarray):
    """A view that gives its memory back at its end."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()
