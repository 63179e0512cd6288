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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.base import OnAnswer, Serve
from dmiddleware.router.transport.telling import tell, tell_elsewhere
from dmiddleware.router.transport.unix_stream import ANSWER, REQUEST, FrameStream, NotAFrame
from dmiddleware.router.wire.byte_pieces import Raw

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
        self, address: str, serve: Serve, *, on_gone: Callable[[int], None], max_frame_bytes: int
    ) -> UnixListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.base.Transport`."""
        return UnixListener(address, serve, on_gone=on_gone, max_frame_bytes=max_frame_bytes)

    def dial(
        self, address: str, *, connect_s: float, answer_s: float, max_frame_bytes: int
    ) -> UnixChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.base.Transport`."""
        return UnixChannel(
            address, connect_s=connect_s, answer_s=answer_s, max_frame_bytes=max_frame_bytes
        )

    def covers_body(self, address: str) -> bool:
        """Tell that frames need not have all their bytes signed: only this user can connect."""
        return False

    def lay_down(self, arrays: Sequence[memoryview]) -> None:
        """Tell that arrays have no place of their own here."""


class UnixChannel:
    """A connection to a listener; its thread reads the answers."""

    def __init__(
        self, address: str, *, connect_s: float, answer_s: float, max_frame_bytes: int
    ) -> None:
        self._address = address
        self._answer_s = answer_s
        self._number = 0
        self._waiting: dict[int, tuple[float, OnAnswer]] = {}
        self._ended = False
        self._reason = "the connection broke"
        self._stream = FrameStream(
            _dialed(address, connect_s),
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

    def request(self, raw: Raw) -> memoryview:
        """Make a request and wait for its answer."""
        result = _Result()
        number = self._begin(raw, result)
        if number is None:
            raise self._error()
        if not result.wait(self._answer_s):
            with self._stream.lock:
                given_up = self._give_up(number) is not None
            if given_up:
                raise self._too_late()
            result.wait(-1)
        return result.get()

    def send(self, raw: Raw, on_answer: OnAnswer) -> None:
        """Make a request without waiting."""
        if self._begin(raw, on_answer) is None:
            tell_elsewhere(on_answer, self._error())

    def close(self) -> None:
        """Close the connection; requests under way fail at once."""
        self._stream.shut()
        if self._reader is not threading.current_thread():
            self._reader.join(_JOIN_S)

    def _begin(self, raw: Raw, on_answer: OnAnswer) -> int | None:
        deadline = time.monotonic() + self._answer_s
        with self._stream.lock:
            if self._ended or self._stream.closed:
                return None
            self._number = number = self._number + 1
            self._waiting[number] = deadline, on_answer
            self._stream.write(number, raw)
        return number

    def _give_up(self, number: int) -> OnAnswer | None:
        """Await an answer no longer; called with the stream's lock held.

        Returns:
            Whom to tell; None if the answer has just come.
        """
        self._stream.forget(number)
        _, on_answer = self._waiting.pop(number, (0.0, None))
        return on_answer

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
            for on_answer in given_up:
                if on_answer is not None:
                    tell(on_answer, self._error())
            self._stream.release()

    def _take(self, number: int, frame: memoryview) -> None:
        # Nobody waits any more for an answer that comes late.
        _, on_answer = self._waiting.pop(number, (0.0, None))
        if on_answer is not None:
            tell(on_answer, frame)

    def _look(self) -> None:
        """Give up those requests whose deadline is over; the oldest come first."""
        now = time.monotonic()
        with self._stream.lock:
            late = list(
                itertools.takewhile(lambda number: self._waiting[number][0] <= now, self._waiting)
            )
            given_up = [self._give_up(number) for number in late]
        for on_answer in given_up:
            if on_answer is not None:
                tell(on_answer, self._too_late())

    def _too_late(self) -> TransportError:
        return TransportError(
            f"could not ask {self._address}: no answer within {self._answer_s:g} s"
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
        serve: Serve,
        *,
        on_gone: Callable[[int], None],
        max_frame_bytes: int,
    ) -> None:
        self._address = address
        self._serve = serve
        self._on_gone = on_gone
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
        self._on_gone(number)


class _Connection:
    """A connection that was accepted; its thread reads requests and serves them."""

    def __init__(
        self,
        number: int,
        accepted: socket.socket,
        serve: Serve,
        on_gone: Callable[[int], None],
        *,
        max_frame_bytes: int,
    ) -> None:
        self._number = number
        self._serve = serve
        self._on_gone = on_gone
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
            self._on_gone(self._number)

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

    def __call__(self, raw: Raw | None) -> None:
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


def _dialed(address: str, connect_s: float) -> socket.socket:
    path = _path("dial", address)
    deadline = time.monotonic() + connect_s
    while True:
        try:
            return _connected(path, max(0.01, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() + _DIAL_EVERY_S >= deadline:
                raise TransportError(
                    f"could not dial {address}: nobody answered within {connect_s:g} s ({error})"
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
