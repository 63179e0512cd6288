"""Bare Unix-domain sockets, and checks that nothing of a connection is left."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

DEADLINE_S: Final = 20.0
MB: Final = 1 << 20


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


@contextlib.contextmanager
def bare_dial(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(DEADLINE_S)
        made.connect(f"{folder}/s")
        yield made


@contextlib.contextmanager
def bare_listen(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(DEADLINE_S)
        made.bind(f"{folder}/s")
        made.listen()
        yield made


def exactly(made: socket.socket, n: int) -> bytes:
    content = bytearray()
    while len(content) < n:
        received = made.recv(n - len(content))
        assert received
        content += received
    return bytes(content)


def is_hung_up_on(made: socket.socket) -> bool:
    try:
        return made.recv(1) == b""
    except ConnectionError:
        return True
