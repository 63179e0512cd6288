"""At how many steps the runs of a task are compared, so that all have the same."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

from dmiddleware.errors import RunFolderError
from dmiddleware.runs.record import COUNTERS, RunRecord

__all__ = ["Budget", "budget_of", "is_within", "units_of"]

_ROUNDING: Final = 0.01
"""Lengths that differ by less, as a share, are equal: runs end with a whole batch."""
_GRIDS: Final = 1.1
"""From this ratio on, the intervals of evaluations differ."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """The steps that runs of a task are compared at.

    Attributes:
        n_steps: the steps; infinity: the runs have different counters, so each counts to its end.
        unit: what is counted, in words.
        warnings: what makes the comparison unfair.
    """

    n_steps: float
    unit: str
    warnings: Sequence[str]

    def cut(self, run: RunRecord) -> RunRecord:
        """Return a run without what comes after the budget.

        Raises:
            RunFolderError: if nothing is left.
        """
        is_kept = is_within(run.at, self.n_steps)
        if not is_kept.any():
            raise RunFolderError(
                f"{run.path} has no evaluation in its first {self.n_steps:,.0f} {self.unit}; the "
                f"first one is at {run.at[0]:,}: choose a later --at, or leave the run out"
            )
        return dataclasses.replace(run, at=run.at[is_kept], values=run.values[is_kept])


def budget_of(runs: Sequence[RunRecord], at: float | None) -> Budget:
    """Return at how many steps to compare the runs of a task.

    Args:
        runs: all runs of the task, of all sides.
        at: the steps; None: what all runs have.
    """
    axes = {run.axis for run in runs}
    units = units_of(runs)
    if len(axes) > 1:
        text = (
            "some runs count env steps and others updates, so each run is taken to its end, and "
            "steps until a return cannot be compared"
        )
        return Budget(math.inf, units, [text])
    shortest = min(runs, key=lambda run: run.n_steps)
    lengths = f"{shortest.n_steps:,} to {max(run.n_steps for run in runs):,} {units}"
    n_steps = shortest.n_steps if at is None else at
    warnings = []
    if at is None and not all(is_within(run.n_steps, n_steps) for run in runs):
        warnings.append(
            f"the runs have {lengths}, and are compared at {n_steps:,}, the length of the shortest "
            f"({shortest.path}); --at STEPS compares at another length"
        )
    n_shorter = sum(not is_within(n_steps, run.n_steps) for run in runs)
    if n_shorter:
        warnings.append(
            f"{n_shorter} of {len(runs)} runs ended before {n_steps:,.0f} {units}, so their last "
            f"evaluations are taken; the runs have {lengths}"
        )
    intervals = [run.interval for run in runs if math.isfinite(run.interval)]
    if intervals and max(intervals) > _GRIDS * min(intervals):
        warnings.append(
            f"evaluations are {min(intervals):,.0f} to {max(intervals):,.0f} {units} apart, so the "
            "last tenth of one run is the mean of more evaluations than that of another"
        )
    return Budget(n_steps, units, warnings)


def units_of(runs: Sequence[RunRecord]) -> str:
    """Return what runs count, in words."""
    return " or ".join(COUNTERS[axis] for axis in sorted({run.axis for run in runs}))


def is_within(n_steps: Any, budget: float) -> Any:
    """Return whether steps, a number or an array, are no more than a budget, up to rounding."""
    return n_steps <= budget * (1 + _ROUNDING)
