"""Watch a run in the terminal: its counters, and the course of its metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dmiddleware.runs.metrics_file import METRICS_FILE, read_rows
from dmiddleware.runs.record import COUNTERS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["sparkline", "view", "watch"]

_BARS: Final = "▁▂▃▄▅▆▇█"
_WIDTH: Final = 40


def watch(run: str | Path, console: Console, *, every_s: float = 1.0) -> None:
    """Show a run until it ends.

    On a terminal the view is renewed in place; elsewhere it is printed once.

    Args:
        run: the run's folder.
        console: where to show it.
        every_s: seconds between two views.

    Raises:
        RunFolderError: if the folder has no metrics.
    """
    from rich.live import Live

    folder = Path(run)
    if not console.is_terminal:
        console.print(view(folder))
        return
    with Live(view(folder), console=console, auto_refresh=False) as live:
        while _end_of(folder) is None:
            time.sleep(every_s)
            live.update(view(folder), refresh=True)


def view(run: Path) -> RenderableType:
    """Return the present state of a run, for rich: its counters, and a line for each metric.

    Raises:
        RunFolderError: if the folder has no metrics.
    """
    from rich.console import Group
    from rich.table import Table

    rows, skipped = read_rows(run / METRICS_FILE)
    last = {name: value for row in rows[-1:] for name, value in row.items() if value is not None}
    counters = [f"{last[name]:,} {word}" for name, word in COUNTERS.items() if name in last]
    if "time_s" in last:
        counters.append(f"{last['time_s']:,.0f} s")
    table = Table("metric", "last", "course")
    for name, values in _columns(rows):
        table.add_row(name, f"{values[-1]:.4g}", sparkline(values))
    end = _end_of(run)
    if end is None:
        age_s = max(0.0, time.time() - (run / METRICS_FILE).stat().st_mtime)
        end = f"running, or killed; the last metrics are {age_s:,.0f} s old"
    return Group(f"{run}: {', '.join(counters)}", table, *filter(None, [skipped]), end)


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Return a row of bars for numbers, each the mean of an equal part of them."""
    n = min(width, len(values))
    parts = [values[at * len(values) // n : (at + 1) * len(values) // n] for at in range(n)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[math.floor((mean - low) * scale)] for mean in means)


def _columns(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    for name in sorted({name for row in rows for name in row if "/" in name}):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            yield name, values


def _end_of(run: Path) -> str | None:
    """Say how a run ended; None: it has not, or nobody wrote it down."""
    try:
        state = json.loads((run / "final_ctx.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return f"ended: {state.get('stop_reason')}" if isinstance(state, dict) else None
