"""Rendering docs/results.md and its learning curves from the records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dmiddleware.runs import RunRecord, interval_of, mean_score
from dmiddleware.runs.statistics import short
from tests.results import bars
from tests.results.bars import Records
from tests.results.entry import Entry
from tests.results.goals import goal_of, steps_text
from tests.results.record import Record, path_of

__all__ = ["draw_curves", "render", "runs_of", "score_text", "sections_of", "spread"]

_INTRO = """\
# Results

What the examples reach, and how sure that is. `make results` trains whatever has no record yet and
writes this page; it can be interrupted at any time. `python -m tests.results NAME --again` repeats
a training.

A training has either a goal or a budget. One with a goal ends with the evaluation that reaches it,
so its returns say little more than the goal does. For these, the table has the env steps to the
goal, from the least to the most over the seeds. Some goals are several evaluations in a row.

For a training with a budget, the table has its score: the mean of the last tenth of its
evaluations, as in [`ditask compare`](howto/compare-runs.md), which makes these tables. It has the
mean over the seeds, its 95% interval by a bootstrap over them, and in brackets the mean return of
the best policies: those with the best evaluation, in fresh episodes (100, for Atari 30) with seeds
that training never uses.

Read the figures with these limits:

- Three seeds are few. If scores are normal, the interval of three covers the true mean in 75% of
  the cases, not in 95%; with seven seeds it is 87%, with ten 90%. A single seed shows no spread.
- A short training has few evaluations. Of ten, the last tenth is a single one; of eleven, it is
  two, and the first of them may come from a policy that has not learned the task yet.
- A goal is reached at an evaluation, and the first of many that reaches it may have been lucky. So
  the steps depend on how often a training evaluates, and in how many episodes.
- The same seed gives other figures on other processor models, because their floating-point sums
  round differently.

Times are training times with evaluations, on two cores, with two trainings at a time. No setting
was tuned on the seeds that are reported. A bar is what the best policy of every seed must reach in
fresh episodes, also where the table has no score.
*Resumed* trainings were interrupted: MuJoCo and Pong cannot save their environments, so they
started new episodes then.
"""

_COLUMNS = (
    *("algorithm", "environment", "goal", "env steps", "score (best policies)"),
    *("bar", "seeds", "time", "published"),
)
_HEAD = "".join(f"| {' | '.join(row)} |\n" for row in (_COLUMNS, ["---"] * len(_COLUMNS)))


def sections_of(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries by their sections, in the order of their first appearance."""
    sections: dict[str, list[Entry]] = {}
    for entry in entries:
        sections.setdefault(entry.section, []).append(entry)
    return sections


def render(
    entries: Iterable[Entry], records: Records, curves: Mapping[str, str], *, comparison: str = ""
) -> str:
    """Return the page.

    Args:
        entries: what to report.
        records: the records by the entries' names.
        curves: by section, the path of its picture relative to docs/.
        comparison: the section that compares with other libraries.
    """
    parts = [_INTRO]
    for title, rows in sections_of(entries).items():
        table = _HEAD + "".join(f"{_row(entry, records)}\n" for entry in rows)
        parts.append(f"## {title}\n\n{table}")
        if title in curves:
            parts.append(f"![Learning curves: {title}]({curves[title]})\n")
        parts += [told for entry in rows if (told := _without_curve(entry, records))]
        parts += [told for entry in rows if (told := _logged(entry, records))]
        parts.append("Commands, for seed 0:\n\n" + _commands(rows))
    parts += [comparison] if comparison else []
    return "\n".join(parts)


def _row(entry: Entry, records: Records) -> str:
    goal, bar = goal_of(entry), bars.text(entry)
    told = [entry.label, entry.env, "" if goal is None else str(goal)]
    own = records.get(entry.name, ())
    if not own:
        return f"| {' | '.join(told)} | not run yet | | {bar} | | | {_source(entry)} |"
    budget = f"{statistics.mean(record.env_step for record in own):,.0f}"
    cells = [
        *told,
        budget if goal is None else steps_text(goal, own),
        score_text(entry.env, own) if goal is None else "",
        f"{bar} **missed**" if bars.missed(entry, records) else bar,
        str(len(own)),
        _time(statistics.mean(record.train_s for record in own))
        + (" (resumed)" if any(record.resumed for record in own) else ""),
        _source(entry),
    ]
    return f"| {' | '.join(cells)} |"


