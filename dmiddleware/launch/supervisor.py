"""Start, watch, restart and stop the processes of a run."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Final, Protocol

import msgspec

from dmiddleware.launch.plan import FailurePolicy, NodeConfig, NodePlan
from dmiddleware.launch.status import NodeStatus
from dmiddleware.pipeline import Role

__all__ = ["Child", "Display", "Supervisor", "SupervisorOptions"]

KILL_AFTER_S: Final = 20.0
SETTLE_S: Final = 5.0
"""Seconds within which each node must learn from its peers that the run is over."""
DRAIN_S: Final = 1.0
FIRST_BACKOFF_S: Final = 0.5
LONGEST_BACKOFF_S: Final = 30.0
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """How nodes are started, and what happens when one fails.

    Attributes:
        on_failure: ``abort``: stop the run; ``continue``: continue without the node; ``restart``:
            restart the node.
        max_restarts: how often each node may be restarted.
        startup_interval_s: pause between two starts.
        kill_after_s: how long nodes may take to finish after they were asked to stop.
    """

    on_failure: FailurePolicy = "abort"
    max_restarts: int = 3
    startup_interval_s: float = 0.0
    kill_after_s: float = KILL_AFTER_S


@dataclass(slots=True)
class Child:
    """One node's process, as the launcher sees it.

    Attributes:
        config: the node's configuration.
        process: the operating system's process; None before the start.
        status: the node's last status.
        restarts: how often it was restarted.
        exit_code: its exit code; None while it runs.
        restart_at: when it will be restarted; None: no restart is planned.
        asked_at: when the launcher asked it to stop; None: not yet.
    """

    config: NodeConfig
    process: subprocess.Popen[bytes] | None = None
    status: NodeStatus = field(default_factory=lambda: NodeStatus(phase="starting"))
    restarts: int = 0
    exit_code: int | None = None
    restart_at: float | None = None
    asked_at: float | None = None

    @property
    def plan(self) -> NodePlan:
        """The node's part in the run."""
        return self.config.plan

    @property
    def name(self) -> str:
        """The node id and its roles, for messages."""
        return str(self.plan)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.exit_code is None

    @property
    def ended_with_run(self) -> bool:
        """Whether it has ended together with the whole run."""
        if self.exit_code is None or not self.status.run_is_over:
            return False
        # A node that failed after an earlier task had ended the run may have been in a later task.
        return self.exit_code == 0 or bool(self.status.reason)


