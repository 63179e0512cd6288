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
import itertools
import logging
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from dmiddleware.errors import TransportError
from dmiddleware.router.parts import Raw
from dmiddleware.router.transport.base import Serve
from dmiddleware.router.transport.redis_address import RedisAddress

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as missing:
    raise ImportError(
        "the redis transport needs redis-py; install it: pip install 'dmiddleware[redis]'"
    ) from missing

__all__ = ["RedisTransport"]

_logger = logging.getLogger(__name__)

_BASE_WORKERS: Final = 4
_PREFIX: Final = "dmw"
_PRESENCE_MS: Final = 2_000
_PRESENCE_EVERY_S: Final = 0.5
_PRESENCE_LOOK_S: Final = 0.05
_LEFTOVER_S: Final = 60
_BLOCK_S: Final = 1.0
_SHORTEST_BLOCK_S: Final = 0.01
_PAUSE_S: Final = 0.1
_JOIN_S: Final = 5.0

_REQUEST: Final = struct.Struct("<BQQQQ")
"""Kind, channel, slot, number of the request, longest answer that is accepted."""

_ANSWER: Final = struct.Struct("<BQ")
"""Kind, number of the request."""

_PRESENCE: Final = struct.Struct("<QQ")
"""The listener's number, longest request that it accepts."""

_MESSAGE, _GONE, _REFUSED = 0, 1, 2

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
        self, address: str, serve: Serve, *, on_gone: Callable[[int], None], max_frame_bytes: int
    ) -> RedisListener:
        """Listen on an address; see :class:`~dmiddleware.router.transport.base.Transport`."""
        return RedisListener(
            _Server(RedisAddress.parse(address), self._login),
            serve,
            on_gone=on_gone,
            max_frame_bytes=max_frame_bytes,
        )

    def dial(
        self, address: str, *, connect_s: float, answer_s: float, max_frame_bytes: int
    ) -> RedisChannel:
        """Connect to an address; see :class:`~dmiddleware.router.transport.base.Transport`."""
        return RedisChannel(
            _Server(RedisAddress.parse(address), self._login),
            connect_s=connect_s,
            answer_s=answer_s,
            max_frame_bytes=max_frame_bytes,
        )

    def covers_body(self, address: str) -> bool:
        """Tell that frames need all their bytes signed: the redis server is not trusted."""
        return True

    def lay_down(self, arrays: Sequence[memoryview]) -> None:
        """Tell that arrays have no place of their own here."""


class _Server:
    """A redis server, and the keys of one listener in it."""

    def __init__(self, place: RedisAddress, login: dict[str, Any]) -> None:
        self._place = place
        self._login = login
        self.address = str(place)
        self.presence = f"{_PREFIX}:{place.name}:here"

    def inbox(self, listener: int) -> str:
        # Each listener has its own, so that none finds what its predecessor left.
        return f"{_PREFIX}:{self._place.name}:in:{listener:x}"

    def answers(self, channel: int, slot: int) -> str:
        return f"{_PREFIX}:{self._place.name}:out:{channel:x}:{slot:x}"

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


