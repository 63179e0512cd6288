"""Wait for a condition that nothing announces, such as a file or a count of another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["DEADLINE_S", "read", "wait_until"]

DEADLINE_S = 90.0
_POLL_S = 0.01


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str],
    *,
    deadline_s: float = DEADLINE_S,
) -> float:
    """Wait until a condition holds, and return the seconds that it took.

    Args:
        condition: called repeatedly, and a last time after the deadline.
        what: what the caller waits for; a function is called only if the wait fails.
        deadline_s: how long to wait.

    Raises:
        TimeoutError: if the condition does not hold in time; the message contains ``what``.
    """
    started_at = time.monotonic()
    while True:
        # In this order, a process that was suspended beyond the deadline looks once more.
        is_late = time.monotonic() - started_at > deadline_s
        if condition():
            return time.monotonic() - started_at
        if is_late:
            explanation = what if isinstance(what, str) else what()
            raise TimeoutError(f"waited {deadline_s:g} s for {explanation}")
        time.sleep(_POLL_S)


def read(file: Path) -> str:
    """Return the text of a file; nothing if it is missing."""
    return file.read_text(errors="replace") if file.exists() else ""
