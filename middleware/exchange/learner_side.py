"""The learner's side of exchanging data: takes batches and evaluations, and sends counters."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from dmiddleware.pipeline import Task
from middleware.context import OnlineRLContext
from middleware.exchange.events import (
    BATCH,
    CONSUMED,
    EVALUATED,
    LEARNED,
    WAITING,
    Counters,
    collected_event,
)
from middleware.exchange.pace import Pace
from middleware.exchange.waiting import Exchange
from middleware.roles import Role

__all__ = ["LearnerSide"]

_log = logging.getLogger(__name__)


class LearnerSide(Exchange[OnlineRLContext]):
    """The part of a :class:`ContextExchanger` in a process that learns.

    Args:
        pace: holds the learner to its pace; None: each step takes one batch.
        timeout_s: how long to wait while no node can bring data.
    """

    def __init__(self, *, pace: Pace | None, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._pace = pace
        self._collected: deque[dict[str, Any]] = deque()
        self._evaluated: deque[dict[str, Any]] = deque()
        self._learned: Counters | None = None
        self._waiting: dict[int, int] = {}
        self._has_evaluator: bool | None = None
        self._epoch_of_rank_0 = 0

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Receive on the way forward, and send on the way back."""
        task = ctx.task
        if not task.has_role(Role.COLLECTOR):
            self._take_collected(ctx, task)
        self.take_evaluated(ctx)
        yield
        if self._pace is not None:
            self._pace.end_step(ctx)
        self._send_updates(ctx, task)

    def take_evaluated(self, ctx: OnlineRLContext) -> None:
        """Take one of the evaluations that have arrived."""
        with self._changed:
            if self._evaluated:
                for name, value in self._evaluated.popleft().items():
                    setattr(ctx, name, value)

    def pending_steps(self) -> int:
        """Return the number of evaluations that arrived and were not passed to observers yet."""
        with self._changed:
            return len(self._evaluated)

    def close(self) -> None:
        """Drop data in transit."""
        if self._collected:
            _log.info(
                "%d collected batches were in transit when the task ended", len(self._collected)
            )
            self._collected.clear()

    def _subscribe(self, task: Task[Any]) -> None:
        if not task.has_role(Role.COLLECTOR):
            event = collected_event(self._ranks.rank, self._ranks.size)
            task.on(event, self._handler(self._collected.append))
        if not self._ranks.leads:
            return
        if not task.has_role(Role.EVALUATOR):
            task.on(EVALUATED, self._handler(self._on_evaluated))
        task.on("node.left", self._on_evaluator_left)
        task.on(WAITING, self._on_waiting)
        # Nodes that connect later get the newest of these at once.
        task.on("node.joined", self._announce)
        task.on("node.rejoined", self._announce)
        self._announce()

    def _on_evaluated(self, evaluation: dict[str, Any]) -> None:
        self._evaluated.append(evaluation)
        self._has_evaluator = True

    def _on_evaluator_left(self, node_id: int, reason: str) -> None:
        """Say if nobody evaluates any more, which a run without a limit may wait for forever."""
        task = self._task
        planned = () if self._node is None else self._node.run_roles or ()
        evaluates = task.has_role(Role.EVALUATOR) or bool(task.participants(Role.EVALUATOR))
        if evaluates or task.finish or not (self._has_evaluator or Role.EVALUATOR in planned):
            self._has_evaluator = evaluates
            return
        if self._has_evaluator is not False:
            _log.warning(
                "node %d has left (%s), and no process evaluates any more: what depends on "
                "evaluations (stop_value, the best checkpoint) waits until one with the role "
                "evaluator joins",
                node_id,
                reason,
            )
        self._has_evaluator = False

    def _epoch(self) -> int:
        return super()._epoch() if self._ranks.leads else self._epoch_of_rank_0

    def _take_collected(self, ctx: OnlineRLContext, task: Task[Any]) -> None:
        blocked_s, batch = 0.0, None
        if self._pace is None or self._pace.wants_data(ctx):
            with self._changed:
                # The other ranks must learn of a stop that waits.
                blocked_s = self._wait(
                    lambda: bool(self._collected) or task.held_stop is not None,
                    lambda: "collected data",
                    lambda: task.participants(Role.COLLECTOR),
                )
                batch = self._collected.popleft() if self._collected else None
        agreed = self._ranks.agree_on_step(task, batch)
        self._epoch_of_rank_0 = agreed.epoch
        ctx.log("exchange/blocked_s", blocked_s)
        if batch is None:
            return
        for name in BATCH:
            setattr(ctx, name, batch[name])
        ctx.env_step += agreed.env_step
        ctx.env_episode += agreed.env_episode
        ctx.log("exchange/policy_lag", ctx.train_iter - batch["train_iter"])
        edge = f"exchange/node{batch['node_id']}_"
        for name, value in batch["logged"].items():
            # A collector's own measurements must not replace those of this node.
            ctx.log(name.replace("exchange/", edge, 1), value)
        if self._pace is not None:
            ctx.learning_held = not self._pace.may_learn(ctx)
        # Only the sender: the others get the counters with the weights or with their own batches.
        counters, sender = self._counters(ctx), batch["node_id"]
        task.emit(CONSUMED, batch["token"], batch["number"], counters, only_remote=True, to=sender)

    def _announce(self, *_: Any, **__: Any) -> None:
        """Send the counters to all nodes, those that connect later included."""
        task = self._task
        with self._changed:
            self._learned = self._counters(task.ctx)
            counters = self._learned
        task.emit(LEARNED, counters, only_remote=True)

    def _send_updates(self, ctx: OnlineRLContext, task: Task[Any]) -> None:
        """Send the counters to the nodes that wait for further updates."""
        with self._changed:
            counters = self._learned = self._counters(ctx)
            ready = [one for one, known in self._waiting.items() if known != ctx.train_iter]
            for node_id in ready:
                del self._waiting[node_id]
        if ready:
            task.emit(LEARNED, counters, only_remote=True, to=ready)

    def _on_waiting(self, node_id: int, train_iter: int) -> None:
        task = self._task
        with self._changed:
            counters = self._learned
            if counters is None or counters["train_iter"] == train_iter:
                self._waiting[node_id] = train_iter
                return
        task.emit(LEARNED, counters, only_remote=True, to=node_id)
