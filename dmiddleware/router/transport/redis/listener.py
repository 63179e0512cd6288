"""Requests and answers through a redis server, where nodes cannot reach each other directly.

A listener blocks on a list, its inbox; each request names the list that its answer goes to. Nobody
but the redis server must be reachable.

What redis promises is less than what a socket does. It holds what is under way in its memory: when
it is restarted, requests and answers are lost, or, if it restores a snapshot, come twice. Requests
without an answer fail at their deadline, and the delivery above sends again what was not
acknowledged and takes nothing twice, so that no event is lost or doubled between nodes that live
through it. Three things remain. The death of a peer is noticed by its missing heartbeats, after
three seconds, not at once. There is no way around a redis server that is away: everything waits for
it, up to the deadlines of the emitters. And whoever may use the redis server can read what the
nodes tell each other, and can hold it up; but not forge or change it, as every byte of every frame
is signed with the run's key.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from dmiddleware.errors import TransportError
from dmiddleware.router.protocol.topology import RedisAddress
from dmiddleware.router.transport.interface import RequestHandler
from dmiddleware.router.transport.redis.channel import RedisChannel
from dmiddleware.router.transport.redis.lists import (
    ANSWER,
    GONE,
    MESSAGE,
    PRESENCE,
    PRESENCE_LOOK_S,
    REFUSED,
    REQUEST,
    Lists,
    body,
    push,
    take_all,
    translated,
)
from dmiddleware.router.wire.byte_pieces import WireBytes

__all__ = ["RedisTransport"]

_logger = logging.getLogger(__name__)

_WORKERS: Final = 4
_PRESENCE_MS: Final = 2_000
_PRESENCE_EVERY_S: Final = 0.5
_BLOCK_S: Final = 1.0
_PAUSE_S: Final = 0.1
_JOIN_S: Final = 5.0

# Says that a listener is here, unless another one has its name.
_BE_PRESENT: Final = """
local now = redis.call('GET', KEYS[1])
if now and now ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_LEAVE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""


