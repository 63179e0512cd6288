"""How long a wait for other processes may last. Pure: no thread, no clock."""

from __future__ import annotations

import math
from typing import Final

__all__ = ["Patience"]

SAY_S: Final = 5.0
"""After this time, a wait says for the first time what it waits for."""

CHECK_S: Final = 1.0
"""The longest time between two looks at the processes that are waited for."""

_ROUNDING_S: Final = 1e-4


class Patience:
    """The deadline of a wait for other processes, which counts only while none of them works.

    A process that is alive and works may take any time. So the deadline counts from the moment at
    which none of the processes that are waited for works any more.

    Args:
        timeout_s: how many seconds to wait while none of them works.
        now: the time in seconds.
    """

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._began = self._hoped_at = now
        self._say_at = now + SAY_S

    def next_look_s(self, now: float) -> float:
        """Return the seconds until the wait should look again at what it waits for."""
        return max(_ROUNDING_S, min(CHECK_S, self._hoped_at + self._timeout_s - now))

    def waited_s(self, now: float) -> float:
        """Return the seconds since the start."""
        return now - self._began

    def is_over(self, now: float, *, hope: bool) -> bool:
        """Return whether the deadline has passed.

        Args:
            now: the time in seconds.
            hope: whether a process that is waited for is alive and works.
        """
        if hope:
            self._hoped_at = now
        return now >= self._hoped_at + self._timeout_s

    def should_say(self, now: float) -> bool:
        """Return whether to log what is missing: after a few seconds, then once per deadline."""
        if now < self._say_at:
            return False
        n_deadlines = math.floor(self.waited_s(now) / self._timeout_s) + 1
        self._say_at = max(now + SAY_S, self._began + n_deadlines * self._timeout_s)
        return True
