"""Evaluation: the policy plays whole episodes without exploring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dmiddleware.env import BaseEnvManager, check_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.policy import EvalMode, HasModes, as_eval_mode
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.rollout.stepper import SUCCESS_KEYS
from dmiddleware.settings import Count, Number, takes_settings
from middleware.base import BaseMiddleware
from middleware.context import RLContext
from middleware.roles import Role
from middleware.support.interval import Interval, IntervalSettings

__all__ = ["InteractionEvaluator", "InteractionEvaluatorSettings", "interaction_evaluator"]


class InteractionEvaluatorSettings(IntervalSettings):
    """The options of :class:`InteractionEvaluator`."""

    n_episode: Count
    """Episodes in an evaluation, at least one per env."""
    every_train_iter: Count | None = 1000
    """Updates from one evaluation to the next; None if `every_env_step` is given."""
    every_env_step: Count | None = None
    """Env steps from one evaluation to the next; None if `every_train_iter` is given."""
    stop_value: Number | None = None
    """Stop the task when the mean return reaches this value after at least one update; None:
    never."""
    stop_evaluations: Count = 1
    """Evaluations in a row that must reach ``stop_value``."""
    video_every: Count | None = None
    """Record every n-th evaluation, including the first, in envs made with
    ``render_mode="rgb_array"``; None: no videos."""
    max_frames: Count = 500
    """Frames in a video at most."""
    deterministic: bool = True
    """Take the most likely actions; False draws them from the policy's distribution, as collecting
    does."""

    def __post_init__(self) -> None:
        """Refuse evaluations without an interval."""
        super().__post_init__()
        self.require_interval()


class InteractionEvaluator(BaseMiddleware[RLContext]):
    """Evaluate the policy in the first step, and then at an interval of updates or env steps.

    The steps are those that reach or pass a multiple of the interval, wherever a run was resumed.

    Every env plays a fixed share of the episodes, so short ones do not count more.

    Args:
        policy: a policy or its eval mode.
        env_manager: the envs. They are launched when the task starts and closed when it ends,
            unless they were launched before.
        settings: the options; or their fields by keyword, see
            :class:`InteractionEvaluatorSettings`.

    Reads:
        ctx.train_iter, ctx.env_step: the counters of the interval.
        ctx.last_eval_iter: whether there was an evaluation before.

    Writes:
        ctx.eval_value, ctx.last_eval_value: the mean return; the first is None in other steps.
        ctx.last_eval_iter: the update that was evaluated.
        ctx.eval_output: a dictionary: ``return_mean``, ``return_std``, ``return_min``,
            ``return_max``, ``length_mean`` (steps of an episode), ``success_rate`` if the envs
            report ``is_success`` or ``success`` at the end of an episode, the list
            ``episode_return``, the means ``episode_info`` of what the envs report at the end of an
            episode, ``policy_state`` (the state of the eval mode, to save
            the policy that was evaluated even if it has learned since), and, if it was recorded,
            ``video`` uint8 ``[N, T, C, H, W]``.

    Raises:
        ConfigError: if ``policy`` or ``env_manager`` has the wrong type, an option is not valid,
            there are fewer episodes than envs, or ``deterministic=False`` with a policy that has
            no distribution over actions.
        EnvTimeout: in a step, if an episode has not ended after 1,000,000 steps; warnings are
            logged from 5,000 steps on, see :func:`~dmiddleware.rollout.evaluate_episodes`.
    """

    roles = (Role.EVALUATOR,)
    lead_only = True
    reads = ("train_iter", "last_eval_iter")
    writes = ("eval_value", "eval_output", "last_eval_iter", "last_eval_value")

    settings: InteractionEvaluatorSettings

    @takes_settings(InteractionEvaluatorSettings)
    def __init__(
        self,
        policy: HasModes | EvalMode,
        env_manager: BaseEnvManager,
        settings: InteractionEvaluatorSettings,
    ) -> None:
        self._mode = as_eval_mode(policy, user="InteractionEvaluator")
        if not settings.deterministic and not self._mode.spec.is_stochastic:
            raise ConfigError(
                "InteractionEvaluator(deterministic=False) needs a policy with a distribution "
                "over actions, such as PPO, but this policy evaluates greedily; leave it out"
            )
        self._kwargs = {} if settings.deterministic else {"deterministic": False}
        check_env_manager(env_manager, user="InteractionEvaluator")
        self._envs = env_manager
        if settings.n_episode < env_manager.env_num:
            raise ConfigError(
                f"n_episode must be at least one per env, got {settings.n_episode} for "
                f"{env_manager.env_num} envs; play more episodes, or in fewer envs"
            )
        self.settings = settings
        self._interval = Interval(settings)
        self._n_evaluations = 0
        self._recent: deque[float] = deque(maxlen=settings.stop_evaluations)
        self._task: Task[Any] | None = None
        self._launched_here = False
        self.owns = (env_manager,)
        self.components = {"env_num": env_manager.env_num}
        self.snapshot_parts = {"env_manager": env_manager}

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse an interval in a counter that the chain does not have."""
        yield from self._interval.preflight(chain)

    def setup(self, task: Task[Any]) -> None:
        """Check that the envs fit the policy, and launch them; stop a run that is already finished.

        Raises:
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        check = self._mode.spec.check_spaces
        check(self._envs.observation_space, self._envs.action_space)
        if self._envs.closed:
            self._envs.launch()
            self._launched_here = True
        self._interval.start(task.ctx)
        self._task = task
        if task.ctx.last_eval_iter >= 0 and not self._recent:
            self._recent.append(task.ctx.last_eval_value)
        self._stop_if_reached(task)

    def __call__(self, ctx: RLContext) -> None:
        """Evaluate, if the interval has passed."""
        settings = self.settings
        if not self._interval.is_due(ctx) and ctx.last_eval_iter >= 0:
            return
        every = settings.video_every
        records = every is not None and self._n_evaluations % every == 0
        self._n_evaluations += 1
        monitor = evaluate_episodes(
            self._mode,
            self._envs,
            settings.n_episode,
            policy_kwargs=self._kwargs,
            max_frames=settings.max_frames if records else 0,
        )
        returns, info = monitor.get_episode_return(), monitor.mean_info()
        mean = float(np.mean(returns))
        ctx.eval_value = ctx.last_eval_value = mean
        ctx.last_eval_iter = ctx.train_iter
        ctx.eval_output = {
            "return_mean": mean,
            "return_std": float(np.std(returns)),
            "return_min": min(returns),
            "return_max": max(returns),
            "length_mean": info["eval_episode_length"],
            "episode_return": returns,
            "episode_info": info,
            "policy_state": self._mode.state_dict(),
        }
        for key in SUCCESS_KEYS:
            if key in info:
                ctx.eval_output.setdefault("success_rate", info[key])
        if records:
            ctx.eval_output["video"] = monitor.get_video()
        self._recent.append(mean)
        self._stop_if_reached(ctx.task)

    def evaluate_fresh(
        self, policy_state: Mapping[str, Any], *, n_episode: int, seed: int
    ) -> list[float]:
        """Return the returns of a saved policy in episodes with new seeds, after a run.

        Args:
            policy_state: the policy's state; the present one is restored afterwards.
            n_episode: number of episodes, at least one per env.
            seed: the seed of the envs.
        """
        before = self._mode.state_dict()
        was_closed = self._envs.closed
        self._envs.seed(seed)
        if was_closed:
            self._envs.launch()
        else:
            self._envs.reset()
        try:
            self._mode.load_state_dict(dict(policy_state))
            n_episode = max(n_episode, self._envs.env_num)
            monitor = evaluate_episodes(
                self._mode, self._envs, n_episode, policy_kwargs=self._kwargs
            )
            return monitor.get_episode_return()
        finally:
            self._mode.load_state_dict(before)
            if was_closed:
                self._envs.close()

    def close(self) -> None:
        """Close the envs, if this middleware launched them."""
        if self._launched_here:
            self._launched_here = False
            self._envs.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of evaluations, the last mean returns, and the interval's state."""
        return {
            "n_evaluations": self._n_evaluations,
            "recent": list(self._recent),
            "interval": self._interval.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; stop the task if that is enough."""
        self._n_evaluations = state["n_evaluations"]
        self._interval.load_state_dict(state["interval"])
        self._recent = deque(state["recent"], maxlen=self._recent.maxlen)
        if self._task is not None:
            self._stop_if_reached(self._task)

    def _stop_if_reached(self, task: Task[Any]) -> None:
        stop_value, n = self.settings.stop_value, self.settings.stop_evaluations
        if stop_value is None or len(self._recent) < n or task.ctx.train_iter == 0:
            return
        if min(self._recent) >= stop_value:
            in_a_row = "" if n == 1 else f" in {n} evaluations in a row"
            task.stop(
                f"the mean return {self._recent[-1]:g} has reached stop_value {stop_value:g}"
                f"{in_a_row}",
                final=False,
            )


interaction_evaluator = InteractionEvaluator
"""DI-engine's name of :class:`InteractionEvaluator`."""
