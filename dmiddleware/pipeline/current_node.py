"""The node that this process is in a run of several processes.

A program that builds ``Task()`` runs alone. Within :func:`running_as`, which the launcher wraps
around it, the same program gets the node's router, roles and labels, in all of its threads. It may
run several tasks, one after the other: the n-th task of a node belongs to the n-th of the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dmiddleware.errors import LaunchError, TaskStateError
from dmiddleware.pipeline.clock import Clock, SystemClock
from dmiddleware.pipeline.context import Context
from dmiddleware.pipeline.event_bus import EventRouter
from dmiddleware.pipeline.lifecycle import StopRequest

__all__ = [
    "NODE_VARIABLE",
    "CurrentNode",
    "Progress",
    "current_node",
    "refuse_to_run_alone",
    "running_as",
]

NODE_VARIABLE: Final = "DITASK_NODE"
"""Environment variable of a node's process and its children: its process id and its node id."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a node's tasks.

    Attributes:
        step: steps of the chain.
        counters: the other counters of their contexts, by name.
        blocked_s: seconds that exchanges spent waiting for other processes.
    """

    step: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    blocked_s: float = 0.0


class NodeTask(Protocol):
    """What a node needs of a task that it runs."""

    name: str

    @property
    def roles(self) -> frozenset[str]:
        """The roles of this process; none means all."""
        ...

    @property
    def ctx(self) -> Context:
        """The context of the present step."""
        ...

    @property
    def closed(self) -> bool:
        """Whether the task was closed."""
        ...

    @property
    def stop_reason(self) -> str | None:
        """Why the task was asked to stop, or None."""
        ...

    @property
    def stopped_ok(self) -> bool:
        """Whether nothing has failed."""
        ...

    @property
    def ends_run(self) -> bool:
        """Whether the task was asked to stop together with the tasks of the peers."""
        ...

    @property
    def decided_end(self) -> bool:
        """Whether the whole run ends because of this task."""
        ...

    def stop(
        self, reason: str, *, ok: bool = True, only_local: bool = False, final: bool = True
    ) -> None:
        """End the run when the current step is done."""
        ...


class CurrentNode:
    """One process of a run.

    Args:
        router: carries events to and from the others.
        roles: the roles that the launcher has given to this process; none means all.
        decides_roles: whether the program gives this process its roles, with ``task.add_role``.
        labels: names by which the process can be selected.
        clock: measures time for its tasks; None: the clock of the machine.
        run_token: identifies the run: all its processes have the same one; empty: none.
        run_id: the name of the run, for people; empty: it was given none.
        run_roles: the roles of all processes of the run; None: unknown.
        may_grow: whether processes with further roles may join the run.
        launch: the options with which the run was started, as texts by their names.
        role_index: its number among the processes with the same roles that its launcher has
            started; None: unknown.
        n_ranks: how many processes the launcher has started to run their tasks as one.
        on_failure: called with the error of a task when it leaves :meth:`Task.run`, before the
            task is closed.
        on_end: called when a task ends the whole run, before the peers know.

    Attributes:
        interrupted: whether this process was interrupted, so that another one may replace it.
        has_begun: whether a task has begun its first step.
    """

    def __init__(
        self,
        *,
        router: EventRouter | None = None,
        roles: tuple[str, ...] = (),
        decides_roles: bool = False,
        labels: tuple[str, ...] = (),
        clock: Clock | None = None,
        run_token: str = "",
        run_id: str = "",
        run_roles: tuple[str, ...] | None = None,
        may_grow: bool = False,
        launch: Mapping[str, Any] | None = None,
        role_index: int | None = None,
        n_ranks: int = 1,
        on_failure: Callable[[BaseException], object] = lambda error: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.on_failure = on_failure
        self.on_end = on_end
        self.router = router
        self.roles = roles
        self.decides_roles = decides_roles
        self.labels = labels
        self.run_roles = run_roles
        self.may_grow = may_grow
        self.launch = dict(launch or {})
        self.role_index = role_index
        self.n_ranks = n_ranks
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._pid = os.getpid()
        self._run_token = run_token
        self.run_id = run_id
        self._n_names = 0
        self._blocked_s = 0.0
        self._waits, self._waited_at = False, 0.0
        # A signal handler may stop the node while this same thread registers a task.
        self._lock = threading.RLock()
        self._tasks: list[NodeTask] = []
        self._n_tasks = 0
        self._running: NodeTask | None = None
        self._changed = threading.Condition(self._lock)
        self._past_ok = True
        self._stop = StopRequest()
        self.interrupted = False
        self.has_begun = False

    def check_task(self, *, rank: int | None) -> None:
        """Refuse a task that would run alone, although the node belongs to a run.

        Raises:
            TaskStateError: in a process that was forked from the node.
            LaunchError: if the task has no rank, and the launcher has started several processes to
                run it as one.
        """
        if os.getpid() != self._pid:
            raise _child_error(str(self.node_id))
        if rank is None and self.n_ranks > 1:
            role = "+".join(self.roles)
            raise LaunchError(
                f"the run has {self.n_ranks} processes with the role {role}, but "
                "this program does not join them with data_parallel(), so each would run alone; "
                "wrap the program in `with data_parallel() as rank:` and give its Task rank=rank, "
                f"or start one, as in --roles {role}=1"
            )

    @property
    def node_id(self) -> int:
        """The number of this process in the run."""
        return 0 if self.router is None else self.router.node_id

    @property
    def task_roles(self) -> tuple[str, ...] | None:
        """The roles of the newest task, which the program may have given to it; none means all.

        None: the program has yet to give this process its roles.
        """
        tasks = list(self._tasks)
        roles = tuple(sorted(map(str, tasks[-1].roles))) if tasks else self.roles
        return roles if roles or not self.decides_roles else None

    def has_role(self, role: str) -> bool:
        """Return whether this process has the role; without any roles, it has them all.

        It has none that its program has yet to give to it.
        """
        roles = self.task_roles
        return roles is not None and (not roles or role in roles)

    def next_shared_name(self) -> str:
        """Return a name for something that a run has one of, such as its folder; empty: none.

        The n-th call returns the same name in all processes of the run.
        """
        with self._lock:
            self._n_names += 1
            return f"{self._run_token}/{self._n_names}" if self._run_token else ""

    def note_blocked(self, seconds: float) -> None:
        """Add the seconds that a middleware waited for another process."""
        with self._lock:
            self._blocked_s += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a block that waits for other processes up to a deadline, which is not a hang."""
        began = time.monotonic()
        self._waits = True
        try:
            yield
        finally:
            self._waits, self._waited_at = False, time.monotonic()
            self.note_blocked(self._waited_at - began)

    def since_waiting_s(self) -> float:
        """Return the seconds since the last such block, on the machine's clock; 0 within one."""
        return 0.0 if self._waits else time.monotonic() - self._waited_at

    def next_task_number(self) -> int:
        """Return the number of a new task among the tasks of this process, from 1.

        Raises:
            TaskStateError: if another task runs, from which the new one would take the peers.
        """
        with self._lock:
            running = self._running
            if running is None:
                self._n_tasks += 1
                return self._n_tasks
        raise self._two_at_once(running)

    def register(self, task: NodeTask) -> None:
        """Add a task of this process; if the process was already asked to stop, stop the task.

        Earlier tasks that are closed are forgotten.
        """
        with self._lock:
            for past in [past_task for past_task in self._tasks if past_task.closed]:
                self._tasks.remove(past)
                # An error that left its run without a stop has been handled by the program.
                self._past_ok &= past.stopped_ok or past.stop_reason is None
            self._tasks.append(task)
        stop = self._stop
        if stop.reason is not None:
            task.stop(stop.reason, ok=stop.ok, only_local=stop.only_local, final=False)

    @contextlib.contextmanager
    def running(self, task: NodeTask) -> Iterator[None]:
        """Mark a block in which a task runs.

        Raises:
            TaskStateError: if a newer one was built, which has the peers now.
        """
        with self._lock:
            current = self._running or (self._tasks[-1] if self._tasks else task)
            is_its_turn = self.router is None or current is task
            if is_its_turn and self.router is not None:
                self._running = task
        if not is_its_turn:
            raise self._two_at_once(current)
        try:
            yield
        finally:
            with self._changed:
                self._running = None if self._running is task else self._running
                self._changed.notify_all()

    def _two_at_once(self, other: NodeTask) -> TaskStateError:
        """Stop the other task too, which may wait for peers forever, and return the error."""
        reason = (
            f"node {self.node_id} has the task {other.name!r}, and its peers talk to one task of a "
            "node at a time; build and run each task when the one before it has ended, or start a "
            "run for each"
        )
        other.stop(reason, ok=False)
        return TaskStateError(reason)

    def wait_until_idle(self) -> None:
        """Wait until no task runs, which another thread may have started."""
        with self._changed:
            self.clock.wait_for(self._changed, lambda: self._running is None, None)

    def stop(
        self,
        reason: str,
        *,
        ok: bool = True,
        only_local: bool = False,
        interrupted: bool = False,
    ) -> None:
        """Stop every task of this process, and every task that it starts later.

        Args:
            reason: why.
            ok: False if the run has failed.
            only_local: True if the peers continue without this process.
            interrupted: True if another process may replace this one.
        """
        self.interrupted |= interrupted
        with self._lock:
            self._stop.make(reason, ok=ok, only_local=only_local)
            tasks = list(self._tasks)
        for task in tasks:
            task.stop(reason, ok=ok, only_local=only_local, final=False)

    @property
    def stop_reason(self) -> str | None:
        """Why the newest task stopped, or None."""
        return self._tasks[-1].stop_reason if self._tasks else None

    @property
    def stopped_ok(self) -> bool:
        """Whether no task was stopped because something failed."""
        return self._past_ok and all(task.stopped_ok for task in list(self._tasks))

    @property
    def ends_run(self) -> bool:
        """Whether a task was asked to stop together with the tasks of the peers.

        What ended earlier tasks, which are closed, has not ended the newest one.
        """
        return any(task.ends_run for task in list(self._tasks))

    @property
    def decided_end(self) -> bool:
        """Whether the whole run ends because of a task of this process."""
        return any(task.decided_end for task in list(self._tasks))

    def progress(self) -> Progress:
        """Return the progress of the tasks; each counter is the highest among them.

        Earlier tasks, which are closed, do not count once there is a newer one.
        """
        contexts = [task.ctx for task in list(self._tasks)]
        counters: dict[str, int] = {}
        for ctx in contexts:
            for name, count in ctx.counters().items():
                counters[name] = max(count, counters.get(name, 0))
        step = max((ctx.total_step for ctx in contexts), default=0)
        return Progress(step, counters, self._blocked_s)


