"""Collecting: the policy acts in environments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.env import BaseEnvManager, check_env_manager
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.rollout import RolloutCollector
from dmiddleware.settings import Count, TakesSettings, Whole, takes_options
from dmiddleware.tree import cat
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.metrics import FAILURES
from middleware.roles import Role
from middleware.support.part_name import PartSettings

__all__ = [
    "EpisodeCollector",
    "EpisodeCollectorSettings",
    "StepCollector",
    "StepCollectorSettings",
    "collectors_of",
]


_ROWS: Final = frozenset(("trajectories", "episodes"))


class _Collector(BaseMiddleware[OnlineRLContext]):
    """Base of both collectors: runs a :class:`RolloutCollector` and counts what it collects.

    The envs are launched when the task starts, unless they are launched already. Only a collector
    that launched its envs closes them.
    """

    roles = (Role.COLLECTOR,)
    reads = ("env_step", "env_episode", "train_iter", "collect_kwargs")
    random_steps = 0

    def __init__(self, policy: HasModes | CollectMode, env_manager: BaseEnvManager) -> None:
        name = type(self).__name__
        self._mode = as_collect_mode(policy, user=name)
        check_env_manager(env_manager, user=name)
        self._envs = env_manager
        self._launched_here = False
        self._failures = FailureLog(env_manager)
        self._worker = RolloutCollector(self._mode, env_manager)
        self.owns = (env_manager,)
        self.components = {"env_num": env_manager.env_num}

    def setup(self, task: Task[Any]) -> None:
        """Check that the envs fit the policy, and launch them.

        In a run of several processes, each explores with a seed derived from its node id or rank. A
        resumed run continues with the generator of the policy's state.

        Raises:
            SpaceError: if the policy's model does not fit the envs' spaces.
        """
        self._launched_here = self._envs.closed
        self._failures.begin()
        self._worker.start()
        if (task.router is not None or task.rank > 0) and task.ctx.total_step == 0:
            # The policies of all processes were built from one seed.
            self._mode.seed(task.seed_for("policy", "act"))

    def close(self) -> None:
        """Close the envs, if this middleware launched them."""
        if self._launched_here:
            self._launched_here = False
            self._envs.close()

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a collector without a learner, and data that another one overwrites unread."""
        yield from _overwritten(self, chain)
        if chain.writes("train_iter") or chain.writes("train_output"):
            return
        if chain.part is not None and self is collectors_of(chain)[0] and not _is_read(chain):
            yield (
                f"it collects data for the part {chain.part!r}, but nothing of that part reads "
                f"them; add a learner with name={chain.part!r}, or give it the name of its learner"
            )
        all_declared = all(declaration.anything for declaration in chain.declarations)
        expects_learning = chain.writes("eval_value") or any(
            declaration.fills for declaration in chain.declarations
        )
        if all_declared and expects_learning and self is collectors_of(chain)[0]:
            yield (
                "it collects data, but nothing in the chain learns from it; "
                "add a learner such as OffPolicyLearner(policy, buffer) or OnPolicyLearner(policy)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the envs, unfinished episodes, counters and generators."""
        return self._worker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._worker.load_state_dict(state)
        self._failures.begin()


class FailureLog:
    """Logs how often envs were restarted since the last step.

    Args:
        envs: the envs.

    Attributes:
        restarts: the restarts that are logged.
    """

    def __init__(self, envs: BaseEnvManager) -> None:
        self._envs = envs
        self.restarts = self._dropped = 0

    def begin(self) -> None:
        """Count from here; before launch, from 0."""
        self.restarts, self._dropped = (0, 0) if self._envs.closed else self._so_far()

    def log(self, ctx: OnlineRLContext) -> None:
        """Log what was added."""
        before = self.restarts, self._dropped
        self.restarts, self._dropped = now = self._so_far()
        for name, was, total in zip(FAILURES, before, now, strict=True):
            # Another collector of the chain may have counted some in this step.
            ctx.log(name, ctx.logged.get(name, 0.0) + total - was)

    def _so_far(self) -> tuple[int, int]:
        return self._envs.failures.restarts, self._envs.dropped_steps


def count_collected(
    ctx: OnlineRLContext, worker: RolloutCollector, env_step: int, env_episode: int
) -> None:
    """Add the steps and episodes collected since the worker's counters had these values."""
    ctx.env_step += worker.env_step - env_step
    ctx.env_episode += worker.env_episode - env_episode
    returns = worker.episode_returns
    if returns:
        ctx.log("collect/return_mean", sum(returns) / len(returns))
        ctx.log("collect/length_mean", sum(worker.episode_lengths) / len(returns))
    if successes := worker.episode_successes:
        ctx.log("collect/success_rate", sum(successes) / len(successes))


def collectors_of(chain: ChainView) -> list[_Collector]:
    """Return the stock collectors of a chain, in order."""
    return [part for part in chain.middleware if isinstance(part, _Collector)]


def _is_read(chain: ChainView) -> bool:
    """Return whether something of the chain reads collected data."""
    return any(not _ROWS.isdisjoint(declaration.reads) for declaration in chain.declarations)


def _overwritten(collector: _Collector, chain: ChainView) -> Iterable[str]:
    """Yield the problem that nothing reads the data of the collector before it, if that is so."""
    last: _Collector | None = None
    written: Collection[str] = ()
    if not _is_read(chain):
        return
    for part, declares in zip(chain.middleware, chain.declarations, strict=True):
        if isinstance(part, _Collector):
            rows = _ROWS.intersection(declares.writes, written)
            if part is collector and last is not None and last is not part and rows:
                yield (
                    f"it replaces ctx.{min(rows)} of the {type(last).__name__} before it, which "
                    "nothing has read; give each collector and its learner a name, such as "
                    'name="red", or use what reads the data before this one'
                )
            last, written = part, declares.writes
        elif not declares.anything or not _ROWS.isdisjoint(declares.reads):
            last = None


class StepCollectorSettings(PartSettings):
    """The options of :class:`StepCollector`."""

    n_sample: Count
    """Env steps in each step of the task, rounded up to a multiple of the number of envs."""
    random_steps: Whole = 0
    """Env steps with random actions at the start of the run, all in its first step."""


class StepCollector(_Collector, TakesSettings[StepCollectorSettings]):
    """Collect a number of environment steps in each step of the task.

    Episodes continue from one step of the task to the next; no transition is dropped in between.

    Args:
        policy: a policy or its collect mode.
        env_manager: the envs. They are launched when the task starts and closed when it ends,
            unless they were launched before.
        settings: the options, each by keyword; see :class:`StepCollectorSettings`.

    Reads:
        ctx.env_step, ctx.env_episode: incremented.
        ctx.train_iter: stored with the rows, as ``collect_iter``.
        ctx.collect_kwargs: keyword arguments of the policy's forward, such as ``eps``.

    Writes:
        ctx.trajectories: a batch ``[T, E, …]`` of transitions, as the policy's
            ``Policy.train_batch`` returns them.
        ctx.trajectory_end_idx: int64 ``[number of ends]``: the rows that end an episode, as indices
            into the trajectories flattened to ``[T * E, …]``.
        ctx.env_step, ctx.env_episode: with the steps and episodes collected.

    Raises:
        ConfigError: if ``policy`` or ``env_manager`` has the wrong type, an option is not valid, or
            ``random_steps`` are given for an on-policy policy, which learns from its actions.
    """

    writes = ("trajectories", "trajectory_end_idx", "env_step", "env_episode")

    settings: StepCollectorSettings

    @takes_options(StepCollectorSettings)
    def __init__(
        self,
        policy: HasModes | CollectMode,
        env_manager: BaseEnvManager,
        settings: StepCollectorSettings,
    ) -> None:
        super().__init__(policy, env_manager)
        self.settings = settings
        self.random_steps = settings.random_steps
        if self.random_steps:
            self._worker.check_random_actions()

    @property
    def env_num(self) -> int:
        """The number of envs."""
        return self._envs.env_num

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Collect."""
        worker = self._worker
        before = worker.env_step, worker.env_episode
        still_random = self.random_steps - ctx.env_step
        collected = worker.collect(
            max(self.settings.n_sample, still_random),
            train_iter=ctx.train_iter,
            policy_kwargs=ctx.collect_kwargs,
            random=still_random > 0,
        )
        ctx.trajectories = trajectories = self._mode.train_batch(collected)
        ends = worker.end_rows
        if ends is None or (
            trajectories is not collected and trajectories["done"] is not collected["done"]
        ):
            # For few rows, much faster than torch's nonzero().
            ends = np.flatnonzero(trajectories["done"].numpy())
        ctx.trajectory_end_idx = torch.from_numpy(ends)
        count_collected(ctx, worker, *before)
        if self._envs.failures.restarts != self._failures.restarts:
            self._failures.log(ctx)


class EpisodeCollectorSettings(PartSettings):
    """The options of :class:`EpisodeCollector`."""

    n_episode: Count
    """Episodes in each step of the task."""


class EpisodeCollector(_Collector, TakesSettings[EpisodeCollectorSettings]):
    """Collect a number of whole episodes in each step of the task.

    Every env contributes a fixed share of the episodes, so short ones do not count more.

    Args:
        policy: a policy or its collect mode.
        env_manager: the envs. They are launched when the task starts and closed when it ends,
            unless they were launched before.
        settings: the options, each by keyword; see :class:`EpisodeCollectorSettings`.

    Reads:
        ctx.env_step, ctx.env_episode: incremented.
        ctx.train_iter: stored with the rows, as ``collect_iter``.
        ctx.collect_kwargs: keyword arguments of the policy's forward, such as ``eps``.

    Writes:
        ctx.episodes: a list with a batch ``[T_i, …]`` for each episode, as the policy's
            ``Policy.train_batch`` returns it.
        ctx.trajectories: the same rows as one batch ``[T_0 + T_1 + …, …]``.
        ctx.trajectory_end_idx: int64 ``[n_episode]``: each episode's last row in the trajectories.
        ctx.env_step, ctx.env_episode: with the steps and episodes collected.

    Raises:
        ConfigError: if ``policy`` or ``env_manager`` has the wrong type, or an option is not valid.
    """

    writes = ("episodes", "trajectories", "trajectory_end_idx", "env_step", "env_episode")

    settings: EpisodeCollectorSettings

    @takes_options(EpisodeCollectorSettings)
    def __init__(
        self,
        policy: HasModes | CollectMode,
        env_manager: BaseEnvManager,
        settings: EpisodeCollectorSettings,
    ) -> None:
        super().__init__(policy, env_manager)
        self.settings = settings

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Collect."""
        worker = self._worker
        before = worker.env_step, worker.env_episode
        collected = worker.collect_episodes(
            self.settings.n_episode, train_iter=ctx.train_iter, policy_kwargs=ctx.collect_kwargs
        )
        ctx.episodes = [self._mode.train_batch(episode) for episode in collected]
        ctx.trajectories = cat(ctx.episodes)
        lengths = torch.tensor([len(episode["done"]) for episode in ctx.episodes])
        ctx.trajectory_end_idx = lengths.cumsum(0) - 1
        count_collected(ctx, worker, *before)
        if self._envs.failures.restarts != self._failures.restarts:
            self._failures.log(ctx)
