"""A clock that a test advances by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dmiddleware.pipeline import Running, SystemClock

__all__ = ["FakeClock"]


class FakeClock:
    """A clock that only moves when a test advances it.

    A wait ends when its predicate holds or when the clock is advanced past its deadline. A wait
    with a deadline fails if neither happens within ``patience_s`` of real time, so a test cannot
    hang. Threads are real threads; their order is not controlled.

    Args:
        start_s: the initial time.
        epoch_s: offset between :meth:`wall` and :meth:`now`.
        patience_s: real seconds after which a wait fails.

    Example:
        >>> clock = FakeClock()
        >>> clock.advance(2.5)
        >>> clock.now()
        2.5
    """

    def __init__(
        self, *, start_s: float = 0.0, epoch_s: float = 0.0, patience_s: float = 30.0
    ) -> None:
        self._now = start_s
        self._epoch_s = epoch_s
        self._patience_s = patience_s
        self._lock = threading.Condition()
        self._waiting: list[threading.Condition] = []

    def now(self) -> float:
        """Return the current time of the clock, in seconds."""
        with self._lock:
            return self._now

    def wall(self) -> float:
        """Return the fake calendar time, in seconds since the epoch."""
        return self._epoch_s + self.now()

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or the clock was advanced by ``timeout_s``.

        Raises:
            AssertionError: if neither happens within ``patience_s`` of real time.
        """
        if timeout_s is None:
            return condition.wait_for(predicate)
        deadline = self.now() + timeout_s
        give_up = time.monotonic() + self._patience_s
        with self._lock:
            self._waiting.append(condition)
            self._lock.notify_all()
        try:
            while not (holds := predicate()) and self.now() < deadline:
                remaining_s = give_up - time.monotonic()
                if remaining_s <= 0 or not condition.wait(remaining_s):
                    raise AssertionError(
                        f"a wait of {timeout_s:g} s on a fake clock did not end within "
                        f"{self._patience_s:g} s of real time: its predicate stayed false and the "
                        "clock was not advanced far enough"
                    )
            return holds
        finally:
            with self._lock:
                self._waiting.remove(condition)

    def spawn(self, function: Callable[[], None], *, name: str) -> Running:
        """Start a daemon thread."""
        return SystemClock().spawn(function, name=name)

    def advance(self, seconds: float) -> None:
        """Advance the clock and wake all waiting threads.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait_until_waiting(self, count: int = 1) -> None:
        """Block until ``count`` threads wait on the clock, so that advancing it reaches them all.

        Raises:
            AssertionError: if there are fewer after ``patience_s`` of real time.
        """
        with self._lock:
            arrived = self._lock.wait_for(lambda: len(self._waiting) >= count, self._patience_s)
        if not arrived:
            raise AssertionError(
                f"expected {count} waiting threads within {self._patience_s:g} s of real time, "
                f"found {len(self._waiting)}"
            )
