"""The redis lists that requests and replies go through."""

from __future__ import annotations

import contextlib
import queue
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dmiddleware.errors import TransportError
from dmiddleware.router.protocol.topology import RedisAddress

__all__ = [
    "REPLY",
    "GONE",
    "MESSAGE",
    "PRESENCE",
    "PRESENCE_CHECK_S",
    "REFUSED",
    "REQUEST",
    "Lists",
    "body",
    "push",
    "take_all",
    "translate",
    "translated",
]

_T = TypeVar("_T")

_PREFIX: Final = "dmw"
_LEFTOVER_S: Final = 60

PRESENCE_CHECK_S: Final = 0.05
"""How often to check whether a listener is present."""

REQUEST: Final = struct.Struct("<BQQQ")
"""Kind, channel, number of the request, longest reply that is accepted."""

REPLY: Final = struct.Struct("<BQ")
"""Kind, number of the request."""

PRESENCE: Final = struct.Struct("<QQ")
"""The listener's number, longest request that it accepts."""

MESSAGE, GONE, REFUSED = 0, 1, 2


class Lists:
    """The keys of one listener in a redis server.

    Args:
        address: the server, and the listener's name.
        login: user name and password, or None for each.
    """

    def __init__(self, address: RedisAddress, login: dict[str, Any]) -> None:
        self._redis_address = address
        self._login = login
        self.address = str(address)
        self.presence = f"{_PREFIX}:{address.name}:here"

    def inbox(self, listener: int) -> str:
        """Return the list of requests to a listener; a new listener gets a new list."""
        return f"{_PREFIX}:{self._redis_address.name}:in:{listener:x}"

    def replies(self, channel: int) -> str:
        """Return the list of replies to a channel."""
        return f"{_PREFIX}:{self._redis_address.name}:out:{channel:x}"

    def connect(self, *, wait_s: float) -> redis.Redis:
        """Return a connection for one thread, whose commands may wait for ``wait_s``."""
        return redis.Redis(
            host=self._redis_address.host,
            port=self._redis_address.port,
            db=self._redis_address.db,
            single_connection_client=True,
            socket_connect_timeout=1.0,
            socket_timeout=wait_s + 1.0,
            # A request that is sent twice could be processed twice.
            retry=Retry(NoBackoff(), 0),
            **self._login,
        )


def body(content: bytes, head: struct.Struct) -> memoryview:
    """Return a writable copy of what follows a head."""
    return memoryview(bytearray(memoryview(content)[head.size :]))


def push(connection: redis.Redis, contents: Sequence[tuple[str, bytes]]) -> None:
    """Append to lists, which expire when unused for a minute."""
    with connection.pipeline(transaction=False) as pipeline:
        for name, content in contents:
            pipeline.rpush(name, content)
            pipeline.expire(name, _LEFTOVER_S)
        pipeline.execute()


def take_all(waiting: queue.SimpleQueue[_T | None]) -> tuple[list[_T], bool]:
    """Wait for items of a queue.

    Returns:
        All items in the queue, and whether they are the last ones, which None marks.
    """
    taken: list[_T] = []
    item = waiting.get()
    with contextlib.suppress(queue.Empty):
        while item is not None:
            taken.append(item)
            item = waiting.get_nowait()
        return taken, True
    return taken, False


def translate(error: redis.RedisError, doing: str) -> TransportError:
    """Return a redis error as a transport error."""
    if isinstance(error, redis.TimeoutError):
        return TransportError(
            f"could not {doing}: the redis server does not respond; check that it is running"
        )
    if isinstance(error, redis.AuthenticationError):
        return TransportError(
            f"could not {doing}: the redis server refused the password ({error}); set "
            "DITASK_REDIS_PASSWORD"
        )
    return TransportError(f"could not {doing}: {error}")


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise redis errors as transport errors."""
    try:
        yield
    except redis.RedisError as error:
        raise translate(error, doing) from error
