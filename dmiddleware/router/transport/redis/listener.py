"""The redis transport, and its listening side."""

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
from dmiddleware.router.transport.interface import Listener, ListenLimits, RequestHandler
from dmiddleware.router.transport.redis.channel import RedisChannel
from dmiddleware.router.transport.redis.lists import (
    GONE,
    MESSAGE,
    PRESENCE,
    PRESENCE_CHECK_S,
    REFUSED,
    REPLY,
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

# Announces a listener, unless another one has its name.
_ANNOUNCE: Final = """
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

    Addresses have the form ``redis://host:port/db/name``. See the package for what it promises.

    Args:
        username: for redis servers with user accounts.
        password: for redis servers that require one.
    """

    def __init__(self, *, username: str | None = None, password: str | None = None) -> None:
        self._login: dict[str, Any] = {"username": username, "password": password}

    def listen(
        self,
        address: str,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> RedisListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.interface.Transport`."""
        return RedisListener(
            Lists(RedisAddress.parse(address), self._login),
            serve,
            on_disconnect=on_disconnect,
            limits=limits,
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
        """Return True: the redis server is not trusted."""
        return True

    def stage_arrays(self, arrays: Sequence[memoryview]) -> None:
        """Return None: arrays cannot be staged."""


class RedisListener(Listener):
    """A list of requests, served by threads with one connection each, and a thread for replies."""

    def __init__(
        self,
        lists: Lists,
        serve: RequestHandler,
        *,
        on_disconnect: Callable[[int], None],
        limits: ListenLimits,
    ) -> None:
        self._lists = lists
        self._serve = serve
        self._on_disconnect = on_disconnect
        self._number = secrets.randbits(63)
        self._presence = PRESENCE.pack(self._number, limits.max_frame_bytes)
        self._inbox = lists.inbox(self._number)
        self._lock = threading.Lock()
        self._pending: set[_PendingRequest] = set()
        self._replies: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        with translated(f"listen on {lists.address}"):
            self._control = lists.connect(wait_s=_BLOCK_S)
            try:
                self._claim_name()
            except BaseException:
                self._control.close()
                raise
        self._keeper = _start(self._stay_present, "router-redis-presence")
        self._replier = _start(self._push_replies, "router-redis-replies")
        self._workers = [_start(self._work, f"router-serve-{number}") for number in range(_WORKERS)]

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._lists.address

    def trust(self, connection: int) -> None:
        """Lift the limits of a connection whose peer has authenticated."""

    def close(self) -> None:
        """Stop listening and end the threads; requests without a reply are refused."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._keeper.join(_JOIN_S)
        with contextlib.suppress(redis.RedisError):
            self._control.eval(_LEAVE, 1, self._lists.presence, self._presence)
            # One empty item for each waiting thread, to wake it up.
            self._control.rpush(self._inbox, *[b""] * len(self._workers))
        for thread in self._workers:
            thread.join(_JOIN_S)
        with contextlib.suppress(redis.RedisError):
            while (request := self._control.lpop(self._inbox)) is not None:
                if isinstance(request, bytes) and len(request) >= REQUEST.size:
                    self._register(request)
            self._control.delete(self._inbox)
        self._control.close()
        with self._lock:
            pending_requests = list(self._pending)
        for pending in pending_requests:
            self._reply(pending, None)
        self._replies.put(None)
        self._replier.join(_JOIN_S)

    def _claim_name(self) -> None:
        # The presence of a killed listener takes a while to expire.
        deadline = time.monotonic() + 2 * _PRESENCE_MS / 1000
        while not self._announce():
            if time.monotonic() > deadline:
                raise TransportError(
                    f"another node is already listening on {self._lists.address}; give each node "
                    "and each run a different name"
                )
            self._closing.wait(PRESENCE_CHECK_S)

    def _announce(self) -> bool:
        return bool(
            self._control.eval(
                _ANNOUNCE, 1, self._lists.presence, self._presence, str(_PRESENCE_MS)
            )
        )

    def _stay_present(self) -> None:
        held = True
        while not self._closing.wait(_PRESENCE_EVERY_S):
            with contextlib.suppress(redis.RedisError):
                holds, held = self._announce(), held
                if held and not holds:
                    _logger.error(
                        "another node is now listening on %s, and receives this node's requests; "
                        "give each node and each run a different name",
                        self._lists.address,
                    )
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
                # The server is down; the dialers will retry when it is back.
                _logger.debug("%s: %s", self._lists.address, error)
                self._closing.wait(_PAUSE_S)

    def _serve_one(self, request: bytes) -> None:
        pending = self._register(request)
        if pending is None:
            return
        try:
            self._serve(
                body(request, REQUEST),
                pending.channel,
                functools.partial(self._reply, pending),
            )
        except Exception:
            # A request that makes the handler fail must not affect other requests.
            _logger.exception("closed a connection, handling its request failed")
            self._reply(pending, None)

    def _register(self, request: bytes) -> _PendingRequest | None:
        """Register a request that needs a reply; return None if the channel has closed."""
        kind, channel, number, longest = REQUEST.unpack_from(request)
        if kind == GONE:
            self._on_disconnect(channel)
            return None
        pending = _PendingRequest(channel, number, longest)
        with self._lock:
            self._pending.add(pending)
        return pending

    def _reply(
        self, pending: _PendingRequest, response: WireBytes | None, *, urgent: bool = False
    ) -> None:
        with self._lock:
            if pending not in self._pending:
                return
            self._pending.remove(pending)
        if response is None or len(response) > pending.longest:
            content = REPLY.pack(REFUSED, pending.number)
        else:
            content = REPLY.pack(MESSAGE, pending.number) + bytes(response)
        self._replies.put((self._lists.replies(pending.channel), content))

    def _push_replies(self) -> None:
        """Push the replies of other threads, which do not wait for the redis server."""
        connection: redis.Redis | None = None
        done = False
        while not done:
            replies, done = take_all(self._replies)
            try:
                if connection is None:
                    connection = self._lists.connect(wait_s=_BLOCK_S)
                push(connection, replies)
            except redis.RedisError as error:
                # The server is down; the dialers will retry when it is back.
                _logger.debug("%s: %s", self._lists.address, error)
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()


@dataclass(eq=False, frozen=True, slots=True)
class _PendingRequest:
    """A request that has no reply yet.

    Attributes:
        channel: number of the channel that it was made on.
        number: number of the request.
        longest: the longest reply that is accepted, in bytes.
    """

    channel: int
    number: int
    longest: int


def _start(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
