"""Operations of nng, and the thread that processes their completions.

nng calls back on threads of its own, which need the GIL and must not wait. Such a callback only
appends to a queue, from which one thread of ours takes it.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.nng_library import ffi, lib

__all__ = ["MAX_PIECES", "CompletionThread", "Operation", "failure", "text_of"]

_logger = logging.getLogger(__name__)

MAX_PIECES: Final = 8
"""The most buffers of one operation."""

_EXIT_S: Final = 5.0
"""How long the end of the program waits for callbacks that are running."""


def text_of(code: int) -> str:
    """Return what nng calls an error."""
    text: str = ffi.string(lib.nng_strerror(code)).decode()
    return text.lower()


def failure(doing: str, code: int) -> TransportError:
    """Return the error for a result of nng that is not zero."""
    return TransportError(f"could not {doing}: {text_of(code)}")


def _complete(handle: Any) -> None:
    ffi.from_handle(handle)()


_COMPLETE: Final = ffi.callback("void(void *)", _complete)


class Operation:
    """One operation at a time, which nng performs in the background.

    Args:
        on_done: called on one of nng's threads when an operation has ended; it must return at
            once. None: nothing is called, see :attr:`is_pending`.
    """

    __slots__ = ("_buffers", "_handle", "_iov", "aio")

    def __init__(self, on_done: Callable[[], None] | None) -> None:
        # nng keeps only the address of the handle, so it must stay alive here.
        self._handle = None if on_done is None else ffi.new_handle(on_done)
        made = ffi.new("nng_aio **")
        code = (
            lib.nng_aio_alloc(made, ffi.NULL, ffi.NULL)
            if on_done is None
            else lib.nng_aio_alloc(made, _COMPLETE, self._handle)
        )
        if code:
            raise failure("allocate an operation", code)
        self.aio = made[0]
        self._iov: Any = None
        self._buffers: list[Any] = []

    def use(self, pieces: Sequence[bytes | bytearray | memoryview]) -> Any:
        """Set what the next operation sends, or where it receives; return nng's operation.

        The memory stays valid until the next call, or until :meth:`forget`.
        """
        if self._iov is None:
            self._iov = ffi.new("nng_iov[]", MAX_PIECES)
        iov, buffers = self._iov, [ffi.from_buffer(piece) for piece in pieces]
        for index, buffer in enumerate(buffers):
            entry = iov[index]
            entry.iov_buf, entry.iov_len = buffer, len(buffer)
        lib.nng_aio_set_iov(self.aio, len(buffers), iov)
        self._buffers = buffers
        return self.aio

    def forget(self) -> None:
        """Release the memory of the last operation, which has ended."""
        self._buffers = []

    @property
    def is_pending(self) -> bool:
        """Whether an operation without a callback has not ended."""
        return bool(lib.nng_aio_busy(self.aio))

    @property
    def result(self) -> int:
        """The result of the last operation; zero if it succeeded."""
        code: int = lib.nng_aio_result(self.aio)
        return code

    @property
    def count(self) -> int:
        """How many bytes it has moved."""
        n_bytes: int = lib.nng_aio_count(self.aio)
        return n_bytes

    def output(self) -> Any:
        """Return what it has made."""
        return lib.nng_aio_get_output(self.aio, 0)

    def cancel(self) -> None:
        """End it, without waiting; not to be called twice."""
        lib.nng_aio_cancel(self.aio)

    def free(self) -> None:
        """Free it when none is pending; wait until its callback has returned."""
        lib.nng_aio_stop(self.aio)
        lib.nng_aio_free(self.aio)
        self.forget()


class User(Protocol):
    """A connection or listener whose operations are processed by a thread."""

    def close(self) -> None:
        """End it, without waiting; may be called twice."""
        ...


class CompletionThread:
    """Calls functions one at a time, in the order in which they were added, on one thread.

    It runs while it has users, and is started again for later ones. It keeps them alive, because
    nng's operations refer to them by their address only.

    Attributes:
        is_exiting: whether the program is about to exit, so that nothing more may be added.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.call: Callable[[Callable[[], None]], None] = self._calls.put
        """Call a function soon, if there is a user; nng's threads add calls too."""

        self._lock = threading.Lock()
        self._users: set[User] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.is_exiting = False

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

    def post(self, call: Callable[[], None]) -> None:
        """Call a function soon, even if there is no user; dropped when the program exits."""
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

    def _exit(self) -> None:
        """Close what is still open when the program exits; a fork of it has nothing to close."""
        if os.getpid() != self._pid:
            # Another thread may have held the lock at the fork.
            return
        with self._lock:
            self.is_exiting = True
        self.close_users(_EXIT_S)

    def _run(self) -> None:
        calls = self._calls
        while not self._has_ended():
            left_s = self._call_due() if self._timers else None
            try:
                call = calls.get(timeout=left_s)
            except queue.Empty:
                continue
            try:
                call()
            except Exception:
                # The other connections must still be served.
                _logger.exception("processing an operation of nng failed")

    def _has_ended(self) -> bool:
        if self._users:
            return False
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
            self.call(call)


def _do_nothing() -> None:
    pass
