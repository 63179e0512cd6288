"""The dialing side of a connection over plain sockets."""

from __future__ import annotations

import threading
import time
from typing import Final

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.callbacks import Result, run_callback, run_callback_in_thread
from dmiddleware.router.transport.connection import Connection, Wire, describe
from dmiddleware.router.transport.framing import REPLY, REQUEST
from dmiddleware.router.transport.interface import OnReply
from dmiddleware.router.transport.io_loop import IoLoop
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["SocketChannel"]

_JOIN_S: Final = 5.0


class SocketChannel:
    """A connection to a listener."""

    def __init__(
        self, address: str, wire: Wire, *, reply_timeout_s: float, max_frame_bytes: int
    ) -> None:
        self._address = address
        self._wire = wire
        self._reply_timeout_s = reply_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._number = 0
        self._waiting: dict[int, OnReply] = {}
        self._closed = False
        self._error: Exception | None = None
        self._ended = threading.Event()

    def start(self, loop: IoLoop) -> bool:
        """Start receiving replies; return False if the loop has stopped."""
        self._loop = loop
        self._connection = Connection(
            self._wire,
            loop,
            self,
            sends=REQUEST,
            takes=REPLY,
            max_frame_bytes=self._max_frame_bytes,
        )
        if not self._connection.start():
            return False
        loop.grow()
        return True

    @property
    def n_bytes(self) -> int:
        """How many bytes show that the peer is alive."""
        return self._connection.n_bytes

    def request(self, raw: WireBytes) -> memoryview:
        """Make an urgent request and wait for the reply."""
        result = Result()
        number = self._start_request(raw, result, urgent=True)
        if number is None:
            raise self._broken_error()
        if not result.wait(self._reply_timeout_s) and self._give_up(number) is not None:
            raise self._late_error(self._reply_timeout_s)
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
        number = self._start_request(raw, on_reply, urgent=urgent)
        if number is None:
            run_callback_in_thread(on_reply, self._broken_error())
        elif timeout_s is not None:
            self._loop.call_at(
                time.monotonic() + timeout_s, lambda: self._expire(number, timeout_s)
            )

    def close(self) -> None:
        """Close the connection; pending requests fail at once."""
        self._closed = True
        self._connection.shut()
        if not self._loop.is_current():
            self._ended.wait(_JOIN_S)
            self._loop.join()

    def on_frame(self, number: int, frame: memoryview) -> None:
        """Pass on a reply."""
        # A reply that arrives late has no callback any more.
        on_reply = self._waiting.pop(number, None)
        if on_reply is not None:
            run_callback(on_reply, frame)

    def has_room(self) -> bool:
        """Return True: there are no more replies than requests."""
        return True

    def on_end(self, error: Exception | None) -> None:
        """Fail the pending requests."""
        with self._connection.lock:
            self._error = error
            waiting, self._waiting = self._waiting, {}
        failure = self._broken_error()
        for on_reply in waiting.values():
            run_callback(on_reply, failure)
        self._ended.set()

    def _start_request(self, raw: WireBytes, on_reply: OnReply, *, urgent: bool) -> int | None:
        connection = self._connection
        with connection.lock:
            if connection.shut_down:
                return None
            self._number = number = self._number + 1
            self._waiting[number] = on_reply
            connection.write(number, raw, urgent=urgent)
        return number

    def _give_up(self, number: int) -> OnReply | None:
        """Stop waiting for a reply; return its callback, or None if it has just arrived."""
        with self._connection.lock:
            self._connection.writer.forget(number)
            return self._waiting.pop(number, None)

    def _expire(self, number: int, timeout_s: float) -> None:
        on_reply = self._give_up(number)
        if on_reply is not None:
            run_callback(on_reply, self._late_error(timeout_s))

    def _late_error(self, timeout_s: float) -> TransportError:
        return TransportError(
            f"could not send a request to {self._address}: no reply within {timeout_s:g} s"
        )

    def _broken_error(self) -> TransportError:
        if self._closed:
            return TransportError(f"the channel to {self._address} is closed")
        return TransportError(
            f"could not send a request to {self._address}: {describe(self._error, 'a reply')}"
        )
