"""The memory transport: what every transport does, and a network that is disturbed on purpose."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import TransportError
from dmiddleware.pipeline import Event
from dmiddleware.router import Router
from dmiddleware.router.transport import Channel, Listener, RequestHandler, Transport
from dmiddleware.router.transport.memory import MemoryNetwork
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.testing import Simulation, SimulationError, Tape
from tests.dmiddleware.router.endpoints import unlimited
from tests.dmiddleware.router.request_handlers import Parking, echo, replying_with

ADDRESS = "memory://listener"
LIMIT = 10_000


@pytest.fixture(params=["memory", "nng"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Transport, Transport, str]:
    """Return the listener's transport, the dialer's, and an address."""
    if request.param == "nng":
        return NngTransport(), NngTransport(), f"ipc://{tmp_path}/l.sock"
    network = MemoryNetwork()
    return network.transport("listener"), network.transport("dialer"), ADDRESS


@contextlib.contextmanager
def joined(
    ends: tuple[Transport, Transport, str],
    serve: RequestHandler,
    gone: Callable[[int], Any] = lambda connection: None,
    *,
    reply_timeout_s: float = 10.0,
) -> Iterator[tuple[Listener, Channel]]:
    here, there, address = ends
    listener = here.listen(address, serve, on_disconnect=gone, limits=unlimited(LIMIT))
    with contextlib.closing(listener):
        channel = there.dial(
            address, connect_timeout_s=5.0, reply_timeout_s=reply_timeout_s, max_frame_bytes=LIMIT
        )
        with contextlib.closing(channel):
            yield listener, channel


def test_a_request_gets_its_own_reply(ends: tuple[Transport, Transport, str]) -> None:
    with joined(ends, replying_with(lambda raw, connection: bytes(raw) * 2)) as (_, channel):
        for text in (b"one", b"two", b"x" * 4000):
            assert bytes(channel.request(text)) == text * 2


def test_requests_are_served_concurrently(ends: tuple[Transport, Transport, str]) -> None:
    replies, parking = Tape(), Parking()
    with joined(ends, parking) as (_, channel):
        threads = [
            threading.Thread(target=lambda n=n: replies(bytes(channel.request(b"%d" % n))))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for content, reply in parking.wait_for(3).items():
            reply(content)
        for thread in threads:
            thread.join(20.0)
    assert sorted(replies) == [b"0", b"1", b"2"]


def test_replying_none_closes_the_connection_and_reports_the_disconnect(
    ends: tuple[Transport, Transport, str],
) -> None:
    gone = Tape()
    with joined(ends, replying_with(lambda raw, connection: None), gone, reply_timeout_s=1.0) as (
        _,
        channel,
    ):
        with pytest.raises(TransportError):
            channel.request(b"hello")
        gone.wait_for(1)


def test_a_request_that_is_too_long_is_refused_unread(
    ends: tuple[Transport, Transport, str],
) -> None:
    served = Tape()

    @replying_with
    def serve(raw: memoryview, connection: int) -> bytes:
        served(len(raw))
        return b"ok"

    with (
        joined(ends, serve, reply_timeout_s=0.5) as (_, channel),
        pytest.raises(TransportError),
    ):
        channel.request(bytes(LIMIT + 1))
    assert served == []


def test_a_missing_reply_fails_the_request_at_the_deadline(
    ends: tuple[Transport, Transport, str],
) -> None:
    with (
        joined(ends, Parking(), reply_timeout_s=0.1) as (_, channel),
        pytest.raises(TransportError),
    ):
        channel.request(b"hello")


def test_dialing_an_address_without_a_listener_raises(
    ends: tuple[Transport, Transport, str],
) -> None:
    _, there, address = ends
    with pytest.raises(
        TransportError, match=r"no connection within 0\.05 s|no listener|could not dial"
    ):
        there.dial(address, connect_timeout_s=0.05, reply_timeout_s=1.0, max_frame_bytes=LIMIT)


def test_an_address_has_at_most_one_listener(ends: tuple[Transport, Transport, str]) -> None:
    _, there, address = ends
    with joined(ends, echo), pytest.raises(TransportError, match=r"already|in use"):
        there.listen(address, echo, on_disconnect=lambda c: None, limits=unlimited(1))


def test_closing_the_channel_fails_pending_requests(
    ends: tuple[Transport, Transport, str],
) -> None:
    parking, failed = Parking(), Tape()
    with joined(ends, parking) as (_, channel):

        def make_requests() -> None:
            try:
                channel.request(b"hello")
            except TransportError:
                failed("failed")

        thread = threading.Thread(target=make_requests)
        thread.start()
        parking.wait_for(1)
        channel.close()
        thread.join(20.0)
        assert failed == ["failed"]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with Simulation(seed=3) as made:
        yield made


def test_packets_are_delayed_in_each_direction(simulation: Simulation) -> None:
    delays = {("dialer", "listener"): 0.25, ("listener", "dialer"): 0.5}
    network = MemoryNetwork(clock=simulation, delay_s=lambda *link: delays[link])
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    with joined(ends, echo) as (_, channel):
        channel.request(b"hello")
        assert simulation.now() == 0.75


def test_requests_overtake_each_other(simulation: Simulation) -> None:
    delays, served = iter([3.0, 1.0, 2.0, 0.0, 0.0, 0.0]), Tape()
    network = MemoryNetwork(clock=simulation, delay_s=lambda source, target: next(delays))
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS

    @replying_with
    def serve(raw: memoryview, connection: int) -> bytes:
        served(bytes(raw), simulation.now())
        return b""

    with joined(ends, serve) as (_, channel):
        began = Tape()

        def make_requests() -> None:
            number = len(began)
            began(number)
            channel.request(b"%d" % number)

        for _ in range(3):
            simulation.spawn(make_requests, name="asks")
        simulation.run_for(5.0)
    assert served == [(b"1", 1.0), (b"2", 2.0), (b"0", 3.0)]


def test_a_request_over_a_cut_link_arrives_when_it_is_healed(simulation: Simulation) -> None:
    network, replies = MemoryNetwork(clock=simulation), Tape()
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    with joined(ends, echo) as (_, channel):
        network.cut("dialer", "listener")
        thread = simulation.spawn(
            lambda: replies(bytes(channel.request(b"hello")), simulation.now()), name="asks"
        )
        simulation.run_for(4.0)
        assert replies == []
        network.heal("dialer", "listener")
        assert thread.join(1.0)
    assert replies == [(b"hello", 4.0)]


def test_a_request_over_a_link_that_stays_cut_is_lost_at_its_deadline(
    simulation: Simulation,
) -> None:
    network, gone, served = MemoryNetwork(clock=simulation), Tape(), Tape()
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS

    @replying_with
    def serve(raw: memoryview, connection: int) -> bytes:
        served(bytes(raw))
        return b""

    with joined(ends, serve, gone) as (_, channel):
        network.cut("dialer", "listener")
        with pytest.raises(TransportError, match=r"no reply from .* within 10 s"):
            channel.request(b"hello")
        assert simulation.now() == 10.0
        with pytest.raises(TransportError, match="no connection within 1 s"):
            ends[1].dial(ADDRESS, connect_timeout_s=1.0, reply_timeout_s=1.0, max_frame_bytes=LIMIT)
        channel.close()
        assert served == gone == []


def test_a_request_on_its_way_is_lost_with_its_connection(simulation: Simulation) -> None:
    network = MemoryNetwork(clock=simulation, delay_s=lambda *link: 1.0)
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    parking, outcomes = Parking(), Tape()
    with joined(ends, parking) as (_, channel):
        channel.send(b"there", outcomes, timeout_s=None)
        simulation.run_for(1.5)
        channel.send(b"on its way", outcomes, timeout_s=None)
        channel.close()
        simulation.run_for(5.0)
        assert list(parking.wait_for(1)) == [b"there"]
    assert len(outcomes) == 2


def test_packets_that_arrived_before_the_cut_are_not_lost(simulation: Simulation) -> None:
    network, served, outcomes = MemoryNetwork(clock=simulation), Tape(), Tape()
    transports = [network.transport(name) for name in ("listener", "dialer")]

    @replying_with
    def serve(raw: memoryview, connection: int) -> bytes:
        served(bytes(raw), simulation.now())
        return bytes(raw)

    listening: list[Listener] = []
    simulation.spawn(
        lambda: listening.append(
            transports[0].listen(
                ADDRESS, serve, on_disconnect=lambda _: None, limits=unlimited(LIMIT)
            )
        ),
        name="listens",
        group="listener",
    )
    channel = transports[1].dial(
        ADDRESS, connect_timeout_s=1.0, reply_timeout_s=5.0, max_frame_bytes=LIMIT
    )
    simulation.run_for(1.0)
    simulation.freeze("listener")
    channel.send(b"early", lambda outcome: outcomes(str(outcome), simulation.now()), timeout_s=5.0)
    simulation.run_for(1.0)
    network.cut("listener", "dialer")
    channel.send(b"late", lambda outcome: outcomes(str(outcome), simulation.now()), timeout_s=5.0)
    simulation.run_for(10.0)
    simulation.thaw("listener")
    simulation.run_for(1.0)
    network.heal("listener", "dialer")
    simulation.run_for(1.0)
    assert served == [(b"early", 12.0)]
    assert outcomes == [
        (f"no reply from {ADDRESS} within 5 s", 6.0),
        (f"no reply from {ADDRESS} within 5 s", 7.0),
    ]
    channel.close()
    listening[0].close()


def test_a_sent_request_gets_its_reply(simulation: Simulation) -> None:
    delays, outcomes = iter([3.0, 1.0, 2.0, 0.5, 0.5, 0.5]), Tape()
    network = MemoryNetwork(clock=simulation, delay_s=lambda source, target: next(delays))
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    with joined(ends, echo) as (_, channel):
        for number in range(3):
            channel.send(
                b"%d" % number,
                lambda outcome: outcomes(bytes(outcome), simulation.now()),
                timeout_s=None,
            )
        assert simulation.now() == 0.0
        simulation.run_for(5.0)
    assert outcomes == [(b"1", 1.5), (b"2", 2.5), (b"0", 3.5)]


def test_a_sent_request_fails_at_its_deadline(simulation: Simulation) -> None:
    network, outcomes, parking = MemoryNetwork(clock=simulation), Tape(), Parking()
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    with joined(ends, parking) as (_, channel):
        channel.send(
            b"one", lambda outcome: outcomes(str(outcome), simulation.now()), timeout_s=2.0
        )
        simulation.run_for(1.0)
        channel.send(
            b"other", lambda outcome: outcomes(bytes(outcome), simulation.now()), timeout_s=2.0
        )
        simulation.run_for(1.5)
        parking.wait_for(2)[b"one"](b"too late")
        parking.wait_for(2)[b"other"](b"in time")
        simulation.run_for(5.0)
    assert outcomes == [(f"no reply from {ADDRESS} within 2 s", 2.0), (b"in time", 2.5)]


def test_a_reply_over_a_cut_link_arrives_when_it_is_healed(simulation: Simulation) -> None:
    network, outcomes, parking = MemoryNetwork(clock=simulation), Tape(), Parking()
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    with joined(ends, parking) as (_, channel):
        channel.send(
            b"?", lambda outcome: outcomes(bytes(outcome), simulation.now()), timeout_s=None
        )
        simulation.run_for(1.0)
        network.cut("listener", "dialer")
        parking.wait_for(1)[b"?"](b"!")
        simulation.run_for(4.0)
        assert outcomes == []
        network.heal("listener", "dialer")
        simulation.run_for(1.0)
    assert outcomes == [(b"!", 5.0)]


def test_a_request_whose_handler_raises_fails_the_simulation() -> None:
    with pytest.raises(SimulationError, match="a defect"), Simulation(seed=3) as simulation:
        network = MemoryNetwork(clock=simulation)
        ends = network.transport("listener"), network.transport("dialer"), ADDRESS

        def serve(*_: object) -> None:
            raise KeyError("a defect")

        with joined(ends, serve) as (_, channel):
            channel.request(b"?")


def test_both_ends_notice_a_broken_connection(simulation: Simulation) -> None:
    network, gone = MemoryNetwork(clock=simulation), Tape()
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    with joined(ends, echo, gone) as (_, channel):
        network.disconnect("listener", "dialer")
        with pytest.raises(TransportError, match="closed or broke"):
            channel.request(b"hello")
        assert gone == [1]
        again = ends[1].dial(
            ADDRESS, connect_timeout_s=1.0, reply_timeout_s=1.0, max_frame_bytes=LIMIT
        )
        assert bytes(again.request(b"hello")) == b"hello"
        again.close()


def test_removing_a_host_breaks_its_connections(simulation: Simulation) -> None:
    network = MemoryNetwork(clock=simulation)
    ends = network.transport("listener"), network.transport("dialer"), ADDRESS
    with joined(ends, echo) as (_, channel):
        network.remove("listener")
        with pytest.raises(TransportError, match="closed or broke"):
            channel.request(b"hello")
        with pytest.raises(TransportError, match="no connection"):
            ends[1].dial(ADDRESS, connect_timeout_s=1.0, reply_timeout_s=1.0, max_frame_bytes=LIMIT)


def test_routers_of_one_process_connect_in_memory() -> None:
    network, got = MemoryNetwork(), Tape()
    here, there = network.transport("here"), network.transport("there")
    with (
        Router(node_id=0, listen=ADDRESS, transport=here, key=bytes(32)) as learner,
        Router(node_id=1, dial=[ADDRESS], transport=there, key=bytes(32)) as collector,
    ):
        learner.attach(lambda name, args, kwargs: got(*args) if name == "e" else None)
        learner.subscribe("e", active=True)
        collector.wait_for_peers(1, timeout_s=20.0, events=["e"])
        for number in range(500):
            collector.emit(Event("e"), (number,), {})
        got.wait_for(500)
    assert got == list(range(500))


def test_a_router_reconnects_when_the_link_is_healed(simulation: Simulation) -> None:
    network, news = MemoryNetwork(clock=simulation), Tape()
    settings: dict[str, Any] = {"key": bytes(32), "clock": simulation}

    def events() -> list[int]:
        return [mark[1] for mark in news if mark[0] == "e"]

    with (
        Router(node_id=0, listen=ADDRESS, transport=network.transport("0"), **settings) as learner,
        Router(node_id=1, dial=[ADDRESS], transport=network.transport("1"), **settings) as other,
    ):
        learner.attach(lambda name, args, kwargs: news(name, *args, simulation.now()))
        learner.subscribe("e", active=True)
        other.wait_for_peers(1, timeout_s=5.0, events=["e"])
        network.cut("0", "1")
        for number in range(20):
            other.emit(Event("e"), (number,), {})
        simulation.run_for(40.0)
        network.heal("0", "1")
        healed_at = simulation.now()
        assert simulation.wait_until(lambda: len(events()) >= 20, 3.0)
    assert events() == list(range(20))
    (_, _, joined_at), (_, _, left_at), (_, _, back_at) = [
        mark for mark in news if mark[0] in ("node.joined", "node.left")
    ][:3]
    assert joined_at < left_at <= 4.0
    assert healed_at <= back_at <= healed_at + 3.0
