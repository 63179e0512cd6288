"""The redis transport, against a real redis-server, alone and under routers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from dmiddleware.errors import TransportError, WaitTimeout
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport import Reply, RequestHandler
from dmiddleware.router.transport.redis import RedisTransport
from dmiddleware.router.transport.redis.channel import RedisChannel
from dmiddleware.router.transport.redis.listener import RedisListener
from tests.dmiddleware.router.endpoints import NEVER_S, BackgroundRequest, unlimited
from tests.dmiddleware.router.redis_server import RedisServer
from tests.dmiddleware.router.request_handlers import Parking, echo, replying_with

pytestmark = pytest.mark.process

KEY = bytes(range(32))
MAX_BYTES = 1 << 20
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    with shared.client() as client:
        client.flushall()
    return shared


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@contextlib.contextmanager
def listening(
    address: str,
    serve: RequestHandler = echo,
    gone: list[int] | None = None,
    **login: Any,
) -> Iterator[RedisListener]:
    listener = RedisTransport(**login).listen(
        address,
        serve,
        on_disconnect=([] if gone is None else gone).append,
        limits=unlimited(MAX_BYTES),
    )
    try:
        yield listener
    finally:
        listener.close()
        listener.close()


@contextlib.contextmanager
def dialed(
    address: str,
    *,
    connect_timeout_s: float = DEADLINE_S,
    reply_timeout_s: float = DEADLINE_S,
    max_frame_bytes: int = MAX_BYTES,
    **login: Any,
) -> Iterator[RedisChannel]:
    channel = RedisTransport(**login).dial(
        address,
        connect_timeout_s=connect_timeout_s,
        reply_timeout_s=reply_timeout_s,
        max_frame_bytes=max_frame_bytes,
    )
    try:
        yield channel
    finally:
        channel.close()
        channel.close()


@pytest.mark.parametrize("size", [0, 1, 1000, MAX_BYTES])
def test_a_request_gets_a_reply(server: RedisServer, size: int) -> None:
    content = bytes(i % 251 for i in range(size))
    with listening(f"{server.url}/a"), dialed(f"{server.url}/a") as channel:
        for _ in range(3):
            assert channel.request(content) == content


def test_concurrent_requests_get_their_own_replies(
    server: RedisServer,
) -> None:
    parking = Parking()
    with listening(f"{server.url}/a", parking), dialed(f"{server.url}/a") as channel:
        asked = {number: BackgroundRequest(channel, b"%d" % number) for number in range(40)}
        for content, reply in reversed(parking.wait_for(40).items()):
            reply(content)
        assert {number: one.result() for number, one in asked.items()} == {
            number: b"%d" % number for number in asked
        }


def test_channels_have_different_numbers_and_disconnect_on_close(server: RedisServer) -> None:
    numbers: list[int] = []

    @replying_with
    def serve(raw: memoryview, connection: int) -> bytes:
        numbers.append(connection)
        return b""

    gone: list[int] = []
    with listening(f"{server.url}/a", serve, gone):
        with dialed(f"{server.url}/a") as one, dialed(f"{server.url}/a") as other:
            for channel in (one, one, other):
                channel.request(b"")
        _until(lambda: len(gone) == 2)
    assert numbers[0] == numbers[1] != numbers[2]
    assert set(gone) == set(numbers)


def test_a_refused_request_breaks_the_channel(server: RedisServer) -> None:
    replies = iter([None])
    with (
        listening(f"{server.url}/a", replying_with(lambda raw, _: next(replies, b"!"))),
        dialed(f"{server.url}/a") as channel,
    ):
        for _ in range(2):
            with pytest.raises(TransportError, match="closed"):
                channel.request(b"?")


def test_a_late_reply_is_not_taken_for_the_next_one(
    server: RedisServer,
) -> None:
    parking = Parking()

    def serve(raw: memoryview, connection: int, reply: Reply) -> None:
        (parking if bytes(raw) == b"slow" else echo)(raw, connection, reply)

    with (
        listening(f"{server.url}/a", serve),
        dialed(f"{server.url}/a", reply_timeout_s=0.3) as channel,
    ):
        with pytest.raises(TransportError, match="no reply in time"):
            channel.request(b"slow")
        parking.wait_for(1)[b"slow"](b"slow")
        assert [bytes(channel.request(b"%d" % number)) for number in range(5)] == [
            b"0", b"1", b"2", b"3", b"4",
        ]  # fmt: skip


def test_a_reply_that_redis_delivers_twice_is_ignored(server: RedisServer) -> None:
    channels: list[int] = []

    @replying_with
    def serve(raw: memoryview, connection: int) -> bytes:
        channels.append(connection)
        return bytes(raw)

    with (
        listening(f"{server.url}/a", serve),
        dialed(f"{server.url}/a") as channel,
        server.client() as client,
    ):
        channel.request(b"first")
        client.rpush(f"dmw:a:out:{channels[0]:x}", bytes(9) + b"an old one")
        assert channel.request(b"second") == b"second"


def test_closing_a_channel_fails_pending_requests_at_once(server: RedisServer) -> None:
    parking = Parking()
    with (
        listening(f"{server.url}/a", parking),
        dialed(f"{server.url}/a", reply_timeout_s=NEVER_S) as channel,
    ):
        asked = BackgroundRequest(channel, b"?")
        parking.wait_for(1)
        channel.close()
        assert "closed" in str(asked.result())


def test_closing_a_listener_fails_waiting_requests(server: RedisServer) -> None:
    served, release = threading.Semaphore(0), threading.Event()

    @replying_with
    def serve(raw: memoryview, _: int) -> bytes | None:
        served.release()
        release.wait(DEADLINE_S)
        return None

    with (
        listening(f"{server.url}/a", serve) as listener,
        dialed(f"{server.url}/a", reply_timeout_s=NEVER_S) as channel,
    ):
        asked = [
            BackgroundRequest(channel, b"?") for _ in range(6)
        ]  # two more than are served at a time
        for _ in range(4):
            assert served.acquire(timeout=DEADLINE_S)
        with server.client() as client:
            _until(lambda: client.llen(_inbox(client, "a")) == 2)
        threading.Timer(0.1, release.set).start()
        listener.close()
        assert all("closed" in str(one.result()) for one in asked)


def test_closing_a_listener_fails_requests_without_a_reply(server: RedisServer) -> None:
    parking = Parking()
    with (
        listening(f"{server.url}/a", parking) as listener,
        dialed(f"{server.url}/a", reply_timeout_s=NEVER_S) as channel,
    ):
        asked = [BackgroundRequest(channel, b"?") for _ in range(6)]
        parking.wait_for(6)
        listener.close()
        assert all("closed" in str(one.result()) for one in asked)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_replies_resume_as_soon_as_redis_is_back(own_server: RedisServer, meanwhile: bool) -> None:
    parking, address = Parking(), f"{own_server.url}/a"
    with listening(address, parking), dialed(address) as channel:
        asked = {content: BackgroundRequest(channel, content) for content in (b"early", b"away")}
        parked = parking.wait_for(2)
        parked[b"early"](b"in time")
        assert asked[b"early"].result() == b"in time"
        own_server.kill()
        assert "could not send a request" in str(asked[b"away"].result())
        if meanwhile:
            parked[b"away"](b"too late")
        own_server.start()
        with dialed_when_back(address) as anew:
            again = BackgroundRequest(anew, b"again")
            parking.wait_for(3)[b"again"](b"back")
            assert again.result() == b"back"


def dialed_when_back(address: str) -> contextlib.AbstractContextManager[RedisChannel]:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(TransportError):
            return contextlib.closing(
                RedisTransport().dial(
                    address,
                    connect_timeout_s=1.0,
                    reply_timeout_s=DEADLINE_S,
                    max_frame_bytes=MAX_BYTES,
                )
            )
        assert time.monotonic() < deadline


def test_a_request_that_is_too_long_is_refused_at_the_sender(server: RedisServer) -> None:
    with listening(f"{server.url}/a", replying_with(lambda raw, _: bytes(2000))):
        with (
            dialed(f"{server.url}/a") as channel,
            pytest.raises(TransportError, match=f"accepts at most {MAX_BYTES}"),
        ):
            channel.request(bytes(MAX_BYTES + 1))
        with (
            dialed(f"{server.url}/a", max_frame_bytes=1999) as channel,
            pytest.raises(TransportError, match="closed"),
        ):
            channel.request(b"?")


def test_a_name_can_be_reused_only_after_its_listener_is_closed(server: RedisServer) -> None:
    address = f"{server.url}/a"
    with listening(address):
        with (
            pytest.raises(TransportError, match="another node is already listening"),
            listening(address),
        ):
            pass
        with dialed(address) as channel:
            assert channel.request(b"still here") == b"still here"
    with listening(address), dialed(address) as channel:
        assert channel.request(b"again") == b"again"


def test_dialing_an_address_without_a_listener_fails_within_the_deadline(
    server: RedisServer,
) -> None:
    with (
        pytest.raises(TransportError, match="no connection within"),
        dialed(f"{server.url}/b", connect_timeout_s=0.3),
    ):
        pass


def test_only_expiring_keys_stay_in_redis(server: RedisServer) -> None:
    with listening(f"{server.url}/a"), dialed(f"{server.url}/a") as channel:
        channel.request(b"?")
        with server.client() as client:
            assert client.pttl("dmw:a:here") <= 2000
    with server.client() as client:
        assert all(0 < client.ttl(key) <= 60 for key in client.scan_iter())
        assert client.get("dmw:a:here") is None


def test_an_unreachable_redis_server_is_named_by_its_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"redis://127.0.0.1:{unused.getsockname()[1]}/0/a"
        with pytest.raises(TransportError, match=f"listen on {address}"), listening(address):
            pass
        with pytest.raises(TransportError, match=f"dial {address}"), dialed(address):
            pass


def test_a_wrong_or_missing_redis_password_raises(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="open-sesame") as server:
        address = f"{server.url}/a"
        with (
            listening(address, password="open-sesame"),
            dialed(address, password="open-sesame") as channel,
        ):
            assert channel.request(b"?") == b"?"
        for login in ({}, {"password": "wrong"}):
            with (
                pytest.raises(TransportError, match="DITASK_REDIS_PASSWORD"),
                listening(address, **login),
            ):
                pass


def test_a_listener_recovers_as_soon_as_redis_does(own_server: RedisServer) -> None:
    address = f"{own_server.url}/a"
    with listening(address), dialed(address) as channel:
        assert channel.request(b"?") == b"?"
        own_server.kill()
        with pytest.raises(TransportError, match="could not send a request"):
            channel.request(b"?")
        own_server.start()
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(TransportError), dialed(address) as anew:
                assert anew.request(b"back") == b"back"
                break
            assert time.monotonic() < deadline


class Ledger:
    """Records what a router delivers, by the sending node."""

    def __init__(self, router: Router, event: str) -> None:
        self.changed = threading.Condition()
        self.numbers: dict[int, list[int]] = {}
        self._event = event
        router.attach(self._deliver)
        router.subscribe(event, active=True)

    def _deliver(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == self._event:
            with self.changed:
                self.numbers.setdefault(args[0], []).append(args[1])
                self.changed.notify_all()

    def wait(self, enough: Callable[[dict[int, list[int]]], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: enough(self.numbers), 2 * DEADLINE_S), {
                node: len(numbers) for node, numbers in self.numbers.items()
            }


@contextlib.contextmanager
def star_of_three(url: str) -> Iterator[list[Router]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Router(
                    node_id=node_id,
                    listen="" if node_id else f"{url}/run/0",
                    dial=[f"{url}/run/0"] if node_id else [],
                    key=KEY,
                    transport=RedisTransport(),
                    expected_peers=1 if node_id else 2,
                )
            )
            for node_id in range(3)
        ]


def start_all(routers: list[Router]) -> None:
    """Wait until each router knows the subscriptions of the others."""
    threads = [threading.Thread(target=router.wait_until_ready) for router in routers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_three_nodes_exchange_events_in_order(server: RedisServer) -> None:
    with star_of_three(server.url) as (hub, *others):
        up, down = Ledger(hub, "up"), [Ledger(other, "down") for other in others]
        start_all([hub, *others])
        for number in range(200):
            hub.emit(Event("down"), (0, number), {})
            for other in others:
                other.emit(Event("up"), (other.node_id, number), {})
        up.wait(lambda numbers: sum(map(len, numbers.values())) == 400)
        for ledger in down:
            ledger.wait(lambda numbers: len(numbers.get(0, ())) == 200)
            assert ledger.numbers == {0: list(range(200))}
    assert up.numbers == {1: list(range(200)), 2: list(range(200))}


def test_a_redis_restart_loses_and_duplicates_nothing(own_server: RedisServer) -> None:
    count, ahead = 400, 50
    with star_of_three(own_server.url) as (hub, *others):
        up = Ledger(hub, "up")
        start_all([hub, *others])

        def emit(other: Router) -> None:
            for number in range(count):
                # A little ahead of the readers, so that some events are always pending.
                least = number - ahead
                up.wait(lambda taken, least=least: len(taken.get(other.node_id, ())) > least)  # type: ignore[misc]
                other.emit(Event("up", timeout_s=DEADLINE_S), (other.node_id, number), {})

        emitters = [threading.Thread(target=emit, args=(other,)) for other in others]
        for emitter in emitters:
            emitter.start()
        for enough in (count // 4, count // 2):
            up.wait(lambda taken, enough=enough: len(taken.get(1, ())) > enough)  # type: ignore[misc]
            own_server.kill()
            own_server.start()
        up.wait(lambda taken: sum(map(len, taken.values())) >= 2 * count)
        for emitter in emitters:
            emitter.join(DEADLINE_S)
            assert not emitter.is_alive()
    assert up.numbers == {1: list(range(count)), 2: list(range(count))}


def test_unsigned_frames_through_redis_are_refused(server: RedisServer) -> None:
    address = f"{server.url}/run/0"
    with (
        Router(listen=address, key=KEY, transport=RedisTransport(), expected_peers=1) as hub,
        server.client() as client,
    ):
        ledger = Ledger(hub, "up")
        inbox = _inbox(client, "run/0")
        for junk in (b"", b"short", bytes(200), b"\xff" * 5000):
            client.rpush(inbox, junk)
        with (
            Router(
                node_id=2,
                dial=[address],
                key=bytes(32),
                transport=RedisTransport(),
                start_timeout_s=0.5,
            ) as stranger,
            pytest.raises((PermissionError, ConnectionError), match="key"),
        ):
            stranger.wait_for_peers(1, timeout_s=DEADLINE_S)
        with Router(
            node_id=1, dial=[address], key=KEY, transport=RedisTransport(), expected_peers=1
        ) as friend:
            start_all([hub, friend])
            friend.emit(Event("up"), (1, 0), {})
            ledger.wait(lambda taken: taken == {1: [0]})
    assert ledger.numbers == {1: [0]}


def test_nodes_wait_for_a_redis_server_that_starts_late(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.kill()
        address = f"{server.url}/run/0"
        with Router(node_id=1, dial=[address], key=KEY, transport=RedisTransport()) as early:
            with pytest.raises(WaitTimeout):
                early.wait_for_peers(1, timeout_s=0.2)
            server.start()
            with Router(listen=address, key=KEY, transport=RedisTransport()):
                early.wait_for_peers(1, timeout_s=DEADLINE_S)


def _inbox(client: redis.Redis, name: str) -> str:
    number, _ = struct.unpack("<QQ", client.get(f"dmw:{name}:here"))
    return f"dmw:{name}:in:{number:x}"


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        threading.Event().wait(0.01)
