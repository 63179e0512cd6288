"""The listening side of connections over plain sockets, and what they may cost."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import resource
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dmiddleware.router.transport.connection import Connection, PlainSocket, Wire, describe
from dmiddleware.router.transport.framing import HEAD_BYTES, REPLY, REQUEST, NotAFrame
from dmiddleware.router.transport.interface import ListenLimits, RequestHandler
from dmiddleware.router.transport.io_loop import BUFFER_BYTES, READ, IoLoop
from dmiddleware.router.transport.socket_addresses import ListeningSocket, tuned
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["SocketListener"]

_logger = logging.getLogger(__name__)

_JOIN_S: Final = 5.0

_MAX_UNANSWERED: Final = 1024
"""A connection with this many requests that wait for their replies is not read."""

_MAX_UNSENT_BYTES: Final = 16 << 20
"""A connection whose peer does not read this many bytes of replies is not read either."""

_ACCEPTS_PER_EVENT: Final = 16
_PAUSE_S: Final = 0.1
_WARN_EVERY_S: Final = 1.0
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})


class SocketListener:
    """A listening socket, and the connections to it.

    Connections whose peer has not authenticated are few, short and small. One
    descriptor is kept in reserve, so that dialers are refused rather than left waiting when the
    process has no other.
    """

    def __init__(
        self,
        listening: ListeningSocket,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
        secure: Callable[[socket.socket], Wire] | None,
    ) -> None:
        self._listening = listening
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._limits = limits
        self._secure = secure
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._connections: dict[int, AcceptedConnection] = {}
        # In the order of their arrival, with the time at which each is closed.
        self._untrusted: OrderedDict[int, float] = OrderedDict()
        self._is_timed = False
        self._max_untrusted = min(limits.max_untrusted, _max_descriptors() // 4)
        self._next_warning = 0.0
        self._loop: IoLoop | None = None
        self._closed = False
        self._reserve = _open_reserve()

    def start(self, loop: IoLoop) -> bool:
        """Start listening; return False if the loop has stopped."""
        descriptor = self._listening.socket.fileno()
        if not loop.add(descriptor, self):
            return False
        self._loop = loop
        loop.watch(descriptor, READ)
        return True

    @property
    def address(self) -> str:
        """Where others can dial; port 0 is replaced by the real one."""
        return self._listening.address

    def trust(self, connection: int) -> None:
        """Lift the limits of a connection whose peer has authenticated."""
        with self._changed:
            accepted = self._connections.get(connection)
            if accepted is None or self._untrusted.pop(connection, None) is None:
                return
            accepted.trust()
        if self._loop is not None:
            self._loop.grow()

    def n_bytes(self, connection: int) -> int:
        """Return how many bytes show that the peer of a connection is alive."""
        accepted = self._connections.get(connection)
        return 0 if accepted is None else accepted.n_bytes

    def close(self) -> None:
        """Stop listening and close the connections."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections.values())
            if self._loop is not None:
                self._loop.remove(self._listening.socket.fileno())
            self._listening.close()
            if self._reserve is not None:
                os.close(self._reserve)
        for accepted in connections:
            accepted.close()
        if self._loop is not None and not self._loop.is_current():
            with self._changed:
                self._changed.wait_for(lambda: not self._connections, _JOIN_S)
            self._loop.join()

    def on_event(self, events: int, buffer: memoryview) -> None:
        """Accept connections."""
        pause_s = 0.0
        for _ in range(_ACCEPTS_PER_EVENT):
            with self._changed:
                if self._closed:
                    return
                try:
                    accepted, _ = self._listening.socket.accept()
                except BlockingIOError:
                    break
                except ConnectionError:
                    continue
                except OSError as error:
                    pause_s = self._make_room(error)
                    if pause_s:
                        break
                    continue
                number = next(self._numbers)
            self._add(number, accepted)
            self._keep_few()
        if pause_s:
            self._warn("cannot accept connections: the process has too many open files")
            assert self._loop is not None
            self._loop.call_at(time.monotonic() + pause_s, self._watch)
        else:
            self._watch()

    def serve(self, raw: memoryview, connection: int, reply: _Reply) -> bool:
        """Serve a request; return False if the connection must be closed."""
        try:
            self._serve(raw, connection, reply)
        except Exception:
            # A request that makes the handler fail must not affect other requests.
            _logger.exception("closed a connection, handling its request failed")
            return False
        return True

    def forget(self, number: int, error: Exception | None) -> None:
        """Forget a connection that is closed."""
        with self._changed:
            self._untrusted.pop(number, None)
            self._connections.pop(number, None)
            self._changed.notify_all()
        if isinstance(error, NotAFrame | ssl.SSLError):
            self._warn("closed connection %d: %s", number, describe(error, "a request"))
        elif error is not None:
            _logger.debug("connection %d: %s", number, error)
        self._on_disconnect(number)

    def _add(self, number: int, accepted: socket.socket) -> None:
        limits, loop = self._limits, self._loop
        assert loop is not None
        try:
            wire = PlainSocket(tuned(accepted)) if self._secure is None else self._secure(accepted)
            added = AcceptedConnection(self, number, wire, loop, limits)
        except OSError:
            accepted.close()
            return
        now = time.monotonic()
        with self._changed:
            if self._closed:
                accepted.close()
                return
            self._connections[number] = added
            self._untrusted[number] = now + limits.handshake_s
            if not self._is_timed:
                self._is_timed = True
                loop.call_at(now + limits.handshake_s, self._close_late)
            added.start()

    def _make_room(self, error: OSError) -> float:
        """Close the oldest untrusted connection, or refuse the next; return how long to pause."""
        if error.errno not in _OUT_OF_DESCRIPTORS:
            return _PAUSE_S
        if self._untrusted:
            number, _ = self._untrusted.popitem(last=False)
            self._connections[number].abort()
            return 0.0
        if self._reserve is None:
            self._reserve = _open_reserve()
            return _PAUSE_S
        os.close(self._reserve)
        try:
            refused, _ = self._listening.socket.accept()
            refused.close()
        except OSError:
            return _PAUSE_S
        finally:
            self._reserve = _open_reserve()
        return _PAUSE_S

    def _keep_few(self) -> None:
        """Close the oldest untrusted connections if there are too many."""
        while True:
            with self._changed:
                if len(self._untrusted) <= self._max_untrusted:
                    return
                number, _ = self._untrusted.popitem(last=False)
                oldest = self._connections[number]
            oldest.abort()

    def _close_late(self) -> None:
        """Close the connections that have not authenticated in time."""
        while True:
            with self._changed:
                number, until = next(iter(self._untrusted.items()), (0, math.inf))
                if until > time.monotonic():
                    self._is_timed = number != 0
                    if self._is_timed and self._loop is not None:
                        self._loop.call_at(until, self._close_late)
                    return
                del self._untrusted[number]
                late = self._connections[number]
            late.abort()

    def _watch(self) -> None:
        with self._changed:
            if not self._closed and self._loop is not None:
                self._loop.watch(self._listening.socket.fileno(), READ)

    def _warn(self, message: str, *args: object) -> None:
        # An attacker may cause thousands of these a second, which must not fill the disk.
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + _WARN_EVERY_S
            _logger.warning("%s: " + message, self.address, *args)


