"""What the ranks of a data-parallel run agree on, once a step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmiddleware.distributed import gather_from_ranks, rank_and_world_size
from dmiddleware.pipeline import SkipRest, Task, current_node

__all__ = ["Agreement", "Ranks"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after a vote.

    Attributes:
        env_step: environment steps since the last vote, summed over the ranks.
        env_episode: episodes, likewise.
        epoch: the epoch of rank 0, which publishes the weights and counters.
    """

    env_step: int
    env_episode: int
    epoch: int


class Ranks:
    """The ranks that learn together, of which this process is one; a process alone is one rank.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_world_size()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which publishes, evaluates, logs and saves."""
        return self.rank == 0

    def agree(
        self, task: Task[Any], *, env_step: int, env_episode: int, epoch: int = 0
    ) -> Agreement:
        """Add up the counters, and stop the task on all ranks if it was stopped on one of them.

        Every rank must call it once a step. Of several stops, the lowest rank's counts.

        Args:
            task: a task that holds its stops.
            env_step: environment steps of this rank since the last vote.
            env_episode: episodes, likewise.
            epoch: the epoch of the weights that this rank publishes.

        Raises:
            RankLost: if another rank does not vote in time.
        """
        if self.size == 1:
            return Agreement(env_step, env_episode, epoch)
        node = current_node()
        with contextlib.nullcontext() if node is None else node.waiting():
            votes = gather_from_ranks([task.held_stop, env_step, env_episode, epoch])
        stops = [stop for stop, *_ in votes if stop is not None]
        if stops:
            task.decide_stop({**stops[0], "ok": all(stop["ok"] for stop in stops)})
        return Agreement(
            env_step=sum(vote[1] for vote in votes),
            env_episode=sum(vote[2] for vote in votes),
            epoch=votes[0][3],
        )

    def agree_on_step(self, task: Task[Any], batch: Mapping[str, Any] | None = None) -> Agreement:
        """Agree on this step, which takes the batch.

        Raises:
            SkipRest: if the ranks have decided to stop.
        """
        agreed = self.agree(
            task,
            env_step=0 if batch is None else batch["env_step"],
            env_episode=0 if batch is None else batch["env_episode"],
            epoch=0 if task.router is None else task.router.incarnation,
        )
        if task.finish:
            raise SkipRest
        return agreed
