"""What all benchmarks share: paired timing, rows, the table, and docs/benchmarks.md.

A benchmark is a module ``bench_<name>.py`` beside this one. The first line of its docstring is the
heading of its table, the rest is the text below the heading, and ``rows() -> list[Row]`` measures.
A row compares our code with a reference that does the same work::

    from tests.benchmarks.report import Row, interleaved


    def rows() -> list[Row]:
        pair = interleaved(push_ours, push_arrays, calls=200)
        return [Row.of_time("push of 32", pair, calls=200, against="arrays", at_most=2.0)]

A benchmark with a table of its own returns it too: ``rows() -> tuple[list[Row], Grid]``. One that
fills in the figures of another page returns a :class:`Page` instead.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "Comparison",
    "Grid",
    "Page",
    "Row",
    "Section",
    "interleaved",
    "machine",
    "median_and_spread",
    "print_sections",
    "render_markdown",
    "render_table",
    "repeated",
    "replace_sections",
    "use_one_thread",
    "versions",
]

MICROSECONDS = 1e6


def use_one_thread() -> None:
    """Limit torch to one thread, on both sides of every benchmark."""
    import torch

    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two durations of the same work, measured alternately.

    Attributes:
        ours_s: median duration of a turn of ours, in seconds.
        reference_s: median duration of a turn of the reference, in seconds.
        time_ratio: median over the turns of ours divided by the reference of the same turn; below 1
            when ours is faster. It is steadier than the ratio of the two medians, because a
            temporary slowdown of the machine affects both halves of a turn.
        spread: half the distance between the quartiles of those ratios, relative to the median.
    """

    ours_s: float
    reference_s: float
    time_ratio: float
    spread: float


def interleaved(
    ours: Callable[[], Any],
    reference: Callable[[], Any],
    *,
    calls: int = 1,
    repeats: int = 15,
    warmup: int = 1,
) -> Comparison:
    """Time two functions that do the same work alternately, so that noise affects both equally.

    The function that goes first changes from turn to turn. In a turn, each should take at least a
    few milliseconds, so short ones need several calls.

    Args:
        ours: our side; its return value is ignored.
        reference: the other side.
        calls: calls of each in a turn.
        repeats: number of turns.
        warmup: turns before the first one that counts.
    """
    ours, reference = repeated(ours, calls), repeated(reference, calls)
    for _ in range(warmup):
        ours()
        reference()
    ours_s: list[float] = []
    reference_s: list[float] = []
    for turn in range(repeats):
        pair = [(ours, ours_s), (reference, reference_s)]
        for function, durations in pair if turn % 2 == 0 else reversed(pair):
            durations.append(_duration_s(function))
    ratio, spread = median_and_spread([a / b for a, b in zip(ours_s, reference_s, strict=True)])
    return Comparison(
        ours_s=statistics.median(ours_s),
        reference_s=statistics.median(reference_s),
        time_ratio=ratio,
        spread=spread,
    )


def repeated(function: Callable[[], Any], times: int) -> Callable[[], None]:
    """Return a function that calls another one ``times`` times."""

    def run() -> None:
        for _ in range(times):
            function()

    return run


def _duration_s(function: Callable[[], Any]) -> float:
    gc.collect()  # one side's garbage must not be collected in the other's time
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and half the distance between the quartiles relative to it."""
    middle = statistics.median(values)
    if len(values) < 2:
        return middle, 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2 / middle


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: what is measured.
        against: what it is compared with.
        ours: our figure; None when it was not measured.
        reference: the other side's figure; None when it was not measured.
        ratio: ours divided by the reference.
        unit: of both figures.
        at_most: the bar for a ratio of times.
        at_least: the bar for a ratio of rates.
        spread: of the ratio, relative (see :class:`Comparison`).
        note: why a figure is missing, or anything else that the reader must know.
    """

    name: str
    against: str
    ours: float | None = None
    reference: float | None = None
    ratio: float | None = None
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None
    spread: float = 0.0
    note: str = ""

    @classmethod
    def of_time(
        cls,
        name: str,
        pair: Comparison,
        *,
        calls: int,
        against: str,
        at_most: float | None = None,
        note: str = "",
    ) -> Row:
        """Make a row of durations: ``calls`` is the number of operations in a turn."""
        return cls(
            name=name,
            against=against,
            ours=pair.ours_s / calls * MICROSECONDS,
            reference=pair.reference_s / calls * MICROSECONDS,
            ratio=pair.time_ratio,
            unit="µs",
            at_most=at_most,
            spread=pair.spread,
            note=note,
        )

    @classmethod
    def of_rate(
        cls,
        name: str,
        pair: Comparison,
        *,
        count: int,
        unit: str,
        against: str,
        at_least: float | None = None,
        note: str = "",
    ) -> Row:
        """Make a row of rates: ``count`` is the number of units in a turn."""
        return cls(
            name=name,
            against=against,
            ours=count / pair.ours_s,
            reference=count / pair.reference_s,
            ratio=1 / pair.time_ratio,
            unit=unit,
            at_least=at_least,
            spread=pair.spread,
            note=note,
        )

    @classmethod
    def missing(cls, name: str, *, against: str, note: str) -> Row:
        """Make a row for a figure that could not be measured."""
        return cls(name=name, against=against, note=note)

    @property
    def bar(self) -> str:
        """The bar as text: ``≤ 4x``, ``≥ 0.8x``, or a dash."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}x"
        return "-" if self.at_least is None else f"≥ {self.at_least:g}x"

    @property
    def met(self) -> bool | None:
        """Whether the bar holds; None without a bar or a figure."""
        if self.ratio is None:
            return None
        if self.at_most is not None:
            return self.ratio <= self.at_most
        return None if self.at_least is None else self.ratio >= self.at_least

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, ``not measured``, or a dash without a bar."""
        if self.ours is None:
            return "not measured"
        return {True: "met", False: "missed", None: "-"}[self.met]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of figures that are not compared with a reference.

    Attributes:
        head: the headings of the columns.
        lines: the cells of each line.
    """

    head: tuple[str, ...]
    lines: list[tuple[str, ...]]


_MEASURED = re.compile(
    r"(<!-- measured: [^\n]*-->\n).*(<!-- end of what was measured -->)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Page:
    """Figures for a page that is written by hand, which has a place for them between two comments.

    Attributes:
        path: the page.
        text: what to write there.
    """

    path: Path
    text: str

    def fill(self, page: str) -> str:
        """Return the page with these figures instead of the old ones.

        Raises:
            ValueError: if the page has no such place.
        """
        text, n_places = _MEASURED.subn(lambda found: f"{found[1]}\n{self.text}\n{found[2]}", page)
        if n_places != 1:
            raise ValueError(f"{self.path} needs one place between the comments, has {n_places}")
        return text


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one benchmark module, with its heading and text.

    Attributes:
        title: the heading.
        text: the text below it.
        rows: the comparisons.
        grid: a table above them; None: there is none.
        page: the figures of another page; None: there is none.
        machine: where it was measured; empty: where the whole page was.
    """

    title: str
    text: str
    rows: list[Row] = field(default_factory=list)
    grid: Grid | None = None
    page: Page | None = None
    machine: str = ""


