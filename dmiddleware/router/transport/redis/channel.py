"""The dialing end of the redis transport."""

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
from dmiddleware.router.transport.callbacks import run_callback, run_callback_in_thread
from dmiddleware.router.transport.interface import OnReply
from dmiddleware.router.transport.redis.lists import (
    ANSWER,
    GONE,
    MESSAGE,
    PRESENCE,
    PRESENCE_LOOK_S,
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


@dataclass(slots=True)
class _Sent:
    """A request under way.

    Attributes:
        on_reply: told what became of it.
        deadline: until when its answer is awaited.
    """

    on_reply: OnReply
    deadline: float


class RedisChannel:
    """A way to a listener: a thread that sends, and one that takes answers.

    Both start with the first request, and have a connection each. All answers come to one list.
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
        self._answers = lists.answers(self._number)
        self._changed = threading.Condition()
        self._under_way: dict[int, _Sent] = {}
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
        """Make a request and wait for its answer."""
        told: queue.SimpleQueue[memoryview | TransportError] = queue.SimpleQueue()
        self.send(raw, told.put)
        outcome = told.get()
        if isinstance(outcome, TransportError):
            raise outcome
        return outcome

    def send(self, raw: WireBytes, on_reply: OnReply) -> None:
        """Make a request without waiting."""
        with self._changed:
            refusal = self._refusal(raw)
            if refusal is None:
                number = next(self._counts)
                head = REQUEST.pack(MESSAGE, self._number, number, self._max_frame_bytes)
                self._under_way[number] = _Sent(on_reply, time.monotonic() + self._reply_timeout_s)
                self._to_send.put((number, head + bytes(raw)))
                self._start()
                self._changed.notify_all()
                return
        run_callback_in_thread(on_reply, refusal)

    def close(self) -> None:
        """Tell the listener, and close; requests under way fail at once."""
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
        while (here := control.get(self._lists.presence)) is None:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"could not dial {self._lists.address}: nobody listens there, within "
                    f"{connect_timeout_s:g} s"
                )
            threading.Event().wait(PRESENCE_LOOK_S)
        if not isinstance(here, bytes) or len(here) != PRESENCE.size:
            raise TransportError(f"{self._lists.address} is used by something else")
        number, longest = PRESENCE.unpack(here)
        return int(number), int(longest)

    def _start(self) -> None:
        if self._threads:
            return
        for work, name in ((self._push_forever, "ask"), (self._take_forever, "answers")):
            thread = threading.Thread(target=work, name=f"router-redis-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _push_forever(self) -> None:
        connection: redis.Redis | None = None
        ended = False
        while not ended:
            requests, ended = take_all(self._to_send)
            contents = [(self._inbox, content) for _, content in requests]
            if ended:
                # The other thread takes note, too.
                contents.append((self._inbox, REQUEST.pack(GONE, self._number, 0, 0)))
                contents.append((self._answers, ANSWER.pack(GONE, 0)))
            try:
                if connection is None:
                    connection = self._lists.connect(wait_s=self._reply_timeout_s)
                push(connection, contents)
            except redis.RedisError as error:
                # A request that is pushed twice could be taken twice.
                _close(connection)
                connection = None
                for number, _ in requests:
                    self._tell(number, self._failure(error))
        _close(connection)

    def _take_forever(self) -> None:
        connection: redis.Redis | None = None
        while (deadline := self._next_deadline()) is not None:
            left_s = max(deadline - time.monotonic(), _SHORTEST_BLOCK_S)
            try:
                if connection is None:
                    connection = self._lists.connect(wait_s=self._reply_timeout_s)
                item: Any = connection.blpop([self._answers], timeout=left_s)
            except redis.RedisError as error:
                _close(connection)
                connection = None
                self._tell_all(self._failure(error))
                continue
            if item is not None and len(item[1]) >= ANSWER.size:
                self._take(item[1])
            self._tell_late_ones()
        _close(connection)

    def _next_deadline(self) -> float | None:
        """Wait until there is something to wait for; None when the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._under_way)
            if not self._closed:
                return min(sent.deadline for sent in self._under_way.values())
        self._tell_all(self._closed_error())
        return None

    def _take(self, answer: bytes) -> None:
        kind, number = ANSWER.unpack_from(answer)
        if number not in self._under_way:
            return  # too late, or the redis server gave it twice
        if kind == MESSAGE:
            self._tell(number, body(answer, ANSWER))
            return
        with self._changed:
            self._broken = True
        self._tell_all(self._closed_error())

    def _tell(self, number: int, outcome: memoryview | TransportError) -> None:
        with self._changed:
            sent = self._under_way.pop(number, None)
        if sent is not None:
            run_callback(sent.on_reply, outcome)

    def _tell_all(self, error: TransportError) -> None:
        with self._changed:
            numbers = list(self._under_way)
        for number in numbers:
            self._tell(number, error)

    def _tell_late_ones(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [number for number, sent in self._under_way.items() if sent.deadline <= now]
        for number in late:
            self._tell(
                number, TransportError(f"could not ask {self._lists.address}: no answer in time")
            )

    def _refusal(self, raw: WireBytes) -> TransportError | None:
        if self._closed or self._broken:
            return self._closed_error()
        if len(raw) > self._longest:
            return TransportError(
                f"{self._lists.address} takes {self._longest} bytes at most, the request has "
                f"{len(raw)}"
            )
        return None

    def _failure(self, error: redis.RedisError) -> TransportError:
        return translate(error, f"ask {self._lists.address}")

    def _closed_error(self) -> TransportError:
        return TransportError(f"the channel to {self._lists.address} is closed")


def _close(connection: redis.Redis | None) -> None:
    if connection is not None:
        connection.close()
