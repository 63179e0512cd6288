"""Deterministic simulation: threads run one at a time, in an order that a seed determines."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Final, Self

__all__ = ["Killed", "SimulatedThread", "Simulation", "SimulationError"]

_MOST_ENDINGS: Final = 1000
_TOLERATED_S: Final = 0.01
_INTERNAL_FILES: Final = frozenset({__file__, threading.__file__})
"""Files whose frames do not show why a thread waits."""


class SimulationError(AssertionError):
    """A simulated program is stuck, or did something that a simulation cannot control."""


class Killed(BaseException):
    """Raised in the waits of a killed thread, to end it."""


class Simulation:
    """Runs threads one at a time, on a simulated clock, in an order that a seed determines.

    It is a :class:`~dmiddleware.pipeline.Clock`: code that waits and starts threads through it is
    simulated. The thread that enters the ``with`` block is part of the simulation, as its first
    thread. A thread runs until it waits for a condition that does not hold yet. Then one of the
    threads that can run is chosen at random, from the seed: one whose deadline has passed, or one
    that was notified and whose predicate holds. If none can run, the clock advances to the next
    deadline. Waiting takes no real time, and computing takes no simulated time, so the same program
    with the same seed does the same things in the same order every time.

    Threads still need locks for the data that they share. No thread may wait while it holds a lock
    other than its condition's.

    Args:
        seed: determines the order.
        epoch_s: offset between :meth:`wall` and :meth:`now`.
        patience_s: real seconds that one thread may run without waiting before it counts as stuck.
        find_missed: before the clock advances, look for threads whose predicate already holds:
            either a ``notify`` is missing, or the deadline should be earlier.

    Raises:
        SimulationError: in the first thread: if all threads wait without a deadline (the message
            lists where), if a thread is stuck or raises, or, with ``find_missed``, if a thread
            should have been notified.

    Example:
        >>> condition = threading.Condition()
        >>> with Simulation(seed=1) as simulation, condition:
        ...     simulation.wait_for(condition, lambda: False, 3600.0)
        ...     simulation.now()
        False
        3600.0
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        epoch_s: float = 1e9,
        patience_s: float = 60.0,
        find_missed: bool = False,
    ) -> None:
        self._now = 0.0
        self._epoch_s = epoch_s
        self._patience_s = patience_s
        self._find_missed = find_missed
        self._random = random.Random(seed)
        self._threads: dict[SimulatedThread, None] = {}
        # Only these are looked at when a thread is chosen, so that it costs the same however many
        # threads wait.
        self._candidates: list[SimulatedThread] = []
        self._observers: dict[SimulatedThread, None] = {}
        self._waits: dict[object, dict[_Wait, SimulatedThread]] = {}
        self._deadlines: list[tuple[float, int, SimulatedThread, _Wait]] = []
        self._suspended: list[SimulatedThread] = []
        self._first: SimulatedThread | None = None
        self._running: SimulatedThread | None = None
        self._version = 0
        self._n_deadlines = itertools.count()
        self._observed: weakref.WeakSet[threading.Condition] = weakref.WeakSet()
        self._n_switches = 0
        self._history = hashlib.sha256()
        self._frozen: set[str] = set()
        self._failure: tuple[SimulatedThread, BaseException] | None = None
        self._is_broken = False

    def __enter__(self) -> Self:
        if self._first is not None:
            raise SimulationError("a simulation can be entered only once; make a new one")
        self._first = self._running = SimulatedThread(self, "the first thread", "", None)
        self._threads[self._first] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all threads that are still running."""
        if self._has_broken():
            return
        self._frozen.clear()
        self._resume_suspended()
        others = [thread for thread in self._threads if thread is not self._first]
        for thread in others:
            self._end(thread)
        late: SimulationError | None = None
        while len(self._threads) > 1:
            try:
                self._wait(None, lambda: len(self._threads) == 1, None)
            except SimulationError as failure:
                late = late or failure
                if self._has_broken():
                    break
        # An error that ended the simulation matters more than errors while its threads ended.
        if late is not None and error is None:
            raise late
        for thread in others:
            thread.thread.join(self._patience_s)

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now

    def wall(self) -> float:
        """Return the simulated calendar time, in seconds since the epoch."""
        return self._epoch_s + self._now

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or ``timeout_s`` simulated seconds have passed.

        Other threads run meanwhile. The predicate is evaluated after a notification, on
        any of the threads, with the condition held.

        Raises:
            SimulationError: from a thread that the simulation did not start.
        """
        self._check_caller()
        if predicate():
            return True
        self._observe(condition)
        with _released(condition):
            wait = self._wait(condition, predicate, timeout_s)
        return wait.result()

    def spawn(
        self, function: Callable[[], None], *, name: str, group: str | None = None
    ) -> SimulatedThread:
        """Start a thread, which runs when the others wait.

        Args:
            function: the function to run.
            name: its name in messages.
            group: the group of threads that :meth:`kill` ends together; None: the caller's group.
        """
        caller = self._check_caller()
        thread = SimulatedThread(self, name, caller.group if group is None else group, function)
        self._threads[thread] = None
        self._add_candidate(thread)
        return thread

    def run_for(self, seconds: float) -> None:
        """Let the other threads run for a number of simulated seconds."""
        self.wait_until(lambda: False, seconds)

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Let the other threads run until the predicate holds, and return whether it does.

        Args:
            predicate: evaluated after each run of another thread.
            timeout_s: the maximum number of simulated seconds.
        """
        self._check_caller()
        return predicate() or self._wait(None, predicate, timeout_s).result()

    def kill(self, group: str) -> None:
        """End the threads of a group at their current waits, and wait until all have ended.

        Their ``finally`` blocks run, but cannot wait.
        """
        caller = self._check_caller()
        if caller.group == group:
            raise SimulationError(f"a thread of {group!r} cannot kill its own group")
        self.thaw(group)
        killed = [thread for thread in self._threads if thread.group == group]
        for thread in killed:
            self._end(thread)
        self._wait(None, lambda: all(thread.has_ended for thread in killed), None)

    def freeze(self, group: str) -> None:
        """Suspend the threads of a group, like those of a process after SIGSTOP."""
        if self._check_caller().group == group:
            raise SimulationError(f"a thread of {group!r} cannot freeze its own group")
        self._frozen.add(group)

    def thaw(self, group: str) -> None:
        """Resume the threads of a group; their deadlines kept running."""
        self._check_caller()
        if group in self._frozen:
            self._frozen.remove(group)
            self._resume_suspended()

    @property
    def history(self) -> str:
        """A digest of which thread ran when; equal for two simulations that ran the same way."""
        return self._history.hexdigest()

    def describe(self) -> str:
        """Return one line per thread: where it waits, and until when."""
        return "\n".join(f"  {_describe(thread)}" for thread in self._threads)

    def wait_for_end(self, thread: SimulatedThread, timeout_s: float) -> bool:
        """Wait until a thread has ended, and return whether it has; the caller holds no lock."""
        if self._running is not None and self._running.is_killed:
            # The other thread ends as well; a killed thread reports no errors.
            return True
        self._check_caller()
        return self._wait(thread, lambda: thread.has_ended, timeout_s).holds

    def leave(self, thread: SimulatedThread, error: BaseException | None) -> None:
        """Record that a thread has ended, and run the next one."""
        thread.has_ended = True
        del self._threads[thread]
        for waiting in self._waits.get(thread, {}).values():
            self._add_candidate(waiting)
        if error is not None and self._failure is None:
            self._failure = thread, error
        if not self._is_broken:
            self._pass_baton(self._next())

    def _has_broken(self) -> bool:
        return self._is_broken

    def _check_caller(self) -> SimulatedThread:
        running = self._running
        if running is None or not running.is_current():
            raise SimulationError(
                f"the thread {threading.current_thread().name!r} uses the clock of a simulation "
                "that did not start it; start threads with its spawn() inside the with block"
            )
        if running.is_killed:
            running.n_killed += 1
            if running.n_killed > _MOST_ENDINGS:
                self._is_broken = True
                raise SimulationError(
                    f"the thread {running.name!r} was killed but keeps running; let Killed pass"
                )
            raise Killed
        return running

    def _wait(
        self,
        event: threading.Condition | SimulatedThread | None,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> _Wait:
        """Let other threads run until the predicate holds or the time is up.

        Args:
            event: the condition or the thread whose notification or end can make it hold; None:
                any run of another thread can.
            predicate: the predicate.
            timeout_s: the maximum number of simulated seconds.
        """
        me = self._running
        assert me is not None
        deadline = None if timeout_s is None else self._now + timeout_s
        condition = event if isinstance(event, threading.Condition) else None
        wait = me.wait = _Wait(condition, predicate, deadline)
        if event is None:
            self._observers[me] = None
        else:
            self._waits.setdefault(event, {})[wait] = me
            if isinstance(event, SimulatedThread) and event.has_ended:
                self._add_candidate(me)
        if deadline is not None:
            self._add_deadline(me, wait)
        chosen = self._next()
        if chosen is not me:
            self._pass_baton(chosen)
            self._await_baton(me)
        else:
            self._note_run(me)
        me.wait = None
        if event is None:
            del self._observers[me]
        else:
            del self._waits[event][wait]
            if not self._waits[event]:
                del self._waits[event]
        if me is self._first:
            self._raise_failure()
        if me.is_killed:
            raise Killed
        return wait

    def _pass_baton(self, thread: SimulatedThread) -> None:
        self._note_run(thread)
        thread.baton.release()

    def _note_run(self, thread: SimulatedThread) -> None:
        self._running = thread
        self._version += 1
        self._n_switches += 1
        self._history.update(f"{self._now!r} {thread.group} {thread.name}\n".encode())

    def _await_baton(self, me: SimulatedThread) -> None:
        if me is not self._first:
            me.baton.acquire()
            return
        n_seen = -1
        while not me.baton.acquire(timeout=self._patience_s):
            if self._n_switches == n_seen:
                self._is_broken = True
                raise SimulationError(self._stuck())
            n_seen = self._n_switches

    def _raise_failure(self) -> None:
        if self._failure is not None:
            (thread, error), self._failure = self._failure, None
            if isinstance(error, _Stuck):
                raise error
            raise SimulationError(f"the thread {thread.name!r} failed: {error!r}") from error

    def _observe(self, condition: threading.Condition) -> None:
        """Wrap a condition so that its notifications reach the simulation."""
        if condition in self._observed:
            return
        self._observed.add(condition)
        notify, notify_all = condition.notify, condition.notify_all

        def observed(n: int = 1) -> None:
            notify(n)
            self._notify(condition, n)

        def observed_all() -> None:
            notify_all()
            self._notify(condition, None)

        condition.notify = observed  # type: ignore[method-assign]
        condition.notify_all = observed_all  # type: ignore[method-assign]

    def _notify(self, condition: threading.Condition, n: int | None) -> None:
        """Wake the ``n`` threads that have waited longest for the condition, or all."""
        waits = (
            (w, thread) for w, thread in self._waits.get(condition, {}).items() if not w.notified
        )
        for wait, thread in itertools.islice(waits, n):
            wait.notified = True
            self._add_candidate(thread)

    def _end(self, thread: SimulatedThread) -> None:
        thread.is_killed = True
        self._add_candidate(thread)

    def _add_candidate(self, thread: SimulatedThread) -> None:
        if not thread.is_candidate:
            thread.is_candidate = True
            self._candidates.append(thread)

    def _add_deadline(self, thread: SimulatedThread, wait: _Wait) -> None:
        assert wait.deadline is not None
        number = next(self._n_deadlines)
        heapq.heappush(self._deadlines, (wait.deadline, number, thread, wait))

    def _resume_suspended(self) -> None:
        """Look again at the threads that could not run because their groups were frozen."""
        suspended, self._suspended = self._suspended, []
        for thread in suspended:
            self._add_candidate(thread)
            if thread.wait is not None and thread.wait.deadline is not None:
                self._add_deadline(thread, thread.wait)

    def _next(self) -> SimulatedThread:
        """Choose the next thread to run; advance the clock if none can."""
        first = self._first
        assert first is not None
        while True:
            if self._failure is not None and first.wait is not None:
                return first
            thread = self._find_ready()
            if thread is not None:
                return thread
            missed = self._missed() if self._find_missed else None
            deadline = self._next_deadline()
            if missed is not None:
                self._failure = first, _Stuck(missed)
            elif deadline is None:
                self._failure = first, _Stuck(self._deadlock())
            else:
                self._now = max(self._now, deadline)
                self._version += 1

    def _next_deadline(self) -> float | None:
        """Return the earliest deadline of the threads that are not frozen."""
        while self._deadlines:
            deadline, _, thread, wait = self._deadlines[0]
            if thread.wait is wait and thread.group not in self._frozen:
                return deadline
            heapq.heappop(self._deadlines)
            if thread.wait is wait:
                self._suspended.append(thread)
        return None

    def _find_ready(self) -> SimulatedThread | None:
        """Return one of the threads that can run, at random."""
        while (deadline := self._next_deadline()) is not None and deadline <= self._now:
            self._add_candidate(heapq.heappop(self._deadlines)[2])
        for thread in self._observers:
            if thread.wait is not None and thread.wait.checked_at_version != self._version:
                self._add_candidate(thread)
        candidates = self._candidates
        while candidates:
            at = int(self._random.random() * len(candidates))
            candidates[at], candidates[-1] = candidates[-1], candidates[at]
            thread = candidates.pop()
            thread.is_candidate = False
            if thread.group in self._frozen:
                self._suspended.append(thread)
            elif not thread.has_ended and self._is_ready(thread):
                return thread
        return None

    def _missed(self) -> str | None:
        """Look for a thread whose predicate already holds."""
        for thread in self._threads:
            wait = thread.wait
            if wait is None or wait.condition is None or thread.group in self._frozen:
                continue
            if wait.deadline is not None and wait.deadline - self._now < _TOLERATED_S:
                continue
            if self._evaluate(thread, wait):
                return (
                    f"after {self._now:g} simulated seconds a thread waits although its predicate "
                    "already holds; notify its condition, or give it an earlier deadline:\n"
                    f"  {_describe(thread)}"
                )
        return None

    def _is_ready(self, thread: SimulatedThread) -> bool:
        wait = thread.wait
        if wait is None or thread.is_killed:
            return True
        wait.checked_at_version = self._version
        wait.notified = False
        if wait.condition is not None:
            # It waits again, behind the others.
            waits = self._waits[wait.condition]
            waits[wait] = waits.pop(wait)
        try:
            wait.holds = self._evaluate(thread, wait)
        except BaseException as error:  # noqa: BLE001 (raised by the thread that waits)
            wait.error = error
            return True
        return wait.holds or (wait.deadline is not None and wait.deadline <= self._now)

    def _evaluate(self, thread: SimulatedThread, wait: _Wait) -> bool:
        if wait.condition is None:
            return wait.predicate()
        if not wait.condition.acquire(blocking=False):
            raise SimulationError(
                f"a thread that waits for something else holds the lock of the condition that "
                f"{thread.name!r} waits for; release it before waiting:\n{self.describe()}"
            )
        try:
            return wait.predicate()
        finally:
            wait.condition.release()

    def _deadlock(self) -> str:
        return (
            f"deadlock: after {self._now:g} simulated seconds every thread waits, and none has a "
            f"deadline:\n{self.describe()}"
        )

    def _stuck(self) -> str:
        running = self._running
        assert running is not None
        frame = _frame_of(running)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (no stack)\n"
        return (
            f"the thread {running.name!r} has run for {self._patience_s:g} real seconds without "
            "waiting through the simulation's clock; it computes for too long, waits for a lock "
            f"that a waiting thread holds, or waits by other means:\n{stack}"
        )


@dataclass(eq=False, slots=True)
class _Wait:
    """The condition, predicate and deadline of one waiting thread."""

    condition: threading.Condition | None
    predicate: Callable[[], bool]
    deadline: float | None
    notified: bool = False
    checked_at_version: int = -1
    holds: bool = False
    error: BaseException | None = None

    def result(self) -> bool:
        """Return the predicate's last result, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.holds


