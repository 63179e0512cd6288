"""Stacks of frames, put together from the newest frame of each row when they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmiddleware.data.ring.row_links import NONE, Pushed, SideTable
from dmiddleware.data.samplers import Ints
from dmiddleware.files.schema import Array, Leaf, same_rows

__all__ = ["FrameStacks"]


class FrameStacks:
    """The frames that the columns of a ring lack, because they hold one frame per row.

    A row continues the row before it in its episode if its older frames are that row's newer ones,
    bit for bit. Its stack is put together from the frames of the rows that it continues. All other
    rows, such as the first one of an episode, keep their older frames in a side table. So does a
    row when the row that it continues leaves the ring.

    Args:
        size: capacity of the ring.
        stacked: the leaves ``[K, …]``, oldest frame first.
        frames: their columns, one frame per row: ``[size, …]`` by path.
    """

    def __init__(self, size: int, stacked: Sequence[Leaf], frames: Mapping[str, Array]) -> None:
        self._size = size
        self._depth = {leaf.path: leaf.shape[0] for leaf in stacked}
        self._frames = frames
        # By slot: the slot of the row that this row continues.
        self._previous = np.full(size, NONE)
        older = [Leaf(x.path, (x.shape[0] - 1, *x.shape[1:]), x.dtype) for x in stacked]
        self._older = SideTable(size, older)

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves."""
        return self._older.paths

    @property
    def nbytes(self) -> int:
        """Memory, without the columns, in bytes."""
        return self._previous.nbytes + self._older.nbytes

    def take(self, path: str, index: Ints) -> Array:
        """Return stacks of rows, ``[*index.shape, K, …]``."""
        depth = self._depth[path]
        slot = index % self._size
        slots = np.empty((*index.shape, depth), np.int64)
        slots[..., -1] = slot
        n_missing = np.zeros(index.shape, np.int64)
        for position in range(depth - 2, -1, -1):
            previous = self._previous.take(slot)
            ends = (previous == NONE) & (n_missing == 0)
            n_missing[ends] = position + 1
            # From its end on, the slot stays that of the oldest row, whose side table is read.
            slot = np.where(n_missing > 0, slot, previous)
            slots[..., position] = slot
        stacks: Array = self._frames[path].take(slots, axis=0)
        for n in range(1, depth):
            rows = n_missing == n
            if rows.any():
                older = self._older.get(path, slot[rows])
                stacks[rows, :n] = older[:, depth - 1 - n :]
        return stacks

    def push(
        self, first: int, rows: Mapping[str, Array], index: Ints, successor: Ints, entered: Pushed
    ) -> None:
        """Add rows whose newest frames are in the columns.

        Args:
            first: index of the first row of ``rows``.
            rows: the leaves that were pushed, ``[N, K, …]`` by path.
            index: the rows of them that the ring holds, int64 ``[n]``, ascending.
            successor: the successor of each, -1 where there is none, int64 ``[n]``.
            entered: the links from rows of earlier pushes.
        """
        slots = index % self._size
        self._older.free(slots)
        self._previous[slots] = NONE
        tail = index[successor != NONE]
        head = successor[successor != NONE]
        inner, outer = np.ones(len(tail), np.bool_), np.ones(len(entered.tail), np.bool_)
        for path in self.paths:
            new = rows[path]
            if len(tail):
                inner &= same_rows(new[tail - first, 1:], new[head - first, :-1])
            if len(entered.tail):
                before = self.take(path, entered.tail)
                outer &= same_rows(before[:, 1:], new[entered.head - first, :-1])
        self._previous[head[inner] % self._size] = tail[inner] % self._size
        self._previous[entered.head[outer] % self._size] = entered.tail[outer] % self._size
        keep = index[self._previous[slots] == NONE]
        self._older.put(
            keep % self._size, {path: rows[path][keep - first, :-1] for path in self.paths}
        )

    def drop(self, dropped: Ints, successor: Ints, *, first: int) -> None:
        """Prepare for the loss of the oldest rows: rows that continue them keep their frames.

        Args:
            dropped: the rows, int64 ``[n]``.
            successor: the successor of each, -1 where there is none.
            first: the oldest row that stays.
        """
        slots = successor % self._size
        keeps = (successor >= first) & (self._previous[slots] == dropped % self._size)
        with_stack = successor[keeps]
        if len(with_stack):
            stacks = {path: self.take(path, with_stack)[:, :-1] for path in self.paths}
            self._previous[with_stack % self._size] = NONE
            self._older.put(with_stack % self._size, stacks)

    def clear(self) -> None:
        """Remove all rows."""
        self._older.clear()
        self._previous[:] = NONE

    def state_dict(self, slots: Ints) -> dict[str, Any]:
        """Return the older frames of those rows of ``slots`` that keep them."""
        return self._older.state_dict(slots)

    def link(self, index: Ints, successor: Ints) -> None:
        """Let rows continue those before them, before :meth:`load`; the columns are restored.

        Args:
            index: all rows that are held, int64 ``[n]``.
            successor: the successor of each, -1 where there is none.
        """
        linked = successor != NONE
        self._previous[successor[linked] % self._size] = index[linked] % self._size

    def load(self, state: Mapping[str, Any], slots: Ints) -> None:
        """Restore what :meth:`state_dict` returned for these slots."""
        self._older.load(state, slots)
        self._previous[slots[np.asarray(state["position"])]] = NONE
