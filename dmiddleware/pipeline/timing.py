"""Timing: the time that each middleware takes, and traces for Perfetto and chrome://tracing."""

from __future__ import annotations

import errno
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dmiddleware.best_effort import BestEffort
from dmiddleware.metric_names import as_metric_name
from dmiddleware.pipeline.clock import Clock, SystemClock
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.describe import aligned
from dmiddleware.pipeline.middleware import Middleware, middleware_name
from dmiddleware.pipeline.onion import around
from dmiddleware.process.closing import Closing

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["StepTimer", "Timing", "TraceFile", "merge_traces"]

C = TypeVar("C", bound=Context)


@dataclass(slots=True)
class Timing:
    """The time that one middleware has taken so far.

    Attributes:
        name: the middleware.
        calls: how many times it ran.
        forward_s: total seconds on the way forward.
        back_s: total seconds on the way back.
    """

    name: str
    calls: int = 0
    forward_s: float = 0.0
    back_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds in both directions."""
        return self.forward_s + self.back_s

    @property
    def mean_s(self) -> float:
        """Mean seconds of a call, in both directions."""
        return self.total_s / self.calls if self.calls else 0.0


class StepTimer:
    """Measures the time that each middleware takes; a wrapper for ``task.use_wrapper``.

    Without it, nothing is measured. In a ``parallel``, the seconds of all branches add up.
    Middleware created in each step, such as a lambda passed to ``task.forward``, share a row.

    Args:
        log: also log the seconds of each middleware as the metric ``time_s/<name>``, for loggers
            that come later in the chain.
        clock: measures the time.

    Example:
        >>> timer = StepTimer()
        >>> with Task(Context()) as task:  # doctest: +SKIP
        ...     task.use_wrapper(timer).use(read).use(write).run(max_step=100)
        >>> print(timer)  # doctest: +SKIP
    """

    def __init__(self, *, log: bool = False, clock: Clock | None = None) -> None:
        self._log = log
        self._clock = clock if clock is not None else SystemClock()
        self._rows: list[_Row] = []
        self._lock = threading.Lock()

    def __call__(self, mw: Middleware[C]) -> Middleware[C]:
        """Return the middleware with its time measured."""
        timing = self._timing_of(mw)

        @contextmanager
        def measure(ctx: Context, direction: str) -> Iterator[None]:
            begin = self._clock.now()
            try:
                yield
            finally:
                seconds = self._clock.now() - begin
                with self._lock:  # the same middleware may be in two branches
                    if direction == "forward":
                        timing.calls += 1
                        timing.forward_s += seconds
                    else:
                        timing.back_s += seconds
                if self._log:
                    name = as_metric_name(f"time_s/{timing.name}")
                    ctx.log(name, ctx.logged.get(name, 0.0) + seconds)

        return around(mw, measure)

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The times of all middleware, in the order of the chain."""
        return tuple(row.timing for row in self._rows)

    def reset(self) -> None:
        """Set all times to zero, for example after a warm-up."""
        for timing in self.timings:
            timing.calls, timing.forward_s, timing.back_s = 0, 0.0, 0.0

    def __str__(self) -> str:
        return "\n".join(aligned([_HEADINGS, *self._cells()], str.rjust))

    def __rich__(self) -> Table:
        # rich takes longer to import than the whole pipeline, and few runs print this table.
        from rich.table import Table

        table = Table(title="time in each middleware")
        for number, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="right" if number else "left")
        for line in self._cells():
            table.add_row(*line)
        return table

    def _cells(self) -> list[tuple[str, ...]]:
        whole = sum(timing.total_s for timing in self.timings) or 1.0
        return [
            (
                timing.name,
                str(timing.calls),
                f"{timing.mean_s * 1e3:.3f}",
                f"{timing.forward_s:.3f}",
                f"{timing.back_s:.3f}",
                f"{timing.total_s / whole:.1%}",
            )
            for timing in self.timings
        ]

    def _timing_of(self, mw: Middleware[C]) -> Timing:
        with self._lock:
            for row in self._rows:
                if row.middleware() is mw:
                    return row.timing
            name, code = middleware_name(mw), getattr(mw, "__code__", None)
            for row in self._rows:
                # A lambda that a middleware creates and calls in each step.
                if row.middleware() is None and (row.name, row.code) == (name, code):
                    row.middleware = _reference(mw)
                    return row.timing
            same = sum(row.name == name for row in self._rows)
            timing = Timing(name if not same else f"{name}#{same + 1}")
            self._rows.append(_Row(_reference(mw), name, code, timing))
            return timing


@dataclass(slots=True)
class _Row:
    """The times of one middleware: of those with one name and one code, one that is alive."""

    middleware: Callable[[], object]
    name: str
    code: object
    timing: Timing


