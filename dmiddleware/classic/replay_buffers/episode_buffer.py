"""EpisodeReplayBuffer: a buffer of whole episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmiddleware.classic.replay_buffers.naive_buffer import NaiveReplayBuffer
from dmiddleware.errors import NotEnoughData

__all__ = ["EpisodeReplayBuffer"]


class EpisodeReplayBuffer(NaiveReplayBuffer):
    """A buffer of whole episodes, each a list of steps; its size counts episodes.

    :meth:`push` takes a list of episodes. With ``enable_track_used_data`` an item is the metadata
    of a stored episode, and its ``unroll_len`` is the episode's length.
    """

    @property
    def episode_len(self) -> list[int]:
        """The number of steps of each episode, oldest first."""
        with self._lock:
            return [self._length(item.data) for item in self._items]

    def sample_steps(
        self,
        size: int,
        length: int,
        cur_learner_iter: int,
        sample_range: slice | None = None,
        replace: bool = False,
    ) -> list[Any] | None:
        """Draw runs of consecutive steps; every run of this length is equally likely.

        Args:
            size: number of runs.
            length: number of steps in a run; shorter episodes are not drawn.
            cur_learner_iter: the learner's iteration; not used.
            sample_range: draw only from this part of the episodes by age.
            replace: whether a run may be drawn twice. Different runs may overlap.

        Returns:
            ``size`` lists of ``length`` steps, none padded. For stored episodes, their metadata
            with ``unroll_split_begin``, the first step, and ``unroll_len`` instead. None, logged
            once a minute, if there are too few such runs.

        Raises:
            ValueError: if ``length`` is not positive.
        """
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")

        def draw() -> list[Any]:
            index = self._items.drawable(sample_range).every_index()
            lengths = [self._length(self._items.get(i).data) for i in index.tolist()]
            ends = np.maximum(np.array(lengths, np.int64) - length + 1, 0).cumsum()
            n_runs = int(ends[-1]) if len(ends) else 0
            if not n_runs or (n_runs < size and not replace):
                raise NotEnoughData(
                    f"asked for {size} runs of {length} steps, but the episodes have only "
                    f"{n_runs}; push longer episodes, or sample fewer or shorter runs"
                )
            run = self._items.generator.choice(n_runs, size, replace=replace)
            position = ends.searchsorted(run, side="right")
            begin = run - np.concatenate([[0], ends]).take(position)
            episodes = self._items.sample(indices=index.take(position).tolist())
            return [
                _cut(item.data, start, length)
                for item, start in zip(episodes, begin.tolist(), strict=True)
            ]

        return self._draw(size, draw)

    def _push(self, items: list[Any], envstep: int) -> bool:
        for episode in items:
            self._length(episode)
        return super()._push(items, envstep)

    def _length(self, episode: Any) -> int:
        """Return the number of steps of an episode, or of the stored one that metadata names."""
        if self._tracked is None and isinstance(episode, list) and episode:
            return len(episode)
        if self._tracked is not None and isinstance(episode.get("unroll_len"), int):
            return int(episode["unroll_len"])
        wanted = "metadata with unroll_len" if self._tracked else "a list of at least one step"
        raise TypeError(
            f"an episode must be {wanted}, got {episode!r:.100}; push one episode as "
            "push([episode], envstep)"
        )


def _cut(episode: Any, start: int, length: int) -> Any:
    if isinstance(episode, list):
        return episode[start : start + length]
    return {**episode, "unroll_split_begin": start, "unroll_len": length}