class RedisTransport:
    """Lists in a redis server.

    Addresses have the form ``redis://host:port/db/name``; see the module for what it promises.

    Args:
        username: for redis servers that ask who comes.
        password: for those that ask for one.
    """

    def __init__(self, *, username: str | None = None, password: str | None = None) -> None:
        self._login: dict[str, Any] = {"username": username, "password": password}

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        max_frame_bytes: int,
    ) -> RedisListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return RedisListener(
            Lists(RedisAddress.parse(address), self._login),
            serve,
            on_disconnect=on_disconnect,
            max_frame_bytes=max_frame_bytes,
        )

    def dial(
        self,
        address: str,
        *,
        connect_timeout_s: float,
        reply_timeout_s: float,
        max_frame_bytes: int,
    ) -> RedisChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return RedisChannel(
            Lists(RedisAddress.parse(address), self._login),
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=reply_timeout_s,
            max_frame_bytes=max_frame_bytes,
        )

    def covers_body(self, address: str) -> bool:
        """Tell that frames need all their bytes signed: the redis server is not trusted."""
        return True

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Tell that arrays have no place of their own here."""


class RedisListener:
    """A list of requests, taken by threads with a connection each, and one that answers."""

    def __init__(
        self,
        lists: Lists,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        max_frame_bytes: int,
    ) -> None:
        self._lists = lists
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._number = secrets.randbits(63)
        self._presence = PRESENCE.pack(self._number, max_frame_bytes)
        self._inbox = lists.inbox(self._number)
        self._lock = threading.Lock()
        self._unanswered: set[_Asked] = set()
        self._answers: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        with translated(f"listen on {lists.address}"):
            self._control = lists.connect(wait_s=_BLOCK_S)
            try:
                self._take_the_name()
            except BaseException:
                self._control.close()
                raise
        self._keeper = _start(self._stay_present, "router-redis-here")
        self._answerer = _start(self._answer_forever, "router-redis-answers")
        self._workers = [_start(self._work, f"router-serve-{number}") for number in range(_WORKERS)]

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._lists.address

    def close(self) -> None:
        """Stop listening and end the threads; those who still ask are told."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._keeper.join(_JOIN_S)
        with contextlib.suppress(redis.RedisError):
            self._control.eval(_LEAVE, 1, self._lists.presence, self._presence)
            # Something to take for each thread that waits, so that it looks up.
            self._control.rpush(self._inbox, *[b""] * len(self._workers))
        for thread in self._workers:
            thread.join(_JOIN_S)
        with contextlib.suppress(redis.RedisError):
            while (request := self._control.lpop(self._inbox)) is not None:
                if isinstance(request, bytes) and len(request) >= REQUEST.size:
                    self._ask(request)
            self._control.delete(self._inbox)
        self._control.close()
        with self._lock:
            unanswered = list(self._unanswered)
        for asked in unanswered:
            self._reply(asked, None)
        self._answers.put(None)
        self._answerer.join(_JOIN_S)

    def _take_the_name(self) -> None:
        # A listener that was killed is present for a while yet.
        deadline = time.monotonic() + 2 * _PRESENCE_MS / 1000
        while not self._be_present():
            if time.monotonic() > deadline:
                raise TransportError(
                    f"another node listens on {self._lists.address}; give each node a name of its "
                    "own, and each run one"
                )
            self._closing.wait(PRESENCE_LOOK_S)

    def _be_present(self) -> bool:
        return bool(
            self._control.eval(
                _BE_PRESENT, 1, self._lists.presence, self._presence, str(_PRESENCE_MS)
            )
        )

    def _stay_present(self) -> None:
        held = True
        while not self._closing.wait(_PRESENCE_EVERY_S):
            with contextlib.suppress(redis.RedisError):
                holds, held = self._be_present(), held
                if held and not holds:
                    _logger.error("another node has taken the name %s", self._lists.address)
                held = holds

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                with contextlib.closing(self._lists.connect(wait_s=_BLOCK_S)) as connection:
                    while not self._closing.is_set():
                        item: Any = connection.blpop([self._inbox], timeout=_BLOCK_S)
                        if item is not None and len(item[1]) >= REQUEST.size:
                            self._serve_one(item[1])
            except redis.RedisError as error:
                # The server is away; the dialers will ask again when it is back.
                _logger.debug("%s: %s", self._lists.address, error)
                self._closing.wait(_PAUSE_S)

    def _serve_one(self, request: bytes) -> None:
        asked = self._ask(request)
        if asked is None:
            return
        try:
            self._serve(
                body(request, REQUEST),
                asked.channel,
                functools.partial(self._reply, asked),
            )
        except Exception:
            # Whoever can make one request fail must not take the others' service away.
            _logger.exception("a request could not be served; its connection is closed")
            self._reply(asked, None)

    def _ask(self, request: bytes) -> _Asked | None:
        """Take note of a request that is to be answered; None if it is a goodbye."""
        kind, channel, number, longest = REQUEST.unpack_from(request)
        if kind == GONE:
            self._on_disconnect(channel)
            return None
        asked = _Asked(channel, number, longest)
        with self._lock:
            self._unanswered.add(asked)
        return asked

    def _reply(self, asked: _Asked, answer: WireBytes | None) -> None:
        with self._lock:
            if asked not in self._unanswered:
                return
            self._unanswered.remove(asked)
        if answer is None or len(answer) > asked.longest:
            content = ANSWER.pack(REFUSED, asked.number)
        else:
            content = ANSWER.pack(MESSAGE, asked.number) + bytes(answer)
        self._answers.put((self._lists.answers(asked.channel), content))

    def _answer_forever(self) -> None:
        """Push answers; other threads give them, which do not wait for the redis server."""
        connection: redis.Redis | None = None
        ended = False
        while not ended:
            answers, ended = take_all(self._answers)
            try:
                if connection is None:
                    connection = self._lists.connect(wait_s=_BLOCK_S)
                push(connection, answers)
            except redis.RedisError as error:
                # The server is away; the dialers will ask again when it is back.
                _logger.debug("%s: %s", self._lists.address, error)
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()


@dataclass(eq=False, frozen=True, slots=True)
class _Asked:
    """A request without an answer.

    Attributes:
        channel: on which it was made.
        number: its own.
        longest: answers with more bytes are not accepted.
    """

    channel: int
    number: int
    longest: int


def _start(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