_HEAD = ("what", "against", "unit", "ours", "reference", "ratio", "bar", "verdict")


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x ± {row.spread:.0%}"
    return (
        row.name,
        row.against,
        row.unit,
        _figure(row.ours),
        _figure(row.reference),
        ratio,
        row.bar,
        row.verdict,
    )


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_sections(sections: Iterable[Section], console: Console) -> None:
    """Print one table for each section."""
    colors = {True: "green", False: "bold red", None: ""}
    for section in sections:
        if section.grid is not None:
            table = Table(*section.grid.head, title=section.title, title_justify="left")
            for line in section.grid.lines:
                table.add_row(*line)
            console.print(table)
        table = Table(*_HEAD, title=section.title, title_justify="left")
        for row in section.rows:
            table.add_row(*_cells(row), style=colors[row.met] or None)
        console.print(table)
        for row in section.rows:
            if row.note:
                console.print(f"  {row.name}: {row.note}", highlight=False)


def machine() -> str:
    """Describe the processor: its name, if the system reports it, and the usable cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    name = ", ".join(sorted(names)) or platform.processor() or platform.machine()
    return f"{name}, {cores} core{'s' * (cores != 1)}, {platform.system()}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed versions; the version of a missing package is ``not installed``."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


_ON_A_GPU = """\
## On a GPU

Nobody has measured this on a GPU yet. With one, this command takes at most 8 minutes, and writes
its table to FOLDER/gpu.md after each row:

```console
$ python -m tests.benchmarks.gpu FOLDER
```

It trains PPO on the torch CartPole with 4,096 and 65,536 lanes, SAC and TD3 on EnvPool's
HalfCheetah-v4, and PPO on EnvPool's Pong: eager, compiled, with `compile="graphs"`, and with
`autocast="bfloat16"` in addition. Beside them are the frames a second that LeanRL published for an
H100: 725, 936 and 6,809. `--small` tries it on the CPU.
"""
_PREFACE = """\
# Benchmarks

<!-- Generated by `make bench`; do not edit. -->

Each row compares our code with a reference that does the same work in the same run. The two sides
are timed alternately, so that a slow phase of the machine affects both. *ours* and *reference* are
medians over the turns; *ratio* is the median of the turns' ratios (ours divided by the reference),
with half its quartile range. Bars with ≤ are for durations, bars with ≥ for rates. Torch uses one
thread on both sides (`torch.set_num_threads(1)`).
"""


def render_markdown(
    sections: Iterable[Section], *, command: str, duration_s: float, packages: Iterable[str]
) -> str:
    """Return the text of docs/benchmarks.md."""
    known = ", ".join(f"{name} {version}" for name, version in versions(packages).items())
    parts = [
        _PREFACE,
        f"- Machine: {machine()}\n- Versions: {known}\n"
        f"- Command: `{command}` ({duration_s / 60:.0f} minutes)\n",
    ]
    return "\n".join([*parts, *map(_render_section, sections), _ON_A_GPU])


def replace_sections(page: str, sections: Iterable[Section]) -> str:
    """Return docs/benchmarks.md with some sections replaced and the others unchanged."""
    preface, *old = page.split("\n## ")
    kept = {text.partition("\n")[0]: f"## {text}" for text in old}
    for section in sections:
        kept[section.title] = _render_section(section)
    return "\n".join([preface, *(text.rstrip("\n") + "\n" for text in kept.values())])


def _render_section(section: Section) -> str:
    parts = [f"## {section.title}\n"]
    if section.text:
        parts.append(f"{section.text}\n")
    if section.grid is not None:
        parts.append(render_table(section.grid.head, section.grid.lines))
    parts.append(render_table(_HEAD, map(_cells, section.rows)))
    notes = [f"- {row.name}: {row.note}" for row in section.rows if row.note]
    if notes:
        parts.append("\n".join(notes) + "\n")
    if section.machine:
        parts.append(f"These figures were measured on {section.machine}.\n")
    return "\n".join(parts)


def render_table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    rendered = ["| " + " | ".join(line) + " |" for line in (head, *lines)]
    return "\n".join([rendered[0], "|" + " --- |" * len(head), *rendered[1:]]) + "\n"
