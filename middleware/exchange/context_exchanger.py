"""Collected data, evaluations and counters: between the learner and the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dmiddleware.pipeline import ChainView, SkipRest, Task
from dmiddleware.settings import Count, Positive, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.exchange.events import BATCH, EVALUATION
from middleware.exchange.follower import FollowerData
from middleware.exchange.learner import LearnerData
from middleware.exchange.pace import Pace
from middleware.exchange.rank import RankCounters, Ranks, exchanging_roles
from middleware.roles import Role
from middleware.support.part_name import PartSettings

__all__ = ["ContextExchanger", "ContextExchangerSettings"]


class ContextExchangerSettings(PartSettings):
    """The options of :class:`ContextExchanger`."""

    samples_per_insert: Positive | None = None
    """How many rows the learner draws from its buffer per collected row, counted from its first
    update. The faster side waits: the learner for data, or the collectors for the learner. It is
    for chains with a buffer: some steps have no new data, and some do not learn. Another value
    after a resume holds for what is collected from there on. None: each step has one batch and all
    updates of the chain."""
    max_ahead: Count = 2
    """How many batches a collector may send before the learner has taken them."""
    timeout_s: Positive = 120.0
    """How long to wait while no node can bring what is missing: they are lost, have ended their
    part, or wait themselves. Nodes that are alive and work have no deadline."""


class ContextExchanger(BaseMiddleware[OnlineRLContext], TakesSettings[ContextExchangerSettings]):
    """Send collected data and evaluations to the learner, and the learner's counters back.

    Use it first in the chain, before exploration and collecting. In a run of one process it does
    nothing.

    Each step of the learner takes one batch from one collector, so the learner makes exactly as
    many updates per environment step as in one process. No data is dropped during the run:
    collectors that are ahead wait, and so does a learner without data.
    An evaluator waits until the learner has made further updates.

    If several ranks learn (:func:`~dmiddleware.distributed.data_parallel`), each batch goes to one
    of them: the i-th collector sends to rank i modulo the number of ranks, and each step takes one
    batch on every rank. Only rank 0 receives evaluations and publishes counters. Once a step the
    ranks add up their counters and agree on stops, so that all leave the loop in the same step.
    With torchrun, where every rank collects too, only this remains to be exchanged.

    In a chain whose parts have names, each part has its own: ``ContextExchanger(name="red")``. With
    ``samples_per_insert``, the collectors of each part need processes of their own, with the role
    ``collector:red``: one that collects for several parts keeps the pace of all of them.

    When the task is stopped, the learner still takes the evaluations that were sent before, and
    passes them to the observers (``CkptSaver``, loggers). Collected batches in transit are dropped
    and not counted. When the learner's task is closed without having been stopped, the nodes that
    wait for it stop too.

    Args:
        settings: the options, each by keyword; see :class:`ContextExchangerSettings`.

    Reads:
        ctx.trajectories, ctx.episodes, ctx.env_step, ctx.env_episode: on the way back, in a
            collector.
        ctx.eval_value, ctx.eval_output, ctx.other_evaluations: on the way back, in an evaluator.

    Writes:
        ctx.trajectories, ctx.trajectory_end_idx, ctx.episodes: in a learner that does not collect.
        ctx.eval_value, ctx.eval_output, ctx.last_eval_iter, ctx.last_eval_value,
            ctx.other_evaluations: in a learner that does not evaluate, when an evaluation has
            arrived.
        ctx.env_step, ctx.env_episode: the sums over all nodes.
        ctx.learning_held: in a learner that is ahead of its pace.

    Raises:
        ConfigError: if an option is not valid.
        WaitTimeout: if data, counters or acknowledgments do not arrive in time; the message says
            which.
    """

    reads = ("env_step", "env_episode", "train_iter")
    writes = ("env_step", "env_episode")
    receives = (*BATCH, *EVALUATION)
    last_step = True

    settings: ContextExchangerSettings

    @takes_options(ContextExchangerSettings)
    def __init__(self, settings: ContextExchangerSettings) -> None:
        self.settings = settings
        self.roles = exchanging_roles(settings.name)
        # All ranks draw equally many rows, and the counters of a context are those of one rank.
        ratio = settings.samples_per_insert
        self._pace = None if ratio is None else Pace(ratio / Ranks().size)
        self._side: LearnerData | FollowerData | RankCounters | None = None
        self._exchangers: list[ContextExchanger] = []

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Reject a task that has not been given its rank."""
        task_rank, ranks = chain.context.task.rank, Ranks()
        if task_rank != ranks.rank:
            yield (
                f"this process is rank {ranks.rank} of {ranks.size}, but its task has "
                f"rank {task_rank}; pass it on: with data_parallel() as rank, Task(rank=rank)"
            )
        task, name = chain.context.task, self.settings.name
        if name is None or self._pace is None or len(chain.parts) == 1 or task.router is None:
            return
        if task.has_role(Role.COLLECTOR) == task.has_role(Role.LEARNER):
            return
        if Role.COLLECTOR in task.roles_for(Role.COLLECTOR):
            yield (
                f"it keeps the pace samples_per_insert={self.settings.samples_per_insert:g} of the "
                f"part {name!r}, whose collectors also collect for other parts, and would wait for "
                f"each other; give it processes of its own, as in --roles collector:{name}=1"
            )

    def bind(self, chain: ChainView) -> None:
        """Find the exchangers of all parts."""
        everything = chain.whole.middleware
        self._exchangers = [each for each in everything if isinstance(each, ContextExchanger)]

    def setup(self, task: Task[Any]) -> None:
        """Subscribe to the events of the other nodes, and let several ranks decide on stops."""
        ranks, settings = Ranks(), self.settings
        if task.router is None or not task.has_role(Role.LEARNER) or task.has_role(Role.COLLECTOR):
            # Its counters would no longer be those of a learner that has kept to the pace.
            self._pace = None
        if task.router is None:
            self._side = RankCounters(task, ranks) if ranks.size > 1 else None
        elif task.has_role(Role.LEARNER):
            self._side = LearnerData(
                task,
                pace=self._pace,
                timeout_s=settings.timeout_s,
                on_collected=self._take_evaluated,
                part=settings.name,
            )
        else:
            self._side = FollowerData(
                task,
                max_ahead=settings.max_ahead,
                timeout_s=settings.timeout_s,
                part=settings.name,
            )
        if ranks.size > 1:
            task.hold_stops()

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Receive on the way forward, and send on the way back."""
        side, task = self._side, ctx.task
        if side is None:
            return
        if task.in_last_step:
            if isinstance(side, LearnerData):
                side.take_evaluated(ctx)
            return
        if task.finish and task.router is not None:
            raise SkipRest
        yield from side(ctx)

    def _take_evaluated(self, ctx: OnlineRLContext) -> None:
        """Take the evaluations of all parts in the last exchanger of the chain.

        Those before it may have taken data, but a stop can end the step while a later one waits.
        Observers would not see what was taken before.
        """
        sides = [each._side for each in self._exchangers if isinstance(each._side, LearnerData)]
        for side in sides if sides[-1] is self._side else ():
            side.take_evaluated(ctx.whole if side.part is None else ctx.whole.part(side.part))

    def pending_steps(self) -> int:
        """Return the number of evaluations that arrived and were not passed to observers yet."""
        return self._side.pending_steps() if isinstance(self._side, LearnerData) else 0

    def close(self) -> None:
        """Drop data in transit."""
        if isinstance(self._side, LearnerData):
            self._side.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the start of the pace; batches in transit belong to the router."""
        pace = self._pace
        return {} if pace is None else {"pace": pace.state_dict(), "pace_ratio": pace.ratio}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        pace = self._pace
        if pace is not None and "pace" in state:
            # Snapshots of earlier versions have no ratio.
            pace.load_state_dict(state["pace"], ratio=state.get("pace_ratio", pace.ratio))
