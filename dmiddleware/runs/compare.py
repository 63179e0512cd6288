"""Compare runs: which of several settings learns better, and how sure that is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dmiddleware.errors import ConfigError
from dmiddleware.runs.record import COUNTERS, EVALUATION, RunRecord, differing_settings, find_runs
from dmiddleware.runs.statistics import (
    Estimate,
    difference_of_means,
    interquartile_mean,
    interval_of,
    is_number,
    least_visible_difference,
    mean_score,
    performance_profile,
    probability_of_improvement,
    short,
)
from dmiddleware.terminal import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "Difference", "TaskRow", "compare", "compare_runs"]

_POINTS: Final = 100
_ONE_RUN: Final = "A single run shows no spread: run other seeds before you trust a difference."


@dataclasses.dataclass(frozen=True)
class TaskRow:
    """The runs of one side in one task.

    Attributes:
        task: the environment; empty: unknown.
        side: the name of the side.
        n_runs: the number of runs.
        iqm: the interquartile mean of their scores.
        mean: the mean of their scores.
        best: the mean of their highest evaluations.
    """

    task: str
    side: str
    n_runs: int
    iqm: Estimate
    mean: Estimate
    best: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much higher the mean score of one side is than that of another in one task.

    Attributes:
        task: the environment; empty: unknown.
        side: the name of the side.
        than: the name of the other side.
        value: the difference.
        least_visible: the least difference that the runs can tell from luck; infinity: a side has a
            single run.
    """

    task: str
    side: str
    than: str
    value: Estimate
    least_visible: float

    @property
    def is_visible(self) -> bool:
        """Whether it is larger than luck alone would make it."""
        return abs(self.value.value) > self.least_visible


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs of two or more sides, side by side; ``print`` shows a table.

    A run's score is the mean of the last tenth of its evaluations. Intervals cover 95%, by a
    bootstrap that resamples the runs of each task separately.

    Attributes:
        metric: the metric that was compared.
        sides: the runs of each side, by its name.
        rows: the estimates for each task and side.
        differences: those of each two sides in each task that both have.
        improvement: by the names of two sides, the probability that a run of the first scores
            higher than one of the second, over the tasks that both have.
        settings: the settings in which the runs differ, with the different values of each side.
    """

    metric: str
    sides: Mapping[str, Sequence[RunRecord]]
    rows: Sequence[TaskRow]
    differences: Sequence[Difference]
    improvement: Mapping[tuple[str, str], Estimate]
    settings: Mapping[str, Sequence[Sequence[Any]]]

    def tables(self) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
        """Yield the title, the head and the rows of each table: scores, chances and settings."""
        yield (
            f"{self.metric}, mean of the last tenth of each run",
            ["task", "side", "runs", "interquartile mean", "mean", "best"],
            [
                [
                    *(row.task or "-", row.side, str(row.n_runs)),
                    *(str(row.iqm), str(row.mean), f"({short(row.best)})"),
                ]
                for row in self.rows
            ],
        )
        if self.differences:
            yield (
                "Difference of the means",
                ["task", "side", "than", "difference", "not visible below"],
                [
                    [one.task or "-", one.side, one.than, str(one.value), _least(one)]
                    for one in self.differences
                ],
            )
        if self.improvement:
            yield (
                "Probability that a run of one side scores higher",
                ["side", "than", "probability"],
                [[*sides, str(found)] for sides, found in self.improvement.items()],
            )
        if self.settings:
            yield (
                "Settings that differ",
                ["setting", *self.sides],
                [
                    [name, *(", ".join(map(str, one)) for one in values)]
                    for name, values in self.settings.items()
                ],
            )

    @property
    def warning(self) -> str:
        """That a side has a single run, which shows no spread; empty: none has."""
        has_one = any(len(side) < 2 for side in self.sides.values())
        return _ONE_RUN if has_one else ""

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Return the tables, for rich."""
        from rich.table import Table

        for title, head, rows in self.tables():
            table = Table(title=title)
            for name, *cells in zip(head, *rows, strict=True):
                table.add_column(name, justify="right" if all(map(is_number, cells)) else "left")
            for row in rows:
                table.add_row(*row)
            yield table
        if self.warning:
            yield self.warning

    def __str__(self) -> str:
        import io

        from rich.console import Console

        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        return text.rstrip()

    def draw(self, path: str | Path) -> None:
        """Write the picture of :meth:`figure`.

        Args:
            path: the file, such as ``compare.png``; its ending gives the format.

        Raises:
            OSError: if it cannot be written.
            ValueError: for an unknown format.
        """
        self.figure().savefig(path)

    def figure(self) -> Figure:
        """Draw the learning curves, one picture for each task, and performance profiles.

        The curves are interquartile means over runs with 95% intervals.
        """
        # Not a pyplot figure, which would change global state and might open a window.
        from matplotlib.figure import Figure

        tasks = list(dict.fromkeys(row.task for row in self.rows))
        n_columns = len(tasks) + 1
        figure = Figure(figsize=(5.2 * n_columns, 4.2), dpi=110, layout="constrained")
        axes = figure.subplots(1, n_columns, squeeze=False)[0]
        for plot, task in zip(axes, tasks, strict=False):
            for number, (side, runs) in enumerate(self.sides.items()):
                of_task = [run for run in runs if run.task == task]
                if of_task:
                    _draw_curve(plot, side, of_task, color=f"C{number}")
            plot.set_title(task or self.metric)
            counters = {run.axis for runs in self.sides.values() for run in runs}
            plot.set_xlabel(" or ".join(COUNTERS[name] for name in sorted(counters)))
            plot.set_ylabel(self.metric)
            plot.xaxis.set_major_formatter("{x:,.0f}")
        self._draw_profiles(axes[-1], tasks)
        for plot in axes:
            plot.grid(alpha=0.3)
            plot.legend(loc="best")
        return figure

    def _draw_profiles(self, plot: Any, tasks: Sequence[str]) -> None:
        every = [run.score for runs in self.sides.values() for run in runs]
        at = np.linspace(min(every), max(every), _POINTS)
        for number, (side, runs) in enumerate(self.sides.items()):
            scores = [_scores(runs, task) for task in tasks if _scores(runs, task)]
            plot.plot(
                at, performance_profile(scores, at), color=f"C{number}", label=printable(side)
            )
        plot.set_title("performance profile")
        plot.set_xlabel("score")
        plot.set_ylabel("share of runs with a higher score")


