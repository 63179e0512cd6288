"""Streams over plain sockets: ``ipc`` and ``tcp``.

Bytes are sent by the thread that has them, as far as the system accepts them. The rest is sent, and
everything is received, by the transport's thread, which waits for all sockets at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from dmiddleware.errors import RouterError, TransportError
from dmiddleware.open_files import explained
from dmiddleware.router.transport.base_stream import IPC, BaseListener, BaseStream
from dmiddleware.router.transport.io_thread import IoThread, fork_error
from dmiddleware.router.transport.ipc_path import PublishedPath
from dmiddleware.router.transport.stream import OnConnection

__all__ = ["SocketListener", "SocketStream", "SocketTransport"]

_TCP: Final = "tcp://"

_READ: Final = selectors.EVENT_READ
_WRITE: Final = selectors.EVENT_WRITE

_MAX_PIECES: Final = 256
"""The most buffers in one call; systems allow at least 1,024."""

_BACKLOG: Final = 128
"""How many connections wait until they are accepted; more of them are dialed again."""

_ENDED: Final = frozenset({errno.ECONNRESET, errno.EPIPE})

_RETRY_S: Final = 0.01


class _Place(NamedTuple):
    """What the system needs to connect to an address, or to listen on it."""

    family: int
    address: Any


class SocketTransport:
    """Connections over sockets of the system."""

    def __init__(self) -> None:
        self._thread = IoThread()

    def dial(self, address: str, *, timeout_s: float) -> SocketStream:
        """Connect to an address; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        self._check(address, "dial")
        stream = SocketStream(address, self._thread)
        stream.connect(timeout_s)
        return stream

    def listen(self, address: str, on_connection: OnConnection) -> SocketListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        self._check(address, "listen on")
        return SocketListener(address, on_connection, self._thread)

    def close(self, *, timeout_s: float) -> bool:
        """Close everything; see :class:`~dmiddleware.router.transport.stream.Transport`."""
        return self._thread.is_forked or self._thread.close_users(timeout_s)

    def _check(self, address: str, doing: str) -> None:
        if self._thread.is_forked:
            raise fork_error()
        is_valid = address.startswith(f"{IPC}/") or (
            address.startswith(_TCP) and address.rpartition(":")[2].isdecimal()
        )
        if not is_valid or "\0" in address:
            raise TransportError(
                f"could not {doing} {address!r}: write ipc:///path or tcp://host:port; for "
                "tls+tcp://host:port, pass certificates and let nng carry the events"
            )


