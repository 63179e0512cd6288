"""Threads and descriptors that a test leaves, and waiting for something to come true."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["comes_true", "is_hung_up_on", "n_descriptors", "nothing_left", "threads"]

DEADLINE_S: Final = 20.0


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no threads and descriptors are left."""
    before, n_before = threads(), n_descriptors()
    yield
    # There may be fewer than before: nng may have closed some of its own.
    assert comes_true(lambda: threads() == before and n_descriptors() <= n_before), (
        threads(),
        before,
        n_descriptors(),
        n_before,
    )


def threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("router-"))


def n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def comes_true(predicate: Callable[[], bool], within_s: float = DEADLINE_S) -> bool:
    """Wait until a predicate is true; return whether it is."""
    deadline = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_hung_up_on(made: socket.socket) -> bool:
    try:
        return made.recv(1) == b""
    except ConnectionError:
        return True
