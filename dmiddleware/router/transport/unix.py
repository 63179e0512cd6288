"""Requests and replies over Unix-domain stream sockets, between processes of one host and user.

One thread per connection reads, and serves or passes on what it has read. Senders write to the
socket themselves and wake no other thread; what the socket does not accept at once is sent by a
writer thread, which is started when it is first needed. A broken connection is not restored: the
dialer has to dial again.

The bytes of a request must not change until its reply arrives, nor those of a reply until it is
sent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import math
import os
import socket
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.callbacks import run_callback, run_callback_in_thread
from dmiddleware.router.transport.interface import ListenLimits, OnReply, RequestHandler
from dmiddleware.router.wire.byte_pieces import BytePieces, WireBytes

__all__ = ["UnixTransport"]

_logger = logging.getLogger(__name__)

_SCHEME: Final = "ipc://"
_MAX_PATH: Final = 107
_QUEUE: Final = 512
_JOIN_S: Final = 5.0
_PAUSE_S: Final = 0.1
_DIAL_EVERY_S: Final = 0.02


class UnixTransport:
    """Unix-domain stream sockets; addresses have the form ``ipc:///path/to/socket``."""

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> UnixListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return UnixListener(address, serve, on_disconnect=on_disconnect, limits=limits)

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> UnixChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return UnixChannel(
            address,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=max_frame_bytes,
        )

    def covers_body(self, address: str) -> bool:
        """Return False: only this user can connect."""
        return False

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Return None: arrays cannot be staged."""


class UnixChannel:
    """A connection to a listener; its thread reads the replies."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> None:
        self._address = address
        self._reply_timeout_s = reply_timeout_s
        self._number = 0
        self._waiting: dict[int, tuple[float, OnReply]] = {}
        self._ended = False
        self._reason = "the connection broke"
        self._stream = FrameStream(
            _dialed(address, connect_timeout_s),
            name=f"router-write-{address}",
            sends=REQUEST,
            takes=REPLY,
            max_frame_bytes=max_frame_bytes,
        )
        self._reader = threading.Thread(
            target=self._read, name=f"router-read-{address}", daemon=True
        )
        try:
            self._reader.start()
        except RuntimeError as error:
            # The system allows no more threads.
            self._stream.release()
            raise TransportError(f"could not dial {address}: {error}") from error

    def request(self, raw: WireBytes) -> memoryview:
        """Make a request and wait for the reply."""
        result = _Result()
        number = self._start_request(raw, result, self._reply_timeout_s)
        if number is None:
            raise self._error()
        if not result.wait(self._reply_timeout_s):
            with self._stream.lock:
                given_up = self._give_up(number) is not None
            if given_up:
                raise self._late_error()
            result.wait(-1)
        return result.get()

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        """Make a request without waiting."""
        if self._start_request(raw, on_reply, timeout_s) is None:
            run_callback_in_thread(on_reply, self._error())

    def close(self) -> None:
        """Close the connection; pending requests fail at once."""
        self._stream.shut()
        if self._reader is not threading.current_thread():
            self._reader.join(_JOIN_S)

    def _start_request(
        self, raw: WireBytes, on_reply: OnReply, timeout_s: float | None
    ) -> int | None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._stream.lock:
            if self._ended or self._stream.closed:
                return None
            self._number = number = self._number + 1
            self._waiting[number] = deadline, on_reply
            self._stream.write(number, raw)
        return number

    def _give_up(self, number: int) -> OnReply | None:
        """Stop waiting for a reply; called with the stream's lock held.

        Returns:
            The callback of the request; None if the reply has just arrived.
        """
        self._stream.forget(number)
        _, on_reply = self._waiting.pop(number, (0.0, None))
        return on_reply

    def _read(self) -> None:
        try:
            self._stream.read(self._take, self._check)
        except (OSError, MemoryError) as error:
            self._reason = str(error) or "out of memory"
        except NotAFrame:
            self._reason = "it sent bytes that are not a reply, or a reply that is too long"
        finally:
            with self._stream.lock:
                self._ended = True
                given_up = [self._give_up(number) for number in list(self._waiting)]
            for on_reply in given_up:
                if on_reply is not None:
                    run_callback(on_reply, self._error())
            self._stream.release()

    def _take(self, number: int, frame: memoryview) -> None:
        # A reply that arrives late has no callback any more.
        _, on_reply = self._waiting.pop(number, (0.0, None))
        if on_reply is not None:
            run_callback(on_reply, frame)

    def _check(self) -> None:
        """Give up the requests whose deadline has passed; the oldest come first."""
        now = time.monotonic()
        with self._stream.lock:
            late = [number for number, (until, _) in self._waiting.items() if until <= now]
            given_up = [self._give_up(number) for number in late]
        for on_reply in given_up:
            if on_reply is not None:
                run_callback(on_reply, self._late_error())

    def _late_error(self) -> TransportError:
        return TransportError(f"could not send a request to {self._address}: no reply in time")

    def _error(self) -> TransportError:
        if self._stream.closed:
            return TransportError(f"the channel to {self._address} is closed")
        return TransportError(f"could not send a request to {self._address}: {self._reason}")


