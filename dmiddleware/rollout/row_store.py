"""The rows of several environments that wait for a batch.

A step of an env manager gives one row for each environment that made a transition: usually one for
every environment, sometimes fewer (an environment was restarted, or spends a step on its reset).
The store keeps the pieces as they arrive and cuts rectangles ``[T, E, …]`` or whole episodes
``[T_i, …]`` from them, with array operations only; rows that do not fit stay for the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from dmiddleware.env.timestep import IdArray
from dmiddleware.tree import (
    Batch,
    as_tree,
    cat,
    clone,
    from_numpy,
    index_rows,
    map_leaves,
    stack,
    to_array,
    to_dict,
)

__all__ = ["NO_ENV", "SPARE_ROWS", "Columns", "RowStore"]

Columns: TypeAlias = dict[str, Any]
"""Columns ``[R, …]`` of one step, or of what is left of earlier ones: arrays, tensors or trees.

As in a batch, ``obs`` is what was acted on, and ``next_obs`` what followed.
"""

SPARE_ROWS: Final = 64
"""Rows that an environment keeps, beyond its own lane, when it fills the lane of another one."""

NO_ENV: Final = -1
"""In place of the environment of a row: the row is not kept."""


class RowStore:
    """Rows that were made and not yet taken, in the order in which they were made.

    Every piece has the columns ``episode_id`` int64 and ``done`` bool; the environment of each row
    is given when it is added. Pieces may share memory with each other; rows that are taken share
    none.

    Args:
        env_num: number of environments, ``E``.
    """

    def __init__(self, env_num: int) -> None:
        self._env_num = env_num
        self._all = np.arange(env_num)
        self._forget_rows()
        # Of the last row that was taken from each environment.
        self._last_id = np.zeros(env_num, np.int64)
        self._last_done = np.ones(env_num, bool)

    def _forget_rows(self) -> None:
        self._pieces: list[Columns] = []
        self._env_ids: list[IdArray] = []
        # While every piece has one row of every environment, in order, there is nothing to sort.
        self._regular = True
        self._counts = np.zeros(self._env_num, np.int64)

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def counts(self) -> IdArray:
        """Rows of each environment, ``[E] int64``."""
        if self._regular:
            return np.full(self._env_num, len(self._pieces), np.int64)
        return self._counts

    def lacking(self, n_steps: int) -> IdArray:
        """Return the environments that have fewer than ``n_steps`` rows, ascending."""
        if self._regular:
            return self._all if len(self._pieces) < n_steps else self._all[:0]
        return np.flatnonzero(self._counts < n_steps)

    @property
    def n_ends(self) -> IdArray:
        """Number of finished episodes among the rows of each environment, ``[E] int64``."""
        rows, env_id = self._joined()
        return np.bincount(env_id[to_array(rows["done"])], minlength=self._env_num)

    @property
    def open_episodes(self) -> IdArray:
        """Ids of the episodes that have rows here, but not their last one."""
        rows, _ = self._joined()
        ids = to_array(rows["episode_id"])
        return np.setdiff1d(ids, ids[to_array(rows["done"])])

    @property
    def cut_episodes(self) -> IdArray:
        """Ids of the episodes of which some rows, but not the last one, were taken."""
        return self._last_id[~self._last_done]

    def add(self, piece: Columns, env_id: IdArray | None = None) -> None:
        """Add a piece.

        Args:
            piece: its columns ``[R, …]``.
            env_id: the environment of each row, ``[R]``; None: one row of every environment, in
                order. Rows of ``NO_ENV`` are left out when rows are taken, which is faster than
                leaving them out of every piece.
        """
        if env_id is None and self._regular:
            self._pieces.append(piece)
            return
        if self._regular:
            # From now on, the environment of each row is noted.
            self._counts = self.counts
            self._env_ids = [self._all] * len(self._pieces)
            self._regular = False
        env_id = self._all if env_id is None else env_id
        self._pieces.append(piece)
        self._env_ids.append(env_id)
        self._counts += np.bincount(env_id - NO_ENV, minlength=self._env_num + 1)[1:]

    def take_rectangle(
        self,
        n_steps: int,
        sources: Mapping[int, int] | None = None,
        split: Callable[[int], int] | None = None,
    ) -> Batch:
        """Take the oldest ``n_steps`` rows of every environment, as ``[T, E, …]``.

        Every environment must have that many rows, or a source.

        Args:
            n_steps: the rectangle's height.
            sources: by environment that lacks rows, the one whose rows fill its lane: those that
                follow the source's own oldest ``n_steps``. An episode that continues from one lane
                into the other is split there, since no id may occur in two lanes of a rectangle. A
                source fills one lane, and has enough rows for its own.
            split: gives the rest of an episode a new id, and returns that id.
        """
        if self._regular:
            pieces = self._pieces[:n_steps]
            del self._pieces[:n_steps]
            self._last_id, self._last_done = pieces[-1]["episode_id"], pieces[-1]["done"]
            if n_steps == 1:
                return as_tree({name: _as_one_step(column) for name, column in pieces[0].items()})
            return as_tree({name: stack([piece[name] for piece in pieces]) for name in pieces[0]})
        rows, env_id = self._joined(with_dropped=True)
        order = np.argsort(env_id, kind="stable")[-len(self) :]  # dropped rows come first
        starts = np.cumsum(self._counts) - self._counts
        steps = np.arange(n_steps)[:, None]
        picked = order[np.minimum(starts + steps, len(order) - 1)]
        source_of = self._all.copy()
        for lane, source in (sources or {}).items():
            assert split is not None
            mine = order[starts[source] : starts[source] + self._counts[source]]
            rows = _split_at(rows, mine, n_steps, split)
            picked[:, lane] = mine[n_steps : 2 * n_steps]
            source_of[lane] = source
        self._keep_others(rows, env_id, picked)
        # The last row taken from each environment; one that lacked rows keeps the one before.
        self._last_id, self._last_done = self._last_id.copy(), self._last_done.copy()
        episode, done = to_array(rows["episode_id"]), to_array(rows["done"])
        is_filled = source_of != self._all
        for lanes in ((~is_filled).nonzero()[0], is_filled.nonzero()[0]):
            self._last_id[source_of[lanes]] = episode[picked[-1, lanes]]
            self._last_done[source_of[lanes]] = done[picked[-1, lanes]]
        index = torch.from_numpy(picked)
        return as_tree({name: _select(column, index) for name, column in rows.items()})

    def take_all(self) -> tuple[Columns, IdArray]:
        """Take all rows, as columns ``[R, …]``, and the environment of each, ``[R] int64``."""
        rows, env_id = self._joined()
        self._forget_rows()
        # Where an environment has several rows, its last one is written last.
        self._last_id, self._last_done = self._last_id.copy(), self._last_done.copy()
        self._last_id[env_id] = to_array(rows["episode_id"])
        self._last_done[env_id] = to_array(rows["done"])
        index = torch.arange(len(env_id))  # selecting copies
        return {name: _select(column, index) for name, column in rows.items()}, env_id.copy()

    def take_waiting(self) -> Batch:
        """Take all rows, as ``[T, E, …]`` if every piece had one row of every environment.

        Otherwise as ``[R, …]``, environment by environment.
        """
        if self._regular:
            return self.take_rectangle(len(self._pieces))
        rows, env_id = self.take_all()
        index = torch.from_numpy(np.argsort(env_id, kind="stable"))
        return as_tree({name: _select(column, index) for name, column in rows.items()})

    def take_episodes(self, shares: IdArray) -> list[Batch]:
        """Take the oldest ``shares[e]`` finished episodes of each environment ``e``.

        Returns:
            Batches ``[T_i, …]``, in the order in which the episodes ended.
        """
        rows, env_id = self._joined()
        done = np.flatnonzero(to_array(rows["done"]))
        # The rank of each end among the ends of its environment.
        rank = np.zeros(len(done), np.int64)
        for env in range(self._env_num):
            mine = env_id[done] == env
            rank[mine] = np.arange(np.count_nonzero(mine))
        ends = done[rank < shares[env_id[done]]]
        episode = to_array(rows["episode_id"])
        indices = [np.flatnonzero(episode[: end + 1] == episode[end]) for end in ends]
        self._keep_others(rows, env_id, np.concatenate(indices) if indices else done[:0])
        return [
            as_tree(
                {name: _select(column, torch.from_numpy(index)) for name, column in rows.items()}
            )
            for index in indices
        ]

    def drop(self, episode_ids: Sequence[int] | IdArray) -> int:
        """Drop the rows of these episodes.

        Returns:
            How many rows were dropped.
        """
        if not self._pieces:
            return 0
        rows, env_id = self._joined()
        unwanted = np.flatnonzero(np.isin(to_array(rows["episode_id"]), episode_ids))
        if len(unwanted):
            self._keep_others(rows, env_id, unwanted)
        return len(unwanted)

    def state_dict(self) -> dict[str, Any]:
        """Return all rows (no ``rows`` if there are none) and which rows were taken last."""
        last = {
            "last_id": torch.from_numpy(self._last_id.copy()),
            "last_done": torch.from_numpy(self._last_done.copy()),
        }
        if not self._pieces:
            return {"env_id": torch.zeros(0, dtype=torch.int64), "rows": {}, **last}
        rows, env_id = self._joined()
        return {
            **last,
            "env_id": torch.from_numpy(env_id.copy()),
            "rows": {name: to_dict(clone(from_numpy(column))) for name, column in rows.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by those of ``state``."""
        self._forget_rows()
        self._last_id = to_array(state["last_id"]).copy()
        self._last_done = to_array(state["last_done"]).copy()
        rows = {name: from_numpy(clone(column)) for name, column in state["rows"].items()}
        if rows:
            self.add(rows, to_array(state["env_id"]).astype(np.int64))

    def _joined(self, *, with_dropped: bool = False) -> tuple[Columns, IdArray]:
        """Return all rows as one piece, with the environment of each (``NO_ENV``: none)."""
        if not self._pieces:
            return {"done": np.zeros(0, bool), "episode_id": np.zeros(0, np.int64)}, self._all[:0]
        rows = _join(self._pieces)
        if self._regular:
            return rows, np.tile(self._all, len(self._pieces))
        env_id = np.concatenate(self._env_ids)
        if with_dropped or len(env_id) == len(self):
            return rows, env_id
        rows_of_envs = np.flatnonzero(env_id != NO_ENV)
        index = torch.from_numpy(rows_of_envs)
        return {name: _select(column, index) for name, column in rows.items()}, env_id[rows_of_envs]

    def _keep_others(self, rows: Columns, env_id: IdArray, taken: IdArray) -> None:
        keep = env_id != NO_ENV
        keep[taken.ravel()] = False
        remaining = np.flatnonzero(keep)
        self._forget_rows()
        if len(remaining):
            index = torch.from_numpy(remaining)
            self.add(
                {name: _select(column, index) for name, column in rows.items()}, env_id[remaining]
            )


def _join(pieces: Sequence[Columns]) -> Columns:
    """Concatenate pieces with the same columns; columns become tensors or trees."""
    if len(pieces) == 1:
        return {name: from_numpy(column) for name, column in pieces[0].items()}
    return {name: cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _split_at(rows: Columns, mine: IdArray, position: int, split: Callable[[int], int]) -> Columns:
    """Give the rows of one environment from a position on another id, if an episode continues."""
    episode, rest = to_array(rows["episode_id"]), mine[position:]
    before = episode[mine[position - 1]]
    continued = rest[episode[rest] == before]
    if len(continued) == 0:
        return rows
    episode = episode.copy()
    episode[continued] = split(int(before))
    return {**rows, "episode_id": torch.from_numpy(episode)}


def _as_one_step(column: Any) -> Any:
    """Return ``[1, E, …]``; arrays are copied, because envs and pieces share them."""
    if type(column) is np.ndarray:
        return torch.from_numpy(column[None].copy())
    if type(column) is torch.Tensor or isinstance(column, torch.Tensor):
        return column.unsqueeze(0)
    return map_leaves(_as_one_step, column)


def _select(column: Any, index: torch.Tensor) -> Any:
    return index_rows(from_numpy(column), index)
