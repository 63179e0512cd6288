"""Clocks: time comes in from outside, so that tests can hold it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """What the pipeline needs of time."""

    def now(self) -> float:
        """Return seconds that only ever go up, from an arbitrary start."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, which processes on one host agree on."""
        ...

    def wait_for(
        self, condition: threading.Condition, predicate: Callable[[], bool], timeout_s: float
    ) -> bool:
        """Wait until the predicate holds or the time is up.

        Args:
            condition: held by the caller, notified whenever the predicate may have changed.
            predicate: called with the condition held, and not again once it was true.
            timeout_s: the most seconds to wait.

        Returns:
            The predicate's last value.
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
        self, condition: threading.Condition, predicate: Callable[[], bool], timeout_s: float
    ) -> bool:
        """Wait until the predicate holds or so many real seconds have passed."""
        return condition.wait_for(predicate, timeout_s)
