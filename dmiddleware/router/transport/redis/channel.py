"""The dialing side of the redis transport."""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import redis

from dmiddleware.errors import TransportError
from dmiddleware.router.transport.callbacks import (
    Result,
    no_connection,
    run_callback,
    run_callback_in_thread,
)
from dmiddleware.router.transport.interface import Channel, OnReply
from dmiddleware.router.transport.redis.lists import (
    GONE,
    MESSAGE,
    PRESENCE,
    PRESENCE_CHECK_S,
    REPLY,
    REQUEST,
    Lists,
    body,
    push,
    take_all,
    translate,
    translated,
)
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["RedisChannel"]

_SHORTEST_BLOCK_S: Final = 0.01
_JOIN_S: Final = 5.0

_LONGEST_WAIT_S: Final = 30.0
"""After this time a request without a deadline counts as lost."""


@dataclass(slots=True)
class _Sent:
    """A pending request.

    Attributes:
        on_reply: called with the outcome.
        deadline: when the request expires.
    """

    on_reply: OnReply
    deadline: float


class RedisChannel(Channel):
    """A channel to a listener: one thread sends requests, another receives replies.

    Both start with the first request and have one connection each. All replies go to one list.
    """

    def __init__(
        self,
        lists: Lists,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> None:
        self._lists = lists
        self._reply_timeout_s = reply_timeout_s
        self._max_frame_bytes = max_frame_bytes
        self._number = secrets.randbits(63)
        self._replies = lists.replies(self._number)
        self._changed = threading.Condition()
        self._pending: dict[int, _Sent] = {}
        self._to_send: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._counts = itertools.count(1)
        self._closed = False
        self._broken = False
        with translated(f"dial {lists.address}"):
            control = lists.connect(wait_s=connect_timeout_s)
            try:
                listener, self._longest = self._find(control, connect_timeout_s)
            finally:
                control.close()
        self._inbox = lists.inbox(listener)

    def request(self, raw: WireBytes) -> memoryview:
        """Make a request and wait for the reply."""
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
        """Make a request without waiting."""
        with self._changed:
            refusal = self._refusal(raw)
            if refusal is None:
                number = next(self._counts)
                head = REQUEST.pack(MESSAGE, self._number, number, self._max_frame_bytes)
                wait_s = _LONGEST_WAIT_S if timeout_s is None else timeout_s
                self._pending[number] = _Sent(on_reply, time.monotonic() + wait_s)
                self._to_send.put((number, head + bytes(raw)))
                self._start()
                self._changed.notify_all()
                return
        run_callback_in_thread(on_reply, refusal)

    def close(self) -> None:
        """Notify the listener and close; pending requests fail at once."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._to_send.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _find(self, control: redis.Redis, connect_timeout_s: float) -> tuple[int, int]:
        deadline = time.monotonic() + connect_timeout_s
        while (presence := control.get(self._lists.presence)) is None:
            if time.monotonic() > deadline:
                raise no_connection(self._lists.address, connect_timeout_s)
            threading.Event().wait(PRESENCE_CHECK_S)
        if not isinstance(presence, bytes) or len(presence) != PRESENCE.size:
            raise TransportError(
                f"{self._lists.address} is in use by another program; choose another redis database"
            )
        number, longest = PRESENCE.unpack(presence)
        return int(number), int(longest)

    def _start(self) -> None:
        if self._threads:
            return
        for work, name in ((self._push_forever, "requests"), (self._receive_forever, "replies")):
            thread = threading.Thread(target=work, name=f"router-redis-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _push_forever(self) -> None:
        connection: redis.Redis | None = None
        done = False
        while not done:
            requests, done = take_all(self._to_send)
            contents = [(self._inbox, content) for _, content in requests]
            if done:
                # The other thread is notified too.
                contents.append((self._inbox, REQUEST.pack(GONE, self._number, 0, 0)))
                contents.append((self._replies, REPLY.pack(GONE, 0)))
            try:
                if connection is None:
                    connection = self._lists.connect(wait_s=self._reply_timeout_s)
                push(connection, contents)
            except redis.RedisError as error:
                # A request that is pushed twice could be processed twice.
                _close(connection)
                connection = None
                for number, _ in requests:
                    self._finish(number, self._failure(error))
        _close(connection)

    def _receive_forever(self) -> None:
        connection: redis.Redis | None = None
        while (deadline := self._next_deadline()) is not None:
            left_s = max(deadline - time.monotonic(), _SHORTEST_BLOCK_S)
            try:
                if connection is None:
                    connection = self._lists.connect(wait_s=self._reply_timeout_s)
                item: Any = connection.blpop([self._replies], timeout=left_s)
            except redis.RedisError as error:
                _close(connection)
                connection = None
                self._fail_all(self._failure(error))
                continue
            if item is not None and len(item[1]) >= REPLY.size:
                self._take(item[1])
            self._expire()
        _close(connection)

    def _next_deadline(self) -> float | None:
        """Wait for a pending request; return its deadline, or None once the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._pending)
            if not self._closed:
                return min(sent.deadline for sent in self._pending.values())
        self._fail_all(self._closed_error())
        return None

    def _take(self, reply: bytes) -> None:
        kind, number = REPLY.unpack_from(reply)
        if number not in self._pending:
            return  # too late, or delivered twice by the redis server
        if kind == MESSAGE:
            self._finish(number, body(reply, REPLY))
            return
        with self._changed:
            self._broken = True
        self._fail_all(self._closed_error())

    def _finish(self, number: int, outcome: memoryview | TransportError) -> None:
        with self._changed:
            sent = self._pending.pop(number, None)
        if sent is not None:
            run_callback(sent.on_reply, outcome)

    def _fail_all(self, error: TransportError) -> None:
        with self._changed:
            numbers = list(self._pending)
        for number in numbers:
            self._finish(number, error)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [number for number, sent in self._pending.items() if sent.deadline <= now]
        for number in late:
            self._finish(
                number,
                TransportError(
                    f"could not send a request to {self._lists.address}: no reply in time"
                ),
            )

    def _refusal(self, raw: WireBytes) -> TransportError | None:
        if self._closed or self._broken:
            return self._closed_error()
        if len(raw) > self._longest:
            return TransportError(
                f"the request has {len(raw)} bytes, but {self._lists.address} accepts at most "
                f"{self._longest}; install the same version of dmiddleware on all hosts"
            )
        return None

    def _failure(self, error: redis.RedisError) -> TransportError:
        return translate(error, f"send a request to {self._lists.address}")

    def _closed_error(self) -> TransportError:
        return TransportError(f"the channel to {self._lists.address} is closed")


def _close(connection: redis.Redis | None) -> None:
    if connection is not None:
        connection.close()
