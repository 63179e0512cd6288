"""The side of collectors and evaluators: sends what they do, and takes counters and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dmiddleware.flow_control import Window
from dmiddleware.pipeline import Task
from dmiddleware.policy import Policy
from middleware.context import OnlineRLContext
from middleware.exchange.events import (
    CONSUMED,
    EVALUATED,
    LEARNED,
    MODEL,
    UPDATED,
    UPDATES_WANTED,
    Batch,
    Counters,
    Evaluation,
    collected_event,
    merge_counters,
    of_part,
)
from middleware.exchange.waiting import Waiting
from middleware.roles import Role

__all__ = ["FollowerData", "FollowerWeights"]


class FollowerData:
    """The part of a :class:`~middleware.ContextExchanger` in one that collects or evaluates.

    Args:
        task: the task, which has a router.
        max_ahead: how many batches it may send before the learner has taken them.
        timeout_s: how long to wait while no learner can answer.
        part: the named part of the chain whose data it exchanges; None: the whole chain.
    """

    def __init__(
        self, task: Task[Any], *, max_ahead: int, timeout_s: float, part: str | None = None
    ) -> None:
        self._part = part
        self._window = Window(max_ahead)
        self._learned: Counters | None = None
        self._gets_weights = False
        self._last = (0, -1)
        self._waiting = Waiting(task, timeout_s=timeout_s)
        self._waiting.on(of_part(LEARNED, part), self._on_learned)
        self._waiting.on(of_part(UPDATED, part), self._on_updated)
        self._waiting.on(of_part(CONSUMED, part), self._on_consumed)

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Receive on the way forward, and send on the way back."""
        task = self._waiting.task
        collects = task.has_role(Role.COLLECTOR)
        if not collects:
            self._ask_for_updates(task)
        with self._waiting.changed:
            blocked_s = self._waiting.until(
                self._has_room if collects else self._has_new_updates,
                missing=self._what_is_missing if collects else lambda: "updates of the learner",
                awaited=lambda: task.participants(Role.LEARNER),
            )
            learned = self._learned
        assert learned is not None
        ctx.log("exchange/blocked_s", blocked_s)
        self._last = learned["epoch"], learned["train_iter"]
        # The counters of this process lack the steps of other collectors, and those of the learner
        # lack the steps in transit. The larger ones are closer to the truth.
        env_step = ctx.env_step = max(ctx.env_step, learned["env_step"])
        env_episode = ctx.env_episode = max(ctx.env_episode, learned["env_episode"])
        yield
        if collects:
            self._send_collected(ctx, task, ctx.env_step - env_step, ctx.env_episode - env_episode)
        has_evaluated = ctx.eval_value is not None or bool(ctx.other_evaluations)
        if has_evaluated and task.has_role(Role.EVALUATOR):
            self._send_evaluated(ctx, task)

    def _ask_for_updates(self, task: Task[Any]) -> None:
        """Ask for the counters after the next update, unless they arrive with the weights."""
        with self._waiting.changed:
            needs_updates = self._learned is not None and not self._has_new_updates()
        if needs_updates and not self._gets_weights:
            node_id = self._waiting.router.node_id
            event = of_part(UPDATES_WANTED, self._part)
            task.emit(event, node_id, self._last[1], only_remote=True)

    def _on_updated(self, counters: Counters) -> None:
        self._gets_weights = True
        self._on_learned(counters)

    def _on_learned(self, counters: Counters) -> None:
        previous, self._learned = self._learned, merge_counters(self._learned, counters)
        if previous is not None and previous["epoch"] < self._learned["epoch"]:
            # A new learner does not have the batches that its predecessor had not taken.
            self._window.forget()

    def _on_consumed(self, token: str, number: int, counters: Counters) -> None:
        self._on_learned(counters)
        self._window.acknowledge(token, number)

    def _has_room(self) -> bool:
        return self._learned is not None and self._window.has_room

    def _has_new_updates(self) -> bool:
        learned = self._learned
        return learned is not None and (learned["epoch"], learned["train_iter"]) != self._last

    def _what_is_missing(self) -> str:
        if self._learned is None:
            return "the first counters of the learner"
        return (
            "an acknowledgment from the learner (it has taken "
            f"{self._window.taken} of the {self._window.sent} batches of this collector)"
        )

    def _send_collected(
        self, ctx: OnlineRLContext, task: Task[Any], env_step: int, env_episode: int
    ) -> None:
        if ctx.trajectories is None and ctx.episodes is None:
            return
        assert self._learned is not None
        n_ranks, node = self._learned["ranks"], self._waiting.node
        node_id = self._waiting.router.node_id
        # This collector's number among those of its launcher.
        index = None if node is None else node.role_index
        rank = (node_id if index is None else index) % n_ranks
        with self._waiting.changed:
            token, number = self._window.send()
        batch = Batch(
            node_id=node_id,
            token=token,
            number=number,
            env_step=env_step,
            env_episode=env_episode,
            train_iter=ctx.train_iter,
            logged={name: float(value) for name, value in ctx.logged.items()},
            trajectories=ctx.trajectories,
            trajectory_end_idx=ctx.trajectory_end_idx,
            episodes=ctx.episodes,
        )
        task.emit(of_part(collected_event(rank, n_ranks), self._part), batch, only_remote=True)

    def _send_evaluated(self, ctx: OnlineRLContext, task: Task[Any]) -> None:
        output = ctx.eval_output
        if isinstance(output, Mapping | None) and ctx.eval_value is not None:
            output = {**(output or {}), "node_id": self._waiting.router.node_id}
        evaluation = Evaluation(
            eval_value=ctx.eval_value,
            eval_output=output,
            last_eval_iter=ctx.last_eval_iter,
            last_eval_value=ctx.last_eval_value,
            other_evaluations=ctx.other_evaluations,
        )
        task.emit(of_part(EVALUATED, self._part), evaluation, only_remote=True)


