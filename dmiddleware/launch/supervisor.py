"""Watching over the processes of a run: start, restart, end, and what they say."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Final, Protocol

import msgspec

from dmiddleware.launch.plan import FailurePolicy, NodePlan
from dmiddleware.launch.status import NodeConfig, NodeStatus

__all__ = ["Child", "Display", "Supervisor", "SupervisorOptions"]

_logger = logging.getLogger("ditask")

KILL_AFTER_S: Final = 20.0
SETTLE_S: Final = 5.0
"""So long after the run's end each process must have heard of it; the others were cut off."""
DRAIN_S: Final = 1.0
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143


class Display(Protocol):
    """Shows how the run goes."""

    def line(self, child: Child, text: str) -> None:
        """Show a line that a process wrote."""
        ...

    def note(self, text: str) -> None:
        """Show a line of the launcher's own."""
        ...

    def update(self, children: Sequence[Child]) -> None:
        """Show where the processes stand."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """How processes are started and what happens when one fails.

    Attributes:
        on_failure: ``abort``: end all; ``continue``: go on without it; ``restart``: start it anew.
        max_restarts: how often one process is started again at the most.
        startup_interval_s: pause between two starts.
        kill_after_s: how long processes may take to end when asked.
    """

    on_failure: FailurePolicy = "abort"
    max_restarts: int = 3
    startup_interval_s: float = 0.0
    kill_after_s: float = KILL_AFTER_S


@dataclass(slots=True)
class Child:
    """One process, as the launcher sees it.

    Attributes:
        plan: what it is to do.
        process: the operating system's process; None before the start.
        status: what it last said of itself.
        restarts: how often it was started again.
        exit_code: as it ended; None while it runs.
        restart_at: when it is to be started again; None: it is not.
        asked_at: when it was told, by the launcher, that the run is over; None: it was not.
        last_lines: what it wrote last.
    """

    plan: NodePlan
    process: subprocess.Popen[bytes] | None = None
    status: NodeStatus = field(default_factory=lambda: NodeStatus(phase="starting"))
    restarts: int = 0
    exit_code: int | None = None
    restart_at: float | None = None
    asked_at: float | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=50))

    @property
    def name(self) -> str:
        """The node id and its roles, to be shown."""
        return f"node {self.plan.node_id} ({'+'.join(self.plan.roles) or 'all roles'})"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.exit_code is None

    @property
    def learns(self) -> bool:
        """Whether it plays the role without which no run goes well."""
        return not self.plan.roles or "learner" in self.plan.roles

    @property
    def saw_the_end(self) -> bool:
        """Whether it has ended together with the whole run."""
        if self.exit_code is None or not self.status.run_is_over:
            return False
        # One that was told and failed may have been at work again, in a task after that one.
        return self.exit_code == 0 or bool(self.status.reason)


class Supervisor:
    """Starts the processes of a run on this host and watches over them until all have ended.

    Args:
        configs: what each process is told; ``status_fd`` is filled in here.
        plans: what each is to do, in the same order.
        options: what happens when one fails.
        display: shows how it goes.
        now: returns seconds that do not go back.
    """

    def __init__(
        self,
        configs: Sequence[NodeConfig],
        plans: Sequence[NodePlan],
        *,
        options: SupervisorOptions,
        display: Display,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configs = {config.node_id: config for config in configs}
        self.children = [Child(plan) for plan in plans]
        self._options = options
        self._display = display
        self._now = now
        self._selector = selectors.DefaultSelector()
        self._stopping_since: float | None = None
        self._killed = False
        self._signal = 0
        self._asked_again = False
        self._ended_since: float | None = None
        self._failed: list[Child] = []
        self._too_late: list[Child] = []

    def run(self) -> int:
        """Start everything, wait until all has ended, and return the exit code.

        Returns:
            0 if all went well; 130 or 143 after Ctrl-C or SIGTERM; otherwise 1.
        """
        with self._selector, self._signals():
            try:
                self._start_all()
                while any(child.alive or child.restart_at is not None for child in self.children):
                    self._step()
            finally:
                self._kill_all()
        return self._exit_code()

    # Starting ---------------------------------------------------------------------------------

    def _start_all(self) -> None:
        for position, child in enumerate(self.children):
            if position and self._options.startup_interval_s:
                self._watch_for(self._options.startup_interval_s)
            if self._stopping_since is None and not self._signal:
                self._start(child)

    def _start(self, child: Child) -> None:
        config = self._configs[child.plan.node_id]
        read_end, write_end = os.pipe()
        try:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "dmiddleware.launch.node_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                # Ctrl-C is for the launcher alone: it ends the processes in order.
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        child.exit_code, child.restart_at = None, None
        child.status = NodeStatus(phase="starting")
        told = msgspec.structs.replace(config, status_fd=write_end)
        assert child.process.stdin is not None and child.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.write(msgspec.json.encode(told) + b"\n")
            child.process.stdin.flush()
        self._watch(child, child.process.stdout, self._on_output)
        self._watch(child, os.fdopen(read_end, "rb", buffering=0), self._on_status)

    def _watch(
        self, child: Child, stream: IO[bytes], handler: Callable[[Child, bytes], None]
    ) -> None:
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, _Reader(child, handler))

    # Watching ---------------------------------------------------------------------------------

    def _watch_for(self, duration_s: float) -> None:
        until = self._now() + duration_s
        while (left := until - self._now()) > 0 and self._stopping_since is None:
            self._step(min(left, 0.2))

    def _step(self, timeout_s: float = 0.2) -> None:
        for key, _ in self._selector.select(timeout_s):
            self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        self._obey()
        for child in self.children:
            self._reap(child)
            if child.restart_at is not None and self._now() >= child.restart_at:
                self._start(child)
        self._end_with_the_run()
        self._enforce_deadline()
        self._display.update(self.children)

    def _read(self, stream: IO[bytes], reader: _Reader) -> bool:
        """Read what is there; returns whether there may be more."""
        data: bytes | None = stream.read(1 << 16)
        if data is None:  # nothing there yet
            return False
        for line in reader.lines(data):
            reader.handler(reader.child, line)
        if not data:
            self._selector.unregister(stream)
            stream.close()
        return bool(data)

    def _on_output(self, child: Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        child.last_lines.append(text)
        self._display.line(child, text)

    def _on_status(self, child: Child, line: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            child.status = msgspec.json.decode(line, type=NodeStatus)

    def _drain(self, child: Child) -> None:
        """Read what a process that has ended wrote last."""
        mine = [key for key in self._selector.get_map().values() if key.data.child is child]
        # What it has started may live on, and write without an end.
        until = self._now() + DRAIN_S
        for key in mine:
            while self._read(key.fileobj, key.data) and self._now() < until:  # type: ignore[arg-type]
                pass

    def _reap(self, child: Child) -> None:
        process = child.process
        if process is None or child.exit_code is not None or process.poll() is None:
            return
        self._drain(child)
        child.exit_code = process.returncode
        if child.exit_code < 0:
            # It could end nothing of what it had started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if child.exit_code != 0 and child not in self._too_late:
            self._on_failure(child)

    def _on_failure(self, child: Child) -> None:
        self._display.note(f"{child.name} {_ended(child.exit_code)}{_last_error(child)}")
        if self._stopping_since is not None:
            self._failed.append(child)
            return
        # A program that ended by saying that the run has failed would only say so again.
        has_crashed = child.status.phase != "finished"
        policy = self._options.on_failure
        if policy == "restart" and has_crashed and child.plan.n_peers and self._is_over():
            self._give_up(child)
            return
        if policy == "restart" and has_crashed and child.restarts < self._options.max_restarts:
            pause_s = min(FIRST_BACKOFF_S * 2**child.restarts, LONGEST_BACKOFF_S)
            child.restarts += 1
            child.restart_at = self._now() + pause_s
            self._display.note(
                f"{child.name} is started again in {pause_s:g} s "
                f"({child.restarts} of {self._options.max_restarts})"
            )
            return
        self._failed.append(child)
        if policy == "continue":
            self._display.note(f"the run goes on without {child.name}")
        else:
            self.stop(f"{child.name} failed")

    # The run's own end ------------------------------------------------------------------------

    def _is_over(self) -> bool:
        """Tell whether who is started now would wait for nothing.

        It would once the learner has done its work, or a process here has ended with the run.
        """
        learners = [child for child in self.children if "learner" in child.plan.roles]
        is_learned = bool(learners) and all(child.exit_code == 0 for child in learners)
        return is_learned or any(child.saw_the_end for child in self.children)

    def _end_with_the_run(self) -> None:
        """When the run is over, spare those who cannot know of it."""
        if self._stopping_since is not None or not self._is_over():
            return
        for child in self.children:
            begins = child.alive and child.restarts > 0 and child.status.step == 0
            if (child.restart_at is not None or begins) and child.asked_at is None:
                self._give_up(child)
        if any(child.saw_the_end for child in self.children):
            self._end_the_cut_off()

    def _give_up(self, child: Child) -> None:
        """Start a process no more, and end it if it was just started."""
        child.restart_at, child.asked_at = None, self._now()
        if child.learns:
            self._display.note(f"{child.name} is not started again: the run is over without it")
            self._failed.append(child)
        else:
            self._display.note(f"{child.name} is not needed any more: the run is over")
            self._too_late.append(child)
        self._send(child, signal.SIGTERM)

    def _end_the_cut_off(self) -> None:
        """Tell those that the run is over whom their peers' word has not reached."""
        if self._ended_since is None:
            self._ended_since = self._now()
        if self._now() - self._ended_since < SETTLE_S:
            return
        for child in self.children:
            if not child.alive or child.status.run_is_over:
                continue
            if child.asked_at is None:
                child.asked_at = self._now()
                self._display.note(f"{child.name} has not heard that the run is over; it ends now")
                if not child.learns:
                    self._too_late.append(child)
                self._send(child, signal.SIGTERM)
            elif not child.learns and self._now() - child.asked_at > self._options.kill_after_s:
                self._send(child, signal.SIGKILL)

    # Ending -----------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Ask all processes to end; those that do not are killed after the deadline."""
        if self._stopping_since is not None:
            return
        self._stopping_since = self._now()
        self._display.note(f"ending the run: {reason}")
        for child in self.children:
            child.restart_at = None
            self._send(child, signal.SIGTERM)

    def _enforce_deadline(self) -> None:
        since = self._stopping_since
        if since is None or self._killed or self._now() - since < self._options.kill_after_s:
            return
        self._killed = True
        for child in self.children:
            if child.alive:
                self._display.note(
                    f"{child.name} did not end within {self._options.kill_after_s:g} s; killed"
                )
        self._kill_all()

    def _kill_all(self) -> None:
        for child in self.children:
            self._send(child, signal.SIGKILL)
        for child in self.children:
            if child.process is not None:
                child.process.wait()

    @staticmethod
    def _send(child: Child, number: signal.Signals) -> None:
        if child.alive and child.process is not None:
            with contextlib.suppress(ProcessLookupError):
                # The whole session: env workers of a killed node must not outlive it.
                if number is signal.SIGKILL:
                    os.killpg(child.process.pid, number)
                else:
                    child.process.send_signal(number)

    def _obey(self) -> None:
        """Do what a signal has asked for."""
        if self._signal:
            self.stop(f"received {signal.Signals(self._signal).name}")
        if self._asked_again:
            # Asked twice: do not wait any longer.
            self._stopping_since = self._now() - self._options.kill_after_s

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def on_signal(number: int, frame: object) -> None:
            # Only a note: it may interrupt a print, and a stream that is being written to refuses
            # to be written to again.
            self._asked_again |= bool(self._signal) and number == signal.SIGINT
            self._signal = self._signal or number

        previous = {
            number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _exit_code(self) -> int:
        if self._signal:
            return EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_TERMINATED
        children = [child for child in self.children if child not in self._too_late]
        if self._failed and self._options.on_failure == "continue":
            # Whoever was not missed may fail; the run went well if its learner did.
            learners = [child for child in children if child.learns]
            return int(any(child.exit_code != 0 for child in learners or children))
        return int(bool(self._failed) or any(child.exit_code != 0 for child in children))


class _Reader:
    """Cuts what a process writes into lines."""

    def __init__(self, child: Child, handler: Callable[[Child, bytes], None]) -> None:
        self.child = child
        self.handler = handler
        self._rest = b""

    def lines(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete; at the end of the stream, the rest too."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _last_error(child: Child) -> str:
    return f": {child.status.error}" if child.status.error else ""
