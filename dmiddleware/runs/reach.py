"""After how many steps runs reach a return; those that never do count, too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from dmiddleware.runs.budget import is_within
from dmiddleware.runs.record import RunRecord
from dmiddleware.runs.statistics import (
    Estimate,
    Floats,
    interval_of,
    median_score,
    probability_of_improvement,
    short,
)

__all__ = ["Reach", "reaches_of", "reaching_sooner", "steps_text"]

_NEVER: Final = 1e100
"""Infinity where a bootstrap, which interpolates, needs a number."""
_LATEST: Final = 1e50
"""A median above it is a mean with infinity."""


@dataclasses.dataclass(frozen=True)
class Reach:
    """After how many steps the runs of one side reach a return in one task.

    Attributes:
        task: the environment; empty: unknown.
        side: the name of the side.
        steps: for each run, the steps at its first evaluation that has the return; infinity: it has
            none within the budget.
        budget: the steps that each run that has not reached it had at least; infinity: all have
            reached it.
        median: the median of the steps; infinity: never.
    """

    task: str
    side: str
    steps: Sequence[float]
    budget: float
    median: Estimate

    @property
    def n_reached(self) -> int:
        """The number of runs that have reached it."""
        return sum(map(math.isfinite, self.steps))


def reaches_of(
    task: str, sides: Mapping[str, Sequence[RunRecord]], value: float, at: float | None
) -> Iterator[Reach]:
    """Yield when the runs of each side reach a return in one task.

    A run that has ended because it reached the return does not shorten the budget of the others.

    Args:
        task: the task.
        sides: the runs in this task, at least one for each side.
        value: the return.
        at: the budget; None: what all runs have that did not reach it.
    """
    runs = [run for side in sides.values() for run in side]
    unfinished = [run.n_steps for run in runs if math.isinf(_first(run, value))]
    budget = min(unfinished, default=math.inf) if at is None else at
    for name, side in sides.items():
        firsts = [_first(run, value) for run in side]
        steps = [first if is_within(first, budget) else math.inf for first in firsts]
        failed = [run.n_steps for run, step in zip(side, steps, strict=True) if math.isinf(step)]
        yield Reach(task, name, steps, min([budget, *failed]), _median(steps))


def reaching_sooner(reaches: Sequence[Reach]) -> dict[tuple[str, str], Estimate]:
    """Return the probability that a run of one side reaches the return sooner than one of another.

    It is the mean over the tasks that both have; two runs that never reach it are a tie.
    """
    intervals = {}
    sides = list(dict.fromkeys(reach.side for reach in reaches))
    ranked = {(reach.task, reach.side): _finite(reach.steps) for reach in reaches}
    tasks = list(dict.fromkeys(reach.task for reach in reaches))
    for first, second in itertools.combinations(sides, 2):
        pairs = [
            (-ranked[task, first], -ranked[task, second])
            for task in tasks
            if (task, first) in ranked and (task, second) in ranked
        ]
        if pairs:
            intervals[first, second] = probability_of_improvement(*zip(*pairs, strict=True))
    return intervals


def steps_text(steps: Estimate) -> str:
    """Return steps as text, where infinity is "never"."""
    value, low, high = ("never" if math.isinf(number) else short(number) for number in steps)
    has_spread = not math.isnan(steps.low) and not math.isinf(steps.low)
    return f"{value} [{low}, {high}]" if has_spread else value


def _first(run: RunRecord, value: float) -> float:
    reached = np.flatnonzero(run.values >= value)
    return float(run.at[reached[0]]) if len(reached) else math.inf


def _finite(steps: Sequence[float]) -> Floats:
    """Return steps with a number that is far above all others in the place of infinity."""
    return np.minimum(np.asarray(steps, np.float64), _NEVER)


def _median(steps: Sequence[float]) -> Estimate:
    estimate = interval_of(median_score, [_finite(steps)])
    return Estimate(*(math.inf if value > _LATEST else value for value in estimate))
