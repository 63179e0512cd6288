"""One node's process, as the launcher sees it."""

from __future__ import annotations

import signal
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from dmiddleware.launch.output import LogFile
from dmiddleware.launch.plan import NodeConfig, NodePlan
from dmiddleware.launch.program_lines import CrashReport
from dmiddleware.launch.status import NodeStatus
from dmiddleware.process.signals import ENDING_SIGNALS

__all__ = ["Child", "Failure"]

_N_LAST_LINES: Final = 10
_WIDTH: Final = 300
_CRASHES: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a node.

    Attributes:
        at: when it happened, on the host's monotonic clock.
        text: the node and its error.
        number: the signal that ended it, sent by another process than the launcher; 0: none.
    """

    at: float
    text: str
    number: int = 0


@dataclass(slots=True)
class Child:
    """One node's process, as the launcher sees it.

    Attributes:
        config: the node's configuration.
        plan: its part in the run, with the roles that the program has given to it.
        log: the file with its whole output; None: there is none.
        is_started: whether it was started.
        where: its process, as its host names it; empty until it runs.
        why: what its host knows about its end.
        status: the node's last status.
        started_at: when it was started.
        heard_at: when that status arrived.
        last_lines: the last lines that it printed.
        crash: where it crashed, if it did.
        has_done_a_step: whether it has done a step of its task in any of its starts.
        restarts: how often it was restarted.
        restarted_at: when it was restarted lately.
        exit_code: its exit code; None while it runs.
        ended_at: when it was seen to have ended.
        restart_at: when it will be restarted; None: no restart is planned.
        asked_at: when the launcher asked it to stop; None: not yet.
        hung_s: for how many seconds it had been hanging when the launcher killed it; 0: it did not.
        is_killed: whether the launcher has killed it.
        failure: its last failure; None: it has not failed.
    """

    config: NodeConfig
    log: LogFile | None = None
    is_started: bool = False
    where: str = ""
    why: str = ""
    status: NodeStatus = field(default_factory=lambda: NodeStatus(phase="starting"))
    started_at: float = 0.0
    heard_at: float = 0.0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_N_LAST_LINES))
    crash: CrashReport = field(default_factory=CrashReport)
    has_done_a_step: bool = False
    restarts: int = 0
    restarted_at: list[float] = field(default_factory=list)
    exit_code: int | None = None
    ended_at: float = 0.0
    restart_at: float | None = None
    asked_at: float | None = None
    hung_s: float = 0.0
    is_killed: bool = False
    failure: Failure | None = None
    plan: NodePlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = self.config.plan

    @property
    def name(self) -> str:
        """The node id and its roles, for messages."""
        return str(self.plan)

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is about to."""
        return self.is_started and self.exit_code is None

    @property
    def log_path(self) -> Path | None:
        """The path of the log, if there is one."""
        return None if self.log is None else self.log.path

    @property
    def ended_with_run(self) -> bool:
        """Whether it has ended together with the whole run."""
        if self.exit_code is None or not self.status.run_is_over:
            return False
        # A node that failed after an earlier task had ended the run may have been in a later task.
        return self.exit_code == 0 or bool(self.status.reason)

    @property
    def ended_by(self) -> int:
        """The signal that ended it, sent by another process than the launcher; 0: none did.

        A signal that kills it without its doing, such as SIGKILL or SIGSEGV, does not count.
        """
        code = self.exit_code
        if code is None or self.is_killed:
            return 0
        number = -code if code < 0 else code - 128
        return number if number in ENDING_SIGNALS else 0

    def take_status(self, status: NodeStatus, now: float) -> None:
        """Note the node's progress, and the roles that its program has given to it."""
        self.status, self.heard_at = status, now
        self.has_done_a_step |= status.step > 0
        plan = self.config.plan
        if plan.decides and status.roles is not None:
            self.plan = replace(plan, roles=status.roles, decides=False)

    def expect_start(self) -> None:
        """Forget the process that ran before."""
        self.exit_code, self.restart_at, self.failure = None, None, None
        self.hung_s, self.is_killed, self.why, self.where = 0.0, False, "", ""
        self.is_started = True
        self.status = NodeStatus(phase="starting")
        self.last_lines.clear()
        self.crash = CrashReport()

    def note_start(self, where: str) -> None:
        """Note that its process runs, in the log too."""
        self.where = where
        if self.log is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S %z")
            start = f"restart {self.restarts}" if self.restarts else "start"
            self.log.write(f"=== ditask: {start} of {self.name}, {at}, {where} ===\n".encode())

    def remember(self, line: str) -> None:
        """Keep a line that it has printed."""
        if self.crash.feed(line):
            return  # the report names the line of the program
        self.last_lines.append(line if len(line) <= _WIDTH else line[:_WIDTH] + "…")

    def describe_failure(self) -> str:
        """Return the node and its error, in one sentence."""
        status, code = self.status, self.exit_code
        where = f" ({status.where})" if status.where else ""
        if self.hung_s:
            return f"{self.name} hung: it made no progress for {self.hung_s:.0f} s; killed"
        if status.error:
            return f"{self.name} failed: {status.error}{where}"
        if code is not None and code < 0:
            hint = self.crash.where if -code in _CRASHES else self.why
            hint = f" ({hint})" if hint else ""
            return f"{self.name} was killed by {_signal_name(-code)}{hint}"
        if status.phase == "finished":
            return f"{self.name} was stopped as failed: {status.reason}"
        return f"{self.name} failed: {self.why or f'exit code {code}'}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
