"""What the router relies on, of each transport that there is."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import TransportError
from dmiddleware.router.transport import Channel, Listener, Transport
from dmiddleware.router.transport.memory import MemoryNetwork
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.transport.redis import RedisTransport
from dmiddleware.router.transport.shared_memory import SharedMemoryTransport
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.redis_server import RedisServer

KINDS = ("memory", "ipc", "tcp", "tls", "redis", "shared memory")
MAX_BYTES = 1 << 20
DEADLINE_S = 20.0


@dataclass
class Place:
    """Where to listen, and what with; what with to dial."""

    address: str
    listens: Transport
    dials: Transport

    def listen(
        self,
        serve: Callable[[memoryview, int], bytes | None],
        on_gone: Callable[[int], None] = lambda _: None,
        address: str = "",
    ) -> contextlib.closing[Listener]:
        return contextlib.closing(
            self.listens.listen(
                address or self.address, serve, on_gone=on_gone, max_frame_bytes=MAX_BYTES
            )
        )

    def dial(self, listener: Listener, **options: float) -> contextlib.closing[Channel]:
        times: dict[str, Any] = {"connect_s": 2.0, "answer_s": 5.0} | options
        return contextlib.closing(
            self.dials.dial(listener.address, max_frame_bytes=MAX_BYTES, **times)
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


names = itertools.count()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = request.param
    if kind == "memory":
        network = MemoryNetwork()
        return Place("memory://a", network.transport("one"), network.transport("other"))
    if kind == "tls":
        ours: Authority = request.getfixturevalue("authority")
        one, other = (NngTransport(tls=ours.files(name)) for name in ("one", "other"))
        return Place("tls+tcp://127.0.0.1:0", one, other)
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return Place(f"{server.url}/{next(names)}", RedisTransport(), RedisTransport())
    if kind == "tcp":
        return Place("tcp://127.0.0.1:0", NngTransport(), NngTransport())
    if kind == "ipc":
        return Place(f"ipc://{tmp_path}/0.sock", NngTransport(), NngTransport())
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    sharing = [
        SharedMemoryTransport(NngTransport(), directory=folder, least_bytes=1) for _ in range(2)
    ]
    return Place(f"ipc://{tmp_path}/0.sock", *sharing)


def echo(raw: memoryview, connection: int) -> bytes:
    return bytes(raw)


class Asking:
    """Makes a request in a thread of its own."""

    def __init__(self, channel: Channel, content: bytes) -> None:
        self._result: bytes | TransportError | None = None
        self._thread = threading.Thread(target=self._ask, args=(channel, content))
        self._thread.start()

    def _ask(self, channel: Channel, content: bytes) -> None:
        try:
            self._result = bytes(channel.request(content))
        except TransportError as error:
            self._result = error

    def result(self) -> bytes | TransportError | None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self._result


@pytest.mark.parametrize("size", [0, 1, 1000, 70_000, MAX_BYTES - 100])
def test_a_request_is_answered(place: Place, size: int) -> None:
    content = bytes(number % 251 for number in range(size))
    with place.listen(echo) as listener, place.dial(listener) as channel:
        for _ in range(2):
            assert channel.request(content) == content
            assert channel.request(bytearray(content)) == content


def test_as_many_are_served_at_a_time_as_was_asked_for(place: Place) -> None:
    together = threading.Barrier(9)

    def serve(raw: memoryview, _: int) -> bytes:
        together.wait(DEADLINE_S)
        return bytes(raw)

    with place.listen(serve) as listener, place.dial(listener) as channel:
        listener.grow(9)
        asking = [Asking(channel, b"%d" % number) for number in range(9)]
        assert [one.result() for one in asking] == [b"%d" % number for number in range(9)]


def test_each_request_gets_its_own_answer(place: Place) -> None:
    wrong: list[bytes] = []

    def ask(channel: Channel, asker: int) -> None:
        for number in range(50):
            content = b"%d %d" % (asker, number)
            answer = bytes(channel.request(content))
            if answer != content:
                wrong.append(answer)

    with (
        place.listen(echo) as listener,
        place.dial(listener) as one,
        place.dial(listener) as other,
    ):
        askers = [
            threading.Thread(target=ask, args=(channel, asker))
            for asker, channel in enumerate([one, other] * 3)
        ]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join(DEADLINE_S)
            assert not asker.is_alive()
    assert wrong == []


def test_no_answer_closes_the_connection_and_no_other_one(place: Place) -> None:
    def serve(raw: memoryview, _: int) -> bytes | None:
        return None if bytes(raw) == b"bad" else bytes(raw)

    with (
        place.listen(serve) as listener,
        place.dial(listener) as good,
        place.dial(listener) as bad,
    ):
        with pytest.raises(TransportError):
            bad.request(b"bad")
        assert good.request(b"good") == b"good"


def test_a_late_answer_is_not_taken_for_the_next_one(place: Place) -> None:
    release = threading.Event()

    def serve(raw: memoryview, _: int) -> bytes:
        if bytes(raw) == b"slow":
            release.wait(DEADLINE_S)
        return bytes(raw)

    with place.listen(serve) as listener, place.dial(listener, answer_s=0.3) as channel:
        with pytest.raises(TransportError):
            channel.request(b"slow")
        release.set()
        for number in range(5):
            assert channel.request(b"%d" % number) == b"%d" % number


def test_closing_a_channel_fails_what_is_under_way_at_once(place: Place) -> None:
    served, release = threading.Event(), threading.Event()

    def serve(raw: memoryview, _: int) -> bytes:
        served.set()
        release.wait(DEADLINE_S)
        return b""

    with place.listen(serve) as listener, place.dial(listener, answer_s=15.0) as channel:
        asking = Asking(channel, b"?")
        assert served.wait(DEADLINE_S)
        began = time.monotonic()
        channel.close()
        channel.close()
        assert isinstance(asking.result(), TransportError)
        assert time.monotonic() - began < 5.0
        with pytest.raises(TransportError, match="closed"):
            channel.request(b"?")
        release.set()


def test_what_is_too_long_is_not_served_and_harms_no_other(place: Place) -> None:
    lengths: list[int] = []

    def serve(raw: memoryview, _: int) -> bytes:
        lengths.append(len(raw))
        return b"ok"

    with (
        place.listen(serve) as listener,
        place.dial(listener) as good,
        place.dial(listener, answer_s=1.0) as bad,
    ):
        with pytest.raises(TransportError):
            bad.request(bytes(MAX_BYTES + 1000))
        bad.close()
        assert good.request(b"1234") == b"ok"
    assert lengths == [4]


def test_connections_have_numbers_and_it_is_told_which_are_gone(place: Place) -> None:
    numbers: list[int] = []
    gone: list[int] = []

    def serve(raw: memoryview, connection: int) -> bytes:
        numbers.append(connection)
        return b""

    with place.listen(serve, gone.append) as listener, place.dial(listener) as stays:
        stays.request(b"?")
        with place.dial(listener) as goes:
            goes.request(b"?")
            goes.request(b"?")
        deadline = time.monotonic() + DEADLINE_S
        while not gone and time.monotonic() < deadline:
            time.sleep(0.01)
        stays.request(b"?")
        stays_number, goes_number = numbers[0], numbers[1]
        assert stays_number != goes_number
        assert numbers == [stays_number, goes_number, goes_number, stays_number]
        assert gone == [goes_number]


def test_an_address_is_given_once_and_is_free_after_its_listener(place: Place) -> None:
    with place.listen(echo) as listener:
        address = listener.address
        with (
            pytest.raises(TransportError, match="listen"),
            place.listen(echo, address=address),
        ):
            pass
    with place.listen(echo, address=address) as listener, place.dial(listener) as channel:
        assert channel.request(b"again") == b"again"


def test_nobody_there_is_told_in_time(place: Place) -> None:
    with place.listen(echo) as listener:
        pass
    began = time.monotonic()
    with pytest.raises(TransportError, match="dial"), place.dial(listener, connect_s=0.3):
        pass
    assert time.monotonic() - began < 2.0


def test_closing_leaves_no_thread(place: Place) -> None:
    before = set(threading.enumerate())
    with place.listen(echo) as listener, place.dial(listener) as channel:
        channel.request(b"?")
        listener.grow(7)
    listener.close()
    channel.close()
    assert set(threading.enumerate()) <= before
