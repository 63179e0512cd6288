"""Requests and answers over Unix-domain stream sockets, between processes of one host and user.

One thread of each connection reads, and serves or passes on what it has read; whoever has something
to send sends it. A connection that breaks is not made again: whoever dialed it dials anew.

What is sent must not change until its request is answered, or, for an answer, until it went out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
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
from dmiddleware.router.transport.interface import OnReply, RequestHandler
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
        max_frame_bytes: int,
    ) -> UnixListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return UnixListener(
            address, serve, on_disconnect=on_disconnect, max_frame_bytes=max_frame_bytes
        )

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
        """Tell that frames need not have all their bytes signed: only this user can connect."""
        return False

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Tell that arrays have no place of their own here."""


class UnixChannel:
    """A connection to a listener; its thread reads the answers."""

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
            takes=ANSWER,
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
        """Make a request and wait for its answer."""
        result = _Result()
        number = self._begin(raw, result)
        if number is None:
            raise self._error()
        if not result.wait(self._reply_timeout_s):
            with self._stream.lock:
                given_up = self._give_up(number) is not None
            if given_up:
                raise self._too_late()
            result.wait(-1)
        return result.get()

    def send(self, raw: WireBytes, on_reply: OnReply) -> None:
        """Make a request without waiting."""
        if self._begin(raw, on_reply) is None:
            run_callback_in_thread(on_reply, self._error())

    def close(self) -> None:
        """Close the connection; requests under way fail at once."""
        self._stream.shut()
        if self._reader is not threading.current_thread():
            self._reader.join(_JOIN_S)

    def _begin(self, raw: WireBytes, on_reply: OnReply) -> int | None:
        deadline = time.monotonic() + self._reply_timeout_s
        with self._stream.lock:
            if self._ended or self._stream.closed:
                return None
            self._number = number = self._number + 1
            self._waiting[number] = deadline, on_reply
            self._stream.write(number, raw)
        return number

    def _give_up(self, number: int) -> OnReply | None:
        """Await an answer no longer; called with the stream's lock held.

        Returns:
            Whom to tell; None if the answer has just come.
        """
        self._stream.forget(number)
        _, on_reply = self._waiting.pop(number, (0.0, None))
        return on_reply

    def _read(self) -> None:
        try:
            self._stream.read(self._take, self._look)
        except (OSError, MemoryError) as error:
            self._reason = str(error) or "out of memory"
        except NotAFrame:
            self._reason = "what came is no answer, or too long"
        finally:
            with self._stream.lock:
                self._ended = True
                given_up = [self._give_up(number) for number in list(self._waiting)]
            for on_reply in given_up:
                if on_reply is not None:
                    run_callback(on_reply, self._error())
            self._stream.release()

    def _take(self, number: int, frame: memoryview) -> None:
        # Nobody waits any more for an answer that comes late.
        _, on_reply = self._waiting.pop(number, (0.0, None))
        if on_reply is not None:
            run_callback(on_reply, frame)

    def _look(self) -> None:
        """Give up those requests whose deadline is over; the oldest come first."""
        now = time.monotonic()
        with self._stream.lock:
            late = list(
                itertools.takewhile(lambda number: self._waiting[number][0] <= now, self._waiting)
            )
            given_up = [self._give_up(number) for number in late]
        for on_reply in given_up:
            if on_reply is not None:
                run_callback(on_reply, self._too_late())

    def _too_late(self) -> TransportError:
        return TransportError(
            f"could not ask {self._address}: no answer within {self._reply_timeout_s:g} s"
        )

    def _error(self) -> TransportError:
        if self._stream.closed:
            return TransportError(f"the channel to {self._address} is closed")
        return TransportError(f"could not ask {self._address}: {self._reason}")


class _Result:
    """What became of a request, for the thread that waits for it."""

    __slots__ = ("_answer", "_there")

    def __init__(self) -> None:
        self._there = threading.Lock()
        self._there.acquire()

    def __call__(self, answer: memoryview | TransportError) -> None:
        self._answer = answer
        self._there.release()

    def wait(self, timeout_s: float) -> bool:
        return self._there.acquire(timeout=timeout_s)

    def get(self) -> memoryview:
        if isinstance(self._answer, TransportError):
            raise self._answer
        return self._answer


