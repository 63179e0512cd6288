"""The thread of a transport, which runs all callbacks one at a time."""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from dmiddleware.errors import RouterStateError, TransportError

__all__ = ["IoThread", "User", "fork_error"]

_logger = logging.getLogger(__name__)

_EXIT_S: Final = 5.0
"""How long the end of the program waits for callbacks that are running."""


class User(Protocol):
    """A connection or listener that a thread works for."""

    def close(self) -> None:
        """End it, without waiting; may be called twice."""
        ...


class IoThread:
    """Calls functions on one thread, when they are added or at a time.

    It runs while it has users, and is started again for later ones. The thread keeps its users
    alive, because nng's operations refer to them by their address only.

    Attributes:
        pid: the process that the thread belongs to.
        is_exiting: whether the program is about to exit, so that nothing more may be added.
    """

    def __init__(self) -> None:
        self.is_exiting = False
        # nng's threads add to it, at any moment.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._users: set[User] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self.pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the process that the thread belongs to."""
        return os.getpid() != self.pid

    def add_user(self, user: User) -> None:
        """Keep an object alive, and the thread running, until :meth:`remove_user` is called.

        Raises:
            TransportError: if the system allows no thread, or the program is about to exit.
        """
        with self._lock:
            if self.is_exiting:
                raise TransportError("the program is about to exit")
            if self._thread is None:
                self._start()
            self._users.add(user)

    def remove_user(self, user: User) -> None:
        """Release an object; called on this thread."""
        with self._lock:
            self._users.discard(user)

    def call(self, call: Callable[[], None]) -> None:
        """Call a function soon, if there is a user; nng's threads add calls too."""
        self._calls.put(call)

    def post(self, call: Callable[[], None]) -> None:
        """Call a function soon, also without a user; dropped when the program exits."""
        with self._lock:
            if self.is_exiting and self._thread is None:
                return
            if self._thread is None:
                self._start()
            self.call(call)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call a function at a time of :func:`time.monotonic`, unless the thread ends before."""
        with self._lock:
            first = not self._timers or when < self._timers[0][0]
            heapq.heappush(self._timers, (when, next(self._order), call))
        if first:
            # The thread has to know that it waits for less long now.
            self.call(_do_nothing)

    def close_users(self, timeout_s: float) -> bool:
        """Close what is open, and wait for the end of the thread, unless it is the caller's.

        Returns:
            Whether it has ended.
        """
        with self._lock:
            users, thread = list(self._users), self._thread
        for user in users:
            user.close()
        if thread is None:
            return True
        if thread is not threading.current_thread():
            thread.join(timeout_s)
        return not thread.is_alive()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="router-io", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise TransportError(f"could not start a thread: {error}") from error
        self._thread = thread
        # pynng has registered a function that ends nng, and any later use of nng would abort the
        # process. Functions that were registered later are called earlier.
        atexit.register(self._exit)

    def _exit(self) -> None:
        """Close what is still open when the program exits; a fork of it has nothing to close."""
        if self.is_forked:
            # Another thread may have held the lock at the fork.
            return
        with self._lock:
            self.is_exiting = True
        self.close_users(_EXIT_S)

    def _run(self) -> None:
        while self._users or not self._has_ended():
            left_s = self._call_due() if self._timers else None
            try:
                call = self._calls.get(timeout=left_s)
            except queue.Empty:
                continue
            try:
                call()
            except Exception:
                # The other connections must still be served.
                _logger.exception("processing a connection failed")

    def _has_ended(self) -> bool:
        with self._lock:
            if self._users or not self._calls.empty():
                return False
            self._thread = None
            self._timers.clear()
            atexit.unregister(self._exit)
            return True

    def _call_due(self) -> float | None:
        """Add the calls that are due; return the seconds until the next one."""
        while True:
            with self._lock:
                if not self._timers:
                    return None
                left_s = self._timers[0][0] - time.monotonic()
                if left_s > 0:
                    return left_s
                _, _, call = heapq.heappop(self._timers)
            self._calls.put(call)


def fork_error() -> RouterStateError:
    """Return the error for a process that was forked from the process with the thread."""
    return RouterStateError(
        "this process was forked from one with a router, whose connections do not survive a fork; "
        "start processes with the 'spawn' method"
    )


def _do_nothing() -> None:
    pass
