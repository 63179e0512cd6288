"""Weights: from the learner to collectors and evaluators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmiddleware.pipeline import Task
from dmiddleware.policy import Policy
from dmiddleware.settings import Count, Positive, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.exchange.follower import FollowerWeights
from middleware.exchange.learner import LearnerWeights
from middleware.exchange.rank import exchanging_roles
from middleware.roles import Role
from middleware.support.checks import check_instance
from middleware.support.part_name import PartSettings

__all__ = [
    "ModelExchanger",
    "ModelExchangerSettings",
    "PeriodicalModelExchanger",
    "PeriodicalModelExchangerSettings",
]


class ModelExchangerSettings(PartSettings):
    """The options of :class:`ModelExchanger`."""

    every_train_iter: Count = 1
    """Updates from one published copy to the next."""
    max_policy_lag: Count | None = None
    """How many updates the weights of a node may be behind the learner when it starts a step; with
    older ones it waits. It counts the updates that the learner has announced, at the latest when it
    has made more than half of this number. None: no limit."""
    timeout_s: Positive = 120.0
    """How long a node waits for weights while no learner can send them."""

    def __post_init__(self) -> None:
        """Refuse a lag that the published copies cannot keep."""
        super().__post_init__()
        self.require(
            self.max_policy_lag is None or self.max_policy_lag >= self.every_train_iter,
            "max_policy_lag",
            f"at least every_train_iter ({self.every_train_iter}), because newer weights are not "
            "published",
        )


class ModelExchanger(BaseMiddleware[OnlineRLContext], TakesSettings[ModelExchangerSettings]):
    """Send the learner's weights to the collectors and evaluators.

    Use it after the :class:`~middleware.ContextExchanger`. The learner publishes a consistent copy
    before the first step and after each step with updates, with the number of updates as its
    version. The other nodes load the newest copy before each of their steps, and store its version
    with the data that they collect (``collect_iter``) and evaluate (``last_eval_iter``). Before
    its first step, a node waits for the first weights. In a run of one process it does nothing.

    If several ranks learn, only rank 0 publishes.

    The statistics of a policy with ``obs_norm`` are updated in the learner, with the observations
    of the trajectories that arrive, and are sent with the weights.

    Args:
        policy: the policy whose weights are sent.
        settings: the options, each by keyword; see :class:`ModelExchangerSettings`.

    Reads:
        ctx.train_iter: the version.
        ctx.trajectories: in a learner that does not collect, for the statistics.

    Writes:
        ctx.train_iter: in the other nodes, the version of the policy.

    Raises:
        ConfigError: if ``policy`` is not a policy, or an option is not valid.
        WaitTimeout: if no weights arrive in time.
    """

    reads = ("train_iter",)
    writes = ("train_iter",)

    settings: ModelExchangerSettings

    @takes_options(ModelExchangerSettings)
    def __init__(self, policy: Policy, settings: ModelExchangerSettings) -> None:
        self.settings = settings
        self.roles = exchanging_roles(settings.name)
        self._policy = check_instance(
            policy, Policy, user=type(self).__name__, hint="pass the policy itself, not a mode"
        )
        self._side: LearnerWeights | FollowerWeights | None = None

    def setup(self, task: Task[Any]) -> None:
        """Publish the first weights, or subscribe to them."""
        settings = self.settings
        if task.router is None:
            self._side = None
        elif task.has_role(Role.LEARNER):
            self._side = LearnerWeights(
                task,
                self._policy,
                every_train_iter=settings.every_train_iter,
                max_lag=settings.max_policy_lag,
                part=settings.name,
            )
        else:
            self._side = FollowerWeights(
                task,
                self._policy,
                max_lag=settings.max_policy_lag,
                timeout_s=settings.timeout_s,
                part=settings.name,
            )

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Load weights on the way forward, or publish them on the way back."""
        if isinstance(self._side, FollowerWeights):
            self._side(ctx)
        elif self._side is not None:
            yield from self._side(ctx)


class PeriodicalModelExchangerSettings(PartSettings):
    """The options of :class:`PeriodicalModelExchanger`."""

    period: Count
    """Updates from one publication to the next."""
    timeout_s: Positive = 120.0
    """How long a node waits for weights while no learner can send them."""


class PeriodicalModelExchanger(ModelExchanger):
    """A :class:`ModelExchanger` that publishes every ``period`` updates.

    Args:
        policy: the policy whose weights are sent.
        settings: the options, each by keyword; see
            :class:`PeriodicalModelExchangerSettings`.

    Reads:
        ctx.train_iter: the version.

    Writes:
        ctx.train_iter: in the other nodes, the version of the policy.

    Raises:
        ConfigError: if ``policy`` is not a policy, or an option is not valid.
    """

    @takes_options(PeriodicalModelExchangerSettings)
    def __init__(self, policy: Policy, settings: PeriodicalModelExchangerSettings) -> None:
        super().__init__(
            policy,
            every_train_iter=settings.period,
            timeout_s=settings.timeout_s,
            name=settings.name,
        )
