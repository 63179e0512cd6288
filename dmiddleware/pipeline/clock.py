"""Clocks: time, and the threads that wait in it, come in from outside, so tests can hold them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "Running", "SystemClock"]


class Running(Protocol):
    """A thread that a clock started."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def is_current(self) -> bool:
        """Tell whether the caller runs on this thread."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended, and tell whether it has; with no lock held."""
        ...


class Clock(Protocol):
    """What the pipeline needs of time, and of threads.

    Who goes by a clock blocks in :meth:`wait_for` and :meth:`Running.join` only, and starts threads
    with :meth:`spawn` only. Then a test can run all of it by a clock of its own.
    """

    def now(self) -> float:
        """Return seconds that only ever go up, from an arbitrary start."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, which processes on one host agree on."""
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
            timeout_s: the most seconds to wait; None: any time, for threads that are idle until
                someone has work for them or ends them.

        Returns:
            The predicate's last value.
        """
        ...

    def spawn(self, function: Callable[[], None], *, name: str) -> Running:
        """Start a thread, which does not keep the process alive.

        Args:
            function: what it runs.
            name: what messages call it.
        """
        ...


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        """Return the seconds of the machine's monotonic clock."""
        return time.perf_counter()

    def wall(self) -> float:
        """Return seconds since 1970."""
        return time.time()

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or so many real seconds have passed."""
        return condition.wait_for(predicate, timeout_s)

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