class AcceptedConnection:
    """One connection to a listener; untrusted until the listener trusts it."""

    def __init__(
        self,
        listener: SocketListener,
        number: int,
        wire: Wire,
        loop: IoLoop,
        limits: ListenLimits,
    ) -> None:
        self._listener = listener
        self._number = number
        self._limits = limits
        self._trusted = False
        self._n_requests = 0
        self._n_unanswered = 0
        self._connection = Connection(
            wire,
            loop,
            self,
            sends=REPLY,
            takes=REQUEST,
            max_frame_bytes=limits.max_untrusted_frame_bytes,
            read_bytes=min(BUFFER_BYTES, limits.max_untrusted_frame_bytes + 2 * HEAD_BYTES),
        )
        if not wire.is_ready:
            # The dialer waits for this, to know that its certificate was accepted.
            self._connection.writer.put(0, b"", urgent=True)

    def start(self) -> None:
        """Start reading requests."""
        self._connection.start()

    @property
    def n_bytes(self) -> int:
        """How many bytes show that the peer is alive."""
        return self._connection.n_bytes

    def trust(self) -> None:
        """Lift the limits."""
        self._trusted = True
        self._connection.trust(self._limits.max_frame_bytes)

    def close(self) -> None:
        """Close the connection."""
        self._connection.shut()

    def abort(self) -> None:
        """Close the connection and its descriptor at once, unless it is being read."""
        self._connection.abort()

    def on_frame(self, number: int, frame: memoryview) -> None:
        """Serve a request."""
        with self._connection.lock:
            self._n_unanswered += 1
        self._n_requests += 1
        if self._is_excessive():
            # Not closed at once, since a stranger that connects again would cost more.
            return
        if not self._listener.serve(frame, self._number, _Reply(self, number)):
            self.close()

    def _is_excessive(self) -> bool:
        return not self._trusted and self._n_requests > self._limits.max_untrusted_requests

    def has_room(self) -> bool:
        """Return whether more requests may be read."""
        unsent_bytes = self._connection.writer.unsent_bytes
        if not self._trusted:
            return not unsent_bytes and not self._is_excessive()
        return self._n_unanswered < _MAX_UNANSWERED and unsent_bytes <= _MAX_UNSENT_BYTES

    def on_end(self, error: Exception | None) -> None:
        """Notify the listener."""
        self._listener.forget(self._number, error)

    def reply(self, reply: _Reply, raw: WireBytes | None, *, urgent: bool) -> None:
        """Reply to a request, once; None closes the connection."""
        connection = self._connection
        with connection.lock:
            if reply.is_done:
                return
            reply.is_done = True
            self._n_unanswered -= 1
            if raw is not None:
                connection.write(reply.number, raw, urgent=urgent)
                return
        connection.shut()


class _Reply:
    """Replies to a request, once."""

    __slots__ = ("_connection", "is_done", "number")

    def __init__(self, connection: AcceptedConnection, number: int) -> None:
        self._connection = connection
        self.number = number
        self.is_done = False

    def __call__(self, raw: WireBytes | None, *, urgent: bool = False) -> None:
        self._connection.reply(self, raw, urgent=urgent)


def _max_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _open_reserve() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