class _Result:
    """The outcome of a request, for the thread that waits for it."""

    __slots__ = ("_answer", "_done")

    def __init__(self) -> None:
        self._done = threading.Lock()
        self._done.acquire()

    def __call__(self, answer: memoryview | TransportError) -> None:
        self._answer = answer
        self._done.release()

    def wait(self, timeout_s: float) -> bool:
        return self._done.acquire(timeout=timeout_s)

    def get(self) -> memoryview:
        if isinstance(self._answer, TransportError):
            raise self._answer
        return self._answer


class UnixListener:
    """A listening socket, and a thread for each connection to it."""

    def __init__(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> None:
        self._address = address
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._max_frame_bytes = limits.max_frame_bytes
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._closing = threading.Event()
        self._path = _path("listen on", address)
        with _translated(f"listen on {address}"):
            self._socket, self._file = _listening(self._path)
        self._thread = threading.Thread(target=self._accept, name="router-accept", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._address

    def trust(self, connection: int) -> None:
        """Lift the limits of a connection whose peer has authenticated."""

    def close(self) -> None:
        """Stop listening and end the threads."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            connections = list(self._connections.values())
        with contextlib.suppress(OSError):
            # If someone removed the file, another listener may have created a new one.
            if _identity(self._path) == self._file:
                self._path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.shut()
        deadline = time.monotonic() + _JOIN_S
        for thread in (self._thread, *(one.thread for one in connections)):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        with self._socket:
            while not self._closing.is_set():
                try:
                    accepted, _ = self._socket.accept()
                except OSError as error:
                    if not self._closing.is_set():
                        _logger.warning("%s cannot accept a connection: %s", self._address, error)
                        self._closing.wait(_PAUSE_S)
                    continue
                self._accept_one(accepted)

    def _accept_one(self, accepted: socket.socket) -> None:
        number = next(self._numbers)
        connection = _Connection(
            number, accepted, self._serve, self._disconnected, max_frame_bytes=self._max_frame_bytes
        )
        with self._lock:
            if self._closing.is_set():
                accepted.close()
                return
            try:
                connection.thread.start()
            except RuntimeError as error:
                _logger.warning("%s cannot accept a connection: %s", self._address, error)
                accepted.close()
                return
            self._connections[number] = connection

    def _disconnected(self, number: int) -> None:
        with self._lock:
            self._connections.pop(number, None)
        self._on_disconnect(number)


class _Connection:
    """An accepted connection; its thread reads requests and serves them."""

    def __init__(
        self,
        number: int,
        accepted: socket.socket,
        serve: RequestHandler,
        on_disconnect: Callable[[int], None],
        *,
        max_frame_bytes: int,
    ) -> None:
        self._number = number
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._stream = FrameStream(
            accepted,
            name=f"router-write-{number}",
            sends=REPLY,
            takes=REQUEST,
            max_frame_bytes=max_frame_bytes,
        )
        self.thread = threading.Thread(
            target=self._read, name=f"router-serve-{number}", daemon=True
        )

    def shut(self) -> None:
        """Close the connection; its thread ends after the request that it is serving."""
        self._stream.shut()

    def _read(self) -> None:
        try:
            self._stream.read(self._take)
        except (OSError, MemoryError) as error:
            _logger.debug("connection %d: %s", self._number, error)
        except NotAFrame:
            _logger.warning(
                "closed connection %d: it sent bytes that are not a request, or a request that is "
                "too long",
                self._number,
            )
        finally:
            self._stream.release()
            self._on_disconnect(self._number)

    def _take(self, number: int, frame: memoryview) -> None:
        self._stream.wait_until_read()
        try:
            self._serve(frame, self._number, _Reply(self._stream, number))
        except Exception:
            # A request that makes the handler fail must not affect other requests.
            _logger.exception("closed a connection, handling its request failed")
            self._stream.shut()


class _Reply:
    """Replies to a request, once."""

    __slots__ = ("_done", "_number", "_stream")

    def __init__(self, stream: FrameStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._done = False

    def __call__(self, raw: WireBytes | None, *, urgent: bool = False) -> None:
        stream = self._stream
        with stream.lock:
            if self._done:
                return
            self._done = True
            if raw is not None:
                stream.write(self._number, raw)
                return
        stream.shut()


def _path(doing: str, address: str) -> Path:
    """Return the path of an address.

    Raises:
        TransportError: if the address is not valid, or its path is too long for the system.
    """
    path = address.removeprefix(_SCHEME)
    if path == address or not path.startswith("/") or "\0" in path:
        raise TransportError(f"could not {doing} {address}: write ipc:///path/to/socket")
    size = len(os.fsencode(path))
    if size > _MAX_PATH:
        raise TransportError(
            f"could not {doing} {address}: the socket path has {size} bytes, but the system allows "
            f"{_MAX_PATH}; use a shorter folder, for example under /tmp"
        )
    return Path(path)


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _dialed(address: str, connect_timeout_s: float) -> socket.socket:
    path = _path("dial", address)
    deadline = time.monotonic() + connect_timeout_s
    while True:
        try:
            return _connected(path, max(0.01, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() + _DIAL_EVERY_S >= deadline:
                raise TransportError(
                    f"could not dial {address}: no connection within "
                    f"{connect_timeout_s:g} s ({error})"
                ) from error
        time.sleep(_DIAL_EVERY_S)


def _connected(path: Path, within_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(within_s)
        made.connect(str(path))
        made.settimeout(None)
        return made
    except BaseException:
        made.close()
        raise


def _listening(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """Return a socket to which only this user can connect, and the identity of its file."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Two listeners that start at once must not consider each other dead.
        with _locked(path.parent):
            _remove_if_dead(path)
            made.bind(str(path))
            path.chmod(0o600)
            made.settimeout(None)
            made.listen(_QUEUE)
            return made, _identity(path)
    except BaseException:
        made.close()
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_if_dead(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "the path exists and is not a socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            # Its queue is full, so a listener is running.
            pass
    raise OSError(errno.EADDRINUSE, "another process is already listening there")


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(f"could not {doing}: {error.strerror or error}") from error


REQUEST: Final = 1
REPLY: Final = 2

_HEAD: Final = struct.Struct("<4sB3xQQ")
"""Magic, kind, length of what follows, number of the request."""

_MAGIC: Final = b"DMWU"

_CHECK_EVERY_S: Final = 0.25

_READ_BYTES: Final = 16 * 1024
"""Shorter frames are read several at a time, longer ones straight into their own memory."""

_SOCKET_BYTES: Final = 2 << 20
"""The requested size of the socket's send buffer; the system may allow less."""

_ENOUGH_BYTES: Final = 16 << 20
_MAX_PIECES: Final = 512
_PARTLY_SENT: Final = -1
_NO_SIGNAL: Final = socket.MSG_NOSIGNAL
_AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT

_Piece = bytes | bytearray | memoryview


class NotAFrame(Exception):
    """The received bytes are not a frame, or the frame is too long."""


class FrameStream:
    """Frames over a connected socket, for either side of a connection.

    Args:
        connected: the socket, which this object owns from now on.
        name: name of the writer thread.
        sends: kind of the frames that are sent.
        takes: kind of the frames that are received.
        max_frame_bytes: longer frames are not read.

    Attributes:
        lock: held while writing.
        closed: whether this side has closed the connection.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        name: str,
        sends: int,
        takes: int,
        max_frame_bytes: int,
    ) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self.lock = threading.Lock()
        self.closed = False
        self._socket = connected
        self._name = name
        self._sends = sends
        self._takes = takes
        self._max_frame_bytes = max_frame_bytes
        self._check: Callable[[], None] | None = None
        self._next_check = 0.0
        self._shut = False
        self._changed = threading.Condition(self.lock)
        self._writer: threading.Thread | None = None
        self._writing = False
        self._unsent: OrderedDict[int, tuple[list[_Piece], int]] = OrderedDict()
        self._unsent_bytes = 0

    def write(self, number: int, raw: WireBytes) -> None:
        """Send a frame without waiting; called with the lock held.

        If the connection is broken, nothing happens: the reader notices that.
        """
        if self._shut:
            return
        size = len(raw)
        pieces: list[_Piece] = [_HEAD.pack(_MAGIC, self._sends, size, number)]
        pieces += raw.pieces if isinstance(raw, BytePieces) else (raw,)
        size += _HEAD.size
        if not self._writing:
            try:
                size = self._send(pieces, size, _AT_ONCE)
            except OSError:
                self._shut_down()
                return
            if not size:
                return
            number = _PARTLY_SENT
        self._leave_to_writer(number, pieces, size)

    def forget(self, number: int) -> None:
        """Do not send a frame, unless part of it is sent; called with the lock held."""
        _, size = self._unsent.pop(number, ((), 0))
        self._unsent_bytes -= size

    def wait_until_read(self) -> None:
        """Wait while too many bytes are unread by the other side."""
        if self._unsent_bytes > _ENOUGH_BYTES:
            with self._changed:
                self._changed.wait_for(lambda: self._shut or self._unsent_bytes <= _ENOUGH_BYTES)

    def read(
        self, take: Callable[[int, memoryview], None], check: Callable[[], None] | None = None
    ) -> None:
        """Read frames until this side closes.

        Args:
            take: called with the number and the content of each frame.
            check: called several times a second, unless None.

        Raises:
            OSError: if the connection broke.
            NotAFrame: if the received bytes are not a frame, or the frame is too long.
        """
        if check is not None:
            # Python's socket timeout would cost one more system call per read.
            limit = struct.pack("ll", 0, int(_CHECK_EVERY_S * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._check = check
        buffer = bytearray(_READ_BYTES)
        window = memoryview(buffer)
        kept = 0
        while not self.closed:
            end = kept + self._receive(window[kept:])
            start = self._take_frames(buffer, window[:end], take)
            kept = end - start
            window[:kept] = window[start:end]

    def shut(self) -> None:
        """Close the connection for both sides; bytes that are already sent still arrive."""
        with self.lock:
            self.closed = True
            self._shut_down()

    def release(self) -> None:
        """End the writer and close the socket; called by the reader at its end."""
        with self.lock:
            self._shut_down()
        if self._writer is not None:
            self._writer.join()
        with self.lock:
            self._socket.close()

    def _take_frames(
        self, buffer: bytearray, window: memoryview, take: Callable[[int, memoryview], None]
    ) -> int:
        """Process the frames that start in a window of the buffer; return where the rest starts."""
        start, end = 0, len(window)
        while end - start >= _HEAD.size and not self.closed:
            magic, kind, size, number = _HEAD.unpack_from(buffer, start)
            if magic != _MAGIC or kind != self._takes or size > self._max_frame_bytes:
                raise NotAFrame
            start += _HEAD.size
            if size <= end - start:
                frame = memoryview(buffer[start : start + size])
                start += size
            else:
                frame = self._receive_rest(size, window[start:])
                start = end
            take(number, frame)
        return start

    def _receive_rest(self, size: int, head: memoryview) -> memoryview:
        frame = np.empty(size, np.uint8).data
        offset = len(head)
        frame[:offset] = head
        while offset < size:
            offset += self._receive(frame[offset:], socket.MSG_WAITALL)
        return frame

    def _receive(self, target: memoryview, flags: int = 0) -> int:
        while True:
            if self._check is not None and time.monotonic() >= self._next_check:
                self._check()
                self._next_check = time.monotonic() + _CHECK_EVERY_S
            try:
                received = self._socket.recv_into(target, 0, flags)
            except BlockingIOError:
                continue
            if not received:
                raise ConnectionResetError("the other side closed the connection")
            return received

    def _send(self, pieces: list[_Piece], size: int, flags: int) -> int:
        """Send pieces of ``size`` bytes in all, and remove what was sent from the list.

        Returns:
            How many bytes the socket did not accept; always 0 with blocking flags.
        """
        while True:
            try:
                sent = self._socket.sendmsg(pieces[:_MAX_PIECES], (), flags)
            except BlockingIOError:
                return size
            size -= sent
            if not size:
                return 0
            _remove(pieces, sent)

    def _leave_to_writer(self, number: int, pieces: list[_Piece], size: int) -> None:
        self._unsent[number] = pieces, size
        self._unsent_bytes += size
        self._writing = True
        if self._writer is not None:
            self._changed.notify_all()
            return
        writer = threading.Thread(target=self._write_unsent, name=self._name, daemon=True)
        try:
            writer.start()
        except RuntimeError:
            # The system allows no more threads.
            self._shut_down()
            return
        self._writer = writer

    def _write_unsent(self) -> None:
        while True:
            with self._changed:
                self._writing = bool(self._unsent)
                self._changed.wait_for(lambda: self._shut or self._unsent)
                if self._shut:
                    return
                _, (pieces, size) = self._unsent.popitem(last=False)
            try:
                self._send(pieces, size, _NO_SIGNAL)
            except OSError:
                with self.lock:
                    self._shut_down()
                return
            with self._changed:
                self._unsent_bytes -= size
                self._changed.notify_all()

    def _shut_down(self) -> None:
        if self._shut:
            return
        self._shut = True
        self._unsent.clear()
        self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _remove(pieces: list[_Piece], sent: int) -> None:
    """Remove the first ``sent`` bytes of pieces."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            pieces[: index + 1] = [memoryview(piece)[sent:]]
            return
        sent -= len(piece)
