"""Holes: rows that were taken out of a ring before their time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dmiddleware.data.samplers import Ints

__all__ = ["Holes"]


class Holes:
    """Notes which slots of a ring hold a row that was deleted.

    Args:
        size: number of slots.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._is_hole = np.zeros(size, np.bool_)
        self._count = 0
        self._present: Ints | None = None

    def __len__(self) -> int:
        return self._count

    def at(self, index: Ints) -> npt.NDArray[np.bool_]:
        """Tell which of these rows (any shape) were deleted."""
        return self._is_hole.take(index % self._size)

    def dig(self, index: Ints) -> None:
        """Delete rows, each of them held until now."""
        self._is_hole[index % self._size] = True
        self._recount()

    def fill(self, first: int, n: int) -> None:
        """Note that rows ``first … first + n - 1`` were written."""
        self._present = None
        if self._count:
            self._is_hole[np.arange(first, first + n) % self._size] = False
            self._recount()

    def leave(self, first: int, last: int) -> None:
        """Note that rows ``first … last - 1``, all deleted, are no longer part of the ring."""
        self._is_hole[np.arange(first, last) % self._size] = False
        self._recount()

    def clear(self) -> None:
        """Forget all holes."""
        self._is_hole[:] = False
        self._recount()

    def present(self, first: int, total: int) -> Ints:
        """Return the rows of ``first … total - 1`` that were not deleted, ascending."""
        if self._present is None:
            index = np.arange(first, total)
            self._present = index[~self.at(index)]
        return self._present

    def state_dict(self, index: Ints) -> dict[str, Any]:
        """Return which rows of ``index`` were deleted."""
        return {"deleted": index[self.at(index)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.clear()
        self.dig(np.asarray(state["deleted"]))

    def _recount(self) -> None:
        self._present = None
        self._count = int(self._is_hole.sum())
