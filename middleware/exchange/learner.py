"""The learner's side: takes batches and evaluations, and sends counters and weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from dmiddleware.flow_control import FairQueue
from dmiddleware.pipeline import CurrentNode, Task
from dmiddleware.policy import Policy
from middleware.context import OnlineRLContext
from middleware.exchange.events import (
    CONSUMED,
    EVALUATED,
    LEARNED,
    MODEL,
    UPDATES_WANTED,
    Batch,
    Counters,
    Evaluation,
    collected_event,
    of_part,
)
from middleware.exchange.pace import Pace
from middleware.exchange.rank import Ranks
from middleware.exchange.waiting import Waiting
from middleware.roles import Role
from middleware.support.rows import rows_of

__all__ = ["LearnerData", "LearnerWeights"]

_log = logging.getLogger(__name__)


class LearnerData:
    """The part of a :class:`~middleware.ContextExchanger` in a process that learns.

    Args:
        task: the task, which has a router.
        pace: holds the learner to its pace; None: each step takes one batch.
        timeout_s: how long to wait while no node can bring data.
        on_collected: called with the context when it waits for nothing more in a step.
        part: the named part of the chain that it learns; None: the whole chain.

    Attributes:
        part: as given.
    """

    def __init__(
        self,
        task: Task[Any],
        *,
        pace: Pace | None,
        timeout_s: float,
        on_collected: Callable[[OnlineRLContext], None],
        part: str | None = None,
    ) -> None:
        self.part = part
        self._on_collected_all = on_collected
        self._pace = pace
        self._consumed = of_part(CONSUMED, part)
        self._ranks = Ranks()
        self._waiting = Waiting(task, timeout_s=timeout_s)
        # The collectors' windows limit the batches.
        self._batches = FairQueue[Batch](changed=self._waiting.changed)
        self._evaluations = FairQueue[Evaluation](changed=self._waiting.changed)
        self._announcer: Announcer | None = None
        if not task.has_role(Role.COLLECTOR):
            collected = collected_event(self._ranks.rank, self._ranks.size)
            task.on(of_part(collected, part), self._on_collected)
        if not self._ranks.leads:
            return
        if not task.has_role(Role.EVALUATOR):
            task.on(of_part(EVALUATED, part), self._evaluations.put)
            EvaluatorWatch(task, self._waiting.node, part)
        self._announcer = Announcer(task, self._ranks, part)

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Receive on the way forward, and send on the way back."""
        task = self._waiting.task
        if self._pace is not None:
            self._pace.begin_step(ctx)
        if not task.has_role(Role.COLLECTOR):
            self._take_collected(ctx, task)
        self._on_collected_all(ctx)
        yield
        if self._pace is not None:
            self._pace.end_step(ctx)
        if self._announcer is not None:
            self._announcer.answer(ctx)

    def take_evaluated(self, ctx: OnlineRLContext) -> None:
        """Take one of the evaluations that have arrived."""
        evaluation = self._evaluations.take()
        if evaluation is None:
            return
        ctx.other_evaluations = evaluation.get("other_evaluations", {})
        if evaluation["eval_value"] is not None:
            ctx.eval_value = evaluation["eval_value"]
            ctx.eval_output = evaluation["eval_output"]
            ctx.last_eval_iter = evaluation["last_eval_iter"]
            ctx.last_eval_value = evaluation["last_eval_value"]

    def pending_steps(self) -> int:
        """Return the number of evaluations that arrived and were not passed to observers yet."""
        return len(self._evaluations)

    def close(self) -> None:
        """Drop data in transit."""
        dropped = self._batches.drain()
        if dropped:
            _log.info("%d collected batches were in transit when the task ended", len(dropped))

    def _on_collected(self, batch: Batch) -> None:
        self._batches.put(batch, acknowledge=partial(self._acknowledge, batch))

    def _take_collected(self, ctx: OnlineRLContext, task: Task[Any]) -> None:
        blocked_s, batch = 0.0, None
        if self._pace is None or self._pace.wants_data(ctx):
            with self._waiting.changed:
                # The other ranks must learn of a stop that waits.
                blocked_s = self._waiting.until(
                    lambda: bool(self._batches) or task.held_stop is not None,
                    missing=lambda: "collected data",
                    awaited=lambda: task.participants(Role.COLLECTOR),
                )
            batch = self._batches.first
        agreed = self._ranks.agree_on_step(task, batch)
        ctx.log("exchange/blocked_s", blocked_s)
        if batch is None:
            return
        ctx.trajectories = batch["trajectories"]
        ctx.trajectory_end_idx = batch["trajectory_end_idx"]
        ctx.episodes = batch["episodes"]
        ctx.env_step += agreed.env_step
        ctx.env_episode += agreed.env_episode
        ctx.log("exchange/policy_lag", ctx.train_iter - batch["train_iter"])
        edge = f"exchange/node{batch['node_id']}_"
        for name, value in batch["logged"].items():
            # A collector's own measurements must not replace those of this node.
            ctx.log(name.replace("exchange/", edge, 1), value)
        if self._pace is not None:
            ctx.learning_held = not self._pace.may_learn(ctx)
        self._batches.take()  # which acknowledges it, with the counters that include it

    def _acknowledge(self, batch: Batch) -> None:
        """Tell the sender of a batch that it was taken."""
        # The other nodes get the counters with the weights or with their own batches.
        task = self._waiting.task
        task.emit(
            self._consumed, batch["token"], batch["number"], self._ranks.counters(task),
            only_remote=True, to=batch["node_id"],
        )  # fmt: skip


