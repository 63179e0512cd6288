"""Weights: from the learner to collectors and evaluators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from dmiddleware.pipeline import Task
from dmiddleware.policy import Policy
from dmiddleware.settings import Count, Positive, Settings, takes_settings
from middleware.context import OnlineRLContext
from middleware.exchange.events import CONSUMED, LEARNED, MODEL, UPDATED, Counters, merge_counters
from middleware.exchange.waiting import Exchange
from middleware.roles import Role
from middleware.support.checks import check_instance
from middleware.support.rows import rows_of

__all__ = [
    "ModelExchanger",
    "ModelExchangerSettings",
    "PeriodicalModelExchanger",
    "PeriodicalModelExchangerSettings",
]


class ModelExchangerSettings(Settings):
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
        self.require(
            self.max_policy_lag is None or self.max_policy_lag >= self.every_train_iter,
            "max_policy_lag",
            f"at least every_train_iter ({self.every_train_iter}), because newer weights are not "
            "published",
        )


class ModelExchanger(Exchange[OnlineRLContext]):
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
    _published: tuple[Counters, dict[str, Any]]

    @takes_settings(ModelExchangerSettings)
    def __init__(self, policy: Policy, settings: ModelExchangerSettings) -> None:
        super().__init__(timeout_s=settings.timeout_s)
        self.settings = settings
        self._policy = check_instance(
            policy, Policy, user=type(self).__name__, hint="pass the policy itself, not a mode"
        )
        self._publishing = threading.Lock()
        self._announced = 0
        self._max_lag = settings.max_policy_lag
        # The updates of a restarted learner may be fewer, but its epoch is larger.
        self._learned: Counters | None = None
        self._newest: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._loaded = (0, -1)

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Exchange."""
        if not self._has_peers:
            return
        task = self._task
        if not task.has_role(Role.LEARNER):
            self._take(ctx, task)
            return
        if not task.has_role(Role.COLLECTOR):
            self._observe(ctx)
        if not self._ranks.leads:
            return
        yield
        if ctx.train_iter - self._published[0]["train_iter"] >= self.settings.every_train_iter:
            self._publish(ctx)
        if self._max_lag is not None and ctx.train_iter - self._announced > self._max_lag // 2:
            # They arrive before weights that are large.
            self._announced = ctx.train_iter
            task.emit(LEARNED, self._counters(ctx), only_remote=True)

    def _observe(self, ctx: OnlineRLContext) -> None:
        if ctx.trajectories is None:
            return
        rows = rows_of(ctx.trajectories)
        if "obs" in rows:
            self._policy.observe(rows["obs"])

    def _subscribe(self, task: Task[Any]) -> None:
        if task.has_role(Role.LEARNER):
            if not self._ranks.leads:
                return
            self._publish(task.ctx)
            task.on("node.joined", self._publish_again)
            task.on("node.rejoined", self._publish_again)
            self._publish_again()
            return
        task.on(MODEL, self._on_model)
        task.on(LEARNED, self._handler(self._on_learned))
        task.on(CONSUMED, self._handler(lambda _, __, counters: self._on_learned(counters)))

    def _on_learned(self, counters: Counters) -> None:
        self._learned = merge_counters(self._learned, counters)

    def _on_model(self, counters: Counters, state: dict[str, Any]) -> None:
        version = counters["epoch"], counters["train_iter"]
        with self._changed:
            if self._newest is None or version >= self._newest[0]:
                self._newest = version, state
            self._on_learned(counters)
            self._changed.notify_all()
        self._task.emit(UPDATED, counters, only_local=True)

    def _is_new_enough(self) -> bool:
        if self._newest is None:
            return False
        if self._max_lag is None or self._learned is None:
            return True
        epoch, version = self._newest[0]
        lag = self._learned["train_iter"] - version
        return epoch == self._learned["epoch"] and lag <= self._max_lag

    def _publish(self, ctx: OnlineRLContext) -> None:
        # A policy's state is a copy of its parameters, which no update changes while it is sent.
        state = self._policy.eval_mode.state_dict()
        with self._publishing:
            self._published = self._counters(ctx), state
            self._task.emit(MODEL, *self._published, only_remote=True)

    def _publish_again(self, *_: Any, **__: Any) -> None:
        """Publish under the current epoch, which grows if a peer knows an earlier learner."""
        with self._publishing:
            counters, state = self._published
            epoch = self._router.incarnation
            if epoch != counters["epoch"]:
                self._published = {**counters, "epoch": epoch}, state
                self._task.emit(MODEL, *self._published, only_remote=True)

    def _take(self, ctx: OnlineRLContext, task: Task[Any]) -> None:
        with self._changed:
            blocked_s = self._wait(
                self._is_new_enough,
                lambda: "recent weights of the learner",
                lambda: task.participants(Role.LEARNER),
            )
            assert self._newest is not None
            version, state = self._newest
        if version != self._loaded:
            self._policy.eval_mode.load_state_dict(state)
            self._loaded = version
        ctx.train_iter = version[1]
        ctx.log("exchange/blocked_for_weights_s", blocked_s)


class PeriodicalModelExchangerSettings(Settings):
    """The options of :class:`PeriodicalModelExchanger`."""

    period: Count
    """Updates from one publication to the next."""
    timeout_s: Positive = 120.0
    """How long a node waits for weights while no learner can send them."""


class PeriodicalModelExchanger(ModelExchanger):
    """A :class:`ModelExchanger` that publishes every ``period`` updates.

    Args:
        policy: the policy whose weights are sent.

    Reads:
        ctx.train_iter: the version.

    Writes:
        ctx.train_iter: in the other nodes, the version of the policy.

    Raises:
        ConfigError: if ``policy`` is not a policy, or an option is not valid.
    """

    @takes_settings(PeriodicalModelExchangerSettings)
    def __init__(self, policy: Policy, settings: PeriodicalModelExchangerSettings) -> None:
        super().__init__(policy, every_train_iter=settings.period, timeout_s=settings.timeout_s)