class Supervisor:
    """Starts the nodes of a run on this host and watches them until all have ended.

    Args:
        configs: the configuration of each node; ``status_fd`` is filled in here.
        options: how nodes are started, and what happens when one fails.
        display: shows the progress.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        configs: Sequence[NodeConfig],
        *,
        options: SupervisorOptions,
        display: Display,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.children = [Child(config) for config in configs]
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
        """Start all nodes, wait until they have ended, and return the exit code.

        Returns:
            0 if the run succeeded; 130 or 143 after Ctrl-C or SIGTERM; otherwise 1.
        """
        with self._selector, self._signals():
            try:
                self._start_all()
                while any(child.alive or child.restart_at is not None for child in self.children):
                    self._step()
            finally:
                self._kill_all()
        return self._exit_code()

    def _start_all(self) -> None:
        for position, child in enumerate(self.children):
            if position and self._options.startup_interval_s:
                self._watch_for(self._options.startup_interval_s)
            if self._stopping_since is None and not self._signal:
                self._start(child)

    def _start(self, child: Child) -> None:
        read_end, write_end = os.pipe()
        try:
            child.process = subprocess.Popen(
                [sys.executable, "-m", "dmiddleware.launch.node_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                # Only the launcher receives Ctrl-C; it then stops the nodes in order.
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        child.exit_code, child.restart_at = None, None
        child.status = NodeStatus(phase="starting")
        assert child.process.stdout is not None
        self._write(child, msgspec.structs.replace(child.config, status_fd=write_end))
        self._watch(child, child.process.stdout, self._on_output)
        self._watch(child, os.fdopen(read_end, "rb", buffering=0), self._on_status)

    @staticmethod
    def _write(child: Child, message: NodeConfig | str) -> None:
        """Send a line of JSON to a node: first its configuration, then a reason to stop."""
        if child.process is not None and child.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                child.process.stdin.write(msgspec.json.encode(message) + b"\n")
                child.process.stdin.flush()

    def _watch(
        self, child: Child, stream: IO[bytes], handler: Callable[[Child, bytes], None]
    ) -> None:
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, _Reader(child, handler))

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
        """Read what is available, and return whether there may be more."""
        data: bytes | None = stream.read(1 << 16)
        if data is None:
            return False
        for line in reader.lines(data):
            reader.handler(reader.child, line)
        if not data:
            self._selector.unregister(stream)
            stream.close()
        return bool(data)

    def _on_output(self, child: Child, line: bytes) -> None:
        self._display.line(child, line.decode(errors="replace").rstrip())

    def _on_status(self, child: Child, line: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            child.status = msgspec.json.decode(line, type=NodeStatus)

    def _drain(self, child: Child) -> None:
        """Read the last output of a process that has ended."""
        mine = [key for key in self._selector.get_map().values() if key.data.child is child]
        # Processes that it started may still be running and writing.
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
            # It was killed, so it could not end the processes that it had started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if child.exit_code != 0 and child not in self._too_late:
            self._on_failure(child)

    def _on_failure(self, child: Child) -> None:
        failure = _describe_failure(child)
        if self._stopping_since is not None:
            self._display.note(failure)
            self._failed.append(child)
            return
        # A node that finished its program and reports a failed run would only fail again.
        has_crashed = child.status.phase != "finished"
        policy, limit = self._options.on_failure, self._options.max_restarts
        if policy == "restart" and has_crashed and child.plan.n_peers and self._is_over():
            self._display.note(failure)
            self._give_up(child)
        elif policy == "restart" and has_crashed and child.restarts < limit:
            pause_s = min(FIRST_BACKOFF_S * 2**child.restarts, LONGEST_BACKOFF_S)
            child.restarts += 1
            child.restart_at = self._now() + pause_s
            self._display.note(
                f"{failure}; restarting it in {pause_s:g} s (restart {child.restarts} of {limit})"
            )
        elif policy == "continue":
            self._failed.append(child)
            self._display.note(f"{failure}; the run continues without it (--on-failure continue)")
        else:
            self._failed.append(child)
            self.stop(failure)
            if has_crashed:
                self._display.note(
                    "--on-failure abort (the default) ends the run; use continue or restart to "
                    "keep it going"
                    if policy == "abort"
                    else f"it was restarted {limit} times (--max-restarts {limit})"
                )

    def _is_over(self) -> bool:
        """Return whether a node that starts now would find nothing left to do.

        That is the case once the learner has finished, or a node has ended together with the run.
        """
        learners = [child for child in self.children if Role.LEARNER in child.plan.roles]
        has_learned = bool(learners) and all(child.exit_code == 0 for child in learners)
        return has_learned or any(child.ended_with_run for child in self.children)

    def _end_with_the_run(self) -> None:
        """When the run is over, stop the nodes that cannot know it."""
        if self._stopping_since is not None or not self._is_over():
            return
        for child in self.children:
            just_restarted = child.alive and child.restarts > 0 and child.status.step == 0
            if (child.restart_at is not None or just_restarted) and child.asked_at is None:
                self._give_up(child)
        if any(child.ended_with_run for child in self.children):
            self._stop_disconnected_nodes()

    def _give_up(self, child: Child) -> None:
        """Stop restarting a node, and stop it if it was just restarted."""
        child.restart_at, child.asked_at = None, self._now()
        if child.plan.learns:
            self._display.note(f"not restarting {child.name}: the run has ended without it")
            self._failed.append(child)
        else:
            self._display.note(f"{child.name} is no longer needed: the run is over")
            self._too_late.append(child)
        self._ask_to_stop(child, "the run is over")

    def _stop_disconnected_nodes(self) -> None:
        """Stop the nodes that have not heard from their peers that the run is over."""
        if self._ended_since is None:
            self._ended_since = self._now()
        if self._now() - self._ended_since < SETTLE_S:
            return
        for child in self.children:
            if not child.alive or child.status.run_is_over:
                continue
            if child.asked_at is None:
                child.asked_at = self._now()
                self._display.note(f"{child.name} has not heard that the run is over; stopping it")
                if not child.plan.learns:
                    self._too_late.append(child)
                self._ask_to_stop(child, "the run is over")
            elif (
                not child.plan.learns and self._now() - child.asked_at > self._options.kill_after_s
            ):
                self._kill(child)

    def stop(self, reason: str) -> None:
        """Ask all nodes to stop; those that take longer than ``kill_after_s`` are killed.

        Args:
            reason: the stop reason that every node reports.
        """
        if self._stopping_since is not None:
            return
        self._stopping_since = self._now()
        self._display.note(f"stopping the run: {reason}")
        for child in self.children:
            child.restart_at = None
            self._ask_to_stop(child, reason)

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
            self._kill(child)
        for child in self.children:
            if child.process is not None:
                child.process.wait()

    def _ask_to_stop(self, child: Child, reason: str) -> None:
        if child.alive:
            self._write(child, reason)

    @staticmethod
    def _kill(child: Child) -> None:
        if child.alive and child.process is not None:
            with contextlib.suppress(ProcessLookupError):
                # The whole session: env workers must not outlive their node.
                os.killpg(child.process.pid, signal.SIGKILL)

    def _obey(self) -> None:
        """Act on a received signal."""
        if self._signal:
            self.stop(
                "received SIGINT (Ctrl-C)"
                if self._signal == signal.SIGINT
                else f"received {signal.Signals(self._signal).name}"
            )
        if self._asked_again:
            # A second Ctrl-C: do not wait any longer.
            self._stopping_since = self._now() - self._options.kill_after_s

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def on_signal(number: int, frame: object) -> None:
            # Only set flags: the handler may have interrupted a print, and printing here would be
            # a reentrant call on the same stream.
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
            # The run succeeded if its learner did.
            learners = [child for child in children if child.plan.learns]
            return int(any(child.exit_code != 0 for child in learners or children))
        return int(bool(self._failed) or any(child.exit_code != 0 for child in children))


class _Reader:
    """Splits the output of a process into lines."""

    def __init__(self, child: Child, handler: Callable[[Child, bytes], None]) -> None:
        self.child = child
        self.handler = handler
        self._rest = b""

    def lines(self, data: bytes) -> list[bytes]:
        """Return the complete lines; at the end of the stream (no data), also the rest."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines


def _describe_failure(child: Child) -> str:
    code, error = child.exit_code, child.status.error
    if code is not None and code < 0:
        return f"{child.name} was killed by {signal.Signals(-code).name}"
    return f"{child.name} failed: {error or f'exit code {code}'}"
