"""Small functions on lists and dictionaries that DI-engine's programs call."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

__all__ = [
    "LimitedSpaceContainer",
    "RunningMeanStd",
    "deep_merge_dicts",
    "deep_update",
    "dicts_to_lists",
    "get_shape0",
    "import_module",
    "list_split",
    "lists_to_dicts",
    "one_time_warning",
    "split_data_generator",
    "squeeze",
]

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V")


def lists_to_dicts(data: Sequence[Any], recursive: bool = False) -> Any:
    """Turn a list of dictionaries, or of named tuples, into one of lists; the first has the keys.

    With ``recursive``, the dictionaries in it are turned too, except for ``prev_state``.

    Raises:
        ValueError: if there are none.
        TypeError: if the items are neither dictionaries nor named tuples.
    """
    if not data:
        raise ValueError("there is nothing to turn into a dictionary: the list is empty")
    first = data[0]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*zip(*data, strict=True))
    if not isinstance(first, dict):
        raise TypeError(f"expected dictionaries or named tuples, got {type(first).__name__}")
    columns = {key: [row[key] for row in data] for key in first}
    if recursive:
        for key, column in columns.items():
            if isinstance(column[0], dict) and key != "prev_state":
                columns[key] = lists_to_dicts(column)
    return columns


def dicts_to_lists(data: Mapping[Any, Sequence[Any]]) -> list[dict[Any, Any]]:
    """Turn a dictionary of lists into a list of dictionaries."""
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def list_split(data: list[T], step: int) -> tuple[list[list[T]], list[T] | None]:
    """Return the pieces of ``step`` items, and the items that are left, or None."""
    n_whole = len(data) // step * step
    return [data[i : i + step] for i in range(0, n_whole, step)], data[n_whole:] or None


def squeeze(data: Any) -> Any:
    """Return the only item of a list, tuple or dictionary; longer lists become tuples."""
    if isinstance(data, list | tuple):
        return data[0] if len(data) == 1 else tuple(data)
    if isinstance(data, dict) and len(data) == 1:
        return next(iter(data.values()))
    return data


def deep_merge_dicts(original: dict[Any, Any] | None, new_dict: Any) -> dict[Any, Any]:
    """Return a copy of ``original``, updated by ``new_dict`` at all depths."""
    return deep_update(copy.deepcopy(original or {}), new_dict or {}, True)


def deep_update(
    original: dict[Any, Any], new_dict: Mapping[Any, Any], new_keys_allowed: bool = False
) -> dict[Any, Any]:
    """Update a dictionary in place, at all depths.

    Raises:
        RuntimeError: for a key that is not in ``original``, unless new keys are allowed.
    """
    for key, value in new_dict.items():
        if key not in original and not new_keys_allowed:
            raise RuntimeError(f"unknown key {key!r}; there are {', '.join(map(str, original))}")
        if isinstance(original.get(key), dict) and isinstance(value, dict):
            deep_update(original[key], value, new_keys_allowed)
        else:
            original[key] = value
    return original


@functools.cache
def one_time_warning(warning_msg: str) -> None:
    """Log a warning, unless it was logged before."""
    _LOG.warning("%s", warning_msg)


def import_module(modules: Iterable[str]) -> None:
    """Import modules, so that they register what they have."""
    for name in modules:
        importlib.import_module(name)


def get_shape0(data: Any) -> int:
    """Return the number of rows of the first tensor in a tree.

    Raises:
        TypeError: if it finds none.
    """
    if isinstance(data, list | tuple):
        return get_shape0(data[0])
    if isinstance(data, torch.Tensor | np.ndarray):
        return len(data)
    if isinstance(data, Mapping) or hasattr(data, "values"):
        return get_shape0(next(iter(data.values())))
    raise TypeError(f"expected a tensor or a tree of them, got {type(data).__name__}")


def split_data_generator(
    data: dict[str, Any], split_size: int, shuffle: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield minibatches of ``split_size`` rows; the last one repeats rows to be full.

    Args:
        data: columns; a list of tensors has columns in it, except for the states of recurrent
            networks, which are lists of rows. None and strings stay as they are.
        split_size: rows of a minibatch.
        shuffle: whether the rows come in random order.

    Raises:
        ValueError: if ``split_size`` is below 1, or without any column.
    """
    if split_size < 1:
        raise ValueError(f"split_size must be at least 1, got {split_size}")
    n_rows = next((n for n in map(_n_rows, data, data.values()) if n is not None), None)
    if n_rows is None:
        raise ValueError("the data have no column of rows to split")
    order = np.random.permutation(n_rows) if shuffle else np.arange(n_rows)
    for start in range(0, n_rows, split_size):
        first = max(min(start, n_rows - split_size), 0)
        yield _rows_of(data, order[first : first + split_size])


