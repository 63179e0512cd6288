"""The side of several ranks, which agree on counters and stops once a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dmiddleware.distributed import gather_from_ranks, rank_and_world_size
from dmiddleware.pipeline import SkipRest, Task, current_node
from middleware.context import OnlineRLContext
from middleware.exchange.events import Batch, Counters
from middleware.roles import Role

__all__ = ["Agreement", "RankCounters", "Ranks", "exchanging_roles"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after a vote.

    Attributes:
        env_step: environment steps since the last vote, summed over the ranks.
        env_episode: episodes, likewise.
    """

    env_step: int
    env_episode: int


class Ranks:
    """The ranks that learn together, of which this process is one; a process alone is one rank.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_world_size()
        self._epoch = 0

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which publishes, evaluates, logs and saves."""
        return self.rank == 0

    def counters(self, task: Task[Any]) -> Counters:
        """Return the counters of a learner, with the epoch of rank 0, which publishes them."""
        ctx = task.ctx
        return {
            "env_step": ctx.env_step,
            "env_episode": ctx.env_episode,
            "train_iter": ctx.train_iter,
            # That of another rank is known from the last vote.
            "epoch": _incarnation(task) if self.leads else self._epoch,
            "ranks": self.size,
        }

    def agree(self, task: Task[Any], *, env_step: int, env_episode: int) -> Agreement:
        """Add up the counters, and stop the task on all ranks if it was stopped on one of them.

        Every rank must call it once a step. Of several stops, the lowest rank's counts.

        Args:
            task: a task that holds its stops.
            env_step: environment steps of this rank since the last vote.
            env_episode: episodes, likewise.

        Raises:
            RankLost: if another rank does not vote in time.
        """
        if self.size == 1:
            return Agreement(env_step, env_episode)
        node = current_node()
        with contextlib.nullcontext() if node is None else node.waiting():
            ballot = [task.held_stop, env_step, env_episode, _incarnation(task)]
            votes = gather_from_ranks(ballot)
        stops = [stop for stop, *_ in votes if stop is not None]
        if stops:
            task.decide_stop({**stops[0], "ok": all(stop["ok"] for stop in stops)})
        self._epoch = votes[0][3]
        return Agreement(
            env_step=sum(vote[1] for vote in votes), env_episode=sum(vote[2] for vote in votes)
        )

    def agree_on_step(self, task: Task[Any], batch: Batch | None = None) -> Agreement:
        """Agree on this step, which takes the batch.

        Raises:
            SkipRest: if the ranks have decided to stop.
        """
        agreed = self.agree(
            task,
            env_step=0 if batch is None else batch["env_step"],
            env_episode=0 if batch is None else batch["env_episode"],
        )
        if task.finish:
            raise SkipRest
        return agreed


def exchanging_roles(part: str | None) -> tuple[str, ...]:
    """Return the roles in which a middleware exchanges what a part has; none means all.

    Without a name, a process with a role of its own exchanges too.
    """
    return () if part is None else (Role.LEARNER, Role.COLLECTOR, Role.EVALUATOR)


class RankCounters:
    """The part of a :class:`~middleware.ContextExchanger` in ranks without a router.

    All of them run the same chain, each with a collector of its own.

    Args:
        task: the task, which has no router.
        ranks: the ranks.
    """

    def __init__(self, task: Task[Any], ranks: Ranks) -> None:
        self._task = task
        self._ranks = ranks
        self._has_voted = False

    def __call__(self, ctx: OnlineRLContext) -> Iterator[None]:
        """Add up the counters of the step on the way back."""
        task = self._task
        if not self._has_voted:
            # A stop in the set-up, as of a run that is resumed at its limit, leaves no first step.
            self._has_voted = True
            self._ranks.agree_on_step(task)
        env_step, env_episode = ctx.env_step, ctx.env_episode
        yield
        agreed = self._ranks.agree(
            task, env_step=ctx.env_step - env_step, env_episode=ctx.env_episode - env_episode
        )
        ctx.env_step = env_step + agreed.env_step
        ctx.env_episode = env_episode + agreed.env_episode


def _incarnation(task: Task[Any]) -> int:
    return 0 if task.router is None else task.router.incarnation
