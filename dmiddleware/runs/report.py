"""A report about runs: one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
import mimetypes
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from dmiddleware.runs.compare import Comparison, compare
from dmiddleware.runs.comparison_figure import draw_metrics
from dmiddleware.runs.metrics_file import read_rows
from dmiddleware.runs.record import EVALUATION, RunRecord
from dmiddleware.runs.statistics import is_number, short
from dmiddleware.yaml_text import yaml_text

__all__ = ["write_report"]

_TIMES: Final = "time_s/"
_VIDEOS: Final = (".mp4", ".gif", ".webm")
_LARGEST_VIDEO: Final = 8 * 2**20
_GROUPS: Final = {
    "eval": "Evaluations",
    "collect": "Collected episodes",
    "learn": "Learning",
    "speed": "Throughput",
    "exchange": "Waiting for other processes",
}

_NUMBER: Final = ' class="number"'

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #1c2127; background: #fff; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dae1; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .25rem .75rem; text-align:
left; border-bottom: 1px solid #e5e8eb; vertical-align: top; } td.number { text-align: right;
font-variant-numeric: tabular-nums; } pre { background: #f4f6f8; padding: .75rem; overflow-x: auto;
font-size: 13px; } figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
summary { cursor: pointer; } video, img { max-width: 24rem; }
"""


def write_report(
    path: str | Path,
    *sides: str,
    metric: str = EVALUATION,
    at: float | None = None,
    reach: float | None = None,
    reference: str | Path | Mapping[str, Any] | None = None,
) -> Comparison:
    """Write a page about runs: curves, throughput, times, waits, settings and videos.

    The page is one file and loads nothing from the network.

    Args:
        path: the file, such as ``report.html``.
        sides: the runs, as :func:`~dmiddleware.runs.compare.compare` takes them.
        metric: the metric that decides.
        at: the steps to compare at; None: those that all runs of a task have.
        reach: a return, to compare also the steps until it is reached; None: they are not.
        reference: scores that make tasks comparable, as ``compare`` takes them.

    Returns:
        The comparison on the page.

    Raises:
        ConfigError: as for :func:`~dmiddleware.runs.compare.compare`.
        RunFolderError: as for :func:`~dmiddleware.runs.compare.compare`.
        OSError: if the file cannot be written.
    """
    comparison = compare(*sides, metric=metric, at=at, reach=reach, reference=reference)
    title = ", ".join(comparison.sides)
    body = "\n".join(_sections(comparison))
    Path(path).write_text(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{_text(title)}</h1>\n{body}\n</body>\n</html>\n",
        encoding="utf-8",
        errors="backslashreplace",
    )
    return comparison


def _sections(found: Comparison) -> Iterator[str]:
    runs = found.sides
    every = [run for side in runs.values() for run in side]
    yield "<h2>Results</h2>"
    for title, head, rows in found.tables():
        yield f"<h3>{_text(title)}</h3>{_table(head, rows)}"
    yield from (f"<p>Warning: {_text(warning)}</p>" for warning in found.warnings)
    yield from (f"<p>{_text(line)}</p>" for line in found.conclusion.splitlines())
    yield _figure(found.figure(), f"{found.metric}: interquartile mean over runs, 95% intervals")
    yield "<h2>Runs</h2>"
    yield _runs_table(runs)
    groups = defaultdict(set)
    for name in {name for run in every for row in run.rows for name in row}:
        group, slash, _ = name.partition("/")
        if slash and not name.startswith(_TIMES):
            groups[group].add(name)
    for group in sorted(
        groups, key=lambda group_name: ([*_GROUPS, group_name].index(group_name), group_name)
    ):
        yield f"<h2>{_text(_GROUPS.get(group, group))}</h2>"
        yield _figure(draw_metrics(runs, sorted(groups[group])), f"{group}/…")
    yield "<h2>Where the time goes</h2>"
    yield _times(runs)
    yield "<h2>Settings</h2>"
    for run in every:
        text = yaml_text(dict(run.settings))
        yield f"<details><summary>{_text(run.path)}</summary><pre>{_text(text)}</pre></details>"
    videos = list(_videos(every))
    if videos:
        yield "<h2>Videos</h2>"
        yield from videos


def _runs_table(runs: Mapping[str, Sequence[RunRecord]]) -> str:
    def rows() -> Iterator[list[Any]]:
        for side, of_side in runs.items():
            for run in of_side:
                last = run.rows[-1]
                seconds = last.get("time_s")
                yield [
                    side,
                    run.path,
                    run.settings.get("seed", "-"),
                    short(run.score),
                    f"({short(run.best)})",
                    f"{last.get('env_step') or 0:,}",
                    f"{last.get('train_iter') or 0:,}",
                    "-" if seconds is None else f"{seconds:,.0f} s",
                ]

    head = [
        "side",
        "folder",
        "seed",
        "score at its end",
        "best",
        "env steps",
        "updates",
        "duration",
    ]
    return _table(head, rows())


def _times(runs: Mapping[str, Sequence[RunRecord]]) -> str:
    """Return the mean seconds of a step in each middleware, by process."""
    means: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    skipped = ""
    for side, of_side in runs.items():
        for run in of_side:
            of_processes = {"lead": run.rows}
            for file in sorted(run.path.glob("metrics.*.jsonl")):
                read = read_rows(file)
                of_processes[file.name.split(".")[1]] = read.rows
                skipped += f"<p>Warning: {_text(read.skipped)}</p>" if read.skipped else ""
            for process, rows in of_processes.items():
                for name, value in (item for row in rows for item in row.items()):
                    if name.startswith(_TIMES) and value is not None:
                        means[side, process, name.removeprefix(_TIMES)].append(value)
    if not means:
        return skipped + (
            "<p>Add <code>task.use_wrapper(StepTimer(log=True))</code> to the program to see the "
            "seconds of each middleware.</p>"
        )
    lines = [[*key, f"{1e3 * np.mean(values):.3g} ms"] for key, values in means.items()]
    return skipped + _table(["side", "process", "middleware", "mean of a step"], lines)


def _videos(runs: Iterable[RunRecord]) -> Iterator[str]:
    for run in runs:
        for file in sorted(path for path in run.path.glob("videos/*") if path.suffix in _VIDEOS):
            if file.stat().st_size > _LARGEST_VIDEO:
                yield f"<p>{_text(file)} is larger than 8 MiB, and is left out.</p>"
                continue
            kind = mimetypes.guess_type(file.name)[0] or "video/mp4"
            data = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
            shown = (
                f'<img src="{data}" alt="{_text(file.name)}">'
                if kind.startswith("image")
                else f'<video controls src="{data}"></video>'
            )
            yield f"<figure>{shown}<figcaption>{_text(file)}</figcaption></figure>"


def _figure(figure: Any, caption: str) -> str:
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": caption}):
        figure.savefig(file, format="svg")
    svg = file.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{_text(caption)}</figcaption></figure>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{_text(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        texts = map(_text, row)
        cells = (f"<td{_NUMBER if is_number(text) else ''}>{text}</td>" for text in texts)
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _text(value: object) -> str:
    return html.escape(str(value))
