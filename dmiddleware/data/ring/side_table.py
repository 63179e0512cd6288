"""A side table: rows kept beside the ring, only for some of its slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmiddleware.data.ring.columns import Array, Leaf
from dmiddleware.data.samplers import Ints

__all__ = ["SideTable"]

_NOWHERE = -1


class SideTable:
    """Keeps leaves for the few slots that need them; grows when it is full, reuses what is free.

    Args:
        size: number of slots.
        kept: the leaves that it keeps.
    """

    def __init__(self, size: int, kept: Sequence[Leaf]) -> None:
        self.paths = [leaf.path for leaf in kept]
        self._place = np.full(size, _NOWHERE)
        self._arrays: dict[str, Array] = {
            leaf.path: np.zeros((0, *leaf.shape), leaf.dtype) for leaf in kept
        }
        self._free = np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        arrays = (self._place, self._free, *self._arrays.values())
        return sum(array.nbytes for array in arrays)

    def __len__(self) -> int:
        return self._capacity - len(self._free)

    def put(self, slots: Ints, rows: Mapping[str, Array]) -> None:
        """Keep rows for slots that have none yet."""
        if len(slots) > len(self._free):
            self._grow(len(slots) - len(self._free))
        place, self._free = self._free[: len(slots)], self._free[len(slots) :]
        self._place[slots] = place
        for path, array in self._arrays.items():
            array[place] = rows[path]

    def get(self, path: str, slots: Ints) -> Array:
        """Copy what is kept for slots that have something."""
        kept: Array = self._arrays[path][self._place[slots]]
        return kept

    def free(self, slots: Ints) -> None:
        """Forget what is kept for slots; some of them may have nothing."""
        place = self._place[slots]
        place = place[place != _NOWHERE]
        if len(place):
            self._place[slots] = _NOWHERE
            self._free = np.concatenate([place, self._free])

    def overlay(self, path: str, slots: Ints, rows: Array) -> None:
        """Write what is kept over ``rows`` ``[*slots.shape, …]``, for slots that have something."""
        place = self._place[slots]
        has = place != _NOWHERE
        rows[has] = self._arrays[path][place[has]]

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self._place[:] = _NOWHERE
        self._free = np.arange(self._capacity)

    def state_dict(self, slots: Ints) -> dict[str, Any]:
        """Return what is kept for these slots: positions in ``slots``, and rows."""
        position = np.flatnonzero(self._place[slots] != _NOWHERE)
        rows = {path: self.get(path, slots[position]) for path in self.paths}
        return {"position": position, "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any], slots: Ints) -> None:
        """Restore what :meth:`state_dict` returned for these slots; nothing else is kept."""
        self.clear()
        rows = {path: np.asarray(array) for path, array in state["rows"].items()}
        self.put(slots[np.asarray(state["position"])], rows)

    @property
    def _capacity(self) -> int:
        return len(next(iter(self._arrays.values())))

    def _grow(self, n_more: int) -> None:
        old = self._capacity
        new = max(64, 2 * old, old + n_more)
        for path, array in self._arrays.items():
            grown = np.zeros((new, *array.shape[1:]), array.dtype)
            grown[:old] = array
            self._arrays[path] = grown
        self._free = np.concatenate([self._free, np.arange(old, new)])