_current: ContextVar[CurrentNode | None] = ContextVar("dmiddleware.current_node", default=None)
# The nodes of this process: one in a launched process, several in a simulated cluster.
_nodes: list[CurrentNode] = []


def current_node() -> CurrentNode | None:
    """Return the node that this program runs as, or None if it runs alone.

    A thread that the program has started belongs to the node too, unless several nodes share the
    process, as in a simulated cluster; there it needs the context of the thread that starts it.
    """
    node = _current.get()
    if node is None and len(nodes := list(_nodes)) == 1:
        return nodes[0]
    return node


def refuse_to_run_alone() -> None:
    """Refuse a task that would silently run alone, although it belongs to a node.

    That is one in a process that a node has started with ``multiprocessing``, or in a thread that
    outlives the node's program.

    Raises:
        TaskStateError: with the node.
    """
    # A process that multiprocessing has started has loaded it; others need not.
    module = sys.modules.get("multiprocessing.process")
    parent = None if module is None else module.parent_process()
    pid, _, node_id = os.environ.get(NODE_VARIABLE, "").partition(":")
    if str(os.getpid()) == pid:
        raise TaskStateError(
            f"the program of node {node_id} has ended, so a task of it would run alone; let the "
            "program join the thread that runs the task"
        )
    if parent is not None and str(parent.pid) == pid:
        raise _child_error(node_id)


def _child_error(node_id: str) -> TaskStateError:
    return TaskStateError(
        f"this process was started by node {node_id} with multiprocessing and is not a node of the "
        "run, so its task would run alone; run the task in the node itself, or start more nodes "
        "with ditask --roles"
    )


@contextlib.contextmanager
def running_as(node: CurrentNode) -> Iterator[CurrentNode]:
    """Make tasks that are built in this block join the run as ``node``."""
    token = _current.set(node)
    _nodes.append(node)
    try:
        yield node
    finally:
        _nodes.remove(node)
        _current.reset(token)
