"""Batches as the lists of transitions that the middleware of DI-engine's users expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import GeneratorType
from typing import Any, Final, overload

import torch

from dmiddleware.pipeline import middleware as declared
from dmiddleware.pipeline.plan import Group
from dmiddleware.tree import Batch, as_tree, flatten_lead, items_of, with_columns
from middleware.base import BaseMiddleware
from middleware.support.rows import rows_of

__all__ = ["Row", "RowView", "seen_by_rows"]

_STOCK: Final = ("dmiddleware.", "middleware.")
_FIELDS: Final = ("trajectories", "train_data")
_WRITES: Final = (
    *(*_FIELDS, "trajectory_end_idx", "episodes", "collect_kwargs"),
    *("train_output", "eval_value", "eval_output"),
)
"""What a user's middleware may write, as it declares nothing."""


class Row(Mapping[str, Any]):
    """One transition of a batch, by attributes or keys; what is set is set in the batch.

    Args:
        view: the rows of the batch.
        number: which row it is.
    """

    def __init__(self, view: RowView, number: int) -> None:
        self.__dict__.update(_view=view, _number=number)

    def __getitem__(self, name: str) -> Any:
        return self._view.column(name)[self._number]

    def __iter__(self) -> Iterator[str]:
        return iter(self._view.names())

    def __len__(self) -> int:
        return len(self._view.names())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._view.names():
            raise AttributeError(
                f"a transition has no {name!r}; it has {', '.join(self._view.names())}"
            )
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._view.set_value(name, self._number, value)

    __setattr__ = __setitem__


class RowView(Sequence[Row]):
    """The transitions of a batch, one after the other.

    Args:
        batch: ``[N, …]`` or ``[T, E, …]``.
    """

    def __init__(self, batch: Batch) -> None:
        self._lead = tuple(batch["done"].shape)
        self._rows = flatten_lead(batch, 2) if len(self._lead) == 2 else batch
        self._changed: dict[str, list[Any]] = {}

    def names(self) -> list[str]:
        """Return the names of the columns."""
        return list(dict.fromkeys([*dict(items_of(self._rows)), *self._changed]))

    def column(self, name: str) -> Any:
        """Return a column."""
        return self._changed[name] if name in self._changed else self._rows[name]

    def set_value(self, name: str, number: int, value: Any) -> None:
        """Set a value of one row; a new column is zero elsewhere."""
        if name not in self._changed:
            columns = dict(items_of(self._rows))
            empty = [torch.zeros_like(torch.as_tensor(value))] * len(self)
            self._changed[name] = list(columns[name]) if name in columns else empty
        self._changed[name][number] = value

    def batch(self) -> Batch:
        """Return the batch, with what was set."""
        columns = {}
        for name, values in self._changed.items():
            column = torch.stack([torch.as_tensor(value) for value in values])
            before = dict(items_of(self._rows)).get(name)
            columns[name] = column if before is None else column.to(before.dtype).view_as(before)
        rows = with_columns(self._rows, **columns) if columns else self._rows
        if len(self._lead) == 2:
            return _with_lead(rows, self._lead)
        return rows

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [Row(self, number) for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} transitions, got the index {index}")
        return Row(self, index % len(self))

    def __len__(self) -> int:
        return len(self._rows["done"])


def _with_lead(rows: Batch, lead: tuple[int, ...]) -> Batch:
    return as_tree(
        {
            name: _with_lead(column, lead)
            if isinstance(column, Batch)
            else column.reshape(*lead, *column.shape[1:])
            for name, column in items_of(rows)
        }
    )


def seen_by_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a user's middleware so that it sees collected data as lists of transitions."""
    is_stock = getattr(function, "__module__", "").startswith(_STOCK)
    if is_stock or isinstance(function, BaseMiddleware | Group):
        return function

    @declared(writes=_WRITES)
    @wraps(function, updated=())
    def middleware(ctx: Any) -> Iterator[None]:
        with _rows(ctx):
            rest = function(ctx)
            if isinstance(rest, GeneratorType):
                next(rest, None)
        yield
        if isinstance(rest, GeneratorType):
            with _rows(ctx):
                next(rest, None)

    return middleware


@contextmanager
def _rows(ctx: Any) -> Iterator[None]:
    """Let the fields of a context be lists of transitions within the block.

    Without an evaluation in the step, ``eval_value`` is -inf there, which users compare.
    """
    if is_without_value := hasattr(ctx, "eval_value") and ctx.eval_value is None:
        ctx.eval_value = -math.inf
    for name in _FIELDS:
        if isinstance(batch := getattr(ctx, name, None), Batch) and "done" in batch:
            setattr(ctx, name, RowView(batch))
    if isinstance(episodes := getattr(ctx, "episodes", None), list):
        ctx.episodes = [RowView(part) if isinstance(part, Batch) else part for part in episodes]
    try:
        yield
    finally:
        if is_without_value and ctx.eval_value == -math.inf:
            ctx.eval_value = None
        for name in _FIELDS:
            value = getattr(ctx, name, None)
            if isinstance(value, RowView | list):
                setattr(ctx, name, _as_batch(value))
        if isinstance(episodes := getattr(ctx, "episodes", None), list):
            ctx.episodes = [_as_batch(part) for part in episodes]


def _as_batch(value: Any) -> Any:
    if isinstance(value, RowView):
        return value.batch()
    is_rows = isinstance(value, list) and value and all(isinstance(row, Row) for row in value)
    return rows_of([dict(row) for row in value]) if is_rows else value
