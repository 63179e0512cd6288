"""Pictures of runs: learning curves of sides and of single runs, and performance profiles."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dmiddleware.process.terminal import printable
from dmiddleware.runs.budget import Budget
from dmiddleware.runs.record import COUNTERS, RunRecord
from dmiddleware.runs.statistics import interquartile_mean, interval_of, performance_profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_comparison", "draw_metrics"]

_POINTS: Final = 100
_LISTED_COLORS: Final = 20
_DASHES: Final = ("-", "--", "-.", ":")


def draw_comparison(
    sides: Mapping[str, Sequence[RunRecord]],
    *,
    metric: str,
    budgets: Mapping[str, Budget],
    profiles: Mapping[str, Sequence[Sequence[float]]],
    is_normalized: bool,
) -> Figure:
    """Draw a curve for each side, one picture for each task, and performance profiles.

    The curves are interquartile means over runs with 95% intervals. A line marks the steps that
    runs are compared at, where some have more.

    Args:
        sides: the runs of each side.
        metric: the name of their values.
        budgets: by task, the steps that its runs are compared at.
        profiles: for each side, the scores in each task; empty: no profiles are drawn.
        is_normalized: whether these scores are on the scale of reference scores.
    """
    # Not a pyplot figure, which would change global state and might open a window.
    from matplotlib.figure import Figure

    n_columns = len(budgets) + bool(profiles)
    figure = Figure(figsize=(5.2 * n_columns, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots(1, n_columns, squeeze=False)[0]
    for plot, (task, budget) in zip(axes, budgets.items(), strict=False):
        for number, (side, runs) in enumerate(sides.items()):
            of_task = [run for run in runs if run.task == task]
            if of_task:
                _draw_curve(plot, side, of_task, color=f"C{number}")
        if any(
            run.task == task and run.at[-1] > budget.n_steps
            for run in itertools.chain(*sides.values())
        ):
            plot.axvline(budget.n_steps, color="0.5", linestyle=":", label="compared here")
        plot.set_title(task or metric)
        plot.set_xlabel(budget.unit)
        plot.set_ylabel(metric)
        plot.xaxis.set_major_formatter("{x:,.0f}")
    if profiles:
        _draw_profiles(axes[-1], profiles)
        axes[-1].set_xlabel("normalized score" if is_normalized else "score")
    for plot in axes:
        plot.grid(alpha=0.3)
        plot.legend(loc="best")
    return figure


def draw_metrics(sides: Mapping[str, Sequence[RunRecord]], names: Sequence[str]) -> Figure:
    """Draw a picture for each metric, with a line for each run, and one legend.

    Each run has a color, and each side a kind of line.
    """
    from matplotlib.figure import Figure

    runs = [(side, run) for side, of_side in sides.items() for run in of_side]
    colors = _colors(len(runs))
    dashes = dict(zip(sides, itertools.cycle(_DASHES), strict=False))
    n_columns = min(3, len(names))
    n_rows = -(-len(names) // n_columns)
    n_legend = -(-len(runs) // n_columns)
    figure = Figure(
        figsize=(4.2 * n_columns, 2.8 * n_rows + 0.2 * n_legend + 0.2), layout="constrained"
    )
    axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    unit = " or ".join(COUNTERS[axis] for axis in sorted({run.axis for _, run in runs}))
    lines = {}
    for plot, name in zip(axes, names, strict=False):
        for (side, run), color in zip(runs, colors, strict=True):
            rows = [row for row in run.rows if None not in (row.get(name), row.get(run.axis))]
            lines[printable(f"{side}: {run.path}" if len(sides) > 1 else run.path)] = plot.plot(
                [row[run.axis] for row in rows],
                [row[name] for row in rows],
                color=color,
                linestyle=dashes[side],
                linewidth=1,
            )[0]
        plot.set_title(name, fontsize=10)
        plot.set_xlabel(unit, fontsize=9)
        plot.xaxis.set_major_formatter("{x:,.0f}")
        plot.grid(alpha=0.3)
    for plot in axes[len(names) :]:
        plot.set_axis_off()
    figure.legend(
        list(lines.values()),
        list(lines),
        loc="outside lower center",
        ncols=n_columns,
        fontsize=8,
        frameon=False,
    )
    return figure


def _colors(n_runs: int) -> Any:
    """Return as many different colors."""
    from matplotlib import colormaps

    if n_runs > _LISTED_COLORS:
        return colormaps["turbo"](np.linspace(0.02, 0.98, n_runs))
    return colormaps["tab10" if 2 * n_runs <= _LISTED_COLORS else "tab20"](range(n_runs))


def _draw_curve(plot: Any, side: str, runs: Sequence[RunRecord], *, color: str) -> None:
    last = min(int(run.at[-1]) for run in runs)
    first = min(max(int(run.at[0]) for run in runs), last)
    at = np.unique(np.linspace(first, last, _POINTS).round().astype(np.int64))
    values = np.stack([np.interp(at, run.at, run.values) for run in runs])
    intervals = [interval_of(interquartile_mean, [scores], n_resamples=500) for scores in values.T]
    middle, low, high = np.array(intervals).T
    label = f"{printable(side)} ({len(runs)} run{'s' if len(runs) > 1 else ''})"
    plot.plot(at, middle, color=color, label=label)
    if np.isfinite(low).all():
        plot.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)


def _draw_profiles(plot: Any, profiles: Mapping[str, Sequence[Sequence[float]]]) -> None:
    every = [score for tasks in profiles.values() for scores in tasks for score in scores]
    at = np.linspace(min(every), max(every), _POINTS)
    for number, (side, tasks) in enumerate(profiles.items()):
        plot.plot(at, performance_profile(tasks, at), color=f"C{number}", label=printable(side))
    plot.set_title("performance profile")
    plot.set_ylabel("share of runs with a higher score")
