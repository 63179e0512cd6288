"""SequenceReplayBuffer: draws runs of consecutive steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dmiddleware.classic.buffer_middleware import ActionMiddleware, Chain
from dmiddleware.classic.deque_buffer import BufferedData, DequeBuffer
from dmiddleware.classic.replay_buffers.naive_buffer import PeriodicBuffer
from dmiddleware.data.samplers import Ints
from dmiddleware.errors import NotEnoughData

__all__ = ["SequenceReplayBuffer"]


class SequenceReplayBuffer(PeriodicBuffer):
    """A buffer of transitions, pushed in order, that draws runs of consecutive ones.

    A run ends at a transition with ``done``, and before one whose ``episode_id`` or ``env_id``
    differs. Items without these keys have no boundaries between them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._episodes = _EpisodeNumbers(self._items)
        self._items.use(self._episodes)

    def sample(
        self,
        batch: int,
        sequence: int,
        cur_learner_iter: int,
        sample_range: slice | None = None,
        replace: bool = False,
    ) -> list[list[Any]] | None:
        """Draw runs of consecutive items of one episode; every run is equally likely.

        Args:
            batch: number of runs.
            sequence: number of items in a run.
            cur_learner_iter: the learner's iteration; not used.
            sample_range: draw only runs that lie in this part of the items by age.
            replace: whether a run may be drawn twice. Different runs may overlap.

        Returns:
            ``batch`` lists of ``sequence`` items, oldest first; None, logged once a minute, if
            there are too few such runs.

        Raises:
            ValueError: if ``sequence`` is not positive.
        """
        if sequence < 1:
            raise ValueError(f"sequence must be at least 1, got {sequence}")

        def draw() -> list[list[Any]]:
            starts = self._starts(sequence, sample_range)
            if not len(starts) or (len(starts) < batch and not replace):
                raise NotEnoughData(
                    f"asked for {batch} runs of {sequence} steps, but the buffer has only "
                    f"{len(starts)}; push longer episodes, or sample fewer or shorter runs"
                )
            first = self._items.generator.choice(starts, batch, replace=replace)
            index = first[:, None] + np.arange(sequence)
            items: list[BufferedData] = self._items.sample(indices=index.reshape(-1).tolist())
            steps = [item.data for item in items]
            return [steps[i : i + sequence] for i in range(0, len(steps), sequence)]

        return self._draw(batch, draw)

    def _starts(self, length: int, sample_range: slice | None) -> Ints:
        """Return the indices of the items at which a run of this length starts, int64 ``[n]``."""
        index = np.sort(self._items.drawable(sample_range).every_index())
        first, last = index[: len(index) - length + 1], index[length - 1 :]
        is_whole = last - first == length - 1
        starts: Ints = first[is_whole & (self._episodes.of(first) == self._episodes.of(last))]
        return starts


class _EpisodeNumbers(ActionMiddleware):
    """Numbers the episodes of the items, in the order in which they were pushed."""

    def __init__(self, buffer: DequeBuffer) -> None:
        super().__init__(buffer)
        self._number = np.zeros(buffer.size, np.int64)
        self._current = 0
        self._is_over = False
        self._source: tuple[Any, Any] = (None, None)

    def of(self, index: Ints) -> Ints:
        """Return the number of the episode of each item."""
        return self._number.take(index % self._attached.size)

    def push(self, chain: Chain, data: Any, meta: Mapping[str, Any] | None = None) -> int:
        """Note the episode of a new item."""
        index: int = chain(data, meta=meta)
        step = data if isinstance(data, Mapping) else {}
        source = (_plain(step.get("episode_id")), _plain(step.get("env_id")))
        if self._is_over or source != self._source:
            self._current += 1
        self._source = source
        self._is_over = bool(_plain(step.get("done", False)))
        self._number[index % self._attached.size] = self._current
        return index

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        return {
            "number": self._number.copy(),
            "current": self._current,
            "is_over": self._is_over,
            "source": self._source,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._number[...] = state["number"]
        self._current = state["current"]
        self._is_over = state["is_over"]
        self._source = tuple(state["source"])


def _plain(value: Any) -> Any:
    """Return a tensor or an array of one element as a number."""
    return value.item() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
