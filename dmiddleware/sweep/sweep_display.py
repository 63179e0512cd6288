"""Showing a sweep: a live table in a terminal, lines elsewhere."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final, Self

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dmiddleware.launch.output import SteadyStream
from dmiddleware.process.closing import Closing
from dmiddleware.process.terminal import can_redraw
from dmiddleware.runs.statistics import short
from dmiddleware.sweep.sweep_plan import SweepPlan

__all__ = ["RunView", "SweepDisplay"]

_EVERY_S: Final = 0.25
_STATES: Final = {
    "failed": "bold red",
    "running": "green",
    "interrupted": "yellow",
    "done": "",
    "pruned": "dim",
    "waiting": "dim",
}
"""The states, those first that matter most where not all runs can be shown, and their styles."""
_MOST_SIDES: Final = 8
_SPARE_LINES: Final = 8


class RunView(msgspec.Struct, frozen=True):
    """The state of a run, to show.

    Attributes:
        name: its name.
        state: its state.
        at: how far it is.
        last: its last evaluation; None: it has none.
        score: the mean of the last tenth of its evaluations; None: it has none.
        text: its error; empty: none.
        output: the file with its output.
        took_s: seconds that it took; None: unknown.
    """

    name: str
    state: str
    at: str = ""
    last: float | None = None
    score: float | None = None
    text: str = ""
    output: str = ""
    took_s: float | None = None


class SweepDisplay(Closing):
    """Shows the runs of a sweep, in the order in which they were shown first.

    Args:
        stream: where to print.
    """

    def __init__(self, stream: SteadyStream | None = None) -> None:
        file = stream or SteadyStream(sys.stdout)
        self._console = Console(
            file=file,  # type: ignore[arg-type]
            force_terminal=can_redraw(file),
            highlight=False,
            soft_wrap=not file.isatty(),
        )
        self._views: dict[str, RunView] = {}
        self._noted: set[str] = set()
        self._next = 0.0
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def close(self) -> None:
        """End the live table, and leave what it shows."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def failed(self) -> list[RunView]:
        """The runs that have failed."""
        return [view for view in self._views.values() if view.state == "failed"]

    def note(self, text: str) -> None:
        """Show a message."""
        self._console.print(Text(f"[sweep] {text}"))

    def note_once(self, kind: str, text: str) -> None:
        """Show a message, unless there was one of its kind."""
        if kind not in self._noted:
            self._noted.add(kind)
            self.note(text)

    def show(self, view: RunView) -> None:
        """Show the present state of a run."""
        before = self._views.get(view.name)
        self._views[view.name] = view
        if self._live is not None:
            if view.state == "failed" and before is not None and before.state != "failed":
                self.note(_line(view))
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + _EVERY_S
                self._draw()
        elif view.state != "waiting" and (before is None or before.state != view.state):
            self.note(_line(view))

    def conclude(self, folder: Path, plan: SweepPlan, found: str) -> None:
        """Show what the runs came to, what the sweep has found, and what to do next."""
        self._draw()
        self.close()  # what follows comes below the table
        counts = Counter(view.state for view in self._views.values())
        counted = ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
        self.note(f"{folder}: {counted}")
        for view in self.failed:
            self.note(f"failed: {view.name}: {view.text} (see {view.output})")
        if found:
            self.note(found)
        if counts["waiting"] or counts["interrupted"]:
            self.note(f"to continue: ditask sweep --resume {shlex.quote(str(folder))}")
        elif counts["done"]:
            self.note(f"next: {_comparison(folder, plan)}")

    def _draw(self) -> None:
        if self._live is not None:
            n_rows = max(3, self._console.height - _SPARE_LINES)
            self._live.update(sweep_table(list(self._views.values()), n_rows), refresh=True)


def sweep_table(views: list[RunView], n_rows: int) -> Table:
    """Return a table of runs, for rich.

    Args:
        views: the runs.
        n_rows: how many to show; those that run or have failed come before the others.
    """
    ranks = list(_STATES)
    chosen = sorted(views, key=lambda view: ranks.index(view.state))[:n_rows]
    names = {view.name for view in chosen}
    table = Table(expand=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for head in ("at", "last evaluation", "score"):
        table.add_column(head, justify="right", no_wrap=True)
    for view in views:
        if view.name in names:
            state = Text(view.state, style=_STATES[view.state])
            table.add_row(view.name, state, view.at, _figure(view.last), _figure(view.score))
    if len(views) > len(chosen):
        table.caption = f"and {len(views) - len(chosen)} more runs"
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else short(value)


def _line(view: RunView) -> str:
    took = "" if view.took_s is None else f" in {view.took_s:,.0f} s"
    at = f", {view.at}" if view.at else ""
    result = "" if view.last is None else f", last evaluation {short(view.last)}"
    score = "" if view.score is None or view.state == "running" else f", score {short(view.score)}"
    text = f": {view.text}" if view.text else ""
    return f"{view.name}: {view.state}{took}{at}{result}{score}{text}"


def _comparison(folder: Path, plan: SweepPlan) -> str:
    """Return the command that compares the settings over their seeds."""
    sides = {}
    for run in plan.grid_runs(folder):
        if seed := next((value for name, value in run.values.items() if name == "seed"), None):
            pattern = run.name.replace(f"seed-{seed}", "seed-*")
            sides[pattern] = f"{pattern.replace('_seed-*', '')}={folder}/{pattern}"
    if 1 < len(sides) <= _MOST_SIDES:
        return f"ditask compare {shlex.join(sides.values())}"
    return f"ditask report {shlex.quote(str(folder))}"
