"""Join a run as one of its nodes.

Each process of a run calls :func:`join_run`: a process of ``ditask``, an actor of Ray, or the entry
point of a container.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dmiddleware.errors import LaunchError
from dmiddleware.launch.early_imports import THE_DOOR
from dmiddleware.launch.main_function import call_main, import_main, with_arguments
from dmiddleware.launch.mistakes import is_mistake
from dmiddleware.launch.pauses import Pauses
from dmiddleware.launch.plan import DEFAULT_RUN_ID, RunPlan
from dmiddleware.launch.program_lines import program_line
from dmiddleware.launch.status import NodeStatus
from dmiddleware.pipeline import CurrentNode, Progress, SystemClock, running_as
from dmiddleware.pipeline.current_node import NODE_VARIABLE
from dmiddleware.process.garbage import kept_for_good
from dmiddleware.process.import_guard import refusing_at_import
from dmiddleware.process.signals import ENDING_SIGNALS, SignalHandler, is_ignored, signal_reason
from dmiddleware.process.terminal import needs_terminal
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router import transport as transports
from dmiddleware.router.transport.shared_memory import SharedMemory

__all__ = ["JoinedNode", "NO_TERMINAL", "Program", "join_run"]

STATUS_EVERY_S: Final = 1.0
_STARTING_EVERY_S: Final = 0.1
_LONGEST_TEXT: Final = 500
_logger = logging.getLogger(__name__)
NO_TERMINAL: Final = (
    "nodes have no terminal, so breakpoint(), pdb and input() cannot be used in them; run the "
    "program in one process without ditask to debug it, or set PYTHONBREAKPOINT to a debugger "
    "that listens on a port"
)

Program = str | Callable[[], Any]
"""A program: a function without arguments, or its name, ``package.module.function``. A named
function whose parameters all have types gets the arguments of ``sys.argv``."""


def join_run(
    plan: RunPlan,
    node_id: int,
    program: Program,
    *,
    package: str = "",
    on_status: Callable[[NodeStatus], None] | None = None,
) -> Any:
    """Run a program as one node of a run, and return what it returns.

    Each ``Task`` that the program builds is connected to those of the other nodes. This blocks
    until the program has ended and the node has left its peers. SIGINT, SIGTERM and SIGHUP stop the
    task in order if the main thread of the process is in this call.

    Args:
        plan: the run, see :func:`~dmiddleware.launch.plan_run`.
        node_id: which of its nodes this process is.
        program: what to run.
        package: the folder to put first on the import path, if ``program`` is a name.
        on_status: called with the node's status every second and when it changes, on another
            thread.

    Raises:
        LaunchError: if the plan has no such node, the program cannot be called, or the run was
            stopped as failed by another node.
        SystemExit: with 128 plus its number, if a signal has stopped the node alone.
        BaseException: what the program raises.

    Example:
        >>> from dmiddleware.launch import join_run, plan_run
        >>> join_run(plan_run(), 0, lambda: "trained")
        'trained'
    """
    with JoinedNode(plan, node_id, on_status=on_status) as node:
        return node.run(program, package=package)


class JoinedNode:
    """A node of a run in this process; :func:`join_run` is the short form.

    Use it as a context manager. Another thread may stop it or ask for its status.

    Args:
        plan: the run.
        node_id: which of its nodes this process is.
        on_status: called with the node's status, see :func:`join_run`.
        on_failure: called once with the error that ends the program, before the node leaves its
            peers, which can take long.

    Attributes:
        ended_by: the signal that has stopped this node alone; 0: none did.

    Raises:
        LaunchError: if the plan has no such node.
    """

    def __init__(
        self,
        plan: RunPlan,
        node_id: int,
        *,
        on_status: Callable[[NodeStatus], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        part = plan.node(node_id)
        self._plan, self._part = plan, part
        self._on_status, self._on_failure = on_status, on_failure
        self._phase = "starting"
        self._failure: BaseException | None = None
        self._error, self._where, self._failed_at = "", "", 0.0
        self._is_final, self._left_early = False, False
        self._stop_reason = ""
        self._signal, self._signalled_at = 0, 0.0
        self._is_asked = False
        self.ended_by = 0
        self._progress = Progress()
        self._progressed_at = time.monotonic()
        self._pauses = Pauses()
        self._done = threading.Event()
        self._reporting = threading.Lock()
        self._met: dict[int, tuple[str, ...]] = {}
        self._reporter = threading.Thread(
            target=self._report_forever, name="node-status", daemon=True
        )
        self._clock = _WatchedClock()
        self._router = Router(
            node_id=part.node_id,
            run_id=plan.run_id,
            roles=part.roles,
            labels=part.labels,
            listen=part.listen,
            advertise=part.advertise,
            dial=part.dial,
            key=bytes.fromhex(plan.key_hex) or None,
            transport=transports.NngStreamTransport(tls=plan.tls),
            shared_memory=_shared_memory(plan),
            options=_router_options(plan),
            clock=self._clock,
            expected_peers=part.n_peers,
            start_timeout_s=plan.start_timeout_s,
        )
        self._node = _Node(
            router=self._router,
            roles=part.roles,
            decides_roles=part.decides,
            labels=part.labels,
            clock=self._clock,
            run_token=plan.run_token,
            run_id="" if plan.run_id == DEFAULT_RUN_ID else plan.run_id,
            run_roles=part.run_roles,
            may_grow=plan.may_grow,
            launch=plan.launch,
            role_index=part.role_index,
            n_ranks=1 if part.ranks is None else part.ranks.size,
            on_failure=self._note_failure,
            on_end=self._report,
        )
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._reporter.start()
        self._exit.callback(self._end_reports)
        self._exit.enter_context(_node_variable(self._part.node_id))
        self._exit.enter_context(self._signals())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()

    def run(self, program: Program | bytes, *, package: str = "") -> Any:
        """Run the program, which cloudpickle may have saved; see :func:`join_run`."""
        self._clock.watch_this_thread()
        try:
            with self._router, running_as(self._node):
                try:
                    function = self._load(program, package)
                    result = None
                    if not self._stop_reason:
                        self._phase = "running"
                        result = self._call(function, _name_of(program, function))
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
                self.ended_by = self._signal
                raise SystemExit(128 + self._signal)
            self._phase = "finished"
            if self._node.stopped_ok:
                self._forget_failure()
        except BaseException as error:
            if self._phase != "failed":
                self._end_as_failed(error)
            raise
        if not self._node.stopped_ok:
            raise LaunchError(f"the run was stopped as failed: {self._node.stop_reason}")
        return result

    def stop(self, reason: str, *, ok: bool = True) -> None:
        """Ask the program's tasks to stop, those that it starts later too; from any thread.

        Args:
            reason: the stop reason.
            ok: whether the run has not failed.
        """
        self._is_asked |= ok
        self._stop_reason = self._stop_reason or reason
        self._node.stop(
            reason,
            ok=ok,
            only_local=self._plan.attached or self._plan.replaced,
            interrupted=self._plan.replaced,
        )

    def redial(self, old: str, new: str) -> None:
        """Dial a peer at another address from now on, because it was restarted elsewhere."""
        self._router.redial(old, new)

    @property
    def done(self) -> threading.Event:
        """Set once the node has ended."""
        return self._done

    def status(self) -> NodeStatus:
        """Return the node's progress."""
        progress = self._node.progress()
        return NodeStatus(
            phase=self._phase,
            address=self._router.address,
            roles=self._node.task_roles,
            step=progress.step,
            counters=dict(progress.counters),
            blocked_s=progress.blocked_s
            + sum(traffic.blocked_s for traffic in self._router.traffic().values()),
            peers=self._met | self._router.peer_roles(),
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

    def _load(self, program: Program | bytes, package: str) -> Callable[[], Any]:
        if self._plan.ding:
            with kept_for_good():
                importlib.import_module(THE_DOOR).open_door(package or ".")
        if isinstance(program, bytes):
            with kept_for_good():
                import cloudpickle

                return cloudpickle.loads(program)  # type: ignore[no-any-return]
        if not isinstance(program, str):
            return program
        with kept_for_good(), refusing_at_import("runs a task"):
            function = import_main(program, package)
        prints = self._part.node_id == 0 or self._plan.attached
        return with_arguments(function, program, prints=prints)

    def _call(self, function: Callable[[], Any], name: str) -> Any:
        """Call the program; ``sys.exit(0)`` is a normal end of it, but not in a task that runs."""
        try:
            return call_main(function, name)
        except SystemExit as end:
            has_ended = self._node.stopped_ok or self._node.stop_reason is not None
            if end.code not in (None, 0) or not has_ended:
                raise
            self._left_early = not self._node.has_tasks and self._part.n_peers > 0
            return None

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
        has_done_a_step = self._node.progress().step > 0
        self._is_final = not has_done_a_step and is_mistake(error, in_step=self._node.has_begun)
        self._phase = "failed"
        self._report()
        if self._on_failure is not None:
            self._on_failure(error)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop the node in order when a signal comes; only the main thread receives them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = SignalHandler(self._on_signal)
        for number in ENDING_SIGNALS:
            # Those that the launcher ignores, as after nohup, are ignored here, too.
            if number != signal.SIGQUIT and not is_ignored(number):
                handler.install(number)
        try:
            yield
        finally:
            handler.restore()

    def _on_signal(self, number: int, frame: object) -> None:
        """Stop this node in order; a second signal ends it at once.

        What the others do is for the launcher to decide, which has not sent the signal.
        """
        if self._signal:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._signal, self._signalled_at = number, time.monotonic()
        reason = signal_reason(number)
        self._stop_reason = self._stop_reason or reason
        self._node.stop(reason, only_local=True, interrupted=True)

    def _end_reports(self) -> None:
        self._done.set()
        self._reporter.join(STATUS_EVERY_S)
        self._report()

    def _report_forever(self) -> None:
        self._report()
        next_at = time.monotonic()
        while not self._done.wait(_STARTING_EVERY_S):
            self._pauses.tick()
            # A peer that joins and leaves between two reports is in the next one.
            self._met |= self._router.peer_roles()
            if time.monotonic() >= next_at:
                every_s = STATUS_EVERY_S if self._phase == "running" else _STARTING_EVERY_S
                next_at = time.monotonic() + every_s
                self._report()
                self._met = {}

    def _report(self) -> None:
        if self._on_status is None:
            return
        # The launcher keeps the status that arrives last, so it must also be the newest.
        with self._reporting:
            self._on_status(self.status())

    def _idle_s(self, progress: Progress) -> float:
        now = time.monotonic()
        if replace(progress, blocked_s=0.0) != self._progress:
            self._progress, self._progressed_at = replace(progress, blocked_s=0.0), now
            if self._phase == "running":
                self._forget_failure()
        if self._clock.program_waits:
            return 0.0
        waited_at = max(self._clock.waited_at, now - self._node.since_waiting_s())
        return max(self._pauses.elapsed(max(self._progressed_at, waited_at)), 0.0)


class _Node(CurrentNode):
    """Notes whether the program has built a task."""

    has_tasks = False

    def register(self, task: Any) -> None:
        self.has_tasks = True
        super().register(task)


class _WatchedClock(SystemClock):
    """Notes when the program's thread waits, which it does only up to a deadline.

    Attributes:
        program_waits: whether it waits now.
        waited_at: when its last wait ended, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.program_waits = False
        self.waited_at = 0.0
        self._thread: threading.Thread | None = None

    def watch_this_thread(self) -> None:
        """Watch the calling thread, which will run the program."""
        self._thread = threading.current_thread()

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or the time is up."""
        if timeout_s is None or threading.current_thread() is not self._thread:
            return super().wait_for(condition, predicate, timeout_s)
        self.program_waits = True
        try:
            return super().wait_for(condition, predicate, timeout_s)
        finally:
            self.waited_at = time.monotonic()
            self.program_waits = False


# What the variable was before the first node of this process, then the values of its nodes.
_node_values: list[str | None] = []
_node_values_lock = threading.Lock()


@contextlib.contextmanager
def _node_variable(node_id: int) -> Iterator[None]:
    """Tell the processes that the program starts which node they belong to.

    Nodes that share a process may end in any order. The newest one that is left counts.
    """
    value = f"{os.getpid()}:{node_id}"
    with _node_values_lock:
        if not _node_values:
            _node_values.append(os.environ.get(NODE_VARIABLE))
        _node_values.append(value)
        os.environ[NODE_VARIABLE] = value
    try:
        yield
    finally:
        with _node_values_lock:
            _node_values.remove(value)
            newest = _node_values[-1]
            if len(_node_values) == 1:
                _node_values.clear()
            if newest is None:
                del os.environ[NODE_VARIABLE]
            else:
                os.environ[NODE_VARIABLE] = newest


def _name_of(program: Program | bytes, function: Callable[[], Any]) -> str:
    return (
        program if isinstance(program, str) else getattr(function, "__qualname__", repr(function))
    )


def _stems_from(error: BaseException | None, first: BaseException) -> bool:
    """Return whether an error is the first one, contains it, or was raised because of it."""
    if error is None or error is first:
        return error is first
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(_stems_from(cause, first) for cause in (*inner, error.__cause__, error.__context__))


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
        text = f"{text}: {NO_TERMINAL}"
    return text[:_LONGEST_TEXT]


def _router_options(plan: RunPlan) -> NodeOptions:
    """Return the router's options; those that the plan leaves out have defaults."""
    if plan.max_event_bytes is None:
        return NodeOptions()
    return NodeOptions(max_event_bytes=plan.max_event_bytes)


def _shared_memory(plan: RunPlan) -> SharedMemory | None:
    """Return the memory that processes of this host share; None if its folder was removed."""
    if not plan.shared_memory:
        return None
    folder = Path(plan.shared_memory)
    if not folder.exists():
        _logger.warning(
            "the folder for shared memory, %s, was removed; arrays take the connections", folder
        )
        return None
    return SharedMemory(folder)
