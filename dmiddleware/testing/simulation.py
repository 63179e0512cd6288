"""A simulation: threads that run one at a time, in an order that a seed decides."""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from dmiddleware.testing.simulated_threads import (
    Killed,
    SimulatedThread,
    SimulationError,
    Wait,
    describe,
    frame_of,
    released,
)

__all__ = ["Simulation"]

_MOST_ENDINGS: Final = 1000
_TOLERATED_S: Final = 0.01


class Simulation:
    """Runs threads one at a time, by a clock of its own, in an order that a seed decides.

    It is a :class:`~dmiddleware.pipeline.Clock`: whoever waits through it and starts threads
    through it is simulated. The thread that enters the ``with`` takes part, as the first one. A
    thread runs until it waits for something that does not hold yet; then one of those that can go
    on is chosen at random, from the seed: one that was notified and whose predicate holds, or whose
    deadline is here. When none can, the clock goes forward to the next deadline: no real time
    passes in waiting, and computing takes no simulated time. So the same program with the same
    seed does the same things in the same order, each time.

    What threads share needs its locks still, and no thread may wait while it holds a lock other
    than its condition's.

    Args:
        seed: decides the order.
        epoch_s: what the calendar's time, :meth:`wall`, is ahead of the clock.
        patience_s: real seconds that one thread may run without waiting; after that it counts as
            stuck.
        find_missed: look, whenever the clock is to go forward, whether a thread waits for what
            holds already, so that a ``notify`` is missing, or its deadline is too late.

    Raises:
        SimulationError: in the first thread: when all threads wait without a deadline, with where
            each of them waits; when a thread is stuck; when one raises; with ``find_missed``, when
            one should have been notified.

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
        self._threads: list[SimulatedThread] = []
        self._first: SimulatedThread | None = None
        self._running: SimulatedThread | None = None
        self._version = 0
        self._lines = itertools.count()
        self._heard: weakref.WeakSet[threading.Condition] = weakref.WeakSet()
        self._n_switches = 0
        self._history = hashlib.sha256()
        self._frozen: set[str] = set()
        self._failure: tuple[SimulatedThread, BaseException] | None = None
        self._is_broken = False

    def __enter__(self) -> Self:
        if self._first is not None:
            raise SimulationError("a simulation is entered once; make a new one")
        self._first = self._running = SimulatedThread(self, "the first thread", "", None)
        self._threads.append(self._first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all threads that still run."""
        if self._has_broken():
            return
        self._frozen.clear()
        others = [thread for thread in self._threads if thread is not self._first]
        for thread in others:
            thread.is_killed = True
        late: SimulationError | None = None
        while not all(thread.has_ended for thread in others):
            try:
                self._wait(None, lambda: all(thread.has_ended for thread in others), None)
            except SimulationError as failure:
                late = late or failure
                if self._has_broken():
                    break
        # What made the simulation end matters more than what threads raised on the way out.
        if late is not None and error is None:
            raise late
        for thread in others:
            thread.thread.join(self._patience_s)

    # The clock --------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self._now

    def wall(self) -> float:
        """Return the calendar's seconds, which go along."""
        return self._epoch_s + self._now

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or so many simulated seconds have passed.

        Meanwhile the others run. The predicate is looked at when the condition was notified, from
        any of the threads, with the condition held.

        Raises:
            SimulationError: from a thread that the simulation did not start.
        """
        self._check_caller()
        if predicate():
            return True
        self._hear(condition)
        with released(condition):
            wait = self._wait(condition, predicate, timeout_s)
        return wait.result()

    def spawn(
        self, function: Callable[[], None], *, name: str, group: str | None = None
    ) -> SimulatedThread:
        """Start a thread; it runs when the others wait.

        Args:
            function: what it runs.
            name: what messages call it.
            group: the threads that :meth:`kill` ends together; None: the caller's.
        """
        caller = self._check_caller()
        thread = SimulatedThread(self, name, caller.group if group is None else group, function)
        self._threads.append(thread)
        return thread

    # For who holds the simulation -------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        """Let the others run for so many simulated seconds."""
        self.wait_until(lambda: False, seconds)

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Let the others run until something holds, and tell whether it does.

        Args:
            predicate: called whenever another thread has run.
            timeout_s: the most simulated seconds.
        """
        self._check_caller()
        return predicate() or self._wait(None, predicate, timeout_s).result()

    def kill(self, group: str) -> None:
        """End the threads of a group, each at the wait that it is in, and wait until all have.

        Their ``finally`` blocks run, but can wait for nothing.
        """
        caller = self._check_caller()
        if caller.group == group:
            raise SimulationError(f"a thread of {group!r} cannot kill its own group")
        self.thaw(group)
        killed = [thread for thread in self._threads if thread.group == group]
        for thread in killed:
            thread.is_killed = True
        self._wait(None, lambda: all(thread.has_ended for thread in killed), None)

    def freeze(self, group: str) -> None:
        """Let the threads of a group stand still, as those of a stopped process do."""
        if self._check_caller().group == group:
            raise SimulationError(f"a thread of {group!r} cannot freeze its own group")
        self._frozen.add(group)

    def thaw(self, group: str) -> None:
        """Let the threads of a group go on; their deadlines have gone on, too."""
        self._check_caller()
        self._frozen.discard(group)

    @property
    def history(self) -> str:
        """A digest of which thread ran when, up to now: equal if two simulations went equally."""
        return self._history.hexdigest()

    def describe(self) -> str:
        """Return a line for each thread: where it waits, and until when."""
        return "\n".join(f"  {describe(thread)}" for thread in self._threads)

    # Switching --------------------------------------------------------------------------------

    def wait_for_end(self, thread: SimulatedThread, timeout_s: float) -> bool:
        """Wait until a thread has ended, and tell whether it has; with no lock held."""
        if self._running is not None and self._running.is_killed:
            # What it waits for ends as well, and it has nothing to complain about.
            return True
        self._check_caller()
        return self._wait(None, lambda: thread.has_ended, timeout_s).holds

    def leave(self, thread: SimulatedThread, error: BaseException | None) -> None:
        """Take note that a thread has ended, and let the next one run."""
        thread.has_ended = True
        self._threads.remove(thread)
        if error is not None and self._failure is None:
            self._failure = thread, error
        if not self._is_broken:
            self._hand_over(self._next())

    def _has_broken(self) -> bool:
        return self._is_broken

    def _check_caller(self) -> SimulatedThread:
        running = self._running
        if running is None or not running.is_current():
            raise SimulationError(
                f"the thread {threading.current_thread().name!r} goes by the clock of a simulation "
                "that did not start it; start threads with the clock's spawn(), within the with"
            )
        if running.is_killed:
            running.n_killed += 1
            if running.n_killed > _MOST_ENDINGS:
                self._is_broken = True
                raise SimulationError(f"the thread {running.name!r} catches its own end")
            raise Killed
        return running

    def _wait(
        self,
        condition: threading.Condition | None,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> Wait:
        """Let others run until the predicate holds or the time is up."""
        me = self._running
        assert me is not None
        deadline = None if timeout_s is None else self._now + timeout_s
        wait = me.wait = Wait(condition, predicate, deadline, next(self._lines))
        chosen = self._next()
        if chosen is not me:
            self._hand_over(chosen)
            self._await_baton(me)
        else:
            self._note_run(me)
        me.wait = None
        if me is self._first:
            self._raise_failure()
        if me.is_killed:
            raise Killed
        return wait

    def _hand_over(self, thread: SimulatedThread) -> None:
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
        seen = -1
        while not me.baton.acquire(timeout=self._patience_s):
            if self._n_switches == seen:
                self._is_broken = True
                raise SimulationError(self._stuck())
            seen = self._n_switches

    def _raise_failure(self) -> None:
        if self._failure is not None:
            (thread, error), self._failure = self._failure, None
            if isinstance(error, _Told):
                raise error
            raise SimulationError(f"the thread {thread.name!r} failed: {error!r}") from error

    def _hear(self, condition: threading.Condition) -> None:
        """Have a condition tell the simulation when it is notified."""
        if condition in self._heard:
            return
        self._heard.add(condition)
        notify, notify_all = condition.notify, condition.notify_all

        def heard(n: int = 1) -> None:
            notify(n)
            self._notify(condition, n)

        def heard_all() -> None:
            notify_all()
            self._notify(condition, None)

        condition.notify = heard  # type: ignore[method-assign]
        condition.notify_all = heard_all  # type: ignore[method-assign]

    def _notify(self, condition: threading.Condition, n: int | None) -> None:
        """Let those look again who have waited longest; ``n`` of them, or all."""
        waits = [
            wait
            for thread in self._threads
            if (wait := thread.wait) is not None
            and wait.condition is condition
            and not wait.notified
        ]
        if n is not None and n < len(waits):
            waits.sort(key=lambda wait: wait.place_in_line)
            waits = waits[:n]
        for wait in waits:
            wait.notified = True

    def _next(self) -> SimulatedThread:
        """Choose who runs next; the clock goes forward if no one can."""
        first = self._first
        assert first is not None
        while True:
            if self._failure is not None and first.wait is not None:
                return first
            thread = self._find_ready()
            if thread is not None:
                return thread
            missed = self._missed() if self._find_missed else None
            deadlines = [
                other.wait.deadline
                for other in self._awake()
                if other.wait is not None and other.wait.deadline is not None
            ]
            if missed is not None:
                self._failure = first, _Told(missed)
            elif not deadlines:
                self._failure = first, _Told(self._deadlock())
            else:
                self._now = max(self._now, min(deadlines))
                self._version += 1

    def _find_ready(self) -> SimulatedThread | None:
        """Return one of the threads that can go on, at random."""
        left = [thread for thread in self._awake() if self._may_be_ready(thread)]
        while left:
            at = int(self._random.random() * len(left))
            left[at], left[-1] = left[-1], left[at]
            thread = left.pop()
            if self._is_ready(thread):
                return thread
        return None

    def _may_be_ready(self, thread: SimulatedThread) -> bool:
        wait = thread.wait
        if wait is None or thread.is_killed or wait.notified:
            return True
        if wait.condition is None and wait.looked_at != self._version:
            return True
        return wait.deadline is not None and wait.deadline <= self._now

    def _missed(self) -> str | None:
        """Look for a thread that waits for what holds already."""
        for thread in self._awake():
            wait = thread.wait
            if wait is None or wait.condition is None:
                continue
            if wait.deadline is not None and wait.deadline - self._now < _TOLERATED_S:
                continue
            if self._look(thread, wait):
                return (
                    f"after {self._now:g} simulated seconds a thread waits for what holds already; "
                    "its condition should have been notified, or its deadline be earlier:\n"
                    f"  {describe(thread)}"
                )
        return None

    def _awake(self) -> list[SimulatedThread]:
        if not self._frozen:
            return self._threads
        return [thread for thread in self._threads if thread.group not in self._frozen]

    def _is_ready(self, thread: SimulatedThread) -> bool:
        wait = thread.wait
        if wait is None or thread.is_killed:
            return True
        wait.looked_at = self._version
        wait.notified = False
        wait.place_in_line = next(self._lines)
        try:
            wait.holds = self._look(thread, wait)
        except BaseException as error:  # noqa: BLE001 (raised by the thread that waits)
            wait.error = error
            return True
        return wait.holds or (wait.deadline is not None and wait.deadline <= self._now)

    def _look(self, thread: SimulatedThread, wait: Wait) -> bool:
        if wait.condition is None:
            return wait.predicate()
        if not wait.condition.acquire(blocking=False):
            raise SimulationError(
                f"the lock of the condition that {thread.name!r} waits for is held by a thread "
                f"that waits for something else; release it before waiting:\n{self.describe()}"
            )
        try:
            return wait.predicate()
        finally:
            wait.condition.release()

    # Words ------------------------------------------------------------------------------------

    def _deadlock(self) -> str:
        return (
            f"after {self._now:g} simulated seconds every thread waits, and none of them has a "
            f"deadline:\n{self.describe()}"
        )

    def _stuck(self) -> str:
        running = self._running
        assert running is not None
        frame = frame_of(running)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (no stack)\n"
        return (
            f"the thread {running.name!r} has run for {self._patience_s:g} real seconds without "
            "waiting through the simulation; it computes for too long, waits for a lock that a "
            f"waiting thread holds, or waits by other means:\n{stack}"
        )


class _Told(SimulationError):
    """What is told as it is, since no thread has raised it."""
