"""Wait for what a run prints and does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["DEADLINE_S", "read", "wait_until"]

DEADLINE_S = 90.0


def wait_until(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    """Wait until something is true; fail with an explanation after the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.05)


def read(file: Path) -> str:
    """Return the text of a file; nothing if it is missing."""
    return file.read_text(errors="replace") if file.exists() else ""
