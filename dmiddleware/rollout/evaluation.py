"""Playing the episodes of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dmiddleware.env import BaseEnvManager
from dmiddleware.policy import EvalMode
from dmiddleware.rollout.monitor import VectorEvalMonitor
from dmiddleware.rollout.stepper import Stepper

__all__ = ["evaluate_episodes"]


def evaluate_episodes(
    eval_mode: EvalMode,
    env_manager: BaseEnvManager,
    n_episode: int,
    *,
    policy_kwargs: Mapping[str, Any] | None = None,
    max_frames: int = 0,
) -> VectorEvalMonitor:
    """Play whole episodes greedily: all envs at once, and a fixed share of episodes in each.

    All envs begin fresh episodes. An env that has played its share pauses, where the manager can
    step the others without it. The episode of an env that fails does not count; it plays another.

    Args:
        eval_mode: the policy's eval mode.
        env_manager: the envs; launched if they are not yet, and left open.
        n_episode: how many episodes, at least one per env.
        policy_kwargs: given to the policy's forward.
        max_frames: film the first episode of each env, so many pictures at most; the envs must be
            made with ``render_mode="rgb_array"``.

    Returns:
        The monitor, with returns and infos of all episodes.

    Raises:
        ConfigError: if there are fewer episodes than envs.
        SpaceError: if the envs do not fit the policy's model.
        EnvCrashed: if an env keeps failing.
    """
    monitor = VectorEvalMonitor(env_manager.env_num, n_episode)
    stepper = Stepper(eval_mode, env_manager)
    stepper.reset()
    kwargs = policy_kwargs or {}
    playing: list[int] = monitor.unfinished
    n_frames = 0
    while playing:
        if n_frames < max_frames:
            n_frames += 1
            monitor.update_video(dict(zip(playing, env_manager.render(playing), strict=True)))
        everyone = len(playing) == env_manager.env_num
        step = stepper.step(kwargs, only=None if everyone else np.array(playing))
        if step.ended:
            for row in np.flatnonzero(step.timestep.done).tolist():
                env_id = int(step.timestep.env_id[row])
                info = step.timestep.info.row(row)
                monitor.update_info(env_id, info)
                monitor.update_reward(env_id, info["eval_episode_return"])
            playing = monitor.unfinished
    return monitor
