"""Exchange between processes: collected data, evaluations, counters and weights."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from dmiddleware.pipeline import ChainView, Event, SkipRest, Task
from dmiddleware.policy import Policy
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.checks import check_instance, check_positive
from middleware.support.exchange_base import (
    CONSUMED,
    LEARNED,
    MODEL,
    UPDATED,
    Counters,
    Exchange,
    Pace,
    merge_counters,
)
from middleware.support.ranks import Agreement
from middleware.support.rows import rows_of

__all__ = ["ContextExchanger", "ModelExchanger", "PeriodicalModelExchanger"]

EVALUATED: Final = Event("exchange.evaluated", timeout_s=120.0)
WAITING: Final = Event("exchange.waiting", timeout_s=120.0)
"""From a node that waits for further updates: its node id, and the updates that it knows."""

_BATCH: Final = ("trajectories", "trajectory_end_idx", "episodes")
_EVALUATION: Final = ("eval_value", "eval_output", "last_eval_iter", "last_eval_value")

_log = logging.getLogger(__name__)


def collected_event(rank: int, n_ranks: int) -> Event:
    """Return the event by which batches go to one rank of the learner."""
    # A joining collector may be connected to some of several ranks only.
    return Event(f"exchange.collected.{rank}", timeout_s=120.0, required=n_ranks > 1)


class ContextExchanger(Exchange[OnlineRLContext]):
    """Send collected data and evaluations to the learner, and the learner's counters back.

    Use it first in the chain, before exploration and collecting. In a run of one process it does
    nothing.

    Each step of the learner takes one batch from one collector, so the learner makes exactly as
    many updates per environment step as in one process. No data is dropped during the run:
    collectors that are ahead wait, and so does a learner without data.
    An evaluator waits until the learner has made further updates.

    If several ranks learn (:func:`~dmiddleware.policy.data_parallel`), each batch goes to one of
    them: the i-th collector sends to rank i modulo the number of ranks, and each step takes one
    batch on every rank. Only rank 0 receives evaluations and publishes counters. Once a step the
    ranks add up their counters and agree on stops, so that all leave the loop in the same step.
    With torchrun, where every rank collects too, only this remains to be exchanged.

    When the task is stopped, the learner still takes the evaluations that were sent before, and
    passes them to the observers (``CkptSaver``, loggers). Collected batches in transit are dropped
    and not counted. When the learner's task is closed without having been stopped, the nodes that
    wait for it stop too.

    Args:
        samples_per_insert: how many rows the learner draws from its buffer per collected row,
            counted from its first update. The faster side waits: the learner for data, or the
            collectors for the learner. It is for chains with a buffer: some steps have no new data,
            and some do not learn. None: each step has one batch and all updates of the chain.
        max_ahead: how many batches a collector may send before the learner has taken them.
        timeout_s: how long to wait while no node can bring what is missing: they are lost, have
            ended their part, or wait themselves. Nodes that are alive and work have no deadline.

    Reads:
        ctx.trajectories, ctx.episodes, ctx.env_step, ctx.env_episode: on the way back, in a
            collector.
        ctx.eval_value, ctx.eval_output: on the way back, in an evaluator.

    Writes:
        ctx.trajectories, ctx.trajectory_end_idx, ctx.episodes: in a learner that does not collect.
        ctx.eval_value, ctx.eval_output, ctx.last_eval_iter, ctx.last_eval_value: in a learner that
            does not evaluate, when an evaluation has arrived.
        ctx.env_step, ctx.env_episode: the sums over all nodes.
        ctx.learning_held: in a learner that is ahead of its pace.

    Raises:
        ValueError: if a number is not positive.
        WaitTimeout: if data, counters or acknowledgements do not arrive in time; the message says
            which.
    """

    reads = ("env_step", "env_episode", "train_iter")
    writes = ("env_step", "env_episode")
    receives = (*_BATCH, *_EVALUATION)
    last_step = True

    def __init__(
        self,
        *,
        samples_per_insert: float | None = None,
        max_ahead: int = 2,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        check_positive(samples_per_insert=samples_per_insert, max_ahead=max_ahead)
        self.settings |= {"samples_per_insert": samples_per_insert, "max_ahead": max_ahead}
        self._max_ahead = max_ahead
        # All ranks draw equally many rows, and the counters of a context are those of one rank.
        self._pace = (
            None if samples_per_insert is None else Pace(samples_per_insert / self._ranks.size)
        )
        # Identifies this process among those that have the same node id one after the other.
        self._token = secrets.token_hex(8)
        self._collected: deque[dict[str, Any]] = deque()
        self._evaluated: deque[dict[str, Any]] = deque()
        self._learned: Counters | None = None
        self._waiting: dict[int, int] = {}
        self._gets_weights = False
        self._has_evaluator: bool | None = None
        self._sent = 0
        self._consumed = 0
        self._last = (0, -1)
        self._has_voted = False
        self._epoch_of_rank_0 = 0

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a task that has not been given its rank."""
        given = chain.context.task.rank
        if given != self._ranks.rank:
            yield (
                f"this process is rank {self._ranks.rank} of {self._ranks.size}, but its task has "
                f"rank {given}; pass it on: with data_parallel() as rank, Task(rank=rank)"
            )

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to the events of the other nodes, and let several ranks decide on stops."""
        super().setup(task)
        if self._ranks.size > 1:
            task.hold_stops()

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Receive on the way forward, and send on the way back."""
        task = self._task
        if task is None:
            if self._ranks.size > 1 and not ctx.task.in_last_step:
                yield from self._as_rank(ctx, ctx.task)
            return
        if task.in_last_step:
            self._take_evaluated(ctx)
            return
        if task.finish:
            raise SkipRest
        if task.has_role(Role.LEARNER):
            yield from self._as_learner(ctx, task)
        else:
            yield from self._as_follower(ctx, task)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the start of the pace; batches in transit belong to the router."""
        return {} if self._pace is None else {"pace": self._pace.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if self._pace is not None and "pace" in state:
            self._pace.load_state_dict(state["pace"])

    def _subscribe(self, task: Task[Any]) -> None:
        if task.has_role(Role.LEARNER):
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
        else:
            task.on(LEARNED, self._handler(self._on_learned))
            task.on(UPDATED, self._handler(self._on_updated))
            task.on(CONSUMED, self._handler(self._on_consumed))

    def _on_evaluated(self, evaluation: dict[str, Any]) -> None:
        self._evaluated.append(evaluation)
        self._has_evaluator = True

    def _on_evaluator_left(self, node_id: int, reason: str) -> None:
        """Say if nobody evaluates any more, which a run without a limit may wait for forever."""
        task = self._task
        assert task is not None
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

    def _as_rank(self, ctx: OnlineRLContext, task: Task[Any]) -> Iterator[None]:
        """Agree with the ranks that run the same chain, each with its own collector."""
        if not self._has_voted:
            # A stop in the set-up, as of a run that is resumed at its limit, leaves no first step.
            self._has_voted = True
            self._agree(task)
        env_step, env_episode = ctx.env_step, ctx.env_episode
        yield
        agreed = self._ranks.agree(
            task, env_step=ctx.env_step - env_step, env_episode=ctx.env_episode - env_episode
        )
        ctx.env_step = env_step + agreed.env_step
        ctx.env_episode = env_episode + agreed.env_episode

    def _agree(self, task: Task[Any], batch: Mapping[str, Any] | None = None) -> Agreement:
        """Agree with the other ranks on this step, which takes the batch.

        Raises:
            SkipRest: if the ranks have decided to stop.
        """
        agreed = self._ranks.agree(
            task,
            env_step=0 if batch is None else batch["env_step"],
            env_episode=0 if batch is None else batch["env_episode"],
            epoch=0 if task.router is None else task.router.incarnation,
        )
        if task.finish:
            raise SkipRest
        return agreed

    def _epoch(self) -> int:
        return super()._epoch() if self._ranks.leads else self._epoch_of_rank_0

    def _as_learner(self, ctx: OnlineRLContext, task: Task[Any]) -> Iterator[None]:
        if not task.has_role(Role.COLLECTOR):
            self._take_collected(ctx, task)
        self._take_evaluated(ctx)
        yield
        if self._pace is not None:
            self._pace.end_step(ctx)
        self._send_updates(ctx, task)

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
        agreed = self._agree(task, batch)
        self._epoch_of_rank_0 = agreed.epoch
        ctx.log("exchange/blocked_s", blocked_s)
        if batch is None:
            return
        for name in _BATCH:
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

    def _take_evaluated(self, ctx: OnlineRLContext) -> None:
        with self._changed:
            if self._evaluated:
                for name, value in self._evaluated.popleft().items():
                    setattr(ctx, name, value)

    def _announce(self, *_: Any, **__: Any) -> None:
        """Send the counters to all nodes, those that connect later included."""
        task = self._task
        assert task is not None
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
        assert task is not None
        with self._changed:
            counters = self._learned
            if counters is None or counters["train_iter"] == train_iter:
                self._waiting[node_id] = train_iter
                return
        task.emit(LEARNED, counters, only_remote=True, to=node_id)

    def _as_follower(self, ctx: OnlineRLContext, task: Task[Any]) -> Iterator[None]:
        collects = task.has_role(Role.COLLECTOR)
        if not collects:
            self._ask_for_updates(task)
        with self._changed:
            blocked_s = self._wait(
                self._has_room if collects else self._has_new_updates,
                self._what_is_missing if collects else lambda: "updates of the learner",
                lambda: task.participants(Role.LEARNER),
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
        if ctx.eval_value is not None and task.has_role(Role.EVALUATOR):
            self._send_evaluated(ctx, task)

    def _ask_for_updates(self, task: Task[Any]) -> None:
        """Ask for the counters after the next update, unless they arrive with the weights."""
        assert task.router is not None
        with self._changed:
            needs_updates = self._learned is not None and not self._has_new_updates()
        if needs_updates and not self._gets_weights:
            task.emit(WAITING, task.router.node_id, self._last[1], only_remote=True)

    def _on_updated(self, counters: Counters) -> None:
        self._gets_weights = True
        self._on_learned(counters)

    def _on_learned(self, counters: Counters) -> None:
        known, self._learned = self._learned, merge_counters(self._learned, counters)
        if known is not None and known["epoch"] < self._learned["epoch"]:
            # A new learner does not have the batches that its predecessor had not taken.
            self._consumed = self._sent

    def _on_consumed(self, token: str, number: int, counters: Counters) -> None:
        self._on_learned(counters)
        if token == self._token:
            self._consumed = max(self._consumed, number)

    def _has_room(self) -> bool:
        return self._learned is not None and self._sent - self._consumed < self._max_ahead

    def _has_new_updates(self) -> bool:
        learned = self._learned
        return learned is not None and (learned["epoch"], learned["train_iter"]) != self._last

    def _what_is_missing(self) -> str:
        if self._learned is None:
            return "the first counters of the learner"
        return (
            "an acknowledgement from the learner (it has taken "
            f"{self._consumed} of the {self._sent} batches of this collector)"
        )

    def _send_collected(
        self, ctx: OnlineRLContext, task: Task[Any], env_step: int, env_episode: int
    ) -> None:
        if ctx.trajectories is None and ctx.episodes is None:
            return
        assert task.router is not None
        self._sent += 1
        batch = {
            "node_id": task.router.node_id,
            "token": self._token,
            "number": self._sent,
            "env_step": env_step,
            "env_episode": env_episode,
            "train_iter": ctx.train_iter,
            "logged": dict(ctx.logged),
            **{name: getattr(ctx, name) for name in _BATCH},
        }
        assert self._learned is not None
        n_ranks = self._learned["ranks"]
        event = collected_event(self._number(task) % n_ranks, n_ranks)
        task.emit(event, batch, only_remote=True)

    def _number(self, task: Task[Any]) -> int:
        """Return this collector's number among those of its launcher."""
        assert task.router is not None
        number = None if self._node is None else self._node.role_index
        return task.router.node_id if number is None else number

    def _send_evaluated(self, ctx: OnlineRLContext, task: Task[Any]) -> None:
        assert task.router is not None
        evaluation = {name: getattr(ctx, name) for name in _EVALUATION}
        if isinstance(ctx.eval_output, Mapping | None):
            evaluation["eval_output"] = {**(ctx.eval_output or {}), "node_id": task.router.node_id}
        task.emit(EVALUATED, evaluation, only_remote=True)


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
        every_train_iter: updates from one published copy to the next.
        max_policy_lag: how many updates the weights of a node may be behind the learner when it
            starts a step; with older ones it waits. It counts the updates that the learner has
            announced, at the latest when it has made more than half of this number. None: no limit.
        timeout_s: how long a node waits for weights while no learner can send them.

    Reads:
        ctx.train_iter: the version.
        ctx.trajectories: in a learner that does not collect, for the statistics.

    Writes:
        ctx.train_iter: in the other nodes, the version of the policy.

    Raises:
        ConfigError: if ``policy`` is not a policy.
        ValueError: if a number is not positive, or the lag is smaller than the period.
        WaitTimeout: if no weights arrive in time.
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
                f"max_policy_lag must be at least every_train_iter ({every_train_iter}), because "
                f"newer weights are not published; got {max_policy_lag}"
            )
        self._policy = check_instance(
            policy, Policy, user=type(self).__name__, hint="pass the policy itself, not a mode"
        )
        self.settings |= {"every_train_iter": every_train_iter, "max_policy_lag": max_policy_lag}
        self._every = every_train_iter
        self._published: tuple[Counters, dict[str, Any]] | None = None
        self._publishing = threading.Lock()
        self._announced = 0
        self._max_lag = max_policy_lag
        # The updates of a restarted learner may be fewer, but its epoch is larger.
        self._learned: Counters | None = None
        self._newest: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._loaded = (0, -1)

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Exchange."""
        task = self._task
        if task is None:
            return
        if not task.has_role(Role.LEARNER):
            self._take(ctx, task)
            return
        if not task.has_role(Role.COLLECTOR):
            self._observe(ctx)
        if not self._ranks.leads:
            return
        yield
        assert self._published is not None
        if ctx.train_iter - self._published[0]["train_iter"] >= self._every:
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
        assert self._task is not None
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
        assert self._task is not None
        state = self._policy.eval_mode.state_dict()
        with self._publishing:
            self._published = self._counters(ctx), state
            self._task.emit(MODEL, *self._published, only_remote=True)

    def _publish_again(self, *_: Any, **__: Any) -> None:
        """Publish under the current epoch, which grows if a peer knows an earlier learner."""
        task = self._task
        assert task is not None and task.router is not None
        with self._publishing:
            assert self._published is not None
            counters, state = self._published
            epoch = task.router.incarnation
            if epoch != counters["epoch"]:
                self._published = {**counters, "epoch": epoch}, state
                task.emit(MODEL, *self._published, only_remote=True)

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


class PeriodicalModelExchanger(ModelExchanger):
    """A :class:`ModelExchanger` that publishes every ``period`` updates.

    Args:
        policy: the policy whose weights are sent.
        period: updates from one publication to the next.
        timeout_s: how long a node waits for weights while no learner can send them.

    Reads:
        ctx.train_iter: the version.

    Writes:
        ctx.train_iter: in the other nodes, the version of the policy.

    Raises:
        ValueError: if a number is not positive.
    """

    def __init__(self, policy: Policy, *, period: int, timeout_s: float = 120.0) -> None:
        check_positive(period=period)
        super().__init__(policy, every_train_iter=period, timeout_s=timeout_s)
