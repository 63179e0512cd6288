"""The result of an env manager's step: a batch of transitions, which can be iterated by env."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from dmiddleware.env.batching import NestedArrays, index_rows

__all__ = ["BatchedTimestep", "EnvTimestep", "StepInfo"]

BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float32]
IdArray: TypeAlias = npt.NDArray[np.int64]
PartialColumns: TypeAlias = tuple[IdArray, Mapping[str, Callable[[], npt.NDArray[Any]]]]
"""Rows in ascending order, and functions that return the columns that only these rows have."""


class StepInfo(Mapping[str, Any]):
    """The infos of several envs, per env and as columns; each form is built on demand.

    As a mapping it is Gymnasium's vector info: each key that any env returned maps to a column over
    all envs, and the key with a leading underscore to a boolean mask of the envs that returned it.
    Numbers become a column of their type, arrays a stacked column, dictionaries a nested mapping of
    columns, everything else a column of objects; an env without the key has zeros or ``None``.

    Attributes:
        n_rows: the number of envs.

    Args:
        rows: one info dictionary per env; they are not copied.
    """

    __slots__ = ("_columns", "_partial", "_rows", "n_rows")

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows: Sequence[Mapping[str, Any]] | None = rows
        self._columns: dict[str, Any] | None = None
        self._partial: PartialColumns | None = None
        self.n_rows = len(rows)

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Any], n_rows: int, *, partial: PartialColumns | None = None
    ) -> StepInfo:
        """Wrap a Gymnasium vector info.

        Args:
            columns: the vector info.
            n_rows: the number of envs.
            partial: columns of some rows, which are built when they are read; a key that is in
                ``columns`` too is ignored here.
        """
        info = cls.__new__(cls)
        info._rows = None
        info._columns = dict(columns)
        info._partial = partial
        info.n_rows = n_rows
        return info

    def row(self, index: int) -> dict[str, Any]:
        """Return the info of one env as that env returned it, in a new dictionary."""
        if self._rows is not None:
            return dict(self._rows[index])
        return _row_of(self._as_columns(), index)

    def rows(self) -> list[dict[str, Any]]:
        """Return the infos of all envs, each as in :meth:`row`."""
        return [self.row(index) for index in range(self.n_rows)]

    def column(self, key: str) -> tuple[Any, BoolArray] | None:
        """Return one column, and which envs returned it; None if none did.

        The other columns are not built.
        """
        if self._rows is None or self._columns is not None:
            columns = self._as_columns()
            if key not in columns:
                return None
            has_value = columns.get(f"_{key}")
            return columns[key], np.ones(self.n_rows, np.bool_) if has_value is None else has_value
        has_value = np.fromiter((key in row for row in self._rows), np.bool_, self.n_rows)
        if not has_value.any():
            return None
        return _column([row.get(key) for row in self._rows], has_value), has_value

    def values_at(self, key: str, rows: Sequence[int]) -> list[Any]:
        """Return the values of one key in some rows, which must have it, as a list."""
        if self._rows is not None:
            return [self._rows[row][key] for row in rows]
        assert self._columns is not None
        if self._partial is not None and key not in self._columns:
            partial_rows, columns = self._partial
            if key in columns and partial_rows.tolist() == rows:
                return list(columns[key]().tolist())
        return list(self._as_columns()[key][rows].tolist())

    def values_of(self, keys: Sequence[str], row: int) -> dict[str, Any]:
        """Return the values of those keys that one row has; columns are not built for it."""
        if self._rows is not None:
            return {key: self._rows[row][key] for key in keys if key in self._rows[row]}
        partial = {} if self._partial is None else self._partial[1]
        assert self._columns is not None
        info = {}
        for key in keys:
            if key in self._columns or key in partial:
                columns = self._as_columns()
                has_value = columns.get(f"_{key}")
                if has_value is None or has_value[row]:
                    info[key] = _value_at(columns, key, row)
        return info

    def __getitem__(self, key: str) -> Any:
        return self._as_columns()[key]

    def __contains__(self, key: object) -> bool:
        if self._rows is None or self._columns is not None:
            return key in self._as_columns()
        if any(key in row for row in self._rows):
            return True
        return isinstance(key, str) and key[:1] == "_" and any(key[1:] in r for r in self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._as_columns())

    def __len__(self) -> int:
        return len(self._as_columns())

    def __repr__(self) -> str:
        return f"StepInfo({self._as_columns()!r})"

    def _as_columns(self) -> dict[str, Any]:
        if self._columns is None:
            assert self._rows is not None
            self._columns = _columns_of(self._rows)
        if self._partial is not None:
            (rows, columns), self._partial = self._partial, None
            mask = np.zeros(self.n_rows, np.bool_)
            mask[rows] = True
            for key in columns.keys() - self._columns.keys():
                self._columns[key], self._columns[f"_{key}"] = _filled(columns[key](), mask), mask
        return self._columns


@dataclass(frozen=True, slots=True)
class EnvTimestep:
    """One transition of one env, without the observation that was acted on.

    Attributes:
        env_id: the env's index in its manager.
        next_obs: the true successor; at the end of an episode the final observation. What to act on
            next is in the manager's ``ready_obs``.
        reward: the reward of this step; for several agents a list with one for each.
        done: whether the episode ended: ``terminated or truncated``.
        terminated: whether the episode reached a terminal state, whose value is zero.
        truncated: whether the episode was cut, for example by a time limit; the value of the
            successor is bootstrapped.
        info: the env's info of this step; at the end of an episode with ``eval_episode_return`` and
            ``eval_episode_length``; with ``abnormal: True`` if the env failed and was restarted, so
            that this is not a transition.
    """

    env_id: int
    next_obs: Any
    reward: float | list[float]
    done: bool
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def obs(self) -> Any:
        """The same as ``next_obs``, under the name that it has in DI-engine's timesteps."""
        return self.next_obs

    def _replace(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields, as a named tuple does."""
        if "obs" in changes:
            changes["next_obs"] = changes.pop("obs")
        return replace(self, **changes)


@dataclass(slots=True)
class BatchedTimestep:
    """One transition of each of ``E'`` envs; usually of all ``E`` envs of a manager.

    The observations that were acted on are not in it: the manager's ``ready_obs`` before the step.
    The manager never writes to the arrays again. Do not write to ``env_id``, ``valid`` and
    ``abnormal``, which steps share. Iterating yields the rows, without those of envs that spent the
    step on their reset.

    Attributes:
        env_id: ``[E'] int64``, the envs that were stepped.
        ready_obs: ``[E', …]`` of the observation space's dtype, or nested dicts and tuples of such
            arrays (tensors, if a vector env returns them): the observations to act on next. After
            the end of an episode they are the first ones of the next episode.
        next_obs: ``[E', …]``, the true successors; at the end of an episode the final observation.
            The same object as ``ready_obs`` if no episode ended.
        reward: ``[E'] float32``; ``[E', A]`` for several agents (:class:`ParallelEnvAdapter`).
        done: ``[E'] bool``, ``terminated | truncated``.
        terminated: ``[E'] bool``.
        truncated: ``[E'] bool``.
        abnormal: ``[E'] bool``: the env failed in this step and was restarted. The row is not a
            transition (its reward is 0, its flags are false, its observations are those of the
            reset), and the unfinished trajectory of the env must be dropped.
        valid: ``[E'] bool``: the row is a transition. The others are ``abnormal``, or their env
            spent the step on its reset (a vector env may do so after each episode); then
            ``next_obs`` is the first observation of the next episode, the reward is 0 and the
            flags are false.
        infos: those of :attr:`info`, or one dictionary for each row, from which it is made.
        is_full: whether ``env_id`` is ``0 … E-1`` and all rows are valid.
        returns: the undiscounted returns of the episodes that ended, in the order of their rows:
            sums of rewards, or what the env itself put under ``eval_episode_return``.
    """

    env_id: IdArray
    ready_obs: NestedArrays
    next_obs: NestedArrays
    reward: FloatArray
    done: BoolArray
    terminated: BoolArray
    truncated: BoolArray
    abnormal: BoolArray
    valid: BoolArray
    infos: StepInfo | Sequence[Mapping[str, Any]]
    is_full: bool
    returns: Sequence[Any] = ()

    @property
    def info(self) -> StepInfo:
        """Gymnasium's vector info of the step.

        It has ``eval_episode_return`` (float32) and ``eval_episode_length`` (int64) where an
        episode ended, and their masks ``_eval_episode_return`` and ``_eval_episode_length``. The
        return of several agents is their mean; ``eval_episode_return_0``, … are their own.
        """
        if not isinstance(self.infos, StepInfo):
            self.infos = StepInfo(self.infos)
        return self.infos

    def __len__(self) -> int:
        return len(self.env_id)

    def __iter__(self) -> Iterator[EnvTimestep]:
        reward, done = self.reward.tolist(), self.done.tolist()
        terminated, truncated = self.terminated.tolist(), self.truncated.tolist()
        shown = (self.valid | self.abnormal).tolist()
        for row, env_id in enumerate(self.env_id.tolist()):
            if not shown[row]:
                continue
            yield EnvTimestep(
                env_id=env_id,
                next_obs=index_rows(self.next_obs, row),
                reward=reward[row],
                done=done[row],
                terminated=terminated[row],
                truncated=truncated[row],
                info=self.info.row(row),
            )


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for key in {key: None for row in rows for key in row}:
        mask = np.fromiter((key in row for row in rows), dtype=np.bool_, count=len(rows))
        columns[key] = _column([row.get(key) for row in rows], mask)
        columns[f"_{key}"] = mask
    return columns


def _column(values: list[Any], mask: BoolArray) -> Any:
    present = [value for value, is_given in zip(values, mask, strict=True) if is_given]
    first = present[0]
    if all(isinstance(value, dict) for value in present):
        return _columns_of([value if ok else {} for value, ok in zip(values, mask, strict=True)])
    kind = np.generic | int | float | bool
    if all(isinstance(value, kind) and not isinstance(value, np.void) for value in present):
        return _filled(np.array(present), mask)
    if isinstance(first, np.ndarray) and all(
        isinstance(value, np.ndarray) and value.shape == first.shape for value in present
    ):
        return _filled(np.stack(present), mask)
    column = np.full(len(values), None, dtype=object)
    for index in np.flatnonzero(mask):
        column[index] = values[index]
    return column


def _filled(given: npt.NDArray[Any], mask: BoolArray) -> npt.NDArray[Any]:
    column = np.zeros((len(mask), *given.shape[1:]), dtype=given.dtype)
    column[mask] = given
    return column


def _row_of(columns: Mapping[str, Any], index: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key in columns:
        mask = columns.get(f"_{key}")
        if mask is None:
            # A mask of another key, or a value without a mask.
            if not (key.startswith("_") and key[1:] in columns):
                row[key] = _value_at(columns, key, index)
        elif mask[index]:
            row[key] = _value_at(columns, key, index)
    return row


def _value_at(columns: Mapping[str, Any], key: str, index: int) -> Any:
    """Return what a column has for one row; without a mask it may be a value of all rows."""
    column = columns[key]
    if f"_{key}" in columns:
        return _row_of(column, index) if isinstance(column, Mapping) else column[index]
    return column[index] if getattr(column, "ndim", 0) > 0 else column