_STATES = ("prev_state", "prev_actor_state", "prev_critic_state")


def _n_rows(key: str, column: Any) -> int | None:
    if column is None or isinstance(column, str):
        return None
    if isinstance(column, list | tuple) and key not in _STATES:
        return None if isinstance(column[0], str) else get_shape0(column[0])
    return get_shape0(column) if isinstance(column, dict) else len(column)


def _rows_of(data: Any, rows: np.ndarray, is_state: bool = False) -> Any:
    if data is None or isinstance(data, str):
        return data
    if isinstance(data, list | tuple):
        return [data[i] for i in rows] if is_state else [_rows_of(x, rows) for x in data]
    if isinstance(data, dict):
        return {key: _rows_of(x, rows, key in _STATES) for key, x in data.items()}
    return data[rows]


class LimitedSpaceContainer:
    """Counts places that are taken, from ``min_val`` to ``max_val``."""

    def __init__(self, min_val: int, max_val: int) -> None:
        if max_val < min_val:
            raise ValueError(f"max_val must be at least min_val, got {max_val} and {min_val}")
        self.min_val, self.max_val, self.cur = min_val, max_val, min_val

    def get_residual_space(self) -> int:
        """Take all places that are free, and return how many."""
        n_free, self.cur = self.max_val - self.cur, self.max_val
        return n_free

    def acquire_space(self) -> bool:
        """Take a place, and return whether there was one."""
        has_space = self.cur < self.max_val
        self.cur += has_space
        return has_space

    def release_space(self) -> None:
        """Free a place."""
        self.cur = max(self.min_val, self.cur - 1)

    def increase_space(self) -> None:
        """Add a place."""
        self.max_val += 1

    def decrease_space(self) -> None:
        """Remove a place."""
        self.max_val -= 1


class RunningMeanStd:
    """The mean and the standard deviation of all rows so far (Chan et al., 1979).

    Args:
        epsilon: how many rows the mean 0 and the variance 1 count for at the start.
        shape: the shape of a row; of numbers ``()``.
        device: where the results are, if rows have a shape.
    """

    def __init__(
        self, epsilon: float = 1e-4, shape: tuple[int, ...] = (), device: Any = "cpu"
    ) -> None:
        self._epsilon, self._shape, self._device = epsilon, tuple(shape), device
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._mean: Any = np.zeros(self._shape, np.float32)
        self._var: Any = np.ones(self._shape, np.float32)
        self._count = self._epsilon

    def update(self, x: np.ndarray) -> None:
        """Add rows ``[n, …]``."""
        mean, variance, count = x.mean(0), x.var(0), len(x)
        total, delta = self._count + count, mean - self._mean
        between = np.square(delta) * self._count * count / total
        self._var = (self._var * self._count + variance * count + between) / total
        self._mean = self._mean + delta * count / total
        self._count = total

    @property
    def mean(self) -> Any:
        """The mean: a number, or a tensor of the rows' shape."""
        return self._result(self._mean)

    @property
    def std(self) -> Any:
        """The standard deviation: a number, or a tensor of the rows' shape."""
        return self._result(np.sqrt(self._var + 1e-8))

    def _result(self, value: Any) -> Any:
        if not self._shape:
            return float(value)
        return torch.as_tensor(value, dtype=torch.float32, device=self._device)
