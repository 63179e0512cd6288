"""Dialing with nng: a Req0 socket, with deadlines of its own."""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pynng

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.callbacks import (
    Result,
    no_connection,
    run_callback,
    run_callback_in_thread,
)
from dmiddleware.router.transport.interface import Channel, OnReply
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

__all__ = ["NngChannel"]

_WINDOW: Final = 16
"""How many parts of requests may be unacknowledged, and how many parts of a reply are fetched at a
time."""

_JOIN_S: Final = 5.0


@dataclass(eq=False, slots=True)
class _Request:
    """A request of a channel that has no reply yet.

    Attributes:
        number: its number.
        raw: its bytes.
        on_reply: called with the outcome.
        until: its deadline.
        n_sent: how many of its bytes have been sent.
        joined: the parts of its reply, if the reply has several.
        fetched: the end of the last part of the reply that was fetched.
    """

    number: int
    raw: WireBytes
    on_reply: OnReply
    until: float
    n_sent: int = 0
    joined: Joined | None = None
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A message of a request.

    Attributes:
        request: the request.
        start: where the part of the reply starts that it fetches; None: it sends a part.
        in_window: whether it takes a place in the window.
    """

    request: _Request
    start: int | None = None
    in_window: bool = False


class NngChannel(Channel):
    """A Req0 socket with one context for each message that waits for its reply.

    Its thread processes the replies and the deadlines.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
        tls: TlsFiles | None,
    ) -> None:
        self._address = address
        self._reply_timeout_s = reply_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._numbers = itertools.count(1)
        # Must be held to use a context.
        self._lock = threading.Lock()
        self._exchanges: dict[Context, _Exchange] = {}
        self._waiting: dict[int, _Request] = {}
        self._unsent: deque[_Request] = deque()
        self._n_in_window = 0
        self._next_deadline = math.inf
        self._error: TransportError | None = None
        self._closed = False
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        with translated(f"dial {address}"):
            # nng must not resend requests, because the listener could process one twice.
            self._socket = pynng.Req0(resend_time=-1)
            self._contexts = ContextPool(
                self._socket, lambda context: self._events.put(partial(self._on_received, context))
            )
            try:
                limit_messages(self._socket)
                self._socket.add_post_pipe_remove_cb(lambda _: self._events.put(self._on_broken))
                if tls is None:
                    self._connect(address, connect_timeout_s)
                else:
                    self._connect_secured(address, connect_timeout_s, tls)
            except BaseException:
                self._socket.close()
                raise
        self._thread = threading.Thread(target=self._work, name=f"router-read-{address}")
        self._thread.daemon = True
        self._thread.start()

    def request(self, raw: WireBytes) -> memoryview:
        """Make an urgent request and wait for the reply."""
        result = Result()
        self.send(raw, result, timeout_s=self._reply_timeout_s, urgent=True)
        return result.get()

    def send(
        self,
        raw: WireBytes,
        on_reply: OnReply,
        *,
        timeout_s: float | None,
        urgent: bool = False,
    ) -> None:
        """Make a request without waiting; ``on_reply`` is called with the outcome."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            error = self._error
            if error is None:
                request = _Request(next(self._numbers) % (1 << 32), raw, on_reply, until)
                self._waiting[request.number] = request
                if urgent:
                    self._unsent.appendleft(request)
                else:
                    self._unsent.append(request)
                self._send_parts()
                if until < self._next_deadline:
                    self._events.put(lambda: None)
        if error is not None:
            run_callback_in_thread(on_reply, error)

    def close(self) -> None:
        """Close the connection; pending requests fail at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._error = TransportError(f"the channel to {self._address} is closed")
        self._events.put(None)
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._contexts.close()

    def _work(self) -> None:
        while True:
            with self._lock:
                deadlines = (request.until for request in self._waiting.values())
                self._next_deadline = min(deadlines, default=math.inf)
            left_s = self._next_deadline - time.monotonic()
            if left_s <= 0:
                self._give_up_late()
                continue
            try:
                event = self._events.get(timeout=None if left_s == math.inf else left_s)
            except queue.Empty:
                continue
            if event is None:
                assert self._error is not None
                self._fail(list(self._waiting.values()), self._error)
                return
            event()

    def _send_parts(self) -> None:
        """Send what the window allows; called with the lock held."""
        try:
            self._send_next_parts()
        except (pynng.NNGException, MemoryError) as error:
            self._events.put(partial(self._break, str(error) or "out of memory"))

    def _send_next_parts(self) -> None:
        while self._unsent:
            request = self._unsent[0]
            start, size = request.n_sent, len(request.raw)
            end = min(start + PART_BYTES, size)
            is_last = end == size
            if not is_last and self._n_in_window >= _WINDOW:
                return
            head = HEAD.pack(PART, request.number, size, start)
            message = new_message(head, part_of(request.raw, start))
            self._start(_Exchange(request, in_window=not is_last), message)
            request.n_sent = end
            if is_last:
                self._unsent.popleft()

    def _fetch(self, request: _Request, joined: Joined) -> None:
        """Fetch the next part of a reply; called with the lock held."""
        if request.fetched < joined.size:
            head = HEAD.pack(FETCH, request.number, 0, request.fetched)
            self._start(_Exchange(request, start=request.fetched), new_message(head))
            request.fetched += PART_BYTES

    def _start(self, exchange: _Exchange, message: Any) -> None:
        """Send a message and wait for its reply; called with the lock held."""
        context = self._contexts.take()
        self._exchanges[context] = exchange
        self._n_in_window += exchange.in_window
        context.send(message)
        context.receive()

    def _on_received(self, context: Context) -> None:
        with self._lock:
            if self._closed:
                return
            context.settle()
            exchange = self._exchanges.pop(context)
            self._n_in_window -= exchange.in_window
            self._contexts.give_back([context])
            reason = "it sent bytes that are not a reply, or a reply that is too long"
            try:
                message, _ = context.received()
            except pynng.NNGException as error:
                message, reason = memoryview(b""), str(error)
            if self._error is None:
                self._send_parts()
        if self._waiting.get(exchange.request.number) is not exchange.request:
            # Its deadline has passed.
            return
        try:
            valid = self._process(exchange, message)
        except MemoryError:
            valid, reason = False, "out of memory"
        if not valid:
            self._break(reason)

    def _process(self, exchange: _Exchange, message: memoryview) -> bool:
        """Process a reply to a message; return False if it is not valid."""
        if len(message) < HEAD.size:
            return False
        kind, number, size, start = HEAD.unpack_from(message)
        request, part = exchange.request, message[HEAD.size :]
        if kind == ACKNOWLEDGED:
            return exchange.in_window
        if kind != PART or number != request.number or size > self._max_frame_bytes:
            return False
        if start != (exchange.start or 0) or len(part) != min(PART_BYTES, size - start):
            return False
        if len(part) == size:
            self._finish(request, part)
            return True
        return self._add_part(exchange, size, start, part)

    def _add_part(self, exchange: _Exchange, size: int, start: int, part: memoryview) -> bool:
        """Process one of several parts of a reply; return False if it is not valid."""
        request, joined = exchange.request, exchange.request.joined
        is_first = exchange.start is None
        if is_first and joined is None:
            joined = request.joined = Joined(size)
            request.fetched = PART_BYTES
        elif is_first or joined is None or size != joined.size:
            return False
        if joined.add(start, part):
            self._finish(request, joined.view())
            return True
        with self._lock:
            for _ in range(_WINDOW if is_first else 1):
                if self._error is None:
                    self._fetch(request, joined)
        return True

    def _finish(self, request: _Request, outcome: memoryview | TransportError) -> None:
        with self._lock:
            if self._waiting.pop(request.number, None) is None:
                return
        run_callback(request.on_reply, outcome)

    def _fail(self, requests: list[_Request], error: TransportError) -> None:
        for request in requests:
            self._finish(request, error)

    def _give_up_late(self) -> None:
        """Fail the requests whose deadline has passed, and wait for their replies no longer."""
        now = time.monotonic()
        with self._lock:
            late = [request for request in self._waiting.values() if request.until <= now]
            for context, exchange in self._exchanges.items():
                if not self._closed and exchange.request in late:
                    context.cancel()
        error = TransportError(f"could not send a request to {self._address}: no reply in time")
        self._fail(late, error)
        if any(request.joined or 0 < request.n_sent < len(request.raw) for request in late):
            # The listener would wait for the rest forever.
            self._break("a request was given up halfway")

    def _on_broken(self) -> None:
        self._break("the connection broke")

    def _break(self, reason: str) -> None:
        """Fail all requests and end the connection; only the first reason counts."""
        with self._lock:
            if self._error is not None:
                return
            error = self._error = TransportError(
                f"could not send a request to {self._address}: {reason}"
            )
            waiting = list(self._waiting.values())
            self._unsent.clear()
            for context in self._exchanges:
                context.cancel()
            for dialer in self._socket.dialers:
                # Otherwise nng would connect again.
                dialer.close()
        self._fail(waiting, error)

    def _connect(self, address: str, timeout_s: float) -> None:
        # A blocking dial has no deadline, and lasts minutes if packets are dropped.
        connected = threading.Event()
        self._socket.add_post_pipe_connect_cb(lambda _: connected.set())
        self._socket.dial(address, block=False)
        if not connected.wait(timeout_s):
            raise no_connection(address, timeout_s)

    def _connect_secured(self, address: str, timeout_s: float, tls: TlsFiles) -> None:
        # Only a blocking dial reports bad certificates; closing the socket ends it.
        self._socket.tls_config = tls.config(listens=False)
        failures: list[pynng.NNGException] = []

        def dial() -> None:
            try:
                self._socket.dial(address, block=True)
            except pynng.NNGException as error:
                failures.append(error)

        dialing = threading.Thread(target=dial, name=f"router-secure-{address}", daemon=True)
        dialing.start()
        dialing.join(timeout_s)
        if dialing.is_alive():
            raise no_connection(address, timeout_s)
        if failures:
            if isinstance(failures[0], pynng.CryptoError):
                tls.check(address, timeout_s=timeout_s / 2)
            raise failures[0]
