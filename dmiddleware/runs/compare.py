"""Compare runs: which of several settings learns better, and how sure that is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dmiddleware.errors import ConfigError
from dmiddleware.runs.budget import Budget, budget_of, units_of
from dmiddleware.runs.comparison_figure import draw_comparison
from dmiddleware.runs.reach import Reach, reaches_of, reaching_sooner, steps_text
from dmiddleware.runs.record import EVALUATION, RunRecord, differing_settings, search_runs
from dmiddleware.runs.reference import Reference, normalized, reference_scores
from dmiddleware.runs.statistics import (
    MOST_RUNS,
    Estimate,
    detectable_difference,
    difference_of_means,
    interquartile_mean,
    interval_of,
    is_number,
    least_visible_difference,
    mean_score,
    probability_of_improvement,
    runs_to_detect,
    short,
)
from dmiddleware.settings import Number, Positive, checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Comparison", "Difference", "OverallRow", "TaskRow", "compare", "compare_runs"]

_ONE_RUN: Final = "A single run shows no spread: run other seeds before you trust a difference."
_SEVERAL_TASKS: Final = (
    "scores of several tasks have no common scale, so there is no mean and no performance profile "
    "over them; --reference FILE gives reference scores, and --reference zoo those of the zoo"
)


@dataclasses.dataclass(frozen=True)
class TaskRow:
    """The runs of one side in one task.

    Attributes:
        task: the environment; empty: unknown.
        side: the name of the side.
        n_runs: the number of runs.
        n_steps: how long the shortest and the longest run are.
        iqm: the interquartile mean of their scores.
        mean: the mean of their scores.
        best: the mean of their highest evaluations.
    """

    task: str
    side: str
    n_runs: int
    n_steps: tuple[int, int]
    iqm: Estimate
    mean: Estimate
    best: float


@dataclasses.dataclass(frozen=True)
class OverallRow:
    """The runs of one side in all tasks that each side has, by reference scores.

    Attributes:
        side: the name of the side.
        tasks: the tasks.
        iqm: the interquartile mean of the normalized scores of all runs.
        mean: the mean over tasks of the mean over runs.
    """

    side: str
    tasks: Sequence[str]
    iqm: Estimate
    mean: Estimate


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
        detectable: the least true difference that as many runs would show with probability 0.8;
            infinity: a side has a single run.
        n_needed: about how many runs a side would show the difference that is seen, with
            probability 0.8, at most 10,000; None: there is no difference, or a side has a single
            run.
    """

    task: str
    side: str
    than: str
    value: Estimate
    least_visible: float
    detectable: float
    n_needed: int | None

    @property
    def is_visible(self) -> bool:
        """Whether it is larger than luck alone would make it."""
        return abs(self.value.value) > self.least_visible

    def in_words(self) -> str:
        """Return which differences the runs can show, and how many runs would show this one."""
        sides = f"{self.side} and {self.than}"
        if math.isinf(self.detectable):
            return f"{sides}: a single run on a side can show no difference; run at least 3 on each"
        difference = short(abs(self.value.value))
        can_show = f"these runs can show a difference of {short(self.detectable)} or more"
        if self.n_needed is None:
            return f"{sides}: {can_show}; their means are equal"
        luck = "more than luck explains" if self.is_visible else "which may be luck"
        return (
            f"{sides}: {can_show}; they differ by {difference}, {luck}, and "
            f"{_about(self.n_needed)} on each side would show that"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs of two or more sides, side by side; ``print`` shows a table.

    The runs of a task are compared at the steps that all of them have, or at those that were asked
    for: what comes later does not count. A run's score is the mean of the last tenth of its
    evaluations until then. Intervals cover 95%, by a bootstrap that resamples the runs of each task
    separately.

    Attributes:
        metric: the metric that was compared.
        sides: the runs of each side, by its name, to their ends.
        budgets: by task, the steps that its runs are compared at.
        rows: the estimates for each task and side.
        overall: for each side, those over all tasks by reference scores; empty: there are none.
        differences: those of each two sides in each task that both have.
        improvement: by the names of two sides, the probability that a run of the first scores
            higher than one of the second, over the tasks that both have.
        reach: the return to reach; None: it was not asked for.
        reaches: when the runs of each side reach it, for each task and side; a task whose runs have
            different counters has none.
        settings: the settings in which the runs differ, with the different values of each side.
        reference: by task, the scores that are 0 and 1 in ``overall``; None: there are none.
        warnings: what makes the comparison unfair, or was left out.
    """

    metric: str
    sides: Mapping[str, Sequence[RunRecord]]
    budgets: Mapping[str, Budget]
    rows: Sequence[TaskRow]
    overall: Sequence[OverallRow]
    differences: Sequence[Difference]
    improvement: Mapping[tuple[str, str], Estimate]
    reach: float | None
    reaches: Sequence[Reach]
    settings: Mapping[str, Sequence[Sequence[Any]]]
    reference: Reference | None
    warnings: Sequence[str]

    def tables(self) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
        """Yield the title, the head and the rows of each table: scores, chances and settings."""
        yield (
            f"{self.metric}, mean of the last tenth of each run",
            ["task", "side", "runs", "steps", "interquartile mean", "mean", "best"],
            [
                [
                    *(row.task or "-", row.side, str(row.n_runs), self._length(row)),
                    *(str(row.iqm), str(row.mean), f"({short(row.best)})"),
                ]
                for row in self.rows
            ],
        )
        if self.overall:
            yield (
                "Scores over tasks, on the scale of the reference scores",
                ["side", "tasks", "interquartile mean", "mean"],
                [
                    [row.side, str(len(row.tasks)), str(row.iqm), str(row.mean)]
                    for row in self.overall
                ],
            )
        if self.differences:
            yield (
                "Difference of the means",
                ["task", "side", "than", "difference", "not visible below"],
                [
                    [row.task or "-", row.side, row.than, str(row.value), _least(row)]
                    for row in self.differences
                ],
            )
        if self.improvement:
            yield (
                "Probability that a run of one side scores higher",
                ["side", "than", "probability"],
                [[*sides, str(interval)] for sides, interval in self.improvement.items()],
            )
        yield from self._reach_tables()
        if self.settings:
            yield (
                "Settings that differ",
                ["setting", *self.sides],
                [
                    [name, *(", ".join(map(str, column)) for column in values)]
                    for name, values in self.settings.items()
                ],
            )

    def _length(self, row: TaskRow) -> str:
        least, most = row.n_steps
        length = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        runs = [run for run in self.sides[row.side] if run.task == row.task]
        return f"{length} {units_of(runs)}"

    def _reach_tables(self) -> Iterator[tuple[str, Sequence[str], list[list[str]]]]:
        if not self.reaches:
            return
        assert self.reach is not None
        yield (
            f"Steps to {self.metric} of {short(self.reach)}",
            ["task", "side", "runs", "reached it", "median", "least", "most", "within"],
            [
                [
                    *(row.task or "-", row.side, str(len(row.steps)), str(row.n_reached)),
                    steps_text(row.median),
                    *(steps_text(Estimate(end(row.steps), *2 * [math.nan])) for end in (min, max)),
                    "all" if math.isinf(row.budget) else f"{row.budget:,.0f}",
                ]
                for row in self.reaches
            ],
        )
        if sooner := reaching_sooner(self.reaches):
            yield (
                f"Probability that a run of one side reaches {short(self.reach)} sooner",
                ["side", "than", "probability"],
                [[*sides, str(interval)] for sides, interval in sooner.items()],
            )

    @property
    def conclusion(self) -> str:
        """In words, which differences these runs can show, a line for each two sides and task."""
        has_tasks = len({row.task for row in self.differences}) > 1
        return "\n".join(
            (f"{row.task or '-'}, " if has_tasks else "") + row.in_words()
            for row in self.differences
        )

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Return the tables, for rich."""
        from rich.table import Table
        from rich.text import Text

        for title, head, rows in self.tables():
            table = Table(title=Text(title))
            for name, *cells in zip(head, *rows, strict=True):
                table.add_column(
                    Text(name, overflow="fold"),
                    justify="right" if all(map(is_number, cells)) else "left",
                )
            for row in rows:
                table.add_row(*map(Text, row))
            yield table
        for warning in self.warnings:
            yield Text(f"Warning: {warning}")
        if self.conclusion:
            yield Text(self.conclusion)

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

        The curves are interquartile means over runs with 95% intervals. There are no profiles of
        several tasks without reference scores.
        """
        return draw_comparison(
            self.sides,
            metric=self.metric,
            budgets=self.budgets,
            profiles=self._profiles(),
            is_normalized=self.reference is not None,
        )

    def _profiles(self) -> dict[str, list[list[float]]]:
        """Return the scores of each side in each task, of which profiles have a meaning."""
        cut = {name: _cut(runs, self.budgets) for name, runs in self.sides.items()}
        if self.reference is not None:
            return _normalized(cut, self.reference)
        if len(self.budgets) > 1:
            return {}
        return {name: [[run.score for run in runs]] for name, runs in cut.items()}


def compare(
    *sides: str,
    metric: str = EVALUATION,
    at: float | None = None,
    reach: float | None = None,
    reference: str | Path | Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare the runs of two or more sides.

    Args:
        sides: each a folder of runs, a run's folder, or a glob, such as ``runs/dqn-*``, with a
            name before it if you like: ``dqn=runs/dqn-*``.
        metric: the metric to compare; higher is better.
        at: the steps to compare at; None: those that all runs of a task have.
        reach: a return, to compare also the steps until it is reached; None: they are not.
        reference: scores that make tasks comparable, for means over them: ``"zoo"``, a YAML file
            with two scores for each task, such as ``CartPole-v1: [22, 475]``, which become 0 and 1,
            or these scores; None: there is no mean over several tasks.

    Raises:
        ConfigError: if two sides have the same name, an option has no meaning, or a task has no
            reference scores.
        RunFolderError: if there is no run, none of a side has such a metric, or one has no
            evaluation until ``at``.
    """
    by_side: dict[str, list[RunRecord]] = {}
    warnings = []
    for side in sides:
        name, is_named, pattern = side.partition("=")
        if not is_named or Path(side).exists():
            name = pattern = side
        if name in by_side:
            raise ConfigError(f"two sides have the name {name}; write NAME={pattern}")
        by_side[name], left_out = search_runs(pattern, metric)
        warnings += [f"left out {text}" for text in left_out]
    if not by_side:
        raise ConfigError("name the runs to compare, such as runs/a runs/b")
    comparison = compare_runs(by_side, metric=metric, at=at, reach=reach, reference=reference)
    return dataclasses.replace(comparison, warnings=[*warnings, *comparison.warnings])


def compare_runs(
    named: Mapping[str, Sequence[RunRecord]],
    *,
    metric: str = EVALUATION,
    at: float | None = None,
    reach: float | None = None,
    reference: str | Path | Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare runs that have been loaded.

    Args:
        named: the runs of each side, at least one, by its name.
        metric: the metric that they have; higher is better.
        at: the steps to compare at; None: those that all runs of a task have.
        reach: a return, to compare also the steps until it is reached; None: they are not.
        reference: as for :func:`compare`.

    Raises:
        ConfigError: if an option has no meaning, or a task has no reference scores.
        RunFolderError: if a run has no evaluation until ``at``.
    """
    at = checked("at", at, Positive | None)
    reach = checked("reach", reach, Number | None)
    by_task = _by_task(named)
    budgets = {
        task: budget_of([run for runs in sides.values() for run in runs], at)
        for task, sides in by_task.items()
    }
    cut = {name: _cut(runs, budgets) for name, runs in named.items()}
    cut_by_task = _by_task(cut)
    scales = None if reference is None else reference_scores(reference, by_task)
    return Comparison(
        metric=metric,
        sides=named,
        budgets=budgets,
        rows=[
            _row(task, name, by_task[task][name], runs)
            for task, sides in cut_by_task.items()
            for name, runs in sides.items()
        ],
        overall=[] if scales is None else list(_overall(cut, scales)),
        differences=list(_differences(cut_by_task)),
        improvement=_improvements(cut, list(by_task)),
        reach=reach,
        reaches=[]
        if reach is None
        else [
            row
            for task, budget in budgets.items()
            if math.isfinite(budget.n_steps)  # steps of one counter
            for row in reaches_of(task, by_task[task], reach, at)
        ],
        settings=differing_settings(list(named.values())),
        reference=scales,
        warnings=list(_warnings(named, budgets, has_reference=scales is not None)),
    )


def _by_task(
    named: Mapping[str, Sequence[RunRecord]],
) -> dict[str, dict[str, list[RunRecord]]]:
    """Return the runs by task and side."""
    tasks = dict.fromkeys(run.task for runs in named.values() for run in runs)
    return {
        task: {
            name: chosen
            for name, runs in named.items()
            if (chosen := [run for run in runs if run.task == task])
        }
        for task in tasks
    }


def _cut(runs: Sequence[RunRecord], budgets: Mapping[str, Budget]) -> list[RunRecord]:
    return [budgets[run.task].cut(run) for run in runs]


def _warnings(
    named: Mapping[str, Sequence[RunRecord]],
    budgets: Mapping[str, Budget],
    *,
    has_reference: bool,
) -> Iterator[str]:
    for task, budget in budgets.items():
        for text in budget.warnings:
            yield f"{task or '-'}: {text}" if len(budgets) > 1 else text
    for (first, runs), (second, others) in itertools.combinations(named.items(), 2):
        common = {run.path.resolve() for run in runs} & {run.path.resolve() for run in others}
        if common:
            yield f"{first} and {second} have {len(common)} runs in common, which hides differences"
    if len(budgets) > 1 and not has_reference:
        yield _SEVERAL_TASKS
    yield from (run.skipped for runs in named.values() for run in runs if run.skipped)
    if any(len(runs) < 2 for runs in named.values()):
        yield _ONE_RUN


def _row(task: str, side: str, whole: Sequence[RunRecord], runs: Sequence[RunRecord]) -> TaskRow:
    scores = [[run.score for run in runs]]
    lengths = [run.n_steps for run in whole]
    return TaskRow(
        task=task,
        side=side,
        n_runs=len(runs),
        n_steps=(min(lengths), max(lengths)),
        iqm=interval_of(interquartile_mean, scores),
        mean=interval_of(mean_score, scores),
        best=float(np.mean([run.best for run in runs])),
    )


def _overall(sides: Mapping[str, Sequence[RunRecord]], scales: Reference) -> Iterator[OverallRow]:
    tasks = _common_tasks(sides, scales)
    for side, scores in _normalized(sides, scales).items():
        yield OverallRow(
            side, tasks, interval_of(interquartile_mean, scores), interval_of(mean_score, scores)
        )


def _normalized(
    sides: Mapping[str, Sequence[RunRecord]], scales: Reference
) -> dict[str, list[list[float]]]:
    """Return the normalized scores of each side in each task that all sides have."""
    tasks = _common_tasks(sides, scales)
    return {
        name: [[normalized(score, scales[task]) for score in _scores(runs, task)] for task in tasks]
        for name, runs in sides.items()
        if tasks
    }


def _common_tasks(sides: Mapping[str, Sequence[RunRecord]], tasks: Iterable[str]) -> list[str]:
    return [task for task in tasks if all(_scores(runs, task) for runs in sides.values())]


def _differences(
    by_task: Mapping[str, Mapping[str, Sequence[RunRecord]]],
) -> Iterator[Difference]:
    for task, sides in by_task.items():
        scores = {name: [run.score for run in runs] for name, runs in sides.items()}
        for side, than in itertools.combinations(scores, 2):
            both = scores[side], scores[than]
            yield Difference(
                task=task,
                side=side,
                than=than,
                value=difference_of_means(*both),
                least_visible=least_visible_difference(*both),
                detectable=detectable_difference(*both),
                n_needed=runs_to_detect(*both),
            )


def _least(row: Difference) -> str:
    return short(row.least_visible) if np.isfinite(row.least_visible) else "-"


def _about(n_runs: int) -> str:
    return f"{n_runs:,} runs or more" if n_runs >= MOST_RUNS else f"about {n_runs:,} runs"


def _improvements(
    sides: Mapping[str, Sequence[RunRecord]], tasks: Sequence[str]
) -> dict[tuple[str, str], Estimate]:
    improvements = {}
    for first, second in itertools.combinations(sides, 2):
        pairs = [(_scores(sides[first], task), _scores(sides[second], task)) for task in tasks]
        common = [pair for pair in pairs if all(pair)]
        if common:
            mine, theirs = zip(*common, strict=True)
            improvements[first, second] = probability_of_improvement(mine, theirs)
    return improvements


def _scores(runs: Sequence[RunRecord], task: str) -> list[float]:
    return [run.score for run in runs if run.task == task]
