"""The process of one node, started by ``ditask`` with the arguments of the program.

It reads its :class:`~dmiddleware.launch.plan.NodeConfig` from the first line of standard input,
connects to its peers, runs the user's function and reports its status to the launcher. Each further
line of standard input is a reason to stop. When standard input ends, the launcher has died, and the
node stops too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from dmiddleware.errors import ChainError, ConfigError, LaunchError
from dmiddleware.import_guard import refusing_at_import
from dmiddleware.launch.leftovers import end_processes
from dmiddleware.launch.main_function import call_main, import_main
from dmiddleware.launch.plan import NodeConfig
from dmiddleware.launch.program_lines import program_line
from dmiddleware.launch.status import NodeStatus
from dmiddleware.pipeline import CurrentNode, Progress, SystemClock, running_as
from dmiddleware.pipeline.current_node import NODE_VARIABLE
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.transport import Transport
from dmiddleware.router.transport.shared_memory import SharedMemoryTransport
from dmiddleware.router.transport.sockets import SocketTransport
from dmiddleware.signals import ENDING_SIGNALS, signal_reason
from dmiddleware.terminal import needs_terminal

__all__ = ["main"]

_logger = logging.getLogger("ditask")

STATUS_EVERY_S: Final = 1.0
_LONGEST_TEXT: Final = 500
_CALLERS: Final = (
    "__main__",
    "dmiddleware.launch.node_process",
    "dmiddleware.launch.main_function",
    "importlib",
    "importlib._bootstrap",
    "importlib._bootstrap_external",
)
_MISTAKES: Final = (ChainError, ConfigError, LaunchError, ImportError, SyntaxError)
_NO_TERMINAL: Final = (
    "nodes have no terminal, so breakpoint(), pdb and input() cannot be used in them; run the "
    "program in one process without ditask to debug it, or set PYTHONBREAKPOINT to a debugger "
    "that listens on a port"
)


def main() -> None:
    """Run one node; the exit code is 0 if it succeeded."""
    if sys.path[0] == "":
        sys.path[0] = str(Path.cwd())  # the program may change the directory
    launcher = _take_stdin()
    config = msgspec.json.decode(_read_line(launcher), type=NodeConfig)
    # Runs after all that the program registers: some of its processes may still have work to do.
    atexit.register(_end_children, os.getpid(), config.mark)
    sys.stdout, sys.stderr = _line_output(1, config.log), _line_output(2, config.log)
    # Its log, and the report of the launcher, then say where it crashed.
    faulthandler.enable(file=2)
    # The launcher sends it to a node that hangs, to see where.
    faulthandler.register(signal.SIGQUIT, file=2, all_threads=True)
    # As in a run of one process, only warnings reach the terminal.
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    logging.basicConfig(handlers=[handler], format="%(levelname)s %(name)s: %(message)s")
    os.environ[NODE_VARIABLE] = f"{os.getpid()}:{config.plan.node_id}"
    sys.exit(_NodeProcess(config, launcher).run())


class _NodeProcess:
    """Runs the user's function and reports to the launcher."""

    def __init__(self, config: NodeConfig, launcher: int) -> None:
        self._config = config
        self._launcher = launcher
        self._phase = "starting"
        self._failure: BaseException | None = None
        self._error, self._where, self._failed_at = "", "", 0.0
        self._is_final, self._left_early = False, False
        self._stop_reason = ""
        self._pid, self._signal, self._signalled_at = os.getpid(), 0, 0.0
        self._is_asked = False
        self._progress = Progress()
        self._progressed_at = time.monotonic()
        self._done = threading.Event()
        self._reporting = threading.Lock()
        self._status = os.fdopen(config.status_fd, "wb", buffering=0)
        self._clock = _WatchedClock()
        plan = config.plan
        self._router = Router(
            node_id=plan.node_id,
            run_id=config.run_id,
            roles=plan.roles,
            labels=plan.labels,
            listen=plan.listen,
            advertise=plan.advertise,
            dial=plan.dial,
            key=bytes.fromhex(config.key_hex) or None,
            transport=_transport(config),
            options=_router_options(config),
            clock=self._clock,
            expected_peers=plan.n_peers,
            start_timeout_s=config.start_timeout_s,
        )
        self._node = _Node(
            router=self._router,
            roles=plan.roles,
            labels=plan.labels,
            clock=self._clock,
            stamp=config.stamp,
            run_roles=plan.run_roles,
            may_grow=config.may_grow,
            role_index=plan.role_index,
            n_ranks=1 if plan.ranks is None else plan.ranks.size,
            on_failure=self._note_failure,
            on_end=self._report,
        )

    def run(self) -> int:
        threading.Thread(target=self._follow_launcher, name="ditask-launcher", daemon=True).start()
        for number in ENDING_SIGNALS:
            # Those that the launcher ignores, as after nohup, are ignored here, too.
            if number != signal.SIGQUIT and signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        reporter = threading.Thread(target=self._report_forever, daemon=True)
        reporter.start()
        try:
            with self._router, running_as(self._node):
                try:
                    with refusing_at_import("runs a task"):
                        function = import_main(self._config.main, self._config.package)
                    _set_threads(self._config.n_threads)
                    if not self._stop_reason:
                        self._phase = "running"
                        self._call(function)
                        # The program may run its task in a thread.
                        self._node.wait_until_idle()
                except BaseException as error:
                    # Leaving the block can take long, and peers can fail meanwhile because of it.
                    self._end_as_failed(error)
                    raise
                if self._node.interrupted:
                    self._router.suspend()
            if self._signal and not self._is_asked and not self._node.ends_run:
                self._phase, self._failed_at = "failed", self._signalled_at
                self._error, self._where = signal_reason(self._signal), ""
                return 128 + self._signal
            self._phase = "finished"
            if self._node.stopped_ok:
                self._forget_failure()
            return 0 if self._node.stopped_ok else 1
        except BaseException as error:  # noqa: BLE001 (the launcher reports any kind of failure)
            if self._phase != "failed":
                self._end_as_failed(error)
            return 1
        finally:
            self._done.set()
            reporter.join(STATUS_EVERY_S)
            self._report()

    def _call(self, function: Callable[[], object]) -> None:
        """Call the program; ``sys.exit(0)`` is a normal end of it, but not in a task that runs."""
        try:
            call_main(function, self._config.main)
        except SystemExit as end:
            has_ended = self._node.stopped_ok or self._node.stop_reason is not None
            if end.code not in (None, 0) or not has_ended:
                raise
            self._left_early = not self._node.has_tasks and self._config.plan.n_peers > 0

    def _note_failure(self, error: BaseException) -> None:
        """Report an error of the program at once."""
        self._idle_s(self._node.progress())
        self._failure, self._failed_at = error, time.monotonic()
        self._error, self._where = _summarize(error), _where(error)
        self._report()

    def _forget_failure(self) -> None:
        """Forget an error that the program has handled."""
        self._failure, self._failed_at = None, 0.0
        self._error, self._where = "", ""

    def _end_as_failed(self, error: BaseException) -> None:
        # Closing the task may have added errors; the first one is the reason.
        if self._failure is None or not _stems_from(error, self._failure):
            self._note_failure(error)
        elif error is self._failure:
            # It now also has the frames around the task.
            self._where = _where(error)
        self._is_final = self._node.progress() == Progress() and _is_mistake(error)
        self._phase = "failed"
        self._report()
        if not isinstance(error, LaunchError):
            _print_traceback(error)

    def _on_signal(self, number: int, frame: object) -> None:
        """Stop this node in order; a second signal ends it at once.

        What the others do is for the launcher to decide, which has not sent the signal.
        """
        if self._signal or os.getpid() != self._pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._signal, self._signalled_at = number, time.monotonic()
        reason = signal_reason(number)
        self._stop_reason = self._stop_reason or reason
        self._node.stop(reason, only_local=True, interrupted=True)

    def _stop(self, reason: str, *, ok: bool = True) -> None:
        self._stop_reason = self._stop_reason or reason
        self._node.stop(reason, ok=ok, only_local=self._config.attached)

    def _follow_launcher(self) -> None:
        """Stop when the launcher asks for it, or when it has died."""
        while line := _read_line(self._launcher):
            self._is_asked = True
            self._stop(msgspec.json.decode(line, type=str))
        if not self._done.is_set():
            self._stop("the launcher has died", ok=False)
            if not self._done.wait(self._config.kill_after_s):
                _end_children(os.getpid(), self._config.mark)
                os._exit(1)

    def _report_forever(self) -> None:
        self._report()
        while not self._done.wait(STATUS_EVERY_S if self._phase == "running" else 0.1):
            self._report()

    def _report(self) -> None:
        # The launcher keeps the status that arrives last, so it must also be the newest.
        with self._reporting:
            self._send_status()

    def _send_status(self) -> None:
        progress = self._node.progress()
        status = NodeStatus(
            phase=self._phase,
            address=self._router.address,
            step=progress.step,
            env_step=progress.env_step,
            train_iter=progress.train_iter,
            blocked_s=progress.blocked_s
            + sum(one.blocked_s for one in self._router.traffic().values()),
            peers=len(self._router.peers()),
            reason=(self._node.stop_reason or self._stop_reason)[:_LONGEST_TEXT],
            run_is_over=self._node.ends_run,
            decided_end=self._node.decided_end,
            idle_s=self._idle_s(progress),
            error=self._error,
            where=self._where,
            is_final=self._is_final,
            left_early=self._left_early,
            failed_at=self._failed_at,
            sent_at=time.monotonic(),
        )
        with contextlib.suppress(OSError):
            self._status.write(msgspec.json.encode(status) + b"\n")

    def _idle_s(self, progress: Progress) -> float:
        now = time.monotonic()
        if replace(progress, blocked_s=0.0) != self._progress:
            self._progress, self._progressed_at = replace(progress, blocked_s=0.0), now
            if self._phase == "running":
                self._forget_failure()
        if self._clock.main_thread_waits:
            return 0.0
        idle_s = now - max(self._progressed_at, self._clock.waited_at)
        return min(idle_s, self._node.since_waiting_s())