def _reference(mw: object) -> Callable[[], object]:
    """Return a function that returns the middleware while it is alive, and then None."""
    try:
        return weakref.ref(mw)
    except TypeError:
        return lambda: mw


_END = b"\n]\n"
_HEADINGS = ("middleware", "calls", "mean ms", "forward s", "back s", "share")


class TraceFile(Closing):
    """Writes a trace of when each middleware ran; a wrapper for ``task.use_wrapper``.

    The file is complete JSON after each flush, also when the run ends with an error. Open it at
    https://ui.perfetto.dev or chrome://tracing. Times are wall-clock times, and the traces of
    several processes can be merged (:func:`merge_traces`).

    Spans that cannot be written, because the disk is full for example, are left out, with a
    warning.

    Format: "Trace Event Format", the Chromium project; JSON array form.

    Args:
        path: the file; its directory must exist.
        process_name: the name of this process in the trace.
        flush_every: how many spans are buffered before they are written.
        clock: measures the time.

    Raises:
        OSError: if the file cannot be created.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        process_name: str = "task",
        flush_every: int = 1000,
        clock: Clock | None = None,
    ) -> None:
        self.path = Path(path)
        self._clock = clock if clock is not None else SystemClock()
        self._start_s = self._clock.wall() - self._clock.now()
        self._flush_every = flush_every
        self._pid = os.getpid()
        self._threads: set[int] = set()
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._best_effort = BestEffort(f"write the trace {self.path}")
        self._file: FileIO | None = self.path.open("w+b", buffering=0)
        self._file.write(b"[" + _END)
        self._is_empty = True
        self._events.append(self._name_of("process_name", process_name, tid=0))
        self.flush()

    def __call__(self, mw: Middleware[C]) -> Middleware[C]:
        """Return the middleware with its calls traced."""
        name = middleware_name(mw)

        @contextmanager
        def trace(ctx: Context, direction: str) -> Iterator[None]:
            label = name if direction == "forward" else f"{name} (back)"
            with self.span(label, step=ctx.total_step):
                yield

        return around(mw, trace)

    @contextmanager
    def span(self, name: str, **details: object) -> Iterator[None]:
        """Trace the code of a ``with`` block.

        Args:
            name: its name in the trace.
            details: shown with it; values that JSON can represent.
        """
        begin = self._clock.now()
        try:
            yield
        finally:
            self._add(name, begin, self._clock.now(), details)

    def flush(self) -> None:
        """Write the buffered spans; the file is complete JSON afterwards.

        Raises:
            OSError: if the file cannot be written.
        """
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write the rest and close the file; may be called twice."""
        with self._lock:
            if self._file is not None:
                with self._best_effort:
                    self._write()
                self._file.close()
                self._file = None

    def _add(self, name: str, begin: float, end: float, details: dict[str, object]) -> None:
        tid = threading.get_native_id()
        event = {
            "name": name,
            "ph": "X",
            "ts": round((self._start_s + begin) * 1e6, 3),
            "dur": round((end - begin) * 1e6, 3),
            "pid": self._pid,
            "tid": tid,
            "args": details,
        }
        with self._lock:
            if tid not in self._threads:
                self._threads.add(tid)
                thread = threading.current_thread().name
                self._events.append(self._name_of("thread_name", thread, tid=tid))
            self._events.append(event)
            if len(self._events) >= self._flush_every:
                with self._best_effort:
                    self._write()

    def _name_of(self, what: str, name: str, *, tid: int) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": self._pid, "tid": tid, "args": {"name": name}}

    def _write(self) -> None:
        """Insert the events before the closing bracket; the caller holds the lock."""
        if self._file is None or not self._events:
            return
        text = ",\n".join(json.dumps(event) for event in self._events)
        self._events.clear()
        data = f"{'' if self._is_empty else ','}\n{text}".encode() + _END
        end = self._file.seek(-len(_END), os.SEEK_END)
        if self._file.write(data) != len(data):
            self._file.truncate(end)
            self._file.seek(end)
            self._file.write(_END)  # this had room before
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._is_empty = False


def merge_traces(paths: Sequence[str | Path], target: str | Path) -> None:
    """Merge the traces of several processes into one file, on one timeline.

    Raises:
        OSError: if a file cannot be read, or the target cannot be written.
        ValueError: if a file is not a trace.
    """
    events: list[Any] = []
    for path in paths:
        part = json.loads(Path(path).read_text())
        if not isinstance(part, list):
            raise ValueError(f"{path} is not a trace: it has a {type(part).__name__}, not a list")
        events += part
    Path(target).write_text(json.dumps(events))