class UnixListener:
    """A socket that is listened on, and a thread for each connection to it."""

    def __init__(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        max_frame_bytes: int,
    ) -> None:
        self._address = address
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._max_frame_bytes = max_frame_bytes
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

    def close(self) -> None:
        """Stop listening and end the threads."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            connections = list(self._connections.values())
        with contextlib.suppress(OSError):
            # Another listener may have taken the place of a file that somebody removed.
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
                        _logger.warning("%s takes nobody in: %s", self._address, error)
                        self._closing.wait(_PAUSE_S)
                    continue
                self._take_in(accepted)

    def _take_in(self, accepted: socket.socket) -> None:
        number = next(self._numbers)
        connection = _Connection(
            number, accepted, self._serve, self._gone, max_frame_bytes=self._max_frame_bytes
        )
        with self._lock:
            if self._closing.is_set():
                accepted.close()
                return
            try:
                connection.thread.start()
            except RuntimeError as error:
                _logger.warning("%s takes nobody in: %s", self._address, error)
                accepted.close()
                return
            self._connections[number] = connection

    def _gone(self, number: int) -> None:
        with self._lock:
            self._connections.pop(number, None)
        self._on_disconnect(number)


class _Connection:
    """A connection that was accepted; its thread reads requests and serves them."""

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
            sends=ANSWER,
            takes=REQUEST,
            max_frame_bytes=max_frame_bytes,
        )
        self.thread = threading.Thread(
            target=self._read, name=f"router-serve-{number}", daemon=True
        )

    def shut(self) -> None:
        """End the connection; its thread ends when it has served what it is at."""
        self._stream.shut()

    def _read(self) -> None:
        try:
            self._stream.read(self._take)
        except (OSError, MemoryError) as error:
            _logger.debug("connection %d: %s", self._number, error)
        except NotAFrame:
            _logger.warning(
                "connection %d is closed: what came is no request, or too long", self._number
            )
        finally:
            self._stream.release()
            self._on_disconnect(self._number)

    def _take(self, number: int, frame: memoryview) -> None:
        self._stream.wait_until_read()
        try:
            self._serve(frame, self._number, _Reply(self._stream, number))
        except Exception:
            # Whoever can make one request fail must not take the others' service away.
            _logger.exception("a request could not be served; its connection is closed")
            self._stream.shut()


class _Reply:
    """Answers a request once."""

    __slots__ = ("_done", "_number", "_stream")

    def __init__(self, stream: FrameStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._done = False

    def __call__(self, raw: WireBytes | None) -> None:
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
        TransportError: if it is none, or longer than the system allows.
    """
    path = address.removeprefix(_SCHEME)
    if path == address or not path.startswith("/") or "\0" in path:
        raise TransportError(f"could not {doing} {address}: write ipc:///path/to/socket")
    size = len(os.fsencode(path))
    if size > _MAX_PATH:
        raise TransportError(
            f"could not {doing} {address}: the socket path has {size} bytes, the system allows "
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
                    f"could not dial {address}: nobody answered within "
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
    """Return a socket to which only this user can connect, and what tells its file from others."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Two that start at once must not take each other for dead.
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
            raise OSError(errno.EEXIST, "there is a file in its place which is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        trying.setblocking(False)
        try:
            trying.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            # Its queue is full, so that somebody must be there.
            pass
    raise OSError(errno.EADDRINUSE, "somebody else listens there")


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(f"could not {doing}: {error.strerror or error}") from error


REQUEST: Final = 1
ANSWER: Final = 2

_HEAD: Final = struct.Struct("<4sB3xQQ")
"""Magic, kind, length of what follows, number of the request."""

_MAGIC: Final = b"DMWU"

_LOOK_EVERY_S: Final = 0.25

_READ_BYTES: Final = 16 * 1024
"""Shorter frames come several at a time, longer ones straight to where they stay."""

_SOCKET_BYTES: Final = 2 << 20
"""What the system is asked to hold for a slow reader; it may allow less."""

_ENOUGH_BYTES: Final = 16 << 20
_MAX_PIECES: Final = 512
_BEGUN: Final = -1
_NO_SIGNAL: Final = socket.MSG_NOSIGNAL
_AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT

_Piece = bytes | bytearray | memoryview


class NotAFrame(Exception):
    """What came is no frame, or one that is too long."""


class FrameStream:
    """A connected socket that frames go out from and come in at.

    Args:
        connected: the socket, which is this object's from here on.
        name: of the writer's thread.
        sends: kind of the frames that go out.
        takes: kind of the frames that come in.
        max_frame_bytes: longer frames are not read.

    Attributes:
        lock: held by who writes.
        closed: whether this side has closed.
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
        self._look: Callable[[], None] | None = None
        self._look_at = 0.0
        self._shut = False
        self._changed = threading.Condition(self.lock)
        self._writer: threading.Thread | None = None
        self._writing = False
        self._unsent: OrderedDict[int, tuple[list[_Piece], int]] = OrderedDict()
        self._unsent_bytes = 0

    def write(self, number: int, raw: WireBytes) -> None:
        """Send a frame without waiting; called with the lock held.

        Nothing happens if the connection is broken: the reader finds that out.
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
            number = _BEGUN
        self._leave_to_writer(number, pieces, size)

    def forget(self, number: int) -> None:
        """Do not send a frame, unless it was begun; called with the lock held."""
        _, size = self._unsent.pop(number, ((), 0))
        self._unsent_bytes -= size

    def wait_until_read(self) -> None:
        """Wait as long as the other side leaves too much unread."""
        if self._unsent_bytes > _ENOUGH_BYTES:
            with self._changed:
                self._changed.wait_for(lambda: self._shut or self._unsent_bytes <= _ENOUGH_BYTES)

    def read(
        self, take: Callable[[int, memoryview], None], look: Callable[[], None] | None = None
    ) -> None:
        """Read frames until this side closes.

        Args:
            take: gets the number and the content of each.
            look: called several times a second. None: nothing is.

        Raises:
            OSError: if the connection broke.
            NotAFrame: if something else came.
        """
        if look is not None:
            # Python's own timeout costs a call to the system for each read.
            limit = struct.pack("ll", 0, int(_LOOK_EVERY_S * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._look = look
        buffer = bytearray(_READ_BYTES)
        window = memoryview(buffer)
        kept = 0
        while not self.closed:
            end = kept + self._receive(window[kept:])
            begin = self._take_frames(buffer, window[:end], take)
            kept = end - begin
            window[:kept] = window[begin:end]

    def shut(self) -> None:
        """Close the connection for both sides; what is in the system already still arrives."""
        with self.lock:
            self.closed = True
            self._shut_down()

    def release(self) -> None:
        """End the writer and close the socket; called by the reader, when it reads no more."""
        with self.lock:
            self._shut_down()
        if self._writer is not None:
            self._writer.join()
        with self.lock:
            self._socket.close()

    def _take_frames(
        self, buffer: bytearray, window: memoryview, take: Callable[[int, memoryview], None]
    ) -> int:
        """Take the frames that begin in a window of the buffer; returns where the rest begins."""
        begin, end = 0, len(window)
        while end - begin >= _HEAD.size and not self.closed:
            magic, kind, size, number = _HEAD.unpack_from(buffer, begin)
            if magic != _MAGIC or kind != self._takes or size > self._max_frame_bytes:
                raise NotAFrame
            begin += _HEAD.size
            if size <= end - begin:
                frame = memoryview(buffer[begin : begin + size])
                begin += size
            else:
                frame = self._receive_rest(size, window[begin:])
                begin = end
            take(number, frame)
        return begin

    def _receive_rest(self, size: int, beginning: memoryview) -> memoryview:
        frame = np.empty(size, np.uint8).data
        place = len(beginning)
        frame[:place] = beginning
        while place < size:
            place += self._receive(frame[place:], socket.MSG_WAITALL)
        return frame

    def _receive(self, target: memoryview, flags: int = 0) -> int:
        while True:
            if self._look is not None and time.monotonic() >= self._look_at:
                self._look()
                self._look_at = time.monotonic() + _LOOK_EVERY_S
            try:
                received = self._socket.recv_into(target, 0, flags)
            except BlockingIOError:
                continue
            if not received:
                raise ConnectionResetError("the other side closed the connection")
            return received

    def _send(self, pieces: list[_Piece], size: int, flags: int) -> int:
        """Send pieces of so many bytes in all, and remove them from the list.

        Returns:
            How many bytes the socket did not take, with the flags for not waiting.
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
        writer = threading.Thread(target=self._write_on, name=self._name, daemon=True)
        try:
            writer.start()
        except RuntimeError:
            # The system allows no more threads.
            self._shut_down()
            return
        self._writer = writer

    def _write_on(self) -> None:
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
    """Remove so many bytes from the beginning of pieces."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            pieces[: index + 1] = [memoryview(piece)[sent:]]
            return
        sent -= len(piece)
