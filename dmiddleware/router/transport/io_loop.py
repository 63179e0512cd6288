"""A few threads that wait for all sockets of a transport at once."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

__all__ = ["BUFFER_BYTES", "BROKEN", "READ", "WRITE", "EventHandler", "IoLoop"]

_logger = logging.getLogger(__name__)

READ: Final = 0x1
WRITE: Final = 0x4
BROKEN: Final = 0x18

BUFFER_BYTES: Final = 64 * 1024
"""Size of the buffer that a thread lends to its handler."""

_MAX_THREADS: Final = 4
"""A handler that takes long holds up the others only if this many do so at a time."""

_LONG_S: Final = 0.02
"""While there are events, how often is checked whether a handler takes longer than this."""

_QUIET_S: Final = 0.2
"""The same while there are none."""

_JOIN_S: Final = 5.0


class EventHandler(Protocol):
    """Handles the events of one socket."""

    def on_event(self, events: int, buffer: memoryview) -> None:
        """Handle an event, which may have happened before the last call.

        The next event is reported only after :meth:`IoLoop.watch` is called again.

        Args:
            events: :data:`READ`, :data:`WRITE` or :data:`BROKEN`, or several of them.
            buffer: memory of :data:`BUFFER_BYTES` that the handler may use until it returns.
        """
        ...


class IoLoop:
    """Waits for sockets.

    One thread, the leader, waits for events and handles them, which costs much less than several
    threads that wake each other. After :meth:`grow`, a second one watches it, and takes the lead if
    a handler takes long. The threads run as long as there is a socket.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN | select.EPOLLONESHOT)
        self._lock = threading.Lock()
        self._handlers: dict[int, EventHandler] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._threads: list[threading.Thread] = []
        self._n_running = 0
        self._stopped = False
        self._changed = threading.Condition(self._lock)
        self._leader: threading.Thread | None = None
        self._has_watcher = False
        self._n_spare = 0
        # Since when the leader has been handling an event; 0.0 while it waits for one.
        self._busy_since = 0.0
        self._n_events = 0

    def add(self, descriptor: int, handler: EventHandler) -> bool:
        """Add a socket, which is not watched yet; return False if the loop has already stopped.

        Raises:
            RuntimeError: if the system allows no thread for the first socket.
        """
        with self._lock:
            if self._stopped:
                return False
            if not self._threads:
                try:
                    self._start_thread()
                except RuntimeError:
                    self._stop()
                    raise
            self._handlers[descriptor] = handler
            self._epoll.register(descriptor, select.EPOLLONESHOT)
            return True

    def watch(self, descriptor: int, events: int) -> None:
        """Call the socket's handler for the next of some events, once."""
        self._epoll.modify(descriptor, events | select.EPOLLONESHOT)

    def remove(self, descriptor: int) -> None:
        """Remove a socket, before it is closed; the threads end after the last one."""
        with self._lock:
            del self._handlers[descriptor]
            self._epoll.unregister(descriptor)
            if not self._handlers:
                self._stop()

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Call a function at a time of :func:`time.monotonic`; a stopped loop does not."""
        with self._lock:
            first = not self._timers or when < self._timers[0][0]
            heapq.heappush(self._timers, (when, next(self._order), call))
            if first and not self._stopped and not self.is_current():
                os.eventfd_write(self._wake, 1)

    def grow(self) -> None:
        """Start a thread that watches the leader, unless there is one."""
        with self._lock:
            if not self._stopped and len(self._threads) < 2:
                self._add_thread()

    def _add_thread(self) -> None:
        """Start one more thread, unless there are enough of them or the system allows no more."""
        if len(self._threads) < _MAX_THREADS:
            with contextlib.suppress(RuntimeError):
                self._start_thread()

    def is_current(self) -> bool:
        """Return whether the calling thread is one of the loop's."""
        return threading.current_thread() in self._threads

    def join(self) -> None:
        """Wait for the end of the threads if the last socket has been removed."""
        if not self._stopped or self.is_current():
            return
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        name = f"router-io-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._n_running += 1

    def _stop(self) -> None:
        self._stopped = True
        if not self._n_running:
            self._close()
            return
        # It stays readable, so each thread sees it.
        os.eventfd_write(self._wake, 1)
        self._changed.notify_all()

    def _close(self) -> None:
        self._epoll.close()
        os.close(self._wake)

    def _run(self) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        this_thread = threading.current_thread()
        while not self._stopped:
            if self._leader is not this_thread and not self._take_lead(this_thread):
                break
            if self._timers:
                self._call_due()
            for descriptor, events in self._epoll.poll(self._wait_s(), 1):
                if descriptor == self._wake:
                    self._rewatch_wake()
                elif (handler := self._handlers.get(descriptor)) is not None:
                    self._n_events += 1
                    self._busy_since = time.monotonic()
                    _guarded(partial(handler.on_event, events, buffer))
                    if self._leader is this_thread:
                        self._busy_since = 0.0
        with self._lock:
            self._n_running -= 1
            if not self._n_running:
                self._close()

    def _take_lead(self, this_thread: threading.Thread) -> bool:
        """Wait until the leader's handler takes long, then lead; return False if stopped."""
        with self._changed:
            self._n_spare += 1
            while self._has_watcher and not self._stopped:
                self._changed.wait()
            self._n_spare -= 1
            self._has_watcher, seen = True, self._n_events
            while not self._stopped and self._leader is not None and not self._is_stuck():
                self._changed.wait(_QUIET_S if self._n_events == seen else _LONG_S)
                seen = self._n_events
            self._has_watcher = False
            if self._stopped:
                self._changed.notify_all()
                return False
            if self._leader is not None and not self._n_spare:
                # The former leader is still busy, so another thread has to watch this one.
                self._add_thread()
            self._changed.notify()
            self._leader, self._busy_since = this_thread, 0.0
            return True

    def _is_stuck(self) -> bool:
        since = self._busy_since
        return since > 0.0 and time.monotonic() - since >= _LONG_S

    def _rewatch_wake(self) -> None:
        with self._lock:
            if not self._stopped:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            self.watch(self._wake, select.EPOLLIN)

    def _wait_s(self) -> float | None:
        if not self._timers:
            return None
        with self._lock:
            return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _call_due(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            with self._lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                _, _, call = heapq.heappop(self._timers)
            _guarded(call)


def _guarded(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        # The other sockets must still be served.
        _logger.exception("a socket is no longer served, handling its event failed")
