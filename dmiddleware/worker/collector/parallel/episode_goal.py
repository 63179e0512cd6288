"""How many episodes each env of a collector is to play."""

from __future__ import annotations

from dmiddleware.classic import BattleEnvManager
from dmiddleware.env import BaseEnvManager
from dmiddleware.settings import Count, checked

__all__ = ["EpisodeGoal"]


class EpisodeGoal:
    """The episodes that each env is to play, and whether they are done.

    The envs do not pause by themselves when they have played them.

    Args:
        manager: the envs.
        episode_num: the episodes of each env since launch; None means no limit.

    Raises:
        ConfigError: if ``episode_num`` is something other than a positive integer or None.
    """

    def __init__(
        self, manager: BaseEnvManager | BattleEnvManager, episode_num: int | None = None
    ) -> None:
        self._manager = manager
        self._episode_num = checked("episode_num", episode_num, Count | None)

    @property
    def unfinished(self) -> list[int]:
        """The envs that have not finished their episodes yet."""
        goal = self._episode_num
        return [
            env_id
            for env_id, count in enumerate(self._manager.episode_counts)
            if goal is None or count < goal
        ]

    @property
    def done(self) -> bool:
        """Whether every env has finished its episodes."""
        return not self.unfinished
