"""Time in which this process could not run, because it was suspended for example."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["Pauses"]

_SHORTEST_S: Final = 1.0
_N_KEPT: Final = 1000


class Pauses:
    """Measures durations without the time in which this process could not run.

    A process that looks at the time often notices that it was suspended, by a batch system or
    Ctrl-Z, or that its container or virtual machine was: the time jumps. Call :meth:`tick` at least
    every 0.2 s. May be used by several threads.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._ticked_at = now()
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_N_KEPT)

    def tick(self) -> float:
        """Return the time, and note a pause if the last tick was more than a second ago."""
        with self._lock:
            now = self._now()
            if now - self._ticked_at > _SHORTEST_S:
                self._pauses.append((self._ticked_at, now))
            self._ticked_at = now
            return now

    def elapsed(self, since: float) -> float:
        """Return the seconds since a moment in which this process could run."""
        now = self.tick()
        with self._lock:
            paused_s = sum(end - max(begin, since) for begin, end in self._pauses if end > since)
        return now - since - paused_s
