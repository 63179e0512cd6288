"""Listening with nng: a Rep0 socket, and the limits of its connections."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pynng

from dmiddleware.router.transport.interface import Listener, ListenLimits, RequestHandler
from dmiddleware.router.transport.nng.context import Context, ContextPool, new_message
from dmiddleware.router.transport.nng.parts import (
    ACKNOWLEDGED,
    FETCH,
    HEAD,
    PART,
    PART_BYTES,
    Joined,
    limit_messages,
    part_of,
    translated,
)
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["NngListener"]

_logger = logging.getLogger(__name__)

_MAX_HELD: Final = 256
"""How many requests without a reply and unsent replies a trusted connection may have."""

_MAX_JOINED: Final = 4
"""How many times the longest frame the unfinished requests of a connection may occupy."""

_MAX_LONG_REPLIES: Final = 16
"""How many long replies a connection may leave unfetched."""

_THREADS: Final = 4
_JOIN_S: Final = 5.0


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection of a listener.

    Attributes:
        pipe: nng's connection.
        trusted: whether its peer has authenticated.
        gone: whether it is closed.
        held: the contexts with a request that has no reply yet.
        sending: the contexts with a reply that may not have been sent yet.
        arrived: messages that wait for their processing, with their contexts.
        processing: whether a thread is processing one.
        joins: requests of which some parts have arrived, by number.
        replies: long replies of which some parts have not been fetched, by number.
    """

    pipe: Any
    trusted: bool = False
    gone: bool = False
    held: set[Context] = field(default_factory=set)
    sending: set[Context] = field(default_factory=set)
    arrived: deque[tuple[Context, memoryview]] = field(default_factory=deque)
    processing: bool = False
    joins: dict[int, Joined] = field(default_factory=dict)
    replies: dict[int, WireBytes] = field(default_factory=dict)

    def close(self) -> None:
        pynng.lib.nng_pipe_close(self.pipe.pipe)


