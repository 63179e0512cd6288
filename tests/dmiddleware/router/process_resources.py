"""Threads and descriptors that a test leaves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import wait_until

__all__ = ["is_hung_up_on", "n_descriptors", "nothing_left", "threads"]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no threads and descriptors are left."""
    before, n_before = threads(), n_descriptors()
    yield
    # There may be fewer than before: nng may have closed some of its own.
    wait_until(
        lambda: threads() == before and n_descriptors() <= n_before,
        lambda: f"{threads()} to become {before}, and {n_descriptors()} descriptors {n_before}",
    )


def threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("router-"))


def n_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_hung_up_on(made: socket.socket) -> bool:
    try:
        return made.recv(1) == b""
    except ConnectionError:
        return True