def runs_of(env: str, records: Iterable[Record]) -> list[RunRecord]:
    """Return the records that have evaluations, as ``ditask compare`` takes them."""
    found = []
    for record in records:
        if record.evaluations:
            at, values = zip(*record.evaluations, strict=True)
            settings = {"env": {"id": env}}
            path = path_of(record.command, record.seed)
            points = np.array(at, np.int64), np.array(values, np.float64)
            rows = ({"env_step": record.env_step},)
            found.append(RunRecord(path, settings, rows, "env_step", *points))
    return found


def score_text(env: str, records: Sequence[Record]) -> str:
    """Return the mean score with its interval, and in brackets the mean of the best policies."""
    runs = runs_of(env, records)
    best = f"({short(statistics.mean(record.figure for record in records))})"
    if not runs:
        return f"not recorded {best}"
    mean = interval_of(mean_score, [[run.score for run in runs]])
    return f"{mean} {best}"


def spread(figures: Sequence[float], *, n_decimals: int = 1) -> str:
    """Return mean and standard deviation as text."""
    mean = f"{statistics.mean(figures):,.{n_decimals}f}"
    return mean if len(figures) == 1 else f"{mean} ± {statistics.stdev(figures):,.{n_decimals}f}"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _source(entry: Entry) -> str:
    return " ".join(filter(None, [entry.literature, f"({entry.source})" if entry.source else ""]))


def _logged(entry: Entry, records: Records) -> str:
    """Return a paragraph with the mean of the entry's logged figure, or nothing."""
    told = [one.logged for one in records.get(entry.name, ()) if one.logged is not None]
    if not told:
        return ""
    return f"{entry.label}, {entry.env}: `{entry.logged}` was {spread(told)} on average.\n"


def _without_curve(entry: Entry, records: Records) -> str:
    """Return a paragraph that says that an entry has no score, or nothing."""
    own = records.get(entry.name, ())
    if not own or runs_of(entry.env, own):
        return ""
    return (
        f"{entry.label}, {entry.env}: the records have no evaluations during the training, so the "
        f"table has only the figure at the end, {entry.figure}.\n"
    )


def _commands(entries: Iterable[Entry]) -> str:
    return "".join(f"- {entry.label}, {entry.env}: `{entry.command}`\n" for entry in entries)


def draw_curves(title: str, entries: Iterable[Entry], records: Records, path: Path) -> bool:
    """Draw the evaluations of several trainings: a panel for each env, a line for each entry.

    A band around a line shows the spread over its seeds.

    Args:
        title: the title of the picture.
        entries: what to draw.
        records: the records by the entries' names.
        path: the picture to write.

    Returns:
        Whether there was anything to draw.
    """
    panels: dict[str, list[tuple[str, list[Record]]]] = {}
    for entry in entries:
        if some := [one for one in records.get(entry.name, ()) if len(one.evaluations) > 1]:
            is_offline = all(one.env_step == 0 for one in some)
            panel = f"{entry.env}, offline" if is_offline else entry.env
            panels.setdefault(panel, []).append((entry.label, some))
    if not panels:
        return False
    n_columns = min(2, len(panels))
    n_rows = -(-len(panels) // n_columns)
    # Not a pyplot figure, which would change global state and might open a window.
    figure = Figure(figsize=(5 * n_columns, 3.4 * n_rows), dpi=110, layout="constrained")
    figure.suptitle(title)
    all_axes = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=False):
        for label, some in lines:
            _draw_line(axes, label, some)
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("updates" if name.endswith("offline") else "environment steps")
        axes.set_ylabel("mean return of an evaluation")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial)
    partial.replace(path)
    return True


def _draw_line(axes: Axes, label: str, records: Sequence[Record]) -> None:
    curves = [np.array(record.evaluations, dtype=np.float64).T for record in records]
    grid = np.linspace(max(at[0] for at, _ in curves), max(at[-1] for at, _ in curves), 200)
    # A run that was solved early keeps its last value.
    values = np.array([np.interp(grid, at, value) for at, value in curves])
    (line,) = axes.plot(grid, values.mean(0), label=label)
    if len(curves) > 1:
        low, high = values.min(0), values.max(0)
        axes.fill_between(grid, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
