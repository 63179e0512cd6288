"""The lists in a redis server that requests and answers go through."""

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
    "ANSWER",
    "GONE",
    "MESSAGE",
    "PRESENCE",
    "PRESENCE_LOOK_S",
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

PRESENCE_LOOK_S: Final = 0.05
"""How often to look who is there."""

REQUEST: Final = struct.Struct("<BQQQ")
"""Kind, channel, number of the request, longest answer that is accepted."""

ANSWER: Final = struct.Struct("<BQ")
"""Kind, number of the request."""

PRESENCE: Final = struct.Struct("<QQ")
"""The listener's number, longest request that it accepts."""

MESSAGE, GONE, REFUSED = 0, 1, 2


class Lists:
    """A redis server, and the keys of one listener in it.

    Args:
        place: the server, and the listener's name.
        login: for servers that ask for one.
    """

    def __init__(self, place: RedisAddress, login: dict[str, Any]) -> None:
        self._place = place
        self._login = login
        self.address = str(place)
        self.presence = f"{_PREFIX}:{place.name}:here"

    def inbox(self, listener: int) -> str:
        """Return where the requests to a listener go: none finds what its predecessor left."""
        return f"{_PREFIX}:{self._place.name}:in:{listener:x}"

    def answers(self, channel: int) -> str:
        """Return where the answers to a channel go."""
        return f"{_PREFIX}:{self._place.name}:out:{channel:x}"

    def connect(self, *, wait_s: float) -> redis.Redis:
        """Return a connection for one thread, on which a command may wait for ``wait_s``."""
        return redis.Redis(
            host=self._place.host,
            port=self._place.port,
            db=self._place.db,
            single_connection_client=True,
            socket_connect_timeout=1.0,
            socket_timeout=wait_s + 1.0,
            # A request that is sent twice could be taken twice.
            retry=Retry(NoBackoff(), 0),
            **self._login,
        )


def body(content: bytes, head: struct.Struct) -> memoryview:
    """Return what follows a head, where it may be written to, as over any other way."""
    return memoryview(bytearray(memoryview(content)[head.size :]))


def push(connection: redis.Redis, contents: Sequence[tuple[str, bytes]]) -> None:
    """Add to the ends of lists, which vanish when nobody adds or takes for a minute."""
    with connection.pipeline(transaction=False) as pipeline:
        for name, content in contents:
            pipeline.rpush(name, content)
            pipeline.expire(name, _LEFTOVER_S)
        pipeline.execute()


def take_all(waiting: queue.SimpleQueue[_T | None]) -> tuple[list[_T], bool]:
    """Wait for what is to be pushed.

    Returns:
        All that is there, and whether that is the last: None has come.
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
    """Return an error of redis' as the router's."""
    if isinstance(error, redis.TimeoutError):
        return TransportError(f"could not {doing}: the redis server does not answer")
    if isinstance(error, redis.AuthenticationError):
        return TransportError(
            f"could not {doing}: the redis server wants another password ({error}); set "
            "DITASK_REDIS_PASSWORD"
        )
    return TransportError(f"could not {doing}: {error}")


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn redis' errors into the router's."""
    try:
        yield
    except redis.RedisError as error:
        raise translate(error, doing) from error
