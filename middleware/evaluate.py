"""Evaluation: the policy plays whole episodes without exploring."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from dmiddleware.env import BaseEnvManager, check_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import ChainView, Task
from dmiddleware.policy import EvalMode, HasModes, as_eval_mode
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.rollout.episode_info import success_of
from dmiddleware.settings import Count, Number, TakesSettings, takes_options
from middleware.base import BaseMiddleware, stock_middleware
from middleware.context import RLContext
from middleware.roles import Role
from middleware.support.interval import Interval, IntervalSettings
from middleware.support.part_name import require_part_name

__all__ = [
    "InteractionEvaluator",
    "InteractionEvaluatorSettings",
    "evaluation_prefixes",
    "evaluators_of",
    "primary_evaluator",
]

_UNNAMED: Final = "eval"
_LIMITS: Final = ("stop_value", "patience")
_PRIMARY_FIELDS: Final[tuple[str, ...]] = (
    "eval_value",
    "eval_output",
    "last_eval_iter",
    "last_eval_value",
)


class InteractionEvaluatorSettings(IntervalSettings):
    """The options of :class:`InteractionEvaluator`."""

    n_episode: Count
    """Episodes in an evaluation, at least one per env."""
    every_train_iter: Count | None = None
    """Updates from one evaluation to the next; offline, without an interval: 1000."""
    every_env_step: Count | None = None
    """Env steps from one evaluation to the next; without an interval: 10,000."""
    name: str | None = None
    """What its metrics and videos begin with, for one of several evaluators; None: `eval`. If other
    middleware of the chain have this name, it belongs to their part, and decides on its policy."""
    primary: bool | None = None
    """Whether its evaluations decide on the best policy and the end of the run. Exactly one
    evaluator of a chain is primary; None: the one that has no name, or the only one."""
    stop_value: Number | None = None
    """Stop the task when the mean return reaches this value after at least one update; None:
    never."""
    stop_evaluations: Count = 1
    """Evaluations in a row that must reach ``stop_value``."""
    patience: Count | None = None
    """Evaluations in a row without a new best mean return after which to stop the task (early
    stopping); None: never stop for this reason."""
    video_every: Count | None = None
    """Record every n-th evaluation, including the first, in envs made with
    ``render_mode="rgb_array"``; None: no videos."""
    max_frames: Count = 500
    """Frames in a video at most."""
    deterministic: bool = True
    """Take the most likely actions; False draws them from the policy's distribution, as collecting
    does."""

    def __post_init__(self) -> None:
        """Refuse a name that is not for metrics, and limits of one that is not to decide."""
        super().__post_init__()
        require_part_name(self, self.name)
        if self.primary is False:
            for limit in _LIMITS:
                self.require(getattr(self, limit) is None, limit, "None with primary=False")

    @property
    def prefix(self) -> str:
        """What the names of its metrics begin with."""
        return _UNNAMED if self.name is None else self.name


class InteractionEvaluator(BaseMiddleware[RLContext], TakesSettings[InteractionEvaluatorSettings]):
    """Evaluate the policy in the first step, and then at an interval of updates or env steps.

    An evaluation is due in steps that reach or pass a multiple of the interval, wherever a run was
    resumed.

    Every env plays a fixed share of the episodes, so short ones do not count more.

    A chain may have several evaluators, for example for the same task under other conditions. Each
    but one needs a ``name``. One of them is primary: its evaluations decide on the best policy and
    on the end of the run, and the final evaluation is in its envs. One with the name of a part of
    the chain evaluates the policy of that part; it is the only one there.

    Args:
        policy: a policy or its eval mode.
        env_manager: the envs. They are launched when the task starts and closed when it ends,
            unless they were launched before.
        settings: the options, each by keyword; see
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
        ctx.other_evaluations: one that is not primary writes only this: under its name, the same
            dictionary without ``policy_state``.

    Raises:
        ConfigError: if ``policy`` or ``env_manager`` has the wrong type, an option is not valid,
            there are fewer episodes than envs, or ``deterministic=False`` with a policy that has
            no distribution over actions.
        ChainError: before the first step, if two evaluators of the chain have one name or none, or
            not exactly one is primary.
        EnvTimeout: in a step, if an episode has not ended after 1,000,000 steps; warnings are
            logged from 5,000 steps on, see :func:`~dmiddleware.rollout.evaluate_episodes`.
    """

    roles = (Role.EVALUATOR,)
    lead_only = True
    reads = ("train_iter", "last_eval_iter")
    writes: tuple[str, ...] = _PRIMARY_FIELDS

    settings: InteractionEvaluatorSettings

    @takes_options(InteractionEvaluatorSettings)
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
        self.metric_prefix = settings.prefix
        self.joins_part = settings.name
        self._is_primary = settings.primary is not False
        if not self._is_primary:
            self.writes = ("other_evaluations",)
        self._interval = Interval(settings, online=10_000, offline=1000)
        self._n_evaluations = 0
        self._recent: deque[float] = deque(maxlen=settings.stop_evaluations)
        self._best = -math.inf
        self._n_since_best = 0
        self._task: Task[Any] | None = None
        self._launched_here = False
        self.owns = (env_manager,)
        self.components = {"env_num": env_manager.env_num}
        self.snapshot_parts = {"env_manager": env_manager}

    def bind(self, chain: ChainView) -> None:
        """Find out whether it decides on the best policy."""
        self._is_primary = any(evaluator is self for evaluator in _primaries(chain))

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse an interval in a counter that the chain lacks, and evaluators that would mix."""
        yield from self._interval.preflight(chain)
        primaries = _primaries(chain)
        is_primary = any(evaluator is self for evaluator in primaries)
        evaluators = evaluators_of(chain)
        others = (part for part in stock_middleware(chain) if part is not self)
        prefixes = [part.metric_prefix for part in others]
        if chain.part is not None and len(evaluators) > 1:
            if self is not evaluators[0]:
                yield (
                    f"the part {chain.part!r} of the chain has another evaluator; give it another "
                    "name than the part, and it evaluates beside those of the whole chain"
                )
        elif self.metric_prefix in prefixes and self.settings.name is None:
            yield (
                "the chain has another evaluator without a name, and their metrics would mix; give "
                'one of them a name, such as InteractionEvaluator(..., name="windy")'
            )
        elif self.metric_prefix in prefixes:
            yield (
                f"the name {self.settings.name!r} is that of another middleware of the chain, and "
                "their metrics would mix; give it another name"
            )
        elif len(primaries) > 1 and is_primary:
            yield (
                f"{len(primaries)} evaluators are primary ({_names(primaries)}), but one alone "
                "decides on the best policy; give the others primary=False"
            )
        elif not primaries and self is evaluators[0] and not _has_other_judge(chain):
            yield (
                f"none of the evaluators {_names(evaluators)} is primary, so nothing decides on "
                "the best policy; give one of them primary=True"
            )
        for limit in _LIMITS if primaries and not is_primary else ():
            if (value := getattr(self.settings, limit)) is not None:
                yield (
                    f"it has {limit}={value:g}, but only the evaluations of the primary evaluator "
                    f"({_names(primaries)}) end the run; give it to that, or primary=True to this"
                )

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
        if self._is_primary and task.ctx.last_eval_iter >= 0 and not self._recent:
            self._recent.append(task.ctx.last_eval_value)
        self._stop_if_reached(task.ctx)

    def __call__(self, ctx: RLContext) -> None:
        """Evaluate, if the interval has passed."""
        settings = self.settings
        has_evaluated = ctx.last_eval_iter >= 0 if self._is_primary else self._n_evaluations > 0
        if not self._interval.is_due(ctx) and has_evaluated:
            return
        every = settings.video_every
        records = every is not None and self._n_evaluations % every == 0
        self._n_evaluations += 1
        output = self._evaluate(max_frames=settings.max_frames if records else 0)
        if not self._is_primary:
            ctx.other_evaluations[settings.prefix] = output
            return
        mean = output["return_mean"]
        ctx.eval_value = ctx.last_eval_value = mean
        ctx.last_eval_iter = ctx.train_iter
        ctx.eval_output = {**output, "policy_state": self._mode.state_dict()}
        self._recent.append(mean)
        self._n_since_best += 1
        if math.isfinite(mean) and mean > self._best:
            self._best, self._n_since_best = mean, 0
        self._stop_if_reached(ctx)

    def _evaluate(self, *, max_frames: int) -> dict[str, Any]:
        monitor = evaluate_episodes(
            self._mode,
            self._envs,
            self.settings.n_episode,
            policy_kwargs=self._kwargs,
            max_frames=max_frames,
        )
        returns, info = monitor.get_episode_return(), monitor.mean_info()
        output = {
            "return_mean": float(np.mean(returns)),
            "return_std": float(np.std(returns)),
            "return_min": min(returns),
            "return_max": max(returns),
            "length_mean": info["eval_episode_length"],
            "episode_return": returns,
            "episode_info": info,
        }
        success_rate = success_of(info)
        if success_rate is not None:
            output["success_rate"] = success_rate
        if max_frames and monitor.has_video:
            output["video"] = monitor.get_video()
        return output

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
        """Return the number of evaluations, the last and best mean returns, and the interval."""
        return {
            "n_evaluations": self._n_evaluations,
            "recent": list(self._recent),
            "best": self._best,
            "n_since_best": self._n_since_best,
            "interval": self._interval.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; stop the task if that is enough."""
        self._n_evaluations = state["n_evaluations"]
        self._interval.load_state_dict(state["interval"])
        self._recent = deque(state["recent"], maxlen=self._recent.maxlen)
        self._best = state.get("best", -math.inf)
        self._n_since_best = state.get("n_since_best", 0)
        if self._task is not None:
            self._stop_if_reached(self._task.ctx)

    def _stop_if_reached(self, ctx: RLContext) -> None:
        patience = self.settings.patience
        if patience is not None and self._n_since_best >= patience:
            ctx.task.stop(
                f"{self._n_since_best} evaluations in a row had no better mean return than "
                f"{self._best:g} (patience is {patience})",
                final=False,
            )
        stop_value, n = self.settings.stop_value, self.settings.stop_evaluations
        if stop_value is None or len(self._recent) < n or ctx.train_iter == 0:
            return
        if min(self._recent) >= stop_value:
            in_a_row = "" if n == 1 else f" in {n} evaluations in a row"
            ctx.task.stop(
                f"the mean return {self._recent[-1]:g} has reached stop_value {stop_value:g}"
                f"{in_a_row}",
                final=False,
            )


def evaluation_prefixes(chain: ChainView) -> tuple[str, ...]:
    """Return the prefixes of the metrics of a chain's evaluators, the primary evaluator's first.

    If a middleware of another class decides, its evaluations count as those without a name. In a
    part, they all do: the metrics of the part begin with its name.
    """
    if chain.part is not None:
        return (_UNNAMED,)
    primary = primary_evaluator(chain)
    first = _UNNAMED if primary is None else primary.settings.prefix
    prefixes = (evaluator.settings.prefix for evaluator in evaluators_of(chain))
    return tuple(dict.fromkeys((first, *prefixes)))


def primary_evaluator(chain: ChainView) -> InteractionEvaluator | None:
    """Return the evaluator of a chain whose evaluations decide; None: another middleware's do."""
    return next(iter(_primaries(chain)), None)


def evaluators_of(chain: ChainView) -> list[InteractionEvaluator]:
    """Return the stock evaluators of a chain, in order."""
    parts = {id(part): part for part in chain.middleware}  # one may be used twice
    return [part for part in parts.values() if isinstance(part, InteractionEvaluator)]


def _primaries(chain: ChainView) -> list[InteractionEvaluator]:
    evaluators = evaluators_of(chain)
    is_alone = len(evaluators) == 1 and not _has_other_judge(chain)
    return [
        evaluator
        for evaluator in evaluators
        if (is_alone or evaluator.settings.name is None or evaluator.settings.primary)
        and evaluator.settings.primary is not False
    ]


def _has_other_judge(chain: ChainView) -> bool:
    """Return whether another middleware than the stock one evaluates."""
    pairs = zip(chain.middleware, chain.declarations, strict=True)
    return any(
        "eval_value" in declares.writes and not isinstance(part, InteractionEvaluator)
        for part, declares in pairs
    )


def _names(evaluators: Iterable[InteractionEvaluator]) -> str:
    return ", ".join(
        evaluator.settings.name or "the one without a name" for evaluator in evaluators
    )
