"""The face of ``gym.wrappers``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import gymnasium

from dmiddleware.ding.gym.core import OldEnv, Wrapper

__all__ = ["RecordVideo", "TimeLimit"]

REFUSED: Final = {"Monitor": "record videos by RecordVideo(env, folder)"}


class TimeLimit(Wrapper):
    """Ends an episode after a number of steps.

    Args:
        env: an env by the old rules.
        max_episode_steps: the number.
    """

    def __init__(self, env: Any, max_episode_steps: int | None = None) -> None:
        super().__init__(env)
        self._max_episode_steps = max_episode_steps
        self._elapsed_steps = 0

    def reset(self, **options: Any) -> Any:
        """Start an episode."""
        self._elapsed_steps = 0
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, dict[str, Any]]:
        """Step the env, and end the episode at the limit."""
        observation, reward, done, info = self.env.step(action)
        self._elapsed_steps += 1
        if self._max_episode_steps is not None and self._elapsed_steps >= self._max_episode_steps:
            info = {**info, "TimeLimit.truncated": not done}
            done = True
        return observation, reward, done, info


def RecordVideo(  # noqa: N802 (gym's name)
    env: Any,
    video_folder: str,
    episode_trigger: Callable[[int], bool] | None = None,
    name_prefix: str = "rl-video",
    **others: Any,
) -> Any:
    """Return the env with videos of its episodes, if it was made with ``render_mode``."""
    if not isinstance(env, OldEnv) or env.env.render_mode != "rgb_array":
        return env
    recorded = gymnasium.wrappers.RecordVideo(
        env.env, video_folder, episode_trigger=episode_trigger, name_prefix=name_prefix
    )
    return OldEnv(recorded)
