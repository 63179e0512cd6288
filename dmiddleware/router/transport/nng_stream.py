"""Streams over nng's byte streams: ``ipc``, ``tcp``, and the bytes below ``tls+tcp``.

nng owns the sockets and the polling; OpenSSL encrypts above it. Here are only the operations that
it performs: one receives and one sends for each connection, one accepts for each listener.

These facts about nng 1.11 shape the code:

- An operation moves at most eight buffers, and often fewer bytes than it was asked to.
- An operation that is canceled may end later. If it is stopped before that, nng takes this for its
  end, and uses it after it was freed; nng's own dialer does so when a dial is canceled. So no
  operation that has a callback is canceled. Its connection, dialer or listener is closed, which
  ends it, and freed when its completion has been processed.
- Closing a websocket, or its listener, does not always end the pending operations. So ``ws`` is not
  offered.
- A timeout of nng may expire while another thread closes the connection, and abort the process.
  None is used.
- After a fork, nng aborts the process.
- It calls back on threads of its own, which need the GIL and must not wait. Such a callback only
  adds a call to the thread of the transport.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from dmiddleware.errors import RouterError, TransportError
from dmiddleware.process.open_files import explained
from dmiddleware.router.transport.base_stream import BaseStream
from dmiddleware.router.transport.io_thread import IoThread, fork_error
from dmiddleware.router.transport.ipc_path import PublishedPath
from dmiddleware.router.transport.nng_library import ffi, lib
from dmiddleware.router.transport.stream import (
    OnConnection,
    Stream,
    encrypts,
)
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.transport.tls_stream import TlsStream

__all__ = ["NngStream", "NngStreamListener", "NngStreamTransport"]

_logger = logging.getLogger(__name__)

_IPC: Final = "ipc://"
_TCP: Final = "tcp://"
_TLS: Final = "tls+tcp://"

_PAUSE_S: Final = 0.1
"""How long a listener waits after it could not accept a connection."""

_NO_DELAY: Final = b"tcp-nodelay"
"""Otherwise the second of two short frames may wait until the first one is acknowledged."""

_MAX_PIECES: Final = 8
"""The most buffers of one operation."""

_ENDED: Final = frozenset({lib.NNG_ECLOSED, lib.NNG_ECONNSHUT, lib.NNG_ECONNRESET})


class NngStreamTransport:
    """Connections over nng.

    Args:
        tls: certificates for ``tls+tcp`` addresses; None: such addresses are refused.
    """

    def __init__(self, *, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._thread = IoThread()

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        """Connect to an address; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        self._check(address, "dial")
        secure = self._security(address, listens=False)
        pointer = ffi.new("nng_stream_dialer **")
        _check_code(f"dial {address}", lib.nng_stream_dialer_alloc(pointer, _plain(address)))
        dialer = pointer[0]
        try:
            if not address.startswith(_IPC):
                code = lib.nng_stream_dialer_set_bool(dialer, _NO_DELAY, True)
                _check_code(f"dial {address}", code)
            stream = NngStream(address, self._thread)
        except BaseException:
            lib.nng_stream_dialer_free(dialer)
            raise
        stream.connect(dialer, timeout_s)
        return secure(stream)

    def listen(self, address: str, on_connection: OnConnection) -> NngStreamListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        self._check(address, "listen on")
        secure = self._security(address, listens=True)
        return NngStreamListener(
            address, lambda stream: on_connection(secure(stream)), self._thread
        )

    def close(self, *, timeout_s: float) -> bool:
        """Close everything; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        return self._thread.is_forked or self._thread.close_users(timeout_s)

    def _check(self, address: str, doing: str) -> None:
        if self._thread.is_forked:
            raise fork_error()
        is_valid = address.startswith((f"{_IPC}/", _TCP, _TLS)) and "\0" not in address
        if not is_valid:
            raise TransportError(
                f"could not {doing} {address!r}: write ipc:///path, tcp://host:port or "
                "tls+tcp://host:port"
            )

    def _security(self, address: str, *, listens: bool) -> Callable[[Stream], Stream]:
        """Return what encrypts a connection, if its address says so."""
        if not encrypts(address):
            return lambda stream: stream
        if self._tls is None:
            raise TransportError(
                f"{address} needs certificates; pass tls=TlsFiles(…) to the transport"
            )
        files = self._tls
        return partial(
            TlsStream,
            address,
            self._thread,
            context=files.context(listens=listens),
            server_name=None if listens else files.server_name,
            explain=partial(files.explain, address, listens=listens),
        )


def _complete(handle: Any) -> None:
    ffi.from_handle(handle)()


_COMPLETE: Final = ffi.callback("void(void *)", _complete)


class Operation:
    """One operation at a time, which nng performs in the background.

    Args:
        on_done: called on one of nng's threads when an operation has ended; it must return at
            once. None: an operation is only tried, see :meth:`end_at_once`.
    """

    __slots__ = ("_buffers", "_handle", "_iov", "aio")

    def __init__(self, on_done: Callable[[], None] | None = None) -> None:
        # nng keeps only the address of the handle, so it must stay alive here.
        self._handle = ffi.NULL if on_done is None else ffi.new_handle(on_done)
        pointer = ffi.new("nng_aio **")
        complete = ffi.NULL if on_done is None else _COMPLETE
        code = lib.nng_aio_alloc(pointer, complete, self._handle)
        if code:
            raise _failure("allocate an operation", code)
        self.aio = pointer[0]
        self._iov: Any = None
        self._buffers: list[Any] = []

    def use(self, pieces: Sequence[bytes | bytearray | memoryview]) -> Any:
        """Set what the next operation sends, or where it receives; return nng's operation.

        The memory stays valid until the operation has ended.
        """
        if self._iov is None:
            self._iov = ffi.new("nng_iov[]", _MAX_PIECES)
        iov, buffers = self._iov, [ffi.from_buffer(piece) for piece in pieces]
        for index, buffer in enumerate(buffers):
            entry = iov[index]
            entry.iov_buf, entry.iov_len = buffer, len(buffer)
        lib.nng_aio_set_iov(self.aio, len(buffers), iov)
        self._buffers = buffers
        return self.aio

    def end_at_once(self) -> int:
        """Cancel the operation unless it has ended; return how many bytes it has moved.

        Only for one without a callback: nng is done with it when this returns.
        """
        if lib.nng_aio_busy(self.aio):
            lib.nng_aio_cancel(self.aio)
            lib.nng_aio_wait(self.aio)
        self._buffers = []
        n_bytes: int = 0 if lib.nng_aio_result(self.aio) else lib.nng_aio_count(self.aio)
        return n_bytes

    def outcome(self) -> tuple[int, int]:
        """Return the result of the operation, zero if it succeeded, and how many bytes it moved.

        Its memory is released.
        """
        self._buffers = []
        return lib.nng_aio_result(self.aio), lib.nng_aio_count(self.aio)

    def output(self) -> Any:
        """Return what it has made."""
        return lib.nng_aio_get_output(self.aio, 0)

    def free(self) -> None:
        """Free it when none is pending; wait until its callback has returned."""
        lib.nng_aio_stop(self.aio)
        lib.nng_aio_free(self.aio)
        self._buffers = []


class NngStream(BaseStream):
    """A connection of nng.

    Its operations live until all their completions have been processed. Completions are processed
    on one thread, most of them with ``_lock`` held.
    """

    def __init__(self, address: str, thread: IoThread, connection: Any = None) -> None:
        super().__init__(address, thread, is_connected=connection is not None)
        self._connection = connection
        self._dialer: Any = None
        self._dialing: Operation | None = None
        self._receiving = Operation(partial(thread.call, self._on_received))
        self._sending = Operation(partial(thread.call, self._on_sent_some))
        self._trying = Operation()
        # How many operations have not called back yet.
        self._n_pending = 0
        thread.add_user(self)

    def connect(self, dialer: Any, timeout_s: float) -> None:
        """Start to connect; called once, by the transport."""
        self._dialer = dialer
        self._dialing = Operation(partial(self._thread.call, self._on_dialed))
        self._n_pending += 1
        lib.nng_stream_dialer_dial(dialer, self._dialing.aio)
        self._thread.call_at(time.monotonic() + timeout_s, partial(self._on_late, timeout_s))

    def _on_late(self, timeout_s: float) -> None:
        with self._lock:
            if self._connection is None:
                self._end(self._dial_error(f"no connection within {timeout_s:g} s"))

    def _on_dialed(self) -> None:
        assert self._dialing is not None
        code, _ = self._dialing.outcome()
        with self._lock:
            lib.nng_stream_dialer_close(self._dialer)
            lib.nng_stream_dialer_free(self._dialer)
            self._dialer = None
            self._n_pending -= 1
            if code:
                self._end(self._dial_error(_text_of(code)))
            else:
                self._connection = self._dialing.output()
                if self._error is None:
                    self._is_connected = True
                    self._start_waiting()
                else:
                    # It was closed, or late, just before nng had connected.
                    lib.nng_stream_close(self._connection)
            self._release_if_done()

    def _start_waiting(self) -> None:
        """Start what has waited for the connection."""
        if self._on_bytes is not None:
            self._start_receiving()
        if self._on_sent is not None and self._send():
            self._report(partial(self._on_sent, None))
            self._on_sent = None

    def _start_receiving(self) -> None:
        self._n_pending += 1
        lib.nng_stream_recv(self._connection, self._receiving.use(self._targets))

    def _on_received(self) -> None:
        with self._lock:
            on_bytes = self._on_bytes
            outcome: int | RouterError | None
            code, outcome = self._receiving.outcome()
            self._targets, self._on_bytes = (), None
            if code:
                self._end(self._error_of(code))
                outcome = self._error
            self._n_pending -= 1
            if self._is_closed:
                self._release_if_done()
        assert on_bytes is not None and outcome is not None
        self._guarded(partial(on_bytes, outcome))

    def _send(self) -> bool:
        while self._unsent:
            pieces = self._unsent[:_MAX_PIECES]
            # Without a callback, where the system has room: no other thread takes part.
            lib.nng_stream_send(self._connection, self._trying.use(pieces))
            n_bytes = self._trying.end_at_once()
            if not n_bytes:
                self._send_later()
                return False
            if n_bytes == sum(map(len, pieces)):
                del self._unsent[:_MAX_PIECES]
            else:
                self._drop_sent(n_bytes)
        return True

    def _send_later(self) -> None:
        """Send more as soon as the system has room, or report why that is not possible."""
        self._n_pending += 1
        pieces = self._unsent[:_MAX_PIECES]
        lib.nng_stream_send(self._connection, self._sending.use(pieces))

    def _on_sent_some(self) -> None:
        outcome = None
        with self._lock:
            self._n_pending -= 1
            on_sent = self._on_sent
            code, n_bytes = self._sending.outcome()
            if code:
                self._end(self._error_of(code))
            else:
                self._drop_sent(n_bytes)
            # If everything was sent, it has not failed, though the connection may have ended since.
            if self._unsent:
                if self._error is None:
                    self._send_later()
                    return
                outcome = self._error
            self._unsent, self._on_sent = [], None
            self._release_if_done()
        assert on_sent is not None
        self._guarded(partial(on_sent, outcome))

    def _end(self, error: RouterError) -> None:
        """End the connection, and with it what is pending; only the first call counts."""
        if self._error is not None:
            return
        self._error = error
        if self._connection is not None:
            # What nng performs fails now, and completes as usual.
            lib.nng_stream_close(self._connection)
            return
        if self._dialer is not None:
            lib.nng_stream_dialer_close(self._dialer)
        self._fail_sending(error)
        self._fail_receiving(error)

    def _error_of(self, code: int) -> TransportError:
        return self._end_error("" if code in _ENDED else _text_of(code))

    def _close(self, error: RouterError) -> None:
        self._end(error)
        self._release_if_done()

    def _release_if_done(self) -> None:
        if self._is_closed and not self._n_pending:
            # Not at once, because the caller may still need the operations.
            self._thread.call(self._release)

    def _release(self) -> None:
        for operation in (self._dialing, self._receiving, self._sending, self._trying):
            if operation is not None:
                operation.free()
        if self._connection is not None:
            lib.nng_stream_free(self._connection)
        self._thread.remove_user(self)


class NngStreamListener:
    """An address that nng listens on; it accepts one connection at a time.

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
        self._path = PublishedPath(address.removeprefix(_IPC)) if address.startswith(_IPC) else None
        self._is_pending = False
        self._accepting = Operation(partial(thread.call, self._on_accepted))
        try:
            self._listener = _listening(address if self._path is None else _IPC + self._path.hidden)
        except BaseException:
            self._accepting.free()
            raise
        try:
            if self._path is not None:
                self._path.publish()
            else:
                self.address = _real_address(address, self._listener)
            thread.add_user(self)
        except BaseException:
            lib.nng_stream_listener_close(self._listener)
            lib.nng_stream_listener_free(self._listener)
            self._accepting.free()
            raise
        self._accept()

    def close(self) -> None:
        """Stop listening; accepted connections stay open."""
        if self._thread.is_forked:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._path is not None:
                self._path.remove()
            # It ends the pending operation.
            lib.nng_stream_listener_close(self._listener)
            self._release_if_done()

    def _accept(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_pending = True
                lib.nng_stream_listener_accept(self._listener, self._accepting.aio)

    def _on_accepted(self) -> None:
        code, _ = self._accepting.outcome()
        connection = None if code else self._accepting.output()
        with self._lock:
            self._is_pending = False
            self._release_if_done()
            if self._is_closed:
                if connection is not None:
                    lib.nng_stream_free(connection)
                return
        pause_s = self._pass_on(code, connection)
        if pause_s:
            self._thread.call_at(time.monotonic() + pause_s, self._accept)
        else:
            self._accept()

    def _pass_on(self, code: int, connection: Any) -> float | None:
        """Pass a connection on, if there is one; return for how long no other may be accepted."""
        try:
            stream = self._accepted(code, connection)
        except RouterError as error:
            # For example, the process has no descriptor left. Dialers wait meanwhile.
            if not self._thread.is_exiting:
                _logger.warning("could not accept a connection to %s: %s", self.address, error)
            return _PAUSE_S
        try:
            return self._on_connection(stream)
        except Exception:
            _logger.exception("closed a connection to %s, its callback failed", self.address)
            stream.close()
            return None

    def _accepted(self, code: int, connection: Any) -> NngStream:
        if code:
            raise TransportError(_text_of(code))
        try:
            return NngStream(self.address, self._thread, connection)
        except BaseException:
            lib.nng_stream_free(connection)
            raise

    def _release_if_done(self) -> None:
        if self._is_closed and not self._is_pending:
            self._thread.call(self._release)

    def _release(self) -> None:
        self._accepting.free()
        lib.nng_stream_listener_free(self._listener)
        self._thread.remove_user(self)


def _text_of(code: int) -> str:
    """Return what nng calls an error; too many open files with their number, limit and remedy."""
    if code == lib.NNG_ENOFILES:
        return explained(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    text: str = ffi.string(lib.nng_strerror(code)).decode()
    return text.lower()


def _failure(doing: str, code: int) -> TransportError:
    """Return the error for a result of nng that is not zero."""
    return TransportError(f"could not {doing}: {_text_of(code)}")


def _plain(address: str) -> bytes:
    """Return what nng connects: it knows nothing of TLS."""
    return address.removeprefix("tls+").encode()


def _check_code(doing: str, code: int) -> None:
    if code:
        raise _failure(doing, code)


def _listening(address: str) -> Any:
    pointer = ffi.new("nng_stream_listener **")
    doing = f"listen on {address}"
    _check_code(doing, lib.nng_stream_listener_alloc(pointer, _plain(address)))
    listener = pointer[0]
    try:
        if address.startswith(_IPC):
            code = lib.nng_stream_listener_set_int(listener, b"ipc:permissions", 0o600)
            _check_code(doing, code)
        else:
            _check_code(doing, lib.nng_stream_listener_set_bool(listener, _NO_DELAY, True))
        _check_code(doing, lib.nng_stream_listener_listen(listener))
    except BaseException:
        lib.nng_stream_listener_free(listener)
        raise
    return listener


def _real_address(address: str, listener: Any) -> str:
    host, _, port = address.rpartition(":")
    if port != "0":
        return address
    bound = ffi.new("int *")
    code = lib.nng_stream_listener_get_int(listener, b"tcp-bound-port", bound)
    _check_code(f"listen on {address}", code)
    return f"{host}:{bound[0]}"