class NngListener(Listener):
    """A Rep0 socket with one context for each request that waits for its reply.

    One context at a time waits for the next request, so the requests of a connection are served in
    order.
    """

    def __init__(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
        tls: TlsFiles | None,
    ) -> None:
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._limits = limits
        self._closed = False
        # Must be held to use a context.
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._untrusted: dict[int, float] = {}
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        with translated(f"listen on {address}"):
            self._socket = pynng.Rep0()
            self._contexts = ContextPool(
                self._socket, lambda context: self._events.put(partial(self._on_received, context))
            )
            try:
                limit_messages(self._socket)
                if tls is not None:
                    self._socket.tls_config = tls.config(listens=True)
                # The callbacks run on nng's threads, and must return at once.
                self._socket.add_pre_pipe_connect_cb(self._note_connect)
                self._socket.add_post_pipe_remove_cb(self._note_disconnect)
                listener = self._socket.listen(address)
            except BaseException:
                self._socket.close()
                raise
        self._address = _real_address(address, listener)
        with self._lock:
            self._receive_next()
        self._threads = [
            threading.Thread(target=self._work, name=f"router-serve-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        """Where others can dial; port 0 is replaced by the real one."""
        return self._address

    def trust(self, connection: int) -> None:
        """Lift the limits of a connection whose peer has authenticated."""
        self._untrusted.pop(connection, None)
        if (trusted := self._connections.get(connection)) is not None:
            trusted.trusted = True

    def close(self) -> None:
        """Stop listening and end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._socket.close()
        for _ in self._threads:
            self._events.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
        self._contexts.close()

    def _note_connect(self, pipe: pynng.Pipe) -> None:
        self._connections[pipe.id] = _Connection(pipe)
        self._untrusted[pipe.id] = time.monotonic() + self._limits.handshake_s
        # One of the threads has to know its deadline.
        self._events.put(lambda: None)

    def _note_disconnect(self, pipe: pynng.Pipe) -> None:
        self._untrusted.pop(pipe.id, None)
        connection = self._connections.pop(pipe.id, None)
        if connection is not None:
            self._events.put(partial(self._drop, connection))
            self._on_disconnect(pipe.id)

    def _work(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._close_untrusted())
            except queue.Empty:
                continue
            if event is None:
                return
            event()

    def _close_untrusted(self) -> float | None:
        """Close connections that have not authenticated; return the seconds to the next one."""
        while True:
            untrusted = list(self._untrusted.items())
            if not untrusted:
                return None
            number, until = untrusted[0]
            left_s = until - time.monotonic()
            if left_s > 0 and len(untrusted) <= self._limits.max_untrusted:
                return left_s
            self._untrusted.pop(number, None)
            if (connection := self._connections.get(number)) is not None and not connection.trusted:
                connection.close()

    def _receive_next(self) -> None:
        """Wait for the next request; called with the lock held."""
        self._contexts.take().receive()

    def _on_received(self, context: Context) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                message, number = context.received()
            except pynng.Closed:
                # nng closes all sockets when the interpreter exits.
                return
            except pynng.NNGException as error:
                _logger.warning("could not receive a request: %s", error)
                context.receive()
                return
            connection = self._connections.get(number)
            if connection is None:
                context.receive()
                return
            self._recycle(connection)
            if self._is_too_much(connection, message):
                connection.close()
                context.receive()
                return
            connection.held.add(context)
            connection.arrived.append((context, message))
            self._receive_next()
            if connection.processing:
                return
            connection.processing = True
        self._process_next(connection)

    def _is_too_much(self, connection: _Connection, message: memoryview) -> bool:
        """Return whether a connection sends more, or reads less, than it may."""
        n_held = len(connection.held) + len(connection.sending)
        if connection.trusted:
            return n_held >= _MAX_HELD
        too_long = len(message) > HEAD.size + self._limits.max_untrusted_frame_bytes
        return too_long or n_held >= self._limits.max_untrusted_requests

    def _process_next(self, connection: _Connection) -> None:
        """Process one message of a connection, and leave the others to the next free thread."""
        with self._lock:
            context, message = connection.arrived.popleft()
        try:
            self._process(connection, context, message)
        except MemoryError:
            _logger.exception("closed a connection, its request did not fit into memory")
            connection.close()
        with self._lock:
            connection.processing = bool(connection.arrived)
            if connection.processing:
                self._events.put(partial(self._process_next, connection))

    def _process(self, connection: _Connection, context: Context, message: memoryview) -> None:
        if connection.gone:
            return
        if len(message) >= HEAD.size:
            kind, number, size, start = HEAD.unpack_from(message)
            part = message[HEAD.size :]
            if kind == FETCH and self._send_part(connection, context, number, start):
                return
            if kind == PART and self._add_part(connection, context, number, size, start, part):
                return
        _logger.warning("closed a connection, its peer sent a message that is not valid")
        connection.close()

    def _add_part(
        self,
        connection: _Connection,
        context: Context,
        number: int,
        size: int,
        start: int,
        part: memoryview,
    ) -> bool:
        """Process a part of a request; return False if it is not valid."""
        limits = self._limits
        bound = limits.max_frame_bytes if connection.trusted else limits.max_untrusted_frame_bytes
        if size > bound or len(part) != min(PART_BYTES, size - start):
            return False
        if len(part) == size:
            self._serve_request(connection, context, number, part)
            return True
        joined = connection.joins.get(number)
        if joined is None:
            occupied = sum(other.size for other in connection.joins.values())
            if occupied + size > _MAX_JOINED * bound:
                return False
            joined = connection.joins[number] = Joined(size)
        if start != joined.received or size != joined.size:
            return False
        if joined.add(start, part):
            del connection.joins[number]
            self._serve_request(connection, context, number, joined.view())
        else:
            self._send(connection, context, new_message(HEAD.pack(ACKNOWLEDGED, number, 0, 0)))
        return True

    def _serve_request(
        self, connection: _Connection, context: Context, number: int, raw: memoryview
    ) -> None:
        reply = _Reply(self, connection, context, number)
        try:
            self._serve(raw, connection.pipe.id, reply)
        except Exception:
            # A request that makes the handler fail must not affect other requests.
            _logger.exception("closed a connection, handling its request failed")
            reply(None)

    def answer(
        self, connection: _Connection, context: Context, number: int, raw: WireBytes | None
    ) -> None:
        """Reply to the request that a context has received."""
        if raw is None or len(connection.replies) >= _MAX_LONG_REPLIES:
            connection.close()
            return
        if len(raw) > PART_BYTES:
            connection.replies[number] = raw
        head = HEAD.pack(PART, number, len(raw), 0)
        self._send(connection, context, new_message(head, part_of(raw, 0)))

    def _send_part(
        self, connection: _Connection, context: Context, number: int, start: int
    ) -> bool:
        """Send a part of a reply; return False if there is no such part."""
        raw = connection.replies.get(number)
        if raw is None or not start < len(raw):
            return False
        if start + PART_BYTES >= len(raw):
            # The dialer fetches the parts in order.
            del connection.replies[number]
        head = HEAD.pack(PART, number, len(raw), start)
        self._send(connection, context, new_message(head, part_of(raw, start)))
        return True

    def _send(self, connection: _Connection, context: Context, message: Any) -> None:
        with self._lock:
            if self._closed or context not in connection.held:
                # The connection is closed. A live dialer sends the request again.
                pynng.lib.nng_msg_free(message)
                return
            connection.held.discard(context)
            connection.sending.add(context)
            context.send(message)

    def _recycle(self, connection: _Connection) -> None:
        """Reuse the contexts whose replies have been sent; called with the lock held."""
        sent = [context for context in connection.sending if not context.is_sending]
        for context in sent:
            context.settle()
        connection.sending.difference_update(sent)
        self._contexts.give_back(sent)

    def _drop(self, connection: _Connection) -> None:
        """Free what a closed connection holds; replies to its requests are dropped."""
        with self._lock:
            connection.gone = True
            for context in connection.sending:
                # nng has ended the sending of what remained.
                context.settle()
            self._contexts.give_back((*connection.held, *connection.sending))
            connection.held.clear()
            connection.sending.clear()
            connection.joins.clear()
            connection.replies.clear()


class _Reply:
    """Replies to one request, once."""

    __slots__ = ("_connection", "_contexts", "_listener", "_number")

    def __init__(
        self, listener: NngListener, connection: _Connection, context: Context, number: int
    ) -> None:
        self._listener = listener
        self._connection = connection
        self._contexts = [context]
        self._number = number

    def __call__(self, raw: WireBytes | None, *, urgent: bool = False) -> None:
        with contextlib.suppress(IndexError):
            context = self._contexts.pop()
            self._listener.answer(self._connection, context, self._number, raw)


def _real_address(address: str, listener: Any) -> str:
    if not address.endswith(":0"):
        return address
    local = str(listener.local_address)
    return f"{address[:-2]}:{local.rpartition(':')[2]}"
