"""Rows of one structure in columns, which the items of a deque buffer stand for."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from dmiddleware.tree import Batch, index_rows, leaves, map_leaves, to_dict

__all__ = ["RowColumns", "StoredRow"]


class StoredRow:
    """One row of columns; a dictionary of its own from when somebody asks for it.

    Args:
        columns: where the row is.
        slot: at which place.

    Attributes:
        columns: where the row is; None: it is a dictionary of its own.
        slot: at which place.
    """

    __slots__ = ("__weakref__", "_dictionary", "columns", "slot")

    def __init__(self, columns: RowColumns, slot: int) -> None:
        self._dictionary: dict[str, Any] = {}
        self.columns: RowColumns | None = columns
        self.slot = slot

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dictionary, the same one each time, which may be changed."""
        if self.columns is not None:
            self._dictionary = self.columns.copy_of(self.slot)
            self.columns = None
        return self._dictionary


class RowColumns:
    """Columns with room for the rows that a deque buffer holds.

    Args:
        size: items that the buffer holds.
        rows: the first rows ``[N, …]``, whose structure is that of all.
    """

    def __init__(self, size: int, rows: Batch) -> None:
        self._n_at_once = len(rows["done"])
        # A place is used again when the buffer has dropped its item, also within a push.
        self._capacity = size + self._n_at_once
        self._kinds = _kinds_of(rows)
        self._columns = map_leaves(
            lambda leaf: leaf.new_empty((self._capacity, *leaf.shape[1:])), rows
        )
        self._rows: list[weakref.ref[StoredRow] | None] = [None] * self._capacity
        self._n_rows = 0

    def fits(self, rows: Batch) -> bool:
        """Return whether rows ``[N, …]`` can be added: no more than at first, of one structure."""
        return len(rows["done"]) <= self._n_at_once and _kinds_of(rows) == self._kinds

    def add(self, rows: Batch) -> list[StoredRow]:
        """Store rows ``[N, …]``."""
        slots = [(self._n_rows + k) % self._capacity for k in range(len(rows["done"]))]
        self._n_rows += len(slots)
        for slot in slots:
            reference = self._rows[slot]
            kept = None if reference is None else reference()
            if kept is not None:
                kept.as_dict()
        index = torch.tensor(slots)
        map_leaves(lambda column, values: column.index_copy_(0, index, values), self._columns, rows)
        added = [StoredRow(self, slot) for slot in slots]
        for row in added:
            self._rows[row.slot] = weakref.ref(row)
        return added

    def gather(self, slots: list[int]) -> Batch:
        """Return rows ``[n, …]``."""
        index = torch.tensor(slots)
        return map_leaves(lambda column: column.index_select(0, index), self._columns)

    def copy_of(self, slot: int) -> dict[str, Any]:
        """Return a copy of a row."""
        row: dict[str, Any] = to_dict(map_leaves(torch.clone, index_rows(self._columns, slot)))
        return row


def _kinds_of(rows: Batch) -> list[tuple[str, Any, Any]]:
    return [(path, leaf.dtype, leaf.shape[1:]) for path, leaf in leaves(rows)]
