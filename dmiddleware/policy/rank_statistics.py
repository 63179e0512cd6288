"""Running statistics of what all ranks see, summed before each update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from dmiddleware.distributed import (
    collective,
    collective_device,
    rank_and_world_size,
    sum_over_ranks,
)
from dmiddleware.rl import RunningMeanStd

__all__ = ["RankMeanStd", "RankStatistics"]


class RankMeanStd(RunningMeanStd):
    """Statistics that all ranks have in common, and of what this rank has seen since.

    The mean, the variance and the count are those in common, which change when the ranks share what
    they have seen (:meth:`RankStatistics.share`). An update adds to :attr:`unshared`.

    Args:
        shape: as in the base class.
        **options: likewise.

    Attributes:
        unshared: the statistics of what this rank has seen since the ranks last shared.
    """

    def __init__(self, shape: Sequence[int] = (), **options: Any) -> None:
        super().__init__(shape, **options)
        self._options = {"shape": shape, **options}
        self.clear()

    def clear(self) -> None:
        """Forget what has not been shared."""
        self.unshared = RunningMeanStd(**self._options)

    def update(self, batch: torch.Tensor) -> None:
        """Add items ``[…, *shape]`` to what is shared next; see the base class."""
        self.unshared.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics in common, and what this rank has not shared yet."""
        rank, _ = rank_and_world_size()
        return {**super().state_dict(), "unshared": self.unshared.state_dict(), "rank": rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, or the base class's.

        What one rank has not shared is not restored by the others, which would count it again.

        Raises:
            CheckpointMismatch: if they belong to items of another shape.
        """
        super().load_state_dict(state)
        self.clear()
        if state.get("rank") == rank_and_world_size()[0]:
            self.unshared.load_state_dict(state["unshared"])


class RankStatistics:
    """All statistics of a policy that are those of what all ranks see."""

    def __init__(self) -> None:
        self._statistics: list[RankMeanStd] = []

    def make(self, shape: Sequence[int] = (), **options: Any) -> RankMeanStd:
        """Return new statistics; all ranks must make the same ones in the same order."""
        statistics = RankMeanStd(shape, **options)
        self._statistics.append(statistics)
        return statistics

    def share(self) -> None:
        """Add what each rank has seen since the last call; every rank must call it.

        All ranks merge the same numbers in the same order, so their statistics stay equal to the
        last bit.
        """
        n_new = sum(statistics.unshared.count for statistics in self._statistics)
        if not self._statistics or sum_over_ranks([n_new]) == [0.0]:
            return
        packed = torch.cat([_packed(statistics.unshared) for statistics in self._statistics])
        of_ranks = [torch.empty_like(packed) for _ in range(rank_and_world_size()[1])]
        with collective():
            dist.all_gather(of_ranks, packed)
        for row in of_ranks:
            at = 0
            for statistics in self._statistics:
                mean = statistics.mean
                part, at = row[at : at + 1 + 2 * mean.numel()], at + 1 + 2 * mean.numel()
                count = int(part[0])
                if count:
                    moments = part[1:].to(mean.device).reshape(2, *mean.shape)
                    statistics.merge(count, moments[0], moments[1])
        for statistics in self._statistics:
            statistics.clear()


def _packed(statistics: RunningMeanStd) -> torch.Tensor:
    """Return the count, the mean and the variance as one float64 vector, to be exchanged."""
    mean, var = statistics.mean.reshape(-1), statistics.var.reshape(-1)
    return torch.cat([mean.new_tensor([statistics.count]), mean, var]).to(collective_device())
