"""Running the runs of a sweep, some at a time, until all have ended or a signal stops them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from dmiddleware.launch.leftovers import (
    ProcessSearch,
    end_processes,
    marked_environment,
    wait_until,
)
from dmiddleware.process.signals import HeldSignals
from dmiddleware.registry import nearest
from dmiddleware.runs.record import no_values_of
from dmiddleware.runs.resuming import FOLDER_VARIABLE, RESUME_VARIABLE, has_snapshot
from dmiddleware.sweep.metrics_tail import MetricsTail
from dmiddleware.sweep.sweep_display import RunView, SweepDisplay
from dmiddleware.sweep.sweep_plan import (
    TAIL,
    SweepPlan,
    SweptRun,
    last_line,
    state_of,
    write_file,
)
from dmiddleware.sweep.swept_process import SweptOrder
from dmiddleware.sweep.warnings_tail import WarningsTail

__all__ = ["GridSource", "Source", "run_sweep"]

_START: Final = "from dmiddleware.sweep.swept_process import main; main()"
_POLL_S: Final = 0.1
_METRICS_EVERY_S: Final = 1.0
_KILLED_S: Final = 10.0
_LEFT_S: Final = 0.2


class Source(Protocol):
    """Chooses what to run next."""

    def known(self) -> list[SweptRun]:
        """Return the runs that have been chosen before."""
        ...

    def next(self) -> SweptRun | None:
        """Return the next run to start; None: there is none."""
        ...

    def progressed(self, run: SweptRun, values: list[float]) -> bool:
        """Take the evaluations of a run so far, and return whether to stop it early."""
        ...

    def ended(self, run: SweptRun, score: float | None) -> None:
        """Take the end of a run, whose folder says how it ended."""
        ...

    def conclusion(self) -> str:
        """Return what the sweep has found; empty: nothing to tell."""
        ...


class GridSource:
    """The runs of a grid that are not done, in order; those that have failed are tried again.

    Args:
        runs: all runs.
    """

    def __init__(self, runs: list[SweptRun]) -> None:
        self._runs = runs
        self._left = [run for run in runs if state_of(run) != "done"]

    def known(self) -> list[SweptRun]:
        """Return all runs."""
        return self._runs

    def next(self) -> SweptRun | None:
        """Return the next run to start."""
        return self._left.pop(0) if self._left else None

    def progressed(self, run: SweptRun, values: list[float]) -> bool:
        """Let every run end by itself."""
        return False

    def ended(self, run: SweptRun, score: float | None) -> None:
        """Learn nothing from the end of a run."""

    def conclusion(self) -> str:
        """Return nothing: ``ditask compare`` tells it."""
        return ""


class _Running:
    """A run whose processes run.

    Args:
        plan: the plan of the sweep.
        run: the run.
    """

    def __init__(self, plan: SweepPlan, run: SweptRun) -> None:
        self.run = run
        self.tail = MetricsTail(run.folder, plan.metric)
        self.started_at = self.look_at = time.monotonic()
        self._stop_s = plan.stop_s
        self._signal_at: float | None = None
        self._n_signals = 0
        resumes = has_snapshot(run.folder)
        if not resumes:
            shutil.rmtree(run.folder, ignore_errors=True)  # of a run that was interrupted
        run.folder.mkdir(parents=True, exist_ok=True)
        run.ended.unlink(missing_ok=True)
        self.warnings = WarningsTail(run.output)
        folder = str(run.folder.resolve())
        variables = {FOLDER_VARIABLE: folder, **({RESUME_VARIABLE: folder} if resumes else {})}
        self._reason_fd, reason_fd = os.pipe()
        os.set_blocking(self._reason_fd, False)
        with run.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=plan.directory,
                env={**marked_environment(plan.mark), **variables},
                pass_fds=(reason_fd,),
                start_new_session=True,
            )
        os.close(reason_fd)
        order = SweptOrder(plan.command(run), str(run.ended.resolve()), reason_fd)
        with contextlib.suppress(BrokenPipeError):
            self._send(msgspec.json.encode(order) + b"\n")

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        if self._process.poll() is None:
            return False
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        return True

    def reason(self) -> str:
        """Return why the run, which has ended, has failed; empty: it has not, or was killed."""
        try:
            return os.read(self._reason_fd, 4 * TAIL).decode(errors="replace")
        except BlockingIOError:  # a process that the run has left behind has it open
            return ""
        finally:
            os.close(self._reason_fd)

    def stop(self) -> None:
        """Ask the run to stop in order; later calls insist once its time is up."""
        now = time.monotonic()
        if self._signal_at is not None and now < self._signal_at:
            return
        # The second signal kills the processes of the run, whose launcher then ends.
        self._signal_at = now + (_KILLED_S if self._n_signals else self._stop_s)
        self._n_signals += 1
        self._process.send_signal(signal.SIGKILL if self._n_signals > 2 else signal.SIGINT)

    def kill(self) -> None:
        """End the processes of the run at once."""
        self._signal_at, self._n_signals = None, max(1, self._n_signals)
        self.stop()


def run_sweep(
    folder: Path, plan: SweepPlan, source: Source, display: SweepDisplay, *, jobs: int
) -> int:
    """Run what has not ended, and return the exit code: that of ``ditask``.

    Args:
        folder: the folder of the sweep.
        plan: its plan.
        source: chooses the runs.
        display: shows them.
        jobs: how many run at a time.

    Raises:
        SystemExit: with 128 and the number of the signal that has stopped the sweep, except for
            SIGINT.
    """
    _end_leftovers(plan, display)
    for run in source.known():
        display.show(_view(run, MetricsTail(run.folder, plan.metric)))
    try:
        with HeldSignals() as signals:
            _run_all(plan, source, display, signals, jobs=jobs)
            display.conclude(folder, plan, source.conclusion())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 1 if display.failed else 0


def _run_all(
    plan: SweepPlan, source: Source, display: SweepDisplay, signals: HeldSignals, *, jobs: int
) -> None:
    running: list[_Running] = []
    with _ended_at_last(running):
        is_told = False
        while True:
            while not signals.reason and len(running) < jobs and (run := source.next()):
                process = _Running(plan, run)
                running.append(process)
                display.show(_view(run, process.tail, "running"))
            if not running:
                return
            if signals.reason and not is_told:
                is_told = True
                display.note(f"{signals.reason}; stopping the runs")
            for process in list(running):
                if signals.reason or process.run.pruned.exists():
                    process.stop()
                if process.has_ended:
                    running.remove(process)
                    _conclude(process, plan, source, display, is_stopped=bool(signals.reason))
                else:
                    _follow(process, plan, source, display)
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _ended_at_last(running: list[_Running]) -> Iterator[None]:
    """Leave no process behind, whatever ends the block: a second Ctrl-C, or a full disk."""
    try:
        yield
    finally:
        for process in running:
            process.kill()
        wait_until(lambda: all([process.has_ended for process in running]), _KILLED_S)


def _follow(one: _Running, plan: SweepPlan, source: Source, display: SweepDisplay) -> None:
    """Look at the metrics of a run, at most once a second."""
    now = time.monotonic()
    if now < one.look_at:
        return
    one.look_at = now + _METRICS_EVERY_S
    one.tail.update()
    display.show(_view(one.run, one.tail, "running"))
    _tell_warnings(one, display)
    if nearest(plan.metric, one.tail.names):
        _tell_missing_metric(one.tail, plan, display)
    if source.progressed(one.run, one.tail.values) and not one.run.pruned.exists():
        write_file(one.run.pruned, b"")


def _tell_warnings(one: _Running, display: SweepDisplay) -> None:
    """Show the warnings of a run, without those that another run has had."""
    for warning in one.warnings.update():
        display.note_once(warning, f"{one.run.name}: {warning}")


def _conclude(
    one: _Running, plan: SweepPlan, source: Source, display: SweepDisplay, *, is_stopped: bool
) -> None:
    tail = MetricsTail(one.run.folder, plan.metric)  # a run that resumed may have cut its file
    took_s = time.monotonic() - one.started_at
    view = _view(one.run, tail)
    if view.state == "done":
        _tell_missing_metric(tail, plan, display)
    if tail.n_skipped:
        display.note(
            f"{one.run.name}: skipped {tail.n_skipped} lines of its metrics, which are cut or "
            "damaged"
        )
    source.ended(one.run, tail.score)
    _tell_warnings(one, display)
    reason = one.reason()
    if view.state == "interrupted" and not is_stopped:
        view = msgspec.structs.replace(view, state="failed", text=last_line(one.run))
    if view.state == "failed" and reason:
        view = msgspec.structs.replace(view, text=reason)
    display.show(msgspec.structs.replace(view, took_s=took_s))


def _tell_missing_metric(tail: MetricsTail, plan: SweepPlan, display: SweepDisplay) -> None:
    """Say, once for the sweep, that a run has no values of the metric that gives the score."""
    if not tail.values:
        display.note_once("metric", f"--metric: {no_values_of(plan.metric, tail.names)}")


def _view(run: SweptRun, tail: MetricsTail, state: str = "") -> RunView:
    tail.update()
    current = state or state_of(run)
    return RunView(
        run.name,
        current,
        at=tail.at,
        last=tail.values[-1] if tail.values else None,
        score=tail.score,
        text=last_line(run) if current == "failed" else "",
        output=str(run.output),
    )


def _end_leftovers(plan: SweepPlan, display: SweepDisplay) -> None:
    """Wait for processes of a sweep that was killed, which are stopping, and end the others."""
    search = ProcessSearch((plan.mark,))
    if search.running():
        display.note("waiting until the runs of the sweep that was killed have stopped")
        wait_until(lambda: not search.running(), plan.stop_s, poll_s=_LEFT_S)
        end_processes((plan.mark,))