class FollowerWeights:
    """The part of a :class:`~middleware.ModelExchanger` in one that collects or evaluates.

    Args:
        task: the task, which has a router.
        policy: the policy that gets the weights.
        max_lag: how many updates they may be behind the learner; None: no limit.
        timeout_s: how long to wait while no learner can send them.
        part: the named part of the chain whose policy it is; None: the whole chain.
    """

    def __init__(
        self,
        task: Task[Any],
        policy: Policy,
        *,
        max_lag: int | None,
        timeout_s: float,
        part: str | None = None,
    ) -> None:
        self._policy = policy
        self._max_lag = max_lag
        # The updates of a restarted learner may be fewer, but its epoch is larger.
        self._learned: Counters | None = None
        self._newest: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._loaded = (0, -1)
        self._waiting = Waiting(task, timeout_s=timeout_s)
        model, updated = of_part(MODEL, part), of_part(UPDATED, part)
        self._waiting.on(model, self._on_model)
        self._waiting.on(of_part(LEARNED, part), self._on_learned)
        consumed = of_part(CONSUMED, part)
        self._waiting.on(consumed, lambda _, __, counters: self._on_learned(counters))
        # For those that wait for updates, which must find the weights here.
        task.on(model, lambda counters, _: task.emit(updated, counters, only_local=True))

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Load the newest weights."""
        with self._waiting.changed:
            blocked_s = self._waiting.until(
                self._is_new_enough,
                missing=lambda: "recent weights of the learner",
                awaited=lambda: ctx.task.participants(Role.LEARNER),
            )
            assert self._newest is not None
            version, state = self._newest
        if version != self._loaded:
            self._policy.eval_mode.load_state_dict(state)
            self._loaded = version
        ctx.train_iter = version[1]
        ctx.log("exchange/blocked_for_weights_s", blocked_s)

    def _on_learned(self, counters: Counters) -> None:
        self._learned = merge_counters(self._learned, counters)

    def _on_model(self, counters: Counters, state: dict[str, Any]) -> None:
        version = counters["epoch"], counters["train_iter"]
        if self._newest is None or version >= self._newest[0]:
            self._newest = version, state
        self._on_learned(counters)

    def _is_new_enough(self) -> bool:
        if self._newest is None:
            return False
        if self._max_lag is None or self._learned is None:
            return True
        epoch, version = self._newest[0]
        lag = self._learned["train_iter"] - version
        return epoch == self._learned["epoch"] and lag <= self._max_lag