class RedisListener:
    """A list of requests, served by threads with a connection each."""

    def __init__(
        self,
        server: _Server,
        serve: Serve,
        *,
        on_gone: Callable[[int], None],
        max_frame_bytes: int,
    ) -> None:
        self._server = server
        self._serve = serve
        self._on_gone = on_gone
        self._number = secrets.randbits(63)
        self._presence = _PRESENCE.pack(self._number, max_frame_bytes)
        self._inbox = server.inbox(self._number)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        with _translated(f"listen on {server.address}"):
            self._control = server.connect(wait_s=_BLOCK_S)
            try:
                self._take_the_name()
            except BaseException:
                self._control.close()
                raise
        self._keeper = threading.Thread(
            target=self._stay_present, name="router-redis-here", daemon=True
        )
        self._keeper.start()
        self.grow(_BASE_WORKERS)

    @property
    def address(self) -> str:
        """Where others can dial."""
        return self._server.address

    def grow(self, workers: int) -> None:
        """Serve at least so many requests at a time."""
        while len(self._threads) < workers and not self._closing.is_set():
            name = f"router-serve-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop listening and end the threads; those who still ask are told."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._keeper.join(_JOIN_S)
        with contextlib.suppress(redis.RedisError):
            self._control.eval(_LEAVE, 1, self._server.presence, self._presence)
            # Something to take for each thread that waits, so that it looks up.
            self._control.rpush(self._inbox, *[b""] * len(self._threads))
        for thread in self._threads:
            thread.join(_JOIN_S)
        with contextlib.suppress(redis.RedisError):
            while (request := self._control.lpop(self._inbox)) is not None:
                if isinstance(request, bytes) and len(request) >= _REQUEST.size:
                    self._answer(self._control, request, None)
            self._control.delete(self._inbox)
        self._control.close()

    def _take_the_name(self) -> None:
        # A listener that was killed is present for a while yet.
        deadline = time.monotonic() + 2 * _PRESENCE_MS / 1000
        while not self._be_present():
            if time.monotonic() > deadline:
                raise TransportError(
                    f"another node listens on {self._server.address}; give each node a name of its "
                    "own, and each run one"
                )
            self._closing.wait(_PRESENCE_LOOK_S)

    def _be_present(self) -> bool:
        return bool(
            self._control.eval(
                _BE_PRESENT, 1, self._server.presence, self._presence, str(_PRESENCE_MS)
            )
        )

    def _stay_present(self) -> None:
        held = True
        while not self._closing.wait(_PRESENCE_EVERY_S):
            with contextlib.suppress(redis.RedisError):
                holds, held = self._be_present(), held
                if held and not holds:
                    _logger.error("another node has taken the name %s", self._server.address)
                held = holds

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                with contextlib.closing(self._server.connect(wait_s=_BLOCK_S)) as connection:
                    while not self._closing.is_set():
                        item: Any = connection.blpop([self._inbox], timeout=_BLOCK_S)
                        if item is not None and len(item[1]) >= _REQUEST.size:
                            self._serve_one(connection, item[1])
            except redis.RedisError as error:
                # The server is away; the dialers will ask again when it is back.
                _logger.debug("%s: %s", self._server.address, error)
                self._closing.wait(_PAUSE_S)

    def _serve_one(self, connection: redis.Redis, request: bytes) -> None:
        kind, channel, _, _, _ = _REQUEST.unpack_from(request)
        if kind == _GONE:
            self._on_gone(channel)
            return
        answer = self._serve(memoryview(request)[_REQUEST.size :], channel)
        self._answer(connection, request, answer)

    def _answer(self, connection: redis.Redis, request: bytes, answer: Raw | None) -> None:
        _, channel, slot, number, longest = _REQUEST.unpack_from(request)
        if answer is None or len(answer) > longest:
            content = _ANSWER.pack(_REFUSED, number)
        else:
            content = _ANSWER.pack(_MESSAGE, number) + bytes(answer)
        _push(connection, self._server.answers(channel, slot), content)


