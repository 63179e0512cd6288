"""Wait for other threads and processes, where nothing can be waited for directly."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["DEADLINE_S", "read", "wait_until"]

DEADLINE_S = 90.0
_PAUSE_S = 0.02


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str],
    *,
    deadline_s: float = DEADLINE_S,
) -> float:
    """Wait until the condition holds, and return the seconds that it took.

    Args:
        condition: the condition, which is about another thread or process.
        what: the condition in words, or a function that returns them at the deadline.
        deadline_s: how long to wait.

    Raises:
        TimeoutError: if it does not hold by the deadline; the message contains ``what``.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > deadline_s:
            words = what if isinstance(what, str) else what()
            raise TimeoutError(f"waited {deadline_s:g} s for {words}")
        time.sleep(_PAUSE_S)
    return time.monotonic() - began


def read(file: Path) -> str:
    """Return the text of a file; nothing if it is missing."""
    return file.read_text(errors="replace") if file.exists() else ""
