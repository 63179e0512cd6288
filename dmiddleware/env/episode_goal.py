"""How many episodes the envs of a manager are to play."""

from __future__ import annotations

from dmiddleware.settings import Count, checked

__all__ = ["EpisodeGoal"]


class EpisodeGoal:
    """A manager's episodes: how many each env is to play, and whether they are done.

    The envs do not pause by themselves when they have played them.
    """

    _episode_num: int | None = None

    @property
    def episode_counts(self) -> list[int]:
        """The episodes that each env has finished since launch, one number per env."""
        raise NotImplementedError

    @property
    def episode_num(self) -> int | None:
        """The episodes that each env is to play; None (the default) means no limit.

        Raises:
            ConfigError: when it is set to something other than a positive integer or None.
        """
        return self._episode_num

    @episode_num.setter
    def episode_num(self, value: int | None) -> None:
        self._episode_num = checked("episode_num", value, Count | None)

    @property
    def done(self) -> bool:
        """Whether every env has finished ``episode_num`` episodes since launch."""
        return self._episode_num is not None and min(self.episode_counts) >= self._episode_num

    @property
    def unfinished(self) -> list[int]:
        """The envs that have not finished ``episode_num`` episodes yet."""
        goal = self._episode_num
        return [
            env_id
            for env_id, count in enumerate(self.episode_counts)
            if goal is None or count < goal
        ]
