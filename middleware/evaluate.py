"""Evaluation: the policy plays, and its returns are looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from dmiddleware.env import BaseEnvManager
from dmiddleware.pipeline import Middleware, Role, Task
from dmiddleware.policy import EvalMode
from dmiddleware.rollout import evaluate_episodes
from middleware.support.checks import check_positive

__all__ = ["interaction_evaluator"]


class _InteractionEvaluator:
    """Lets the policy play now and then; see :func:`interaction_evaluator`."""

    __name__ = "interaction_evaluator"
    roles = (Role.EVALUATOR,)
    reads = ("train_iter", "last_eval_iter")
    writes = ("eval_value", "eval_output", "last_eval_iter", "last_eval_value")

    def __init__(
        self,
        eval_mode: EvalMode,
        env_manager: BaseEnvManager,
        *,
        n_episode: int,
        every_train_iter: int,
        stop_value: float | None,
        film_every: int | None,
        max_frames: int,
    ) -> None:
        self._mode = eval_mode
        self._envs = env_manager
        self._n_episode = n_episode
        self._every = every_train_iter
        self._stop_value = stop_value
        self._film_every = film_every
        self._max_frames = max_frames
        self._n_evaluations = 0
        self._launched_here = False

    def setup(self, task: Task[Any]) -> None:
        check = self._mode.get_attribute("check_spaces")
        check(self._envs.observation_space, self._envs.action_space)
        self._check_stop(task)  # a run that is resumed may have reached the value
        if self._envs.closed:
            self._envs.launch()
            self._launched_here = True

    def __call__(self, ctx: Any) -> None:
        if ctx.last_eval_iter >= 0 and ctx.train_iter - ctx.last_eval_iter < self._every:
            return
        films = self._film_every is not None and self._n_evaluations % self._film_every == 0
        self._n_evaluations += 1
        monitor = evaluate_episodes(
            self._mode,
            self._envs,
            self._n_episode,
            max_frames=self._max_frames if films else 0,
        )
        returns = monitor.get_episode_return()
        mean = float(np.mean(returns))
        ctx.eval_value = ctx.last_eval_value = mean
        ctx.last_eval_iter = ctx.train_iter
        ctx.eval_output = {
            "return_mean": mean,
            "return_std": float(np.std(returns)),
            "return_min": min(returns),
            "return_max": max(returns),
            "episode_return": returns,
            "episode_info": monitor.get_episode_info(),
            "policy_state": self._mode.state_dict(),
        }
        if films:
            ctx.eval_output["video"] = monitor.get_video()
        self._check_stop(ctx.task)

    def _check_stop(self, task: Task[Any]) -> None:
        mean, ctx = task.ctx.last_eval_value, task.ctx
        if self._stop_value is not None and mean >= self._stop_value and ctx.train_iter > 0:
            task.stop(
                f"the mean return {mean:g} has reached stop_value {self._stop_value:g}",
                final=False,
            )

    def close(self) -> None:
        if self._launched_here:
            self._launched_here = False
            self._envs.close()

    def state_dict(self) -> dict[str, Any]:
        return {"n_evaluations": self._n_evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._n_evaluations = state["n_evaluations"]


def interaction_evaluator(
    eval_mode: EvalMode,
    env_manager: BaseEnvManager,
    *,
    n_episode: int,
    every_train_iter: int = 1000,
    stop_value: float | None = None,
    film_every: int | None = None,
    max_frames: int = 500,
) -> Middleware[Any]:
    """Let the policy play whole episodes in the first step, and then every so many updates.

    Every env plays its fixed share of the episodes, so that short ones do not count more.

    Args:
        eval_mode: the policy's eval mode.
        env_manager: the envs; launched when the task begins, and closed when it ends, unless they
            were launched before.
        n_episode: episodes in an evaluation, at least one per env.
        every_train_iter: updates from one evaluation to the next.
        stop_value: the mean return at which to stop the task, once there was an update; None:
            never.
        film_every: film each so-manieth evaluation, the first one included; the envs must be made
            with ``render_mode="rgb_array"``. None: no films.
        max_frames: pictures in a film at most.

    Reads:
        ctx.train_iter, ctx.last_eval_iter: when the last evaluation was.

    Writes:
        ctx.eval_value, ctx.last_eval_value: the mean return; the first is None in other steps.
        ctx.last_eval_iter: the update that was evaluated.
        ctx.eval_output: a dictionary: ``return_mean``, ``return_std``, ``return_min``,
            ``return_max``, the list ``episode_return``, the means ``episode_info`` of what envs
            told at the episodes' ends, ``policy_state`` (that of the eval mode, so that the policy
            which was evaluated can be saved though it learns on), and, of a filmed one, ``video``
            uint8 ``[N, T, C, H, W]``.

    Raises:
        ValueError: if a number is not positive, or there are fewer episodes than envs.
    """
    check_positive(
        n_episode=n_episode,
        every_train_iter=every_train_iter,
        film_every=film_every,
        max_frames=max_frames,
    )
    if n_episode < env_manager.env_num:
        raise ValueError(
            f"n_episode must be at least one per env, got {n_episode} for {env_manager.env_num} "
            "envs; play more episodes, or in fewer envs"
        )
    return _InteractionEvaluator(
        eval_mode,
        env_manager,
        n_episode=n_episode,
        every_train_iter=every_train_iter,
        stop_value=stop_value,
        film_every=film_every,
        max_frames=max_frames,
    )