def compare(*sides: str, metric: str = EVALUATION) -> Comparison:
    """Compare the runs of two or more sides.

    Args:
        sides: each a folder of runs, a run's folder, or a glob, such as ``runs/dqn-*``, with a
            name before it if you like: ``dqn=runs/dqn-*``.
        metric: the metric to compare; higher is better.

    Raises:
        ConfigError: if two sides have the same name.
        RunFolderError: if there is no run, or one has no such metric.
    """
    named: dict[str, list[RunRecord]] = {}
    for side in sides:
        name, is_named, pattern = side.partition("=")
        if name in named:
            raise ConfigError(f"two sides have the name {name}; write NAME={pattern or name}")
        named[name] = find_runs(pattern if is_named else name, metric)
    if not named:
        raise ConfigError("name the runs to compare, such as runs/a runs/b")
    return compare_runs(named, metric=metric)


def compare_runs(
    named: Mapping[str, Sequence[RunRecord]], *, metric: str = EVALUATION
) -> Comparison:
    """Compare runs that have been loaded.

    Args:
        named: the runs of each side, at least one, by its name.
        metric: the metric that they have; higher is better.
    """
    tasks = list(dict.fromkeys(run.task for side in named.values() for run in side))
    return Comparison(
        metric=metric,
        sides=named,
        rows=[
            _row(task, name, [run for run in side if run.task == task])
            for task in tasks
            for name, side in named.items()
            if any(run.task == task for run in side)
        ],
        differences=list(_differences(named, tasks)),
        improvement=_improvements(named, tasks),
        settings=differing_settings(list(named.values())),
    )


def _row(task: str, side: str, runs: Sequence[RunRecord]) -> TaskRow:
    scores = [[run.score for run in runs]]
    return TaskRow(
        task=task,
        side=side,
        n_runs=len(runs),
        iqm=interval_of(interquartile_mean, scores),
        mean=interval_of(mean_score, scores),
        best=float(np.mean([run.best for run in runs])),
    )


def _differences(
    sides: Mapping[str, Sequence[RunRecord]], tasks: Sequence[str]
) -> Iterator[Difference]:
    for task in tasks:
        found = {name: scores for name, runs in sides.items() if (scores := _scores(runs, task))}
        for side, than in itertools.combinations(found, 2):
            both = found[side], found[than]
            value, least = difference_of_means(*both), least_visible_difference(*both)
            yield Difference(task, side, than, value, least)


def _least(one: Difference) -> str:
    return short(one.least_visible) if np.isfinite(one.least_visible) else "-"


def _improvements(
    sides: Mapping[str, Sequence[RunRecord]], tasks: Sequence[str]
) -> dict[tuple[str, str], Estimate]:
    found = {}
    for first, second in itertools.combinations(sides, 2):
        pairs = [(_scores(sides[first], task), _scores(sides[second], task)) for task in tasks]
        common = [pair for pair in pairs if all(pair)]
        if common:
            mine, theirs = zip(*common, strict=True)
            found[first, second] = probability_of_improvement(mine, theirs)
    return found


def _scores(runs: Sequence[RunRecord], task: str) -> list[float]:
    return [run.score for run in runs if run.task == task]


def _draw_curve(plot: Any, side: str, runs: Sequence[RunRecord], *, color: str) -> None:
    last = min(int(run.at[-1]) for run in runs)
    first = min(max(int(run.at[0]) for run in runs), last)
    at = np.unique(np.linspace(first, last, _POINTS).round().astype(np.int64))
    values = np.stack([np.interp(at, run.at, run.values) for run in runs])
    found = [interval_of(interquartile_mean, [one], n_resamples=500) for one in values.T]
    middle, low, high = np.array(found).T
    label = f"{printable(side)} ({len(runs)} run{'s' if len(runs) > 1 else ''})"
    plot.plot(at, middle, color=color, label=label)
    if np.isfinite(low).all():
        plot.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
