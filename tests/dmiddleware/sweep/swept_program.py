"""A program for sweeps that starts quickly: it only counts, and writes metrics."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from dmiddleware import Context, Task, middleware
from dmiddleware.command_line import DefaultsBy
from dmiddleware.runs.metrics_file import MetricsFile
from dmiddleware.runs.resuming import given_folder
from dmiddleware.settings import Count, Positive, Settings, Whole
from tests.waiting import wait_until


class CountingSettings(Settings):
    """Settings of what counts."""

    learning_rate: Positive = 1e-3
    "How fast the score grows."
    big: bool = False
    "Whether the score has another sign."


class OtherSettings(Settings):
    """Settings in which a name has a second home."""

    learning_rate: Positive = 1e-3
    "Another rate."
    kind: Literal["a", "b"] = "a"
    "Nothing depends on it."


def main(
    seed: Whole = 0,
    n_evaluation: Count = 10,
    held_at: Whole = 0,
    fails: Whole = 0,
    policy: CountingSettings = CountingSettings(),
) -> None:
    """Count.

    Args:
        seed: the seed.
        n_evaluation: number of evaluations.
        held_at: after this number of evaluations, the run waits until it is stopped, or the
            current folder has the file ``go``, or ``go-`` with the name of the run; 0: never.
        fails: the seed with which the program fails.
    """
    folder = given_folder()
    assert folder is not None
    with Path("starts.txt").open("a") as starts:
        starts.write(f"{folder.name}\n")
    file = MetricsFile(folder / "metrics.jsonl")
    sign = -1 if policy.big else 1
    released = [Path("go"), Path(f"go-{folder.name}")]
    with Task(Context()) as task:

        @middleware()
        def evaluate(ctx: Context) -> None:
            if held_at and ctx.total_step == held_at:
                wait_until(
                    lambda: ctx.task.finish or any(file.exists() for file in released),
                    f"one of {released}",
                    deadline_s=200.0,
                )
            value = sign * policy.learning_rate * (ctx.total_step + 1) + seed
            file.append({"env_step": 100 * ctx.total_step, "eval/return_mean": value})
            if ctx.total_step + 1 >= n_evaluation:
                ctx.task.stop("counted")

        task.use(evaluate).run()
    if fails and seed == fails:
        raise ValueError("bad reward")


def ambiguous(
    policy: CountingSettings = CountingSettings(), other: OtherSettings = OtherSettings()
) -> None:
    """Take settings of which two have one name."""


def warned(seed: Whole = 0) -> None:
    """Warn in both ways of Python, and end.

    Args:
        seed: the seed.
    """
    for n_clipped in (7, 9):
        logging.getLogger("swept").warning("run %d clips %d returns", seed, n_clipped)
    logging.getLogger("swept").info("nothing to warn of")
    warnings.warn("every run says this", RuntimeWarning, stacklevel=1)


def named(name: str = "") -> None:
    """Take a text."""


CHOICES: Mapping[str, Settings] = {"a": CountingSettings(), "b": OtherSettings()}


def chosen(
    algo: Literal["a", "b"] = "a",
    policy: Annotated[Settings | None, DefaultsBy("algo", CHOICES)] = None,
) -> None:
    """Take settings that depend on another option."""


def untyped(seed=0):  # type: ignore[no-untyped-def]
    """Take what no command line can read."""
