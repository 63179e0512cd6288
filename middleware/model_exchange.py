"""The way of the weights: from the learner to those who act with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmiddleware.pipeline import Role, Task
from dmiddleware.policy import Policy
from middleware.support.checks import check_positive
from middleware.support.exchange_base import LEARNED, MODEL, Exchange

__all__ = ["ModelExchanger", "PeriodicalModelExchanger"]


class ModelExchanger(Exchange):
    """Carry the learner's weights to those who act with them.

    Its place is behind the :class:`~middleware.ContextExchanger`. The learner publishes a
    consistent copy after each step in which it learned, and one before the first, with the number
    of updates as its version; the others take the newest before each of their steps, and stamp its
    version on what they collect (``collect_iter``) and evaluate (``last_eval_iter``). Before its
    first step a follower waits for the first weights. In a run of one process it does nothing.

    A policy that gathers statistics of observations while it acts (``obs_norm`` of PPO) gathers
    them at the learner instead, from the trajectories that come, and they travel with the weights:
    the policy's method ``observe(obs)`` is called with them, if it has one.

    Args:
        policy: whose weights.
        every_train_iter: publish only after so many further updates.
        max_policy_lag: how many updates the weights of a follower may be behind the learner when it
            begins a step; if they are, it waits for newer ones. None: any number.
        timeout_s: how long a follower waits for weights.

    Reads:
        ctx.train_iter: the version.
        ctx.trajectories: as a learner that does not collect, for the statistics.

    Writes:
        ctx.train_iter: as a follower, the version that the policy has now.

    Raises:
        ValueError: if a number is not positive, or the lag smaller than the period.
        WaitTimeout: if the weights that are waited for do not come.
    """

    reads = ("train_iter",)
    writes = ("train_iter",)

    def __init__(
        self,
        policy: Policy,
        *,
        every_train_iter: int = 1,
        max_policy_lag: int | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        check_positive(every_train_iter=every_train_iter, max_policy_lag=max_policy_lag)
        if max_policy_lag is not None and max_policy_lag < every_train_iter:
            raise ValueError(
                f"max_policy_lag must be at least every_train_iter ({every_train_iter}), or "
                f"followers would wait for weights that are not published; got {max_policy_lag}"
            )
        self._policy = policy
        self._every = every_train_iter
        self._published = -1
        self._epoch = 0.0
        self._max_lag = max_policy_lag
        # (epoch, updates): a learner that begins anew may count from below, and still is the newer.
        self._learned = (0.0, 0)
        self._newest: tuple[tuple[float, int], dict[str, Any]] | None = None
        self._loaded = (0.0, -1)

    def __call__(self, ctx: Any) -> Iterator[None]:
        """Exchange."""
        task = self._task
        if task is None:
            return
        if not task.has_role(Role.LEARNER):
            self._take(ctx)
            return
        if not task.has_role(Role.COLLECTOR):
            self._observe(ctx)
        yield
        if ctx.train_iter - self._published >= self._every:
            self._publish(ctx, task)

    def close(self) -> None:
        """Tell the others that a learner ends."""
        self._tell_end()

    def _observe(self, ctx: Any) -> None:
        observe = getattr(self._policy, "observe", None)
        trajectories = getattr(ctx, "trajectories", None)
        if observe is not None and trajectories is not None:
            observe(trajectories["obs"])

    def _subscribe(self, task: Task[Any]) -> None:
        if task.has_role(Role.LEARNER):
            self._epoch = task.clock.wall()
            self._publish(task.ctx, task)
            return
        task.on(MODEL, self._handler(self._on_model))
        task.on(LEARNED, self._handler(self._on_learned))
        self._hear_of_end(task)

    def _on_learned(self, counters: dict[str, Any]) -> None:
        self._learned = max(self._learned, (counters["epoch"], counters["train_iter"]))

    def _on_model(self, epoch: float, version: int, state: dict[str, Any]) -> None:
        if self._newest is None or (epoch, version) >= self._newest[0]:
            self._newest = (epoch, version), state

    def _is_new_enough(self) -> bool:
        if self._newest is None:
            return False
        if self._max_lag is None:
            return True
        _, version = self._newest[0]
        return self._learned[1] - version <= self._max_lag

    def _publish(self, ctx: Any, task: Task[Any]) -> None:
        # A policy's state is a copy of its parameters: no update can tear it while it is sent.
        self._published = ctx.train_iter
        state = self._policy.eval_mode.state_dict()
        task.emit(MODEL, self._epoch, ctx.train_iter, state, only_remote=True)

    def _take(self, ctx: Any) -> None:
        with self._changed:
            blocked_s = self._wait(self._is_new_enough, lambda: "new enough weights of the learner")
            assert self._newest is not None
            version, state = self._newest
        if version != self._loaded:
            self._policy.eval_mode.load_state_dict(state)
            self._loaded = version
        ctx.train_iter = version[1]
        ctx.log("exchange/blocked_for_weights_s", blocked_s)


class PeriodicalModelExchanger(ModelExchanger):
    """A :class:`ModelExchanger` that publishes every ``period`` updates.

    Args:
        policy: whose weights.
        period: updates from one publication to the next.
        timeout_s: how long a follower waits for weights.

    Reads:
        ctx.train_iter: the version.

    Writes:
        ctx.train_iter: as a follower, the version that the policy has now.

    Raises:
        ValueError: if a number is not positive.
    """

    def __init__(self, policy: Policy, *, period: int, timeout_s: float = 120.0) -> None:
        check_positive(period=period)
        super().__init__(policy, every_train_iter=period, timeout_s=timeout_s)