class RedisChannel:
    """A way to a listener; each request under way has a list and a connection of its own."""

    def __init__(
        self, server: _Server, *, connect_s: float, answer_s: float, max_frame_bytes: int
    ) -> None:
        self._server = server
        self._answer_s = answer_s
        self._max_frame_bytes = max_frame_bytes
        self._number = secrets.randbits(63)
        self._lock = threading.Lock()
        self._idle: list[_Slot] = []
        self._busy: set[_Slot] = set()
        self._counts = itertools.count(1)
        self._closed = False
        self._broken = False
        with _translated(f"dial {server.address}"):
            self._control = server.connect(wait_s=connect_s)
            try:
                listener, self._longest = self._find(connect_s)
            except BaseException:
                self._control.close()
                raise
        self._inbox = server.inbox(listener)

    def request(self, raw: Raw) -> memoryview:
        """Make a request and wait for its answer."""
        if len(raw) > self._longest:
            raise TransportError(
                f"{self._server.address} takes {self._longest} bytes at most, the request has "
                f"{len(raw)}"
            )
        with _translated(f"ask {self._server.address}"):
            slot = self._borrow()
            answer: memoryview | None = None
            try:
                answer = self._ask(slot, raw)
                return answer
            finally:
                self._give_back(slot, reusable=answer is not None)

    def close(self) -> None:
        """Tell the listener, and close; requests under way fail at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        with contextlib.suppress(redis.RedisError):
            for slot in busy:
                _push(self._control, slot.answers, _ANSWER.pack(_GONE, slot.number))
            _push(self._control, self._inbox, _REQUEST.pack(_GONE, self._number, 0, 0, 0))
        for slot in idle:
            slot.connection.close()
        self._control.close()

    def _find(self, connect_s: float) -> tuple[int, int]:
        deadline = time.monotonic() + connect_s
        while (here := self._control.get(self._server.presence)) is None:
            if time.monotonic() > deadline:
                raise TransportError(
                    f"could not dial {self._server.address}: nobody listens there, within "
                    f"{connect_s:g} s"
                )
            threading.Event().wait(_PRESENCE_LOOK_S)
        if not isinstance(here, bytes) or len(here) != _PRESENCE.size:
            raise TransportError(f"{self._server.address} is used by something else")
        number, longest = _PRESENCE.unpack(here)
        return int(number), int(longest)

    def _ask(self, slot: _Slot, raw: Raw) -> memoryview:
        head = _REQUEST.pack(_MESSAGE, self._number, slot.place, slot.number, self._max_frame_bytes)
        _push(slot.connection, self._inbox, head + bytes(raw))
        deadline = time.monotonic() + self._answer_s
        while (left := deadline - time.monotonic()) > 0:
            item: Any = slot.connection.blpop([slot.answers], timeout=max(left, _SHORTEST_BLOCK_S))
            if item is None:
                break
            if len(item[1]) < _ANSWER.size:
                continue
            kind, number = _ANSWER.unpack_from(item[1])
            if number != slot.number:
                continue  # too late, or the redis server gave it twice
            if kind != _MESSAGE:
                self._broken = True
                raise self._closed_error()
            return memoryview(bytearray(item[1]))[_ANSWER.size :]
        raise TransportError(f"could not ask {self._server.address}: no answer in time")

    def _borrow(self) -> _Slot:
        with self._lock:
            slot = self._idle.pop() if self._idle else None
            place = next(self._counts)
        if slot is None:
            connection = self._server.connect(wait_s=self._answer_s)
            slot = _Slot(place, self._server.answers(self._number, place), connection)
        with self._lock:
            slot.number = next(self._counts)
            if not self._closed and not self._broken:
                self._busy.add(slot)
                return slot
        slot.connection.close()
        raise self._closed_error()

    def _give_back(self, slot: _Slot, *, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(slot)
            if reusable and not self._closed:
                self._idle.append(slot)
                return
        slot.connection.close()

    def _closed_error(self) -> TransportError:
        return TransportError(f"the channel to {self._server.address} is closed")


class _Slot:
    """What one request under way needs.

    Attributes:
        place: its number in the channel.
        answers: the list that its answers go to.
        connection: its own.
        number: of the request that is under way.
    """

    def __init__(self, place: int, answers: str, connection: redis.Redis) -> None:
        self.place = place
        self.answers = answers
        self.connection = connection
        self.number = 0


def _push(connection: redis.Redis, name: str, content: bytes) -> None:
    """Add to the end of a list, which vanishes when nobody adds or takes for a minute."""
    with connection.pipeline(transaction=False) as pipeline:
        pipeline.rpush(name, content)
        pipeline.expire(name, _LEFTOVER_S)
        pipeline.execute()


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Turn redis' errors into the router's."""
    try:
        yield
    except redis.TimeoutError as error:
        raise TransportError(f"could not {doing}: the redis server does not answer") from error
    except redis.AuthenticationError as error:
        raise TransportError(
            f"could not {doing}: the redis server wants another password ({error}); set "
            "DITASK_REDIS_PASSWORD"
        ) from error
    except redis.RedisError as error:
        raise TransportError(f"could not {doing}: {error}") from error
