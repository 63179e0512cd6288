"""What the streams and listeners of every transport share: their rules, callbacks and errors."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from dmiddleware.errors import RouterError, RouterStateError, TransportError
from dmiddleware.open_files import explained
from dmiddleware.router.transport.io_thread import IoThread, fork_error
from dmiddleware.router.transport.ipc_path import PublishedPath
from dmiddleware.router.transport.stream import OnBytes, OnConnection, OnSent, Piece

__all__ = ["IPC", "BaseListener", "BaseStream"]

_logger = logging.getLogger(__name__)

IPC: Final = "ipc://"

_PAUSE_S: Final = 0.1
"""How long a listener waits after it could not accept a connection."""


class BaseStream(ABC):
    """One connection; see :class:`~dmiddleware.router.transport.stream.Stream`.

    ``_lock`` guards what is being sent and received. It is held while ``_send``,
    ``_start_receiving`` and ``_close`` are called.

    Args:
        address: the address that was dialed, or that was listened on.
        thread: the transport's thread, which runs all callbacks.
        is_connected: whether the connection exists already.
    """

    def __init__(self, address: str, thread: IoThread, *, is_connected: bool) -> None:
        self._address = address
        self._thread = thread
        self._lock = threading.Lock()
        self._is_connected = is_connected
        self._is_closed = False
        # Why nothing more is sent or received.
        self._error: RouterError | None = None
        # Whether the transport receives without being asked again.
        self._is_receiving = False
        self._targets: Sequence[memoryview] = ()
        self._on_bytes: OnBytes | None = None
        self._unsent: list[Piece] = []
        self._on_sent: OnSent | None = None

    def send(self, pieces: Sequence[Piece], on_sent: OnSent) -> bool:
        """Send bytes; return whether the system has accepted all of them."""
        if os.getpid() != self._thread.pid:
            raise fork_error()
        with self._lock:
            if self._on_sent is not None:
                raise RouterStateError("a stream sends one list of pieces at a time")
            if self._error is not None:
                self._report(partial(on_sent, self._error))
                return False
            self._unsent, self._on_sent = list(pieces), on_sent
            if self._unsent and not (self._is_connected and self._send()):
                return False
            self._on_sent = None
            return True

    def receive(self, targets: Sequence[memoryview], on_bytes: OnBytes) -> None:
        """Receive the next bytes."""
        if os.getpid() != self._thread.pid:
            raise fork_error()
        with self._lock:
            if self._on_bytes is not None:
                raise RouterStateError("a stream receives one list of targets at a time")
            if self._error is not None:
                self._report(partial(on_bytes, self._error))
                return
            self._targets, self._on_bytes = targets, on_bytes
            if self._is_connected and not self._is_receiving:
                self._start_receiving()

    def close(self) -> None:
        """Close the connection, without waiting."""
        if self._thread.is_forked:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close(TransportError(f"the connection with {self._address} is closed"))

    @abstractmethod
    def _send(self) -> bool:
        """Start to send what is unsent; return whether the system has accepted all of it."""

    @abstractmethod
    def _start_receiving(self) -> None:
        """Start to receive into the targets."""

    @abstractmethod
    def _close(self, error: RouterError) -> None:
        """Fail what is pending, unless the connection has ended before, and release everything."""

    def _drop_sent(self, n_bytes: int) -> None:
        """Remove the first ``n_bytes`` of what is unsent."""
        unsent = self._unsent
        for index, piece in enumerate(unsent):
            if n_bytes < len(piece):
                unsent[: index + 1] = [memoryview(piece)[n_bytes:]]
                return
            n_bytes -= len(piece)
        unsent.clear()

    def _fail_pending(self, error: RouterError, send_error: RouterError | None = None) -> None:
        """Report why what is pending has failed; called with the lock held.

        Args:
            error: the reason.
            send_error: a better one why the pieces were not sent.
        """
        if self._on_sent is not None:
            self._report(partial(self._on_sent, send_error or error))
        if self._on_bytes is not None:
            self._report(partial(self._on_bytes, error))
        self._unsent, self._on_sent = [], None
        self._targets, self._on_bytes = (), None

    def _dial_error(self, reason: str) -> TransportError:
        return TransportError(
            f"could not dial {self._address}: {reason}; check the address, and that the peer is "
            "running"
        )

    def _end_error(self, reason: str = "") -> TransportError:
        """Return the error for a connection that broke for a reason, or that the peer has ended."""
        end = f"broke: {reason}" if reason else "has ended"
        return TransportError(f"the connection with {self._address} {end}")

    def _report(self, call: Callable[[], None]) -> None:
        self._thread.post(partial(self._guarded, call))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _logger.exception("closed the connection with %s, its callback failed", self._address)
            self.close()


class BaseListener(ABC):
    """An address that is listened on; see :class:`~dmiddleware.router.transport.stream.Listener`.

    Args:
        address: the address.
        on_connection: takes each connection.
        thread: the transport's thread, which runs all callbacks.

    Attributes:
        address: where others can dial.
    """

    def __init__(self, address: str, on_connection: OnConnection, thread: IoThread) -> None:
        self.address = address
        self._on_connection = on_connection
        self._thread = thread
        self._lock = threading.Lock()
        self._is_closed = False
        self._path = PublishedPath(address.removeprefix(IPC)) if address.startswith(IPC) else None

    def close(self) -> None:
        """Stop listening; accepted connections stay open."""
        if self._thread.is_forked:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                if self._path is not None:
                    self._path.remove()
                self._close()

    @abstractmethod
    def _close(self) -> None:
        """Release everything; called with the lock held."""

    def _pass_on(self, accept: Callable[[], BaseStream | None]) -> float | None:
        """Pass a connection on, if there is one; return for how long no other may be accepted."""
        try:
            stream = accept()
        except (OSError, RouterError) as error:
            # For example, the process has no descriptor left. Dialers wait meanwhile.
            if not self._thread.is_exiting:
                text = explained(error)
                _logger.warning("could not accept a connection to %s: %s", self.address, text)
            return _PAUSE_S
        if stream is None:
            return None
        try:
            return self._on_connection(stream)
        except Exception:
            _logger.exception("closed a connection to %s, its callback failed", self.address)
            stream.close()
            return None