class Announcer:
    """Sends the learner's counters: to all nodes that join, and to all nodes that want updates.

    Args:
        task: the task of rank 0, which has a router.
        ranks: the ranks of the learner.
        part: the named part of the chain that it learns; None: the whole chain.
    """

    def __init__(self, task: Task[Any], ranks: Ranks, part: str | None = None) -> None:
        self._learned = of_part(LEARNED, part)
        self._task = task
        self._ranks = ranks
        self._lock = threading.Lock()
        self._counters = ranks.counters(task)
        # The updates that nodes know which want further ones.
        self._known: dict[int, int] = {}
        task.on(of_part(UPDATES_WANTED, part), self._on_wanted)
        # Nodes that connect later get the newest of these at once.
        task.on("node.joined", self._announce)
        task.on("node.rejoined", self._announce)
        self._announce()

    def answer(self, ctx: OnlineRLContext) -> None:
        """Send the counters to the nodes that have waited for the updates of this step."""
        with self._lock:
            counters = self._counters = self._ranks.counters(self._task)
            ready = [peer for peer, version in self._known.items() if version != ctx.train_iter]
            for node_id in ready:
                del self._known[node_id]
        if ready:
            self._task.emit(self._learned, counters, only_remote=True, to=ready)

    def _announce(self, *_: Any, **__: Any) -> None:
        """Send the counters to all nodes, also to nodes that connect later."""
        with self._lock:
            counters = self._counters = self._ranks.counters(self._task)
        self._task.emit(self._learned, counters, only_remote=True)

    def _on_wanted(self, node_id: int, train_iter: int) -> None:
        with self._lock:
            counters = self._counters
            if counters["train_iter"] == train_iter:
                self._known[node_id] = train_iter
                return
        self._task.emit(self._learned, counters, only_remote=True, to=node_id)


class EvaluatorWatch:
    """Warns when nobody evaluates anymore, which a run without a limit may wait for forever.

    Args:
        task: the task of a learner that does not evaluate itself.
        node: the node that it runs as.
        part: the named part of the chain that it learns; None: the whole chain.
    """

    def __init__(self, task: Task[Any], node: CurrentNode | None, part: str | None = None) -> None:
        self._task = task
        planned = () if node is None else node.run_roles or ()
        self._planned = not {*task.roles_for(Role.EVALUATOR)}.isdisjoint(planned)
        self._has_evaluator: bool | None = None
        task.on(of_part(EVALUATED, part), self._on_evaluated)
        task.on("node.left", self._on_left)

    def _on_evaluated(self, evaluation: Evaluation) -> None:
        self._has_evaluator = True

    def _on_left(self, node_id: int, reason: str) -> None:
        task = self._task
        evaluates = bool(task.participants(Role.EVALUATOR))
        if evaluates or task.finish or not (self._has_evaluator or self._planned):
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


class LearnerWeights:
    """The part of a :class:`~middleware.ModelExchanger` in a process that learns.

    Args:
        task: the task, which has a router.
        policy: the policy whose weights are sent.
        every_train_iter: updates from one published copy to the next.
        max_lag: announces the updates often enough for this lag; None: it does not.
        part: the named part of the chain whose policy it is; None: the whole chain.
    """

    _published: tuple[Counters, dict[str, Any]]

    def __init__(
        self,
        task: Task[Any],
        policy: Policy,
        *,
        every_train_iter: int,
        max_lag: int | None,
        part: str | None = None,
    ) -> None:
        self._model, self._learned = of_part(MODEL, part), of_part(LEARNED, part)
        self._task = task
        self._policy = policy
        self._every = every_train_iter
        self._max_lag = max_lag
        self._ranks = Ranks()
        self._announced = 0
        self._publishing = threading.Lock()
        if self._ranks.leads:
            self._publish()
            task.on("node.joined", self._publish_again)
            task.on("node.rejoined", self._publish_again)
            self._publish_again()

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Update the statistics of observations on the way forward, and publish on the way back."""
        if not self._task.has_role(Role.COLLECTOR):
            self._observe(ctx)
        if not self._ranks.leads:
            return
        yield
        if ctx.train_iter - self._published[0]["train_iter"] >= self._every:
            self._publish()
        if self._max_lag is not None and ctx.train_iter - self._announced > self._max_lag // 2:
            # They arrive before weights that are large.
            self._announced = ctx.train_iter
            self._task.emit(self._learned, self._ranks.counters(self._task), only_remote=True)

    def _observe(self, ctx: OnlineRLContext) -> None:
        if ctx.trajectories is None:
            return
        rows = rows_of(ctx.trajectories)
        if "obs" in rows:
            self._policy.observe(rows["obs"])

    def _publish(self) -> None:
        # A policy's state is a copy of its parameters, which no update changes while it is sent.
        state = self._policy.eval_mode.state_dict()
        with self._publishing:
            self._published = self._ranks.counters(self._task), state
            self._task.emit(self._model, *self._published, only_remote=True)

    def _publish_again(self, *_: Any, **__: Any) -> None:
        """Publish under the current epoch, which grows if a peer knows an earlier learner."""
        with self._publishing:
            counters, state = self._published
            epoch = self._ranks.counters(self._task)["epoch"]
            if epoch != counters["epoch"]:
                self._published = {**counters, "epoch": epoch}, state
                self._task.emit(self._model, *self._published, only_remote=True)
