"""Clocks: time and waiting threads, behind an interface that tests can replace."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["Clock", "Running", "SystemClock"]


_SIGNAL_CHECK_S: Final = 0.25
"""How long the main thread may overlook what a signal handler has changed."""


_LONGEST_S: Final = 1.0
"""How long the main thread may take to look again; beyond that, the process was suspended."""


class Running(Protocol):
    """A thread that a clock started."""

    @property
    def name(self) -> str:
        """The thread's name in messages."""
        ...

    def is_current(self) -> bool:
        """Return whether the caller runs on this thread."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended, without holding a lock, and return whether it has."""
        ...


class Clock(Protocol):
    """What the pipeline needs from time and threads.

    Code that uses a clock blocks only in :meth:`wait_for` and :meth:`Running.join`, and starts
    threads only with :meth:`spawn`. Tests can then run it under a fake clock.
    """

    def now(self) -> float:
        """Return monotonic seconds since an arbitrary start."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, the same in all processes of a host."""
        ...

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or the time is up.

        Args:
            condition: held by the caller, notified whenever the predicate may have changed.
            predicate: called with the condition held, and not again once it was true.
            timeout_s: the most seconds to wait; None means no limit, for threads that are idle
                until there is work for them.

        Returns:
            The predicate's last value.
        """
        ...

    def spawn(self, function: Callable[[], None], *, name: str) -> Running:
        """Start a thread, which does not keep the process alive.

        Args:
            function: runs on the thread.
            name: the thread's name in messages.
        """
        ...


class SystemClock:
    """The clock of the machine."""

    now = staticmethod(time.perf_counter)
    """Returns the seconds of the machine's monotonic clock."""

    wall = staticmethod(time.time)
    """Returns seconds since 1970."""

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or the time is up."""
        if threading.current_thread() is not threading.main_thread():
            return condition.wait_for(predicate, timeout_s)
        # A signal handler runs in the main thread. If it runs between a call of the predicate and
        # the wait, its notification reaches nobody, so the main thread looks again after a while.
        left_s = math.inf if timeout_s is None else timeout_s
        looked_at = self.now()
        while not condition.wait_for(predicate, min(_SIGNAL_CHECK_S, max(left_s, 0.0))):
            now = self.now()
            # The peers could do nothing either while a job was suspended.
            left_s -= min(now - looked_at, _LONGEST_S)
            looked_at = now
            if left_s <= 0.0:
                return False
        return True

    def spawn(self, function: Callable[[], None], *, name: str) -> Running:
        """Start a daemon thread."""
        return _SystemThread(function, name)


class _SystemThread:
    """A thread of the machine."""

    def __init__(self, function: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=function, name=name, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._thread.name

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