class SimulatedThread:
    """A thread of a simulation, which runs only while it holds the baton."""

    def __init__(
        self,
        simulation: Simulation,
        name: str,
        group: str,
        function: Callable[[], None] | None,
    ) -> None:
        self.name = name
        self.group = group
        self.baton = threading.Lock()
        self.baton.acquire()
        self.wait: _Wait | None = None
        self.has_ended = False
        self.is_killed = False
        self.is_candidate = False
        self.n_killed = 0
        self._simulation = simulation
        if function is None:
            self.thread = threading.current_thread()
        else:
            self.thread = threading.Thread(
                target=self._run, args=(function,), name=name, daemon=True
            )
            self.thread.start()

    def is_current(self) -> bool:
        """Return whether the caller runs on this thread."""
        return threading.current_thread() is self.thread

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended, and return whether it has."""
        return self._simulation.wait_for_end(self, timeout_s)

    def _run(self, function: Callable[[], None]) -> None:
        self.baton.acquire()
        error: BaseException | None = None
        try:
            if not self.is_killed:
                function()
        except Killed:
            pass
        except BaseException as raised:  # noqa: BLE001 (raised in the first thread)
            # Errors of a killed thread do not matter.
            error = None if self.is_killed else raised
        self._simulation.leave(self, error)


@contextlib.contextmanager
def _released(condition: threading.Condition) -> Iterator[None]:
    """Release a condition as often as it is held, and acquire it as often again."""
    depth = 0
    with contextlib.suppress(RuntimeError):
        while True:
            condition.release()
            depth += 1
    if depth == 0:
        raise RuntimeError("cannot wait for a condition whose lock is not held")
    try:
        yield
    finally:
        for _ in range(depth):
            condition.acquire()


class _Stuck(SimulationError):
    """Found by the simulation itself, so it is raised as it is."""


def _describe(thread: SimulatedThread) -> str:
    """Describe on one line where a thread waits, and until when."""
    wait = thread.wait
    group = f" of {thread.group}" if thread.group else ""
    if wait is None:
        return f"{thread.name}{group}: can run"
    until = "without a deadline" if wait.deadline is None else f"until {wait.deadline:g} s"
    return f"{thread.name}{group}: waits {until} at {_place(thread)}"


def _place(thread: SimulatedThread) -> str:
    frame = _frame_of(thread)
    while frame is not None and frame.f_code.co_filename in _INTERNAL_FILES:
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def _frame_of(thread: SimulatedThread) -> FrameType | None:
    """Return the frame that a thread executes, or None if it has ended."""
    return sys._current_frames().get(thread.thread.ident or 0)
