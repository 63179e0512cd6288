"""One node's process, as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from dmiddleware.launch.leftovers import marked_environment, new_mark
from dmiddleware.launch.output import LogFile
from dmiddleware.launch.plan import RANK_STORE, NodeConfig, NodePlan, RankPlan
from dmiddleware.launch.program_lines import CrashReport
from dmiddleware.launch.status import NodeStatus
from dmiddleware.signals import ENDING_SIGNALS

__all__ = ["Child", "Failure"]

_N_LAST_LINES: Final = 10
_WIDTH: Final = 300
# Not with -m: programs would show the name of that module in their help.
_START: Final = "from dmiddleware.launch.node_process import main; main()"
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
        log: the file with its whole output; None: there is none.
        process: the operating system's process; None before the start.
        mark: the mark of the process and its children.
        status: the node's last status.
        started_at: when it was started.
        heard_at: when that status arrived; later if the launcher was suspended since.
        last_lines: the last lines that it printed.
        crash: where it crashed, if it did.
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
    process: subprocess.Popen[bytes] | None = None
    mark: str = ""
    status: NodeStatus = field(default_factory=lambda: NodeStatus(phase="starting"))
    started_at: float = 0.0
    heard_at: float = 0.0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_N_LAST_LINES))
    crash: CrashReport = field(default_factory=CrashReport)
    restarts: int = 0
    restarted_at: list[float] = field(default_factory=list)
    exit_code: int | None = None
    ended_at: float = 0.0
    restart_at: float | None = None
    asked_at: float | None = None
    hung_s: float = 0.0
    is_killed: bool = False
    failure: Failure | None = None

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

    def start(self, run_mark: str) -> int:
        """Start the process, and return the descriptor from which its status can be read.

        Args:
            run_mark: the mark of all processes of the run.

        Raises:
            OSError: if the system cannot start it.
        """
        self.exit_code, self.restart_at, self.failure = None, None, None
        self.hung_s, self.is_killed, self.mark = 0.0, False, new_mark()
        self.status = NodeStatus(phase="starting")
        self.last_lines.clear()
        self.crash = CrashReport()
        read_end, write_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, *self.config.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[write_end],
                env=self._environment(run_mark),
                # Only the launcher receives Ctrl-C; it then stops the nodes in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._mark_start_in_log()
        log = "" if self.log_path is None else str(self.log_path.absolute())
        self.send(
            msgspec.structs.replace(
                self.config,
                status_fd=write_end,
                mark=self.mark,
                log=log,
                arguments=(),
                variables={},
            )
        )
        return read_end

    def _environment(self, run_mark: str) -> dict[str, str]:
        """Return the process's environment, with the variables of a learner's process group.

        Those that the launcher has itself, because torchrun has started it for example, are for
        another group.
        """
        ranks = self.plan.ranks
        environment = marked_environment(run_mark, self.mark)
        for name in (RANK_STORE, *RankPlan(0, 1, 0).environment()):
            environment.pop(name, None)
        if ranks is not None:
            environment |= ranks.environment()
            if self.config.run_dir:
                # Each start has a store of its own; all ranks are restarted together.
                environment[RANK_STORE] = f"{self.config.run_dir}/ranks-{self.restarts}"
        return environment | self.config.variables

    def send(self, message: NodeConfig | str) -> None:
        """Send a line of JSON: first the node's configuration, then a reason to stop."""
        data = msgspec.json.encode(message) + b"\n"
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self.process.stdin.write(data)
                self.process.stdin.flush()

    def kill(self) -> None:
        """Kill the process and the others of its session."""
        if self.alive and self.process is not None:
            self.is_killed = True
            with contextlib.suppress(ProcessLookupError):
                # The whole session: env workers must not outlive their node.
                os.killpg(self.process.pid, signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Make the process print what its threads are doing."""
        if self.alive and self.process is not None:
            self.process.send_signal(signal.SIGQUIT)

    def remember(self, line: str) -> None:
        """Keep a line that it has printed."""
        if self.crash.feed(line):
            return  # the report names the line of the program
        self.last_lines.append(line if len(line) <= _WIDTH else line[:_WIDTH] + "…")

    def describe_failure(self, hint: str = "") -> str:
        """Return the node and its error, in one sentence.

        Args:
            hint: more about a signal that killed it.
        """
        status, code = self.status, self.exit_code
        where = f" ({status.where})" if status.where else ""
        if self.hung_s:
            return f"{self.name} hung: it made no progress for {self.hung_s:.0f} s; killed"
        if status.error:
            return f"{self.name} failed: {status.error}{where}"
        if code is not None and code < 0:
            if -code in _CRASHES:
                hint = self.crash.where
            hint = f" ({hint})" if hint else ""
            return f"{self.name} was killed by {_signal_name(-code)}{hint}"
        if status.phase == "finished":
            return f"{self.name} was stopped as failed: {status.reason}"
        return f"{self.name} failed: exit code {code}"

    def _mark_start_in_log(self) -> None:
        if self.log is not None and self.process is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S %z")
            what = f"restart {self.restarts}" if self.restarts else "start"
            line = f"=== ditask: {what} of {self.name}, {at}, process {self.process.pid} ===\n"
            self.log.write(line.encode())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