class _Node(CurrentNode):
    """Notes whether the program has built a task."""

    has_tasks = False

    def register(self, task: Any) -> None:
        self.has_tasks = True
        super().register(task)


class _WatchedClock(SystemClock):
    """Notes when the main thread waits, which it does only up to a deadline.

    Attributes:
        main_thread_waits: whether it waits now.
        waited_at: when its last wait ended, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.main_thread_waits = False
        self.waited_at = 0.0

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or the time is up."""
        if timeout_s is None or threading.current_thread() is not threading.main_thread():
            return super().wait_for(condition, predicate, timeout_s)
        self.main_thread_waits = True
        try:
            return super().wait_for(condition, predicate, timeout_s)
        finally:
            self.waited_at = time.monotonic()
            self.main_thread_waits = False


class _Output(io.FileIO):
    """Standard output, which continues in the log file when the launcher no longer reads it."""

    def __init__(self, descriptor: int, log: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._log = log

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            try:
                file = os.open(self._log or os.devnull, os.O_WRONLY | os.O_APPEND)
            except OSError:
                file = os.open(os.devnull, os.O_WRONLY)
            os.dup2(file, self.fileno())
            os.close(file)
            return super().write(data) or 0


def _line_output(descriptor: int, log: str) -> io.TextIOWrapper:
    """Return a text stream that writes each line at once: people should see it."""
    raw = io.BufferedWriter(_Output(descriptor, log))
    name = (sys.stdout if descriptor == 1 else sys.stderr).encoding
    return io.TextIOWrapper(raw, encoding=name, errors="backslashreplace", line_buffering=True)


def _end_children(node: int, mark: str) -> None:
    """End the processes that the node has started; a fork of the node ends none."""
    if os.getpid() == node:
        n_left = end_processes((mark,) if mark else (), below=(node,), helpers=False)
        if n_left:
            _logger.warning("ended %d processes that the program had left behind", n_left)


def _stems_from(error: BaseException | None, first: BaseException) -> bool:
    """Return whether an error is the first one, contains it, or was raised because of it."""
    if error is None or error is first:
        return error is first
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(_stems_from(one, first) for one in (*inner, error.__cause__, error.__context__))


def _is_mistake(error: BaseException) -> bool:
    """Return whether every start of the program would raise the error."""
    is_usage = isinstance(error, SystemExit) and error.code == 2
    return is_usage or isinstance(error, _MISTAKES)


def _where(error: BaseException) -> str:
    """Return the line of the user's program that raised the error, as ``file:line``."""
    frames = traceback.extract_tb(error.__traceback__)
    return program_line((frame.filename, frame.lineno) for frame in reversed(frames))


def _summarize(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"[:_LONGEST_TEXT]
    first, *others = str(error).splitlines() or [""]
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if needs_terminal(error):
        text = f"{text}: {_NO_TERMINAL}"
    return text[:_LONGEST_TEXT]


def _print_traceback(error: BaseException) -> None:
    """Print the traceback from the user's function on."""
    if needs_terminal(error):
        error.add_note(_NO_TERMINAL)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals["__name__"] in _CALLERS:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


def _take_stdin() -> int:
    """Return a private descriptor of standard input, and give the program an empty one.

    Otherwise the program, or a process that it starts, could read what the launcher sends.
    """
    launcher = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return launcher


def _read_line(descriptor: int) -> bytes:
    line = bytearray()
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _set_threads(n: int) -> None:
    """Set torch's number of threads if the program uses torch; 0 leaves it."""
    torch = sys.modules.get("torch")
    if n and torch is not None:
        torch.set_num_threads(n)


def _router_options(config: NodeConfig) -> NodeOptions:
    """Return the router's options; those that the command line leaves out have defaults."""
    if config.max_event_bytes is None:
        return NodeOptions()
    return NodeOptions(max_event_bytes=config.max_event_bytes)


def _transport(config: NodeConfig) -> Transport:
    """Return the transport for this node's addresses.

    Each is imported only if it is used: redis-py is optional, and nng takes time to load.
    """
    if config.mq_type == "redis":
        from dmiddleware.router.transport.redis import RedisTransport

        return RedisTransport(username=config.redis_username, password=config.redis_password)
    sockets: Transport
    if config.mq_type == "nng":
        from dmiddleware.router.transport.nng import NngTransport

        sockets = NngTransport(tls=config.tls)
    else:
        sockets = SocketTransport(tls=config.tls)
    if not config.shared_memory:
        return sockets
    return SharedMemoryTransport(sockets, directory=Path(config.shared_memory))
