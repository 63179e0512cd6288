"""Bytes in several pieces, so that each byte is copied once, to its final place in memory.

numpy copies without the GIL. It is loaded with the first large copy, as in
:mod:`~dmiddleware.router.wire.arrays`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

__all__ = ["ALIGNMENT", "BytePieces", "WireBytes", "copy_bytes", "new_memory", "write_into"]

ALIGNMENT: Final = 64
"""The alignment of arrays in a frame, in bytes."""

_LARGE: Final = 64 * 1024


class BytePieces:
    """Several pieces that are sent as one; ``bytes()`` joins them.

    Args:
        pieces: the pieces, in order.

    Attributes:
        size: how many bytes they have.
    """

    __slots__ = ("_pieces", "size")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces: Sequence[bytes | memoryview] = pieces
        self.size = sum(map(len, pieces))

    @property
    def pieces(self) -> Sequence[bytes | memoryview]:
        """The pieces, in order."""
        return self._pieces

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


WireBytes: TypeAlias = bytes | BytePieces
"""Bytes that a transport sends."""


def copy_bytes(view: memoryview) -> bytes | memoryview:
    """Copy the bytes of an array; a large copy releases the GIL."""
    if len(view) < _LARGE:
        return view.tobytes()
    import numpy as np

    return np.frombuffer(view, np.uint8).copy().data


def new_memory(n_bytes: int) -> memoryview:
    """Return writable memory, which takes up room only as it is written to."""
    import numpy as np

    return np.empty(n_bytes, np.uint8).data


def write_into(target: memoryview, content: WireBytes | memoryview) -> None:
    """Copy content to the start of a target; releases the GIL."""
    import numpy as np

    offset = 0
    into = np.frombuffer(target, np.uint8)
    for piece in content.pieces if isinstance(content, BytePieces) else (content,):
        end = offset + len(piece)
        into[offset:end] = np.frombuffer(piece, np.uint8)
        offset = end