class SocketStream(BaseStream):
    """A connection over a socket, which the transport's thread watches and closes."""

    def __init__(
        self, address: str, thread: IoThread, connection: socket.socket | None = None
    ) -> None:
        super().__init__(address, thread, is_connected=connection is not None)
        self._socket = connection
        # Why nothing more is sent; bytes that arrived before the end are still received.
        self._send_error: RouterError | None = None
        # What the socket is watched for.
        self._events = 0
        # Where it can be connected to; those that have refused it are removed.
        self._places: Sequence[_Place] = ()
        thread.add_user(self)

    def connect(self, timeout_s: float) -> None:
        """Start to connect; called once, by the transport."""
        deadline = time.monotonic() + timeout_s
        self._thread.call_at(deadline, partial(self._on_late, timeout_s))
        if self._address.startswith(IPC):
            self._places = [_Place(socket.AF_UNIX, self._address.removeprefix(IPC))]
            self._thread.call(self._connect)
            return
        try:
            self._places = _places(self._address, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            # To look up a name may take long.
            looking = threading.Thread(target=self._look_up, name="router-names", daemon=True)
            try:
                looking.start()
            except RuntimeError as error:
                self._thread.call(partial(self._fail_to_dial, str(error)))
        else:
            self._thread.call(self._connect)

    def _look_up(self) -> None:
        try:
            self._places = _places(self._address)
        except (OSError, UnicodeError) as error:
            self._thread.post(partial(self._fail_to_dial, _text_of(error)))
        else:
            self._thread.post(self._connect)

    def _connect(self) -> None:
        """Connect to the first of the places that accepts it."""
        if self._error is not None:
            return
        try:
            self._socket = _socket_of(self._places[0])
            code = self._socket.connect_ex(self._places[0].address)
        except OSError as error:
            self._try_next(error.errno or errno.EINVAL)
            return
        if code in (0, errno.EINPROGRESS):
            self._watch(_WRITE)
        elif code == errno.EAGAIN:
            # The queue of the listener is full.
            self._close_socket()
            self._thread.call_at(time.monotonic() + _RETRY_S, self._connect)
        else:
            self._try_next(code)

    def _on_connected(self) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._try_next(code)
            return
        with self._lock:
            self._is_connected = True
        self._go_on_sending()
        self._update()

    def _try_next(self, code: int) -> None:
        self._close_socket()
        self._places = self._places[1:]
        if self._places:
            self._connect()
        else:
            self._fail_to_dial(os.strerror(code))

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._watch(0)
            self._socket.close()
            self._socket = None

    def _on_late(self, timeout_s: float) -> None:
        if not self._is_connected:
            self._fail_to_dial(f"no connection within {timeout_s:g} s")

    def _fail_to_dial(self, reason: str) -> None:
        self._fail(self._dial_error(reason))

    def _on_ready(self, events: int) -> None:
        if not self._events:
            return
        if not self._is_connected:
            self._on_connected()
            return
        if events & _WRITE:
            self._go_on_sending()
        if events & _READ:
            self._receive()

    def _go_on_sending(self) -> None:
        with self._lock:
            on_sent = self._on_sent
            if on_sent is None or not (self._send() or self._send_error):
                return
            self._on_sent = None
            error = self._send_error
        self._update()
        self._guarded(partial(on_sent, error))

    def _send(self) -> bool:
        """Send what the system accepts now; return whether that is everything."""
        assert self._socket is not None
        while self._unsent:
            pieces = self._unsent[:_MAX_PIECES]
            try:
                n_bytes = self._socket.sendmsg(pieces)
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    self._send_error = self._broken(error)
                    self._unsent.clear()
                # The thread sends the rest, or reports the error.
                if not self._events & _WRITE:
                    self._thread.post(self._update)
                return False
            if n_bytes == sum(map(len, pieces)):
                del self._unsent[:_MAX_PIECES]
            else:
                self._drop_sent(n_bytes)
        return True

    def _receive(self) -> None:
        on_bytes = self._on_bytes
        if on_bytes is None or self._socket is None:
            self._update()
            return
        try:
            n_bytes = self._socket.recvmsg_into(self._targets)[0]
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(self._broken(error))
            return
        if not n_bytes:
            self._fail(self._end_error())
            return
        with self._lock:
            self._targets, self._on_bytes = (), None
        self._guarded(partial(on_bytes, n_bytes))

    def _update(self) -> None:
        """Watch the socket for what is being sent and received; called on the thread."""
        with self._lock:
            if self._is_connected and self._error is None:
                reads = _READ if self._on_bytes is not None else 0
                self._watch(reads | (_WRITE if self._on_sent is not None else 0))

    def _watch(self, events: int) -> None:
        if events != self._events:
            self._thread.watch(self._socket, self._events, events, self._on_ready)
            self._events, self._is_receiving = events, bool(events & _READ)

    def _broken(self, error: OSError) -> TransportError:
        return self._end_error("" if error.errno in _ENDED else _text_of(error))

    def _fail(self, error: RouterError) -> None:
        """Report why nothing more is sent or received; only the first reason counts."""
        with self._lock:
            self._error = self._error or error
            self._watch(0)
            self._fail_pending(self._error, self._send_error)

    def _start_receiving(self) -> None:
        self._thread.post(self._update)

    def _close(self, error: RouterError) -> None:
        self._error = self._error or error
        self._thread.post(partial(self._end, self._error))

    def _end(self, error: RouterError) -> None:
        self._fail(error)
        self._close_socket()
        # After the callbacks.
        self._thread.call(partial(self._thread.remove_user, self))


class SocketListener(BaseListener):
    """An address that a socket listens on; see :class:`SocketTransport`."""

    def __init__(self, address: str, on_connection: OnConnection, thread: IoThread) -> None:
        super().__init__(address, on_connection, thread)
        self._is_watched = False
        try:
            self._socket = _listening(address, self._path)
        except (OSError, UnicodeError) as error:
            raise TransportError(f"could not listen on {address}: {_text_of(error)}") from error
        try:
            if self._path is not None:
                self._path.publish()
            host, _, port = address.rpartition(":")
            if self._path is None and int(port) == 0:
                self.address = f"{host}:{self._socket.getsockname()[1]}"
            thread.add_user(self)
        except BaseException:
            self._socket.close()
            raise
        thread.call(self._resume)

    def _close(self) -> None:
        # The address is free at once; some systems only free it when the socket is closed.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.post(self._end)

    def _resume(self) -> None:
        if not self._is_closed:
            self._thread.watch(self._socket, 0, _READ, self._on_ready)
            self._is_watched = True

    def _pause(self) -> None:
        if self._is_watched:
            self._thread.watch(self._socket, _READ, 0, self._on_ready)
            self._is_watched = False

    def _on_ready(self, _: int) -> None:
        if self._is_closed or not self._is_watched:
            return
        pause_s = self._pass_on(self._accept)
        if pause_s:
            self._pause()
            self._thread.call_at(time.monotonic() + pause_s, self._resume)

    def _accept(self) -> SocketStream | None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            _set_options(connection)
            stream = SocketStream(self.address, self._thread, connection)
            stack.pop_all()
        return stream

    def _end(self) -> None:
        self._pause()
        self._socket.close()
        self._thread.remove_user(self)


def _text_of(error: OSError | UnicodeError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    text = explained(error)
    return text if text != str(error) else error.strerror or text


def _places(address: str, flags: int = 0) -> list[_Place]:
    """Return where an address of a host and a port leads.

    Raises:
        OSError: if the host is not known.
        UnicodeError: if it cannot be the name of a host.
    """
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=flags
    )
    return [_Place(family, place) for family, _, _, _, place in found]


def _socket_of(place: _Place) -> socket.socket:
    opened = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        _set_options(opened)
    except BaseException:
        opened.close()
        raise
    return opened


def _set_options(opened: socket.socket) -> None:
    opened.setblocking(False)
    if opened.family != socket.AF_UNIX:
        # Otherwise the second of two short frames may wait until the first one is acknowledged.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _listening(address: str, path: PublishedPath | None) -> socket.socket:
    if path is not None:
        place = _Place(socket.AF_UNIX, path.hidden)
    else:
        place = _places(address, socket.AI_PASSIVE)[0]
    opened = _socket_of(place)
    try:
        if path is None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(place.address)
        if path is not None:
            # Nobody can connect before the next line.
            Path(path.hidden).chmod(0o600)
        opened.listen(_BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened
