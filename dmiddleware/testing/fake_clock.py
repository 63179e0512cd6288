"""A clock that a test holds in its hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dmiddleware.pipeline import Running, SystemClock

__all__ = ["FakeClock"]


class FakeClock:
    """A clock that stands still until a test advances it.

    Waits under it end when their predicate holds or when the clock was advanced past their
    deadline. A wait with a deadline that neither happens to within ``patience_s`` of real time
    fails, so that a test cannot hang. Threads are those of the machine, and run as they like.

    Args:
        start_s: the first reading.
        epoch_s: what the calendar's time, :meth:`wall`, is ahead of it.
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
        """Return the seconds to which the clock was advanced."""
        with self._lock:
            return self._now

    def wall(self) -> float:
        """Return the calendar's seconds, which go along."""
        return self._epoch_s + self.now()

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        """Wait until the predicate holds or the clock was advanced by so many seconds.

        Raises:
            AssertionError: when neither happens within the clock's patience.
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
                left = give_up - time.monotonic()
                if left <= 0 or not condition.wait(left):
                    raise AssertionError(
                        f"a wait of {timeout_s:g} s under a fake clock neither came true nor was "
                        f"the clock advanced, within {self._patience_s:g} s of real time"
                    )
            return holds
        finally:
            with self._lock:
                self._waiting.remove(condition)

    def spawn(self, function: Callable[[], None], *, name: str) -> Running:
        """Start a daemon thread."""
        return SystemClock().spawn(function, name=name)

    def advance(self, seconds: float) -> None:
        """Let time pass, and wake whoever waits.

        Raises:
            ValueError: for a negative number.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back, got {seconds}")
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait_until_waiting(self, count: int = 1) -> None:
        """Block until so many waits are under way, to advance the clock only then.

        Raises:
            AssertionError: when there are fewer within the clock's patience.
        """
        with self._lock:
            arrived = self._lock.wait_for(lambda: len(self._waiting) >= count, self._patience_s)
        if not arrived:
            raise AssertionError(
                f"{len(self._waiting)} waits are under way, not {count}, within "
                f"{self._patience_s:g} s of real time"
            )
