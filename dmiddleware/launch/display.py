"""Show the progress of a run: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Final, Protocol, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dmiddleware.launch.child import Child
from dmiddleware.launch.output import SteadyStream
from dmiddleware.process.terminal import can_redraw

__all__ = [
    "BothDisplays",
    "Display",
    "LiveDisplay",
    "PlainDisplay",
    "choose_display",
    "make_table",
]

_PLAIN_EVERY_S: Final = 10.0
_LIVE_EVERY_S: Final = 0.25
_PHASE_STYLE: Final = {
    "starting": "yellow",
    "running": "green",
    "finished": "dim",
    "failed": "bold red",
}


class Display(Protocol):
    """Shows the progress of the run."""

    def line(self, child: Child, text: str) -> None:
        """Show a line that a node printed."""
        ...

    def note(self, text: str) -> None:
        """Show a message of the launcher."""
        ...

    def update(self, children: Sequence[Child]) -> None:
        """Show the status of the nodes."""
        ...


def choose_display(stream: SteadyStream) -> LiveDisplay | PlainDisplay:
    """Return a live table for a terminal, plain lines for a file or a pipe."""
    console = Console(file=stream, force_terminal=can_redraw(stream))  # type: ignore[arg-type]
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(stream)


class _Rates:
    """Throughput of each node, between the last two updates that are a second or more apart."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last: dict[int, tuple[float, Mapping[str, int]]] = {}
        self._rates: dict[int, Mapping[str, float]] = {}

    def of(self, child: Child) -> Mapping[str, float]:
        """Return the growth of each counter per second, by the counter's name."""
        counters, key, now = child.status.counters, child.plan.node_id, self._now()
        since, before = self._last.get(key, (now, counters))
        if now - since >= 1.0:
            self._rates[key] = {
                name: max(0.0, (count - before.get(name, 0)) / (now - since))
                for name, count in counters.items()
            }
        if now - since >= 1.0 or key not in self._last:
            self._last[key] = (now, dict(counters))
        return self._rates.get(key, {})


class PlainDisplay:
    """Prints each line with its node, and the status of all nodes every ten seconds.

    Args:
        stream: where to print.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self, stream: TextIO | SteadyStream, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._now = now
        self._next = now() + _PLAIN_EVERY_S
        self._rates = _Rates(now)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def line(self, child: Child, text: str) -> None:
        """Show a line that a node printed."""
        self._print(f"[node {child.plan.node_id}] {text}")

    def note(self, text: str) -> None:
        """Show a message of the launcher."""
        self._print(f"[ditask] {text}")

    def update(self, children: Sequence[Child]) -> None:
        """Show the status of the nodes, at most every ten seconds."""
        if self._now() < self._next:
            return
        self._next = self._now() + _PLAIN_EVERY_S
        for child in children:
            # A status after a node's final summary would only distract from it.
            if child.alive and not child.status.reason:
                self.note(_status_line(child, self._rates.of(child)))

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")


class LiveDisplay:
    """A live table of the nodes, below the lines that they print.

    Args:
        console: where to draw.
        now: a monotonic clock, in seconds.
    """

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._rates = _Rates(now)
        self._now = now
        self._next = now()
        self._children: Sequence[Child] = ()
        # Without a thread of its own, whose errors nobody would handle.
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._draw()
        self._live.stop()

    def line(self, child: Child, text: str) -> None:
        """Show a line that a node printed, above the table."""
        self._console.print(Text(f"node {child.plan.node_id} │ ", style="cyan") + Text(text))

    def note(self, text: str) -> None:
        """Show a message of the launcher, above the table."""
        self._console.print(Text(f"ditask │ {text}", style="bold"))

    def update(self, children: Sequence[Child]) -> None:
        """Redraw the table, at most four times a second."""
        self._children = children
        if self._now() >= self._next:
            self._next = self._now() + _LIVE_EVERY_S
            self._draw()

    def _draw(self) -> None:
        self._live.update(make_table(self._children, self._rates.of), refresh=True)


class BothDisplays:
    """Shows a run twice.

    Args:
        first: one display.
        second: the other.
    """

    def __init__(self, first: Display, second: Display) -> None:
        self._displays = first, second

    def line(self, child: Child, text: str) -> None:
        """Show a line that a node printed."""
        for display in self._displays:
            display.line(child, text)

    def note(self, text: str) -> None:
        """Show a message of the launcher."""
        for display in self._displays:
            display.note(text)

    def update(self, children: Sequence[Child]) -> None:
        """Show the status of the nodes."""
        for display in self._displays:
            display.update(children)


def make_table(children: Sequence[Child], rates: Callable[[Child], Mapping[str, float]]) -> Table:
    """Return a table with one row per node: its status, throughput, and stop reason or error."""
    counters = list(dict.fromkeys(name for child in children for name in child.status.counters))
    table = Table(expand=False, header_style="bold")
    for name in ("node", "roles", "status", "peers"):
        table.add_column(name)
    for name in (
        "step",
        *chain.from_iterable((counter, f"{counter}/s") for counter in counters),
        "blocked",
    ):
        table.add_column(name, justify="right")
    table.add_column("stop reason", overflow="fold")
    for child in children:
        status, rate = child.status, rates(child)
        phase = _phase(child)
        counts = (
            (f"{status.counters.get(name, 0):,}", f"{rate.get(name, 0.0):,.0f}")
            for name in counters
        )
        table.add_row(
            str(child.plan.node_id),
            "+".join(child.plan.roles) or ("" if child.plan.decides else "all"),
            Text(phase, style=_PHASE_STYLE.get(phase.split(" ")[0], "")),
            str(len(status.peers)),
            f"{status.step:,}",
            *chain.from_iterable(counts),
            f"{status.blocked_s:.1f} s",
            Text(status.error or status.reason),
        )
    return table


def _phase(child: Child) -> str:
    if child.restart_at is not None:
        return "failed (restarting)"
    if child.exit_code is not None:
        return "finished" if child.exit_code == 0 else f"failed ({child.exit_code})"
    return child.status.phase + (f" (restart {child.restarts})" if child.restarts else "")


def _status_line(child: Child, rates: Mapping[str, float]) -> str:
    status = child.status
    counts = "".join(
        f"{count} {name} ({rates.get(name, 0.0):.0f}/s), "
        for name, count in status.counters.items()
    )
    return (
        f"{child.name}: {_phase(child)}, step {status.step}, {counts}"
        f"blocked {status.blocked_s:.1f} s, peers: {len(status.peers)}"
    )
