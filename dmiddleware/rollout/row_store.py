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
import numpy.typing as npt
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

__all__ = ["Columns", "RowStore"]

Columns: TypeAlias = dict[str, Any]
"""Columns ``[R, …]`` of one step, or of what is left of earlier ones: arrays, tensors or trees.

As in a batch, ``obs`` is what was acted on, and ``next_obs`` what followed.
"""


_NOWHERE: Final = torch.zeros(0, dtype=torch.int64)
_FEW: Final = 64
_DROPPED: Final = -1


class RowStore:
    """Rows that were made and not yet taken, in the order in which they were made.

    Every piece has the columns ``episode_id`` int64 and ``done`` bool; the environment of each row
    is given when it is added. Pieces may share memory with each other; rows that are taken share
    none.

    Attributes:
        ends: the rows that end an episode in the rectangle that was taken last: int64 indices into
            its ``T * E`` rows.

    Args:
        env_num: number of environments, ``E``.
    """

    def __init__(self, env_num: int) -> None:
        self._env_num = env_num
        self._all = np.arange(env_num)
        self.ends = _NOWHERE
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self._forget_rows()
        self._last_id = np.zeros(self._env_num, np.int64)
        self._last_done = np.ones(self._env_num, bool)

    def _forget_rows(self) -> None:
        self._pieces: list[Columns] = []
        self._env_ids: list[IdArray] = []
        # While every piece has one row of every environment, in order, there is nothing to sort.
        self._regular = True
        self._counts = np.zeros(self._env_num, np.int64)

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def is_empty(self) -> bool:
        """Whether the store is empty."""
        return not self._pieces

    @property
    def counts(self) -> IdArray:
        """Rows of each environment, ``[E] int64``."""
        if self._regular:
            return np.full(self._env_num, len(self._pieces), np.int64)
        return self._counts

    @property
    def is_level(self) -> bool:
        """Whether all environments have the same number of rows."""
        return self._regular or bool((self._counts == self._counts[0]).all())

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

    @property
    def fewest(self) -> int:
        """Rows of the environment that has the fewest."""
        return len(self._pieces) if self._regular else int(self._counts.min())

    def add(self, piece: Columns, valid: npt.NDArray[np.bool_] | None = None) -> None:
        """Add a piece with one row of every environment, in order.

        Args:
            piece: its columns ``[E, …]``.
            valid: ``[E]``, the rows to keep; None: all. The others are dropped when rows are taken,
                which is faster than dropping them from every piece.
        """
        if valid is not None:
            self._sort_later()
        self._pieces.append(piece)
        if self._regular:
            return
        self._counts += 1
        if valid is None:
            self._env_ids.append(self._all)
            return
        dropped = (~valid).nonzero()[0]
        self._counts[dropped] -= 1
        env_id = self._all.copy()
        env_id[dropped] = _DROPPED
        self._env_ids.append(env_id)

    def add_some(self, piece: Columns, env_id: IdArray) -> None:
        """Add a piece whose row ``i`` comes from environment ``env_id[i]``."""
        if len(env_id) == 0:
            return
        self._sort_later()
        self._pieces.append(piece)
        self._env_ids.append(env_id)
        self._counts += np.bincount(env_id, minlength=self._env_num)

    def _sort_later(self) -> None:
        """Note the environment of each row from now on, because a piece lacks some."""
        if self._regular:
            self._counts = self.counts
            self._env_ids = [self._all] * len(self._pieces)
            self._regular = False

    def take_rectangle(
        self,
        n_steps: int,
        loans: Mapping[int, int] | None = None,
        split: Callable[[int], int] | None = None,
    ) -> Batch:
        """Take the oldest ``n_steps`` rows of every environment, as ``[T, E, …]``.

        Every environment must have that many rows, or borrow them.

        Args:
            n_steps: the rectangle's height.
            loans: the lender of each environment whose lane holds another one's rows: those that
                follow the lender's oldest ``n_steps``. An episode that continues from its own lane
                into the other one is split there, since no id may occur in two lanes of a
                rectangle. An environment lends once at most, and none both lends and borrows.
            split: gives the rest of an episode a new id, and returns that id.
        """
        if self._regular:
            taken = self._pieces[:n_steps]
            del self._pieces[:n_steps]
            if n_steps == 1:
                return self.pass_on(taken[0])
            self._last_id = to_array(taken[-1]["episode_id"])
            self._last_done = to_array(taken[-1]["done"])
            columns = {name: stack([piece[name] for piece in taken]) for name in taken[0]}
            self.ends = _true_at(columns["done"].numpy())
            return as_tree(columns)
        rows, env_id = self._joined(with_dropped=True)
        order = np.argsort(env_id, kind="stable")[-len(self) :]  # dropped rows come first
        starts = np.cumsum(self._counts) - self._counts
        steps = np.arange(n_steps)[:, None]
        picked = order[np.minimum(starts + steps, len(order) - 1)]
        source = self._all.copy()
        for borrower, lender in (loans or {}).items():
            assert split is not None
            mine = order[starts[lender] : starts[lender] + self._counts[lender]]
            rows = _split_at(rows, mine, n_steps, split)
            picked[:, borrower] = mine[n_steps : 2 * n_steps]
            source[borrower] = lender
        self._keep_others(rows, env_id, picked)
        # The last row taken from each environment; a borrower keeps the one before.
        self._last_id, self._last_done = self._last_id.copy(), self._last_done.copy()
        episode, done = to_array(rows["episode_id"]), to_array(rows["done"])
        is_lent = source != self._all
        for lanes in ((~is_lent).nonzero()[0], is_lent.nonzero()[0]):
            self._last_id[source[lanes]] = episode[picked[-1, lanes]]
            self._last_done[source[lanes]] = done[picked[-1, lanes]]
        index = torch.from_numpy(picked)
        columns = {name: _select(column, index) for name, column in rows.items()}
        self.ends = _true_at(columns["done"].numpy())
        return as_tree(columns)

    def pass_on(self, piece: Columns) -> Batch:
        """Return a piece with one row of every environment, in order, as ``[1, E, …]``.

        The store must be empty. Arrays are copied.
        """
        self._last_id, self._last_done = piece["episode_id"], piece["done"]
        self.ends = _true_at(self._last_done)
        return as_tree({name: _as_one_step(column) for name, column in piece.items()})

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
        self.add_some(rows, to_array(state["env_id"]).astype(np.int64))

    def _joined(self, *, with_dropped: bool = False) -> tuple[Columns, IdArray]:
        """Return all rows as one piece, with the environment of each (``_DROPPED``: none)."""
        if not self._pieces:
            return {"done": np.zeros(0, bool), "episode_id": np.zeros(0, np.int64)}, self._all[:0]
        rows = _join(self._pieces)
        if self._regular:
            return rows, np.tile(self._all, len(self._pieces))
        env_id = np.concatenate(self._env_ids)
        if with_dropped or len(env_id) == len(self):
            return rows, env_id
        kept = np.flatnonzero(env_id != _DROPPED)
        index = torch.from_numpy(kept)
        return {name: _select(column, index) for name, column in rows.items()}, env_id[kept]

    def _keep_others(self, rows: Columns, env_id: IdArray, taken: IdArray) -> None:
        keep = env_id != _DROPPED
        keep[taken.ravel()] = False
        left = np.flatnonzero(keep)
        self._forget_rows()
        index = torch.from_numpy(left)
        self.add_some({name: _select(column, index) for name, column in rows.items()}, env_id[left])


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
    """Return ``[1, E, …]``; arrays are copied."""
    if type(column) is np.ndarray:
        return torch.from_numpy(column[None].copy())
    if type(column) is torch.Tensor or isinstance(column, torch.Tensor):
        return column.unsqueeze(0)
    return map_leaves(_as_one_step, column)


def _true_at(flags: npt.NDArray[Any]) -> torch.Tensor:
    # For so few values numpy is much faster than torch, and a list faster than numpy.
    array = flags.ravel()
    if array.size < _FEW and True not in array.tolist():
        return _NOWHERE
    return torch.from_numpy(array.nonzero()[0])


def _select(column: Any, index: torch.Tensor) -> Any:
    return index_rows(from_numpy(column), index)
