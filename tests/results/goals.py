"""The goals at which trainings end, and the env steps to them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dmiddleware.command_line import arguments_of
from middleware.programs.train import program_of
from tests.results.entry import Entry
from tests.results.record import Record

__all__ = ["Goal", "goal_of", "steps_text"]


@dataclass(frozen=True)
class Goal:
    """The mean return at which a training ends.

    Attributes:
        value: the mean return of an evaluation.
        in_a_row: how many evaluations in a row must reach it.
    """

    value: float
    in_a_row: int = 1

    def __str__(self) -> str:
        times = "" if self.in_a_row == 1 else f", {self.in_a_row} times in a row"
        return f"≥ {self.value:g}{times}"

    def steps(self, record: Record) -> int | None:
        """Return the env steps (offline: the updates) to the goal; None: it was not reached."""
        in_a_row = 0
        for at, mean_return in record.evaluations:
            in_a_row = in_a_row + 1 if mean_return >= self.value else 0
            if in_a_row == self.in_a_row:
                return at
        return None


def goal_of(entry: Entry) -> Goal | None:
    """Return the goal of an entry's evaluator; None: the budget alone ends its trainings."""
    if entry.is_in_zoo:
        config = ("--config", f"zoo:{entry.program}/{entry.options[0]}")
        return _goal(program_of(entry.program), (*config, *entry.options[1:]))
    if entry.program.startswith("examples."):
        return _goal(importlib.import_module(entry.program).main, entry.options)
    return None


@functools.cache
def _goal(program: Callable[..., Any], line: tuple[str, ...]) -> Goal | None:
    evaluator = arguments_of(program, line).get("evaluator")
    value = getattr(evaluator, "stop_value", None)
    return None if value is None else Goal(value, evaluator.stop_evaluations)


def steps_text(goal: Goal, records: Sequence[Record]) -> str:
    """Return the env steps (offline: the updates) to a goal, from the least to the most."""
    steps = [at for record in records if (at := goal.steps(record)) is not None]
    if not steps:
        return "not reached"
    ends = sorted({min(steps), max(steps)})
    text = " to ".join(f"{at:,}" for at in ends)
    unit = "" if any(record.env_step for record in records) else " updates"
    some = "" if len(steps) == len(records) else f" ({len(steps)} of {len(records)} seeds)"
    return text + unit + some
