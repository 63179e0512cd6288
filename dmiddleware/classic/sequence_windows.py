"""Cuts the steps of each episode into sequences of one length, across pushes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import torch

from dmiddleware.tree import Batch, as_tree, cat, index_rows, map_leaves, to_dict

__all__ = ["SequenceWindows", "padded"]

_MOST_UNFINISHED: Final = 10_000
"""Episodes that wait for their next rows; the oldest are forgotten, since their envs are gone."""


class SequenceWindows:
    """Cuts the rows of each episode into sequences that begin every ``unroll_len`` rows.

    A sequence has ``burn_in`` rows before those to learn from, which the sequence before it has
    too. The last one of an episode may be shorter. The first ``burn_in`` rows of an episode are
    never learned from, and an episode of ``burn_in`` rows or fewer gives no sequence.

    Args:
        unroll_len: rows to learn from.
        burn_in: rows before them.
    """

    def __init__(self, unroll_len: int, burn_in: int) -> None:
        self._unroll_len = unroll_len
        self._burn_in = burn_in
        self._unfinished: dict[int, Batch] = {}

    @property
    def length(self) -> int:
        """The rows of a sequence, with the burn-in."""
        return self._burn_in + self._unroll_len

    def add(self, batch: Batch) -> list[Batch]:
        """Take collected rows, and return the sequences that are complete now.

        Args:
            batch: ``[T, E, …]``, or the rows of one env ``[T, …]``, with ``done`` and
                ``episode_id``.
        """
        if batch["done"].dim() == 1:
            batch = map_leaves(lambda leaf: leaf.unsqueeze(1), batch)
        sequences: list[Batch] = []
        for env in range(batch["done"].shape[1]):
            column = map_leaves(lambda leaf, env=env: leaf[:, env], batch)
            for rows in _episodes(column):
                sequences += self._continue(rows)
        return sequences

    def _continue(self, rows: Batch) -> list[Batch]:
        episode = int(rows["episode_id"][0])
        before = self._unfinished.pop(episode, None)
        rows = rows if before is None else cat([before, rows])
        is_over, sequences = bool(rows["done"][-1]), []
        while len(rows["done"]) >= self.length:
            sequences.append(index_rows(rows, slice(0, self.length)))
            rows = index_rows(rows, slice(self._unroll_len, None))
        if is_over and len(rows["done"]) > self._burn_in:
            sequences.append(rows)
        elif not is_over and len(rows["done"]):
            self._unfinished[episode] = rows
            if len(self._unfinished) > _MOST_UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]
        return sequences

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that wait for the next ones of their episodes."""
        return {"unfinished": [to_dict(rows) for rows in self._unfinished.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        parts = [as_tree(rows) for rows in state["unfinished"]]
        self._unfinished = {int(rows["episode_id"][0]): rows for rows in parts}


def _episodes(rows: Batch) -> list[Batch]:
    """Cut the rows of one env after each end of an episode, and where the episode changes."""
    done, episode = rows["done"], rows["episode_id"]
    cuts = (done[:-1] | (episode[1:] != episode[:-1])).nonzero().flatten() + 1
    bounds = [0, *cuts.tolist(), len(done)]
    return [index_rows(rows, slice(a, b)) for a, b in itertools.pairwise(bounds)]


def padded(sequence: Batch, length: int) -> tuple[Batch, torch.Tensor]:
    """Return a sequence ``[length, …]`` that repeats its last row, and which rows are its own."""
    n_rows = len(sequence["done"])
    index = torch.arange(length)
    return index_rows(sequence, index.clamp(max=n_rows - 1)), index < n_rows
