"""Collecting: the policy acts, the environments answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dmiddleware.data import cat
from dmiddleware.env import BaseEnvManager, check_env_manager
from dmiddleware.pipeline import OnlineRLContext, Role, Task
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.rollout import RolloutCollector

__all__ = ["StepCollector", "EpisodeCollector"]


class _Collector:
    """What both collectors share: the worker behind them, and the counters in front.

    The envs are launched when the task begins, unless they are launched already; whoever launched
    them closes them.
    """

    roles = (Role.COLLECTOR,)
    reads = ("env_step", "env_episode", "train_iter", "collect_kwargs")

    def __init__(self, policy: HasModes | CollectMode, env_manager: BaseEnvManager) -> None:
        self._mode = as_collect_mode(policy, user=type(self).__name__)
        check_env_manager(env_manager, user=type(self).__name__)
        self._envs = env_manager
        self._launched_here = False
        self._worker = RolloutCollector(self._mode, env_manager)

    def setup(self, task: Task[Any]) -> None:
        """Launch the envs and refuse those that do not fit the policy, before the first step.

        In a run of several processes, each explores in its own way.

        Raises:
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        self._launched_here = self._envs.closed
        self._worker.start()
        if task.router is not None:
            # The policies of all processes were built from one seed.
            self._mode.seed(task.seed_for("policy", "act"))

    def close(self) -> None:
        """Close the envs, if this middleware launched them."""
        if self._launched_here:
            self._launched_here = False
            self._envs.close()

    @property
    def worker(self) -> RolloutCollector:
        """The worker that collects."""
        return self._worker

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's state: unfinished episodes, counters, generators."""
        return self.worker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.worker.load_state_dict(state)

    def _count(self, ctx: OnlineRLContext, env_step: int, env_episode: int) -> None:
        """Add what was collected since the worker's counters stood at these values."""
        worker = self.worker
        ctx.env_step += worker.env_step - env_step
        ctx.env_episode += worker.env_episode - env_episode
        returns = worker.episode_returns
        if returns:
            ctx.log("collect/return_mean", sum(returns) / len(returns))


class StepCollector(_Collector):
    """Collect a number of environment steps in each step of the task.

    Episodes go on from step to step; nothing is dropped at the cut.

    Args:
        policy: a policy or its collect mode.
        env_manager: the envs; launched when the task begins, and closed when it ends, unless they
            were launched before.
        n_sample: environment steps to collect each time; rounded up to a multiple of the number of
            envs ``E``.
        random_steps: environment steps to collect with random actions at the begin of the run, all
            in its first step.

    Reads:
        ctx.env_step, ctx.env_episode: counted on.
        ctx.train_iter: stamped on the rows, as ``collect_iter``.
        ctx.collect_kwargs: given to the policy's forward, such as ``eps``.

    Writes:
        ctx.trajectories: a batch ``[T, E, …]`` of transitions, such as the policy's
            ``get_train_sample`` makes them of what was collected.
        ctx.trajectory_end_idx: int64 ``[number of ends]``: the rows that end an episode, as indices
            into the trajectories flattened to ``[T * E, …]``.
        ctx.env_step, ctx.env_episode: with what was collected.

    Raises:
        ValueError: if ``n_sample`` is not positive or ``random_steps`` negative.
        ConfigError: if an argument has the wrong type, or ``random_steps`` is given for an
            on-policy policy, which learns from the actions of its own distribution only.
    """

    writes = ("trajectories", "trajectory_end_idx", "env_step", "env_episode")

    def __init__(
        self,
        policy: HasModes | CollectMode,
        env_manager: BaseEnvManager,
        *,
        n_sample: int,
        random_steps: int = 0,
    ) -> None:
        if n_sample < 1:
            raise ValueError(f"n_sample must be positive, got {n_sample}")
        if random_steps < 0:
            raise ValueError(f"random_steps must not be negative, got {random_steps}")
        super().__init__(policy, env_manager)
        self._n_sample = n_sample
        self._random_steps = random_steps
        if random_steps:
            self._worker.check_random_actions()

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Collect."""
        worker = self.worker
        before = worker.env_step, worker.env_episode
        still_random = self._random_steps - ctx.env_step
        collected = worker.collect(
            max(self._n_sample, still_random),
            train_iter=ctx.train_iter,
            policy_kwargs=ctx.collect_kwargs,
            random=still_random > 0,
        )
        ctx.trajectories = trajectories = self._mode.get_train_sample(collected)
        ctx.trajectory_end_idx = (
            worker.ends
            if trajectories is collected
            else trajectories["done"].reshape(-1).nonzero().squeeze(1)
        )
        self._count(ctx, *before)


class EpisodeCollector(_Collector):
    """Collect a number of whole episodes in each step of the task.

    Every env contributes its fixed share, so that short episodes are not preferred.

    Args:
        policy: a policy or its collect mode.
        env_manager: the envs; launched when the task begins, and closed when it ends, unless they
            were launched before.
        n_episode: episodes to collect each time.

    Reads:
        ctx.env_step, ctx.env_episode: counted on.
        ctx.train_iter: stamped on the rows, as ``collect_iter``.
        ctx.collect_kwargs: given to the policy's forward, such as ``eps``.

    Writes:
        ctx.episodes: a list of batches ``[T_i, …]``, one an episode, such as the policy's
            ``get_train_sample`` makes them of what was collected.
        ctx.trajectories: the same rows as one batch ``[T_0 + T_1 + …, …]``.
        ctx.trajectory_end_idx: int64 ``[n_episode]``: each episode's last row in the trajectories.
        ctx.env_step, ctx.env_episode: with what was collected.

    Raises:
        ValueError: if ``n_episode`` is not positive.
        ConfigError: if an argument has the wrong type.
    """

    writes = ("episodes", "trajectories", "trajectory_end_idx", "env_step", "env_episode")

    def __init__(
        self, policy: HasModes | CollectMode, env_manager: BaseEnvManager, *, n_episode: int
    ) -> None:
        if n_episode < 1:
            raise ValueError(f"n_episode must be positive, got {n_episode}")
        super().__init__(policy, env_manager)
        self._n_episode = n_episode

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Collect."""
        worker = self.worker
        before = worker.env_step, worker.env_episode
        collected = worker.collect_episodes(
            self._n_episode, train_iter=ctx.train_iter, policy_kwargs=ctx.collect_kwargs
        )
        ctx.episodes = [self._mode.get_train_sample(episode) for episode in collected]
        ctx.trajectories = cat(ctx.episodes)
        lengths = torch.tensor([len(episode["done"]) for episode in ctx.episodes])
        ctx.trajectory_end_idx = lengths.cumsum(0) - 1
        self._count(ctx, *before)
