"""The router over real sockets: events between the nodes of one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmiddleware.errors import (
    ConfigError,
    DeliveryTimeout,
    HandshakeRefused,
    NoSubscriber,
    RouterError,
    RouterStateError,
    TopologyError,
    TransportError,
    WaitTimeout,
)
from dmiddleware.pipeline import Event, SystemClock
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.wire.stream_frames import FrameWriter
from tests.accepting import accepting
from tests.dmiddleware.router.endpoints import RouterEndpoints
from tests.dmiddleware.router.process_resources import is_hung_up_on, n_descriptors
from tests.dmiddleware.router.stream_ends import start_nng
from tests.router_state import break_connection, locked_node, n_refused
from tests.waiting import wait_until

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
DEADLINE_S = 20.0


class Received:
    """Records what a router delivers, and waits for it."""

    def __init__(self, router: Router, *events: str) -> None:
        self.changed = threading.Condition()
        self.events: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.hold = self.holding = False
        for event in events:
            router.subscribe(event, active=True)
        router.attach(accepting(self.deliver, waits=True))

    def deliver(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.changed:
            self.holding = self.hold
            assert self.changed.wait_for(lambda: not self.hold, DEADLINE_S)
            self.events.append((name, args, kwargs))
            self.changed.notify_all()

    def release(self) -> None:
        with self.changed:
            self.hold = False
            self.changed.notify_all()

    def of(self, event: str, count: int) -> list[tuple[Any, ...]]:
        """Wait for ``count`` emissions of an event; return their arguments."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.count(event) >= count, DEADLINE_S), (
                f"{self.count(event)} of {count} came"
            )
            return [args for name, args, _ in self.events if name == event]

    def count(self, event: str) -> int:
        return sum(name == event for name, _, _ in self.events)


@pytest.fixture(params=["ipc", "tcp"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/0.sock" if request.param == "ipc" else "tcp://127.0.0.1:0"


@contextlib.contextmanager
def two(listen: str, **options: Any) -> Iterator[tuple[Router, Router]]:
    settings = NodeOptions(**options)
    with (
        Router(node_id=0, listen=listen, roles=["learner"], key=KEY, options=settings) as learner,
        Router(
            node_id=1, dial=[learner.address], roles=["collector"], key=KEY, options=settings
        ) as collector,
    ):
        yield learner, collector


def test_events_reach_subscribers_whole_and_in_order(listen: str) -> None:
    with two(listen) as (learner, collector):
        got = Received(learner, "trajectories")
        Received(collector, "weights")
        collector.wait_for_peers(1, timeout_s=DEADLINE_S, events=["trajectories"])
        event = Event("trajectories")
        for number in range(300):
            collector.emit(event, (number, np.full(100, number)), {"tag": "x"})
        collector.emit(Event("unwanted"), (1,), {})
        args = got.of("trajectories", 300)
        assert [one[0] for one in args] == list(range(300))
        assert all((one[1] == one[0]).all() for one in args)
        assert got.count("unwanted") == 0
        assert collector.traffic()["trajectories"].sent == 300
        assert collector.traffic()["unwanted"].unsubscribed == 1
        assert collector.counters()["event/unwanted/unsubscribed"] == 1.0


def test_a_listener_sends_to_its_dialers_too(listen: str) -> None:
    with two(listen) as (learner, collector):
        got = Received(collector, "weights")
        Received(learner)
        learner.wait_for_peers(1, timeout_s=DEADLINE_S, events=["weights"])
        learner.emit(Event("weights"), (1,), {})
        assert got.of("weights", 1) == [(1,)]


def test_a_late_subscriber_gets_the_latest_event(listen: str) -> None:
    model = Event("model", delivery="latest")
    with two(listen) as (learner, collector):
        Received(learner)
        for version in range(5):
            learner.emit(model, (version,), {})
        assert "model" not in learner.traffic()
        got = Received(collector, "model")
        assert got.of("model", 1) == [(4,)]
        assert learner.traffic()["model"].sent == collector.traffic()["model"].received == 1
        learner.emit(model, (5,), {})
        assert got.of("model", 2)[-1] == (5,)
        sent, received = learner.traffic()["model"], collector.traffic()["model"]
        assert sent.sent == received.received == 2
        assert sent.sent_bytes == received.received_bytes > 0


@pytest.mark.parametrize("delivery", ["reliable", "latest", "lossy"])
def test_an_event_may_be_for_named_peers_only(tmp_path: Path, delivery: Any) -> None:
    event, end = Event("e", delivery=delivery), Event("end")
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock"))
        Received(learner)
        collectors = [
            stack.enter_context(Router(node_id=number, dial=[learner.address]))
            for number in (1, 2, 3)
        ]
        got = [Received(one, "e", "end") for one in collectors[:2]]
        Received(collectors[2], "end")
        learner.wait_for_peers(3, timeout_s=DEADLINE_S, events=["end"])
        learner.emit(event, (12,), {}, to=[1, 2])
        for one in got:
            assert one.of("e", 1) == [(12,)]
        learner.emit(event, (1,), {}, to={1, 3, 0, 99})
        assert got[0].of("e", 2) == [(12,), (1,)]
        learner.emit(end, (), {})
        for one in got:
            one.of("end", 1)
        assert got[1].count("e") == 1
        assert learner.traffic()["e"].sent == 3
        assert learner.traffic()["e"].unsubscribed == 3
        late = Received(collectors[2], "e")
        learner.emit(end, (), {})
        late.of("end", 1)
        assert late.count("e") == 0


def test_a_required_event_that_no_peer_subscribes_to_is_an_error(listen: str) -> None:
    event = Event("e", required=True)
    with two(listen) as (learner, collector):
        got = Received(learner, "e")
        Received(collector)
        collector.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        collector.emit(event, (0,), {})
        with pytest.raises(NoSubscriber, match="not node 7"):
            collector.emit(event, (1,), {}, to=[0, 7])
        with pytest.raises(NoSubscriber, match="no peer"):
            collector.emit(Event("f", required=True), (2,), {})
        collector.emit(event, (3,), {}, to=[0])
        assert got.of("e", 2) == [(0,), (3,)]


def test_nodes_that_start_before_their_peer_connect(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/late.sock"
    with Router(node_id=1, dial=[address]) as early:
        got = Received(early, "hello")
        with Router(node_id=0, listen=address) as late:
            late.wait_for_peers(1, timeout_s=DEADLINE_S, events=["hello"])
            late.emit(Event("hello"), (), {})
            got.of("hello", 1)


def test_a_router_behind_nat_reports_the_address_that_peers_dial() -> None:
    advertised = "tcp://203.0.113.5:5000"
    with Router(listen="tcp://127.0.0.1:0", advertise=advertised, key=KEY) as router:
        assert router.address == advertised


def test_an_advertised_address_that_other_hosts_can_reach_needs_a_key() -> None:
    with pytest.raises(TopologyError, match="key"):
        Router(listen="tcp://127.0.0.1:5000", advertise="tcp://203.0.113.5:5000")


def test_a_peer_that_closes_leaves_with_a_goodbye(listen: str) -> None:
    with Router(node_id=0, listen=listen, key=KEY) as learner:
        got = Received(learner)
        with Router(node_id=1, dial=[learner.address], key=KEY):
            assert got.of("node.joined", 1) == [(1,)]
        got.of("node.left", 1)
        assert got.events[-1][2] == {"reason": "said goodbye"}


def test_a_router_that_ends_with_an_error_leaves_its_events_to_its_successor(listen: str) -> None:
    with Router(node_id=0, listen=listen, key=KEY) as learner:
        got = Received(learner)
        with pytest.raises(KeyError), Router(node_id=1, dial=[learner.address], key=KEY) as failing:
            Received(failing, "e")
            learner.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
            raise KeyError
        got.of("node.left", 1)
        assert got.events[-1][2] == {"reason": "the connection broke"}
        for number in range(3):
            learner.emit(Event("e", required=True), (number,), {})
        with Router(node_id=1, dial=[learner.address], key=KEY) as successor:
            wait_until(lambda: bool(successor.peer_ids()), "the successor to join")
            later = Received(successor, "e")
            assert later.of("e", 3) == [(0,), (1,), (2,)]


def test_a_suspended_router_accepts_nothing_and_closes_without_a_goodbye(listen: str) -> None:
    with Router(node_id=0, listen=listen, key=KEY) as learner:
        got = Received(learner)
        with Router(node_id=1, dial=[learner.address], key=KEY) as failing:
            first = Received(failing, "e")
            learner.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
            learner.emit(Event("e"), (0,), {})
            first.of("e", 1)
            failing.suspend()
            failing.subscribe("e", active=False)
            learner.emit(Event("e"), (1,), {})
            wait_until(
                lambda: learner.peer_traffic()[1].waiting == 1, "an event that waits for its peer"
            )
            again = Received(failing, "e")
            assert again.of("e", 1) == [(1,)]
            failing.suspend()
        got.of("node.left", 1)
        assert got.events[-1][2] == {"reason": "the connection broke"}
        learner.emit(Event("e"), (2,), {})
        wait_until(
            lambda: learner.peer_traffic()[1].waiting == 1, "an event that waits for its peer"
        )
        assert first.count("e") == again.count("e") == 1


def test_what_a_goodbye_drops_is_counted_and_reported(listen: str) -> None:
    learner = Router(node_id=0, listen=listen, key=KEY)
    with learner:
        got = Received(learner)
        leaving = Router(
            node_id=1, dial=[learner.address], key=KEY, options=NodeOptions(inbox_bytes=1)
        )
        with leaving:
            hanging = Received(leaving, "e")
            learner.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
            hanging.of("node.joined", 1)
            hanging.hold = True
            learner.emit(Event("e"), (0, bytes(1000)), {})
            wait_until(lambda: hanging.holding, "the reader to hold an event")
            for number in range(1, 600):
                learner.emit(Event("e"), (number, bytes(1000)), {})
            # The handler holds one event, and the inbox has room for one behind it.
            waiting = 598
            wait_until(
                lambda: learner.peer_traffic()[1].waiting == waiting, f"{waiting} events that wait"
            )
            with locked_node(leaving) as node:
                node.accepting = False
            hanging.release()
            leaving.close()
        got.of("node.left", 1)
        assert str(waiting) in got.events[-1][2]["reason"]
        assert learner.traffic()["e"].undelivered == waiting > 0
        learner.emit(Event("e"), (600,), {})
        assert learner.traffic()["e"].unsubscribed == 1
        assert learner.close() == {1: waiting}


def test_events_wait_until_the_program_has_had_time_to_subscribe(listen: str) -> None:
    with Router(node_id=0, listen=listen, key=KEY) as learner:
        Received(learner)
        with (
            contextlib.suppress(KeyError),
            Router(node_id=1, dial=[learner.address], key=KEY) as failing,
        ):
            Received(failing, "e", "f")
            learner.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e", "f"])
            raise KeyError
        for name in ("e", "f"):
            learner.emit(Event(name), (name,), {})
        with Router(node_id=1, dial=[learner.address], key=KEY, start_timeout_s=1.0) as successor:
            got = Received(successor, "f")
            # Nothing subscribes to "e", so "f" waits behind it until the start timeout.
            assert got.of("f", 1) == [("f",)]


HANDLED = Event("e", acknowledged="handled", timeout_s=0.3)


@pytest.mark.parametrize("listener_sends", [False, True])
def test_an_event_may_be_acknowledged_only_when_it_was_handled(
    listen: str, listener_sends: bool
) -> None:
    with two(listen) as pair:
        sender, receiver = pair if listener_sends else reversed(pair)
        got = Received(receiver, "e")
        Received(sender)
        sender.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        got.of("node.joined", 1)
        got.hold = True
        for number in range(100):
            sender.emit(HANDLED, (number,), {})
        peer = receiver.node_id
        wait_until(lambda: "e" in receiver.traffic(), "an event to arrive")
        assert sender.peer_traffic()[peer].waiting >= 100
        got.release()
        assert [one[0] for one in got.of("e", 100)] == list(range(100))
        wait_until(lambda: sender.peer_traffic()[peer].waiting == 0, "acknowledgments")


def test_events_that_were_not_handled_go_to_the_next_program(listen: str) -> None:
    with two(listen) as (receiver, sender):
        confirmed: queue.SimpleQueue[tuple[int, Callable[[bool], None]]] = queue.SimpleQueue()

        def accept(
            name: str, args: tuple[Any, ...], kwargs: dict[str, Any], done: Any, may_wait: bool
        ) -> bool:
            if name == "e":
                confirmed.put((args[0], done))
            return True

        receiver.attach(accept)
        receiver.subscribe("e", active=True)
        sender.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        for number in range(3):
            sender.emit(HANDLED, (number,), {})
        for handled in (True, False, False):
            _, done = confirmed.get(timeout=DEADLINE_S)
            done(handled)
        wait_until(lambda: sender.peer_traffic()[0].waiting == 2, "both events to wait")
        assert Received(receiver).of("e", 2) == [(1,), (2,)]
        wait_until(lambda: sender.peer_traffic()[0].waiting == 0, "acknowledgments")


def test_a_handler_that_raises_counts_as_handled(listen: str) -> None:
    def fail(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise KeyError("what is this?")

    with two(listen) as (receiver, sender):
        receiver.attach(accepting(fail, waits=True))
        receiver.subscribe("e", active=True)
        sender.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        sender.emit(HANDLED, (1,), {})
        wait_until(lambda: sender.peer_traffic()[0].waiting == 0, "acknowledgments")
        assert sender.close() == {}


def test_a_timeout_names_the_peers_that_have_the_event(tmp_path: Path) -> None:
    options = NodeOptions(outbox_bytes=20_000, inbox_bytes=20_000, batch_bytes=5_000)
    with (
        Router(node_id=0, listen=f"ipc://{tmp_path}/0.sock", options=options) as sender,
        Router(node_id=1, dial=[sender.address], options=options) as slow,
        Router(node_id=2, dial=[sender.address], options=options) as fast,
    ):
        hanging, got = Received(slow, "e"), Received(fast, "e")
        Received(sender)
        sender.wait_for_peers(2, timeout_s=DEADLINE_S, events=["e"])
        hanging.hold = True
        with pytest.raises(DeliveryTimeout, match="the nodes that receive it: 2") as caught:
            for number in range(1000):
                sender.emit(Event("e", timeout_s=0.3), (number, bytes(1000)), {})
        hanging.release()
        assert (caught.value.accepted, caught.value.refused) == ((2,), (1,))
        assert got.of("e", number + 1)[-1][0] == number
        sender.emit(Event("e"), (number, b""), {}, to=caught.value.refused)
        assert hanging.of("e", number + 1)[-1][0] == number


def test_closing_delivers_what_was_accepted(listen: str) -> None:
    with Router(node_id=0, listen=listen, key=KEY) as learner:
        got = Received(learner, "e")
        collector = Router(node_id=1, dial=[learner.address], key=KEY)
        collector.start()
        collector.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        for number in range(500):
            collector.emit(Event("e"), (number,), {})
        assert collector.close(deadline_s=DEADLINE_S) == {}
        assert [one[0] for one in got.of("e", 500)] == list(range(500))


def test_a_slow_reader_makes_the_emitter_wait_and_its_deadline_names_the_peer(listen: str) -> None:
    with two(listen, outbox_bytes=20_000, inbox_bytes=20_000, batch_bytes=5_000) as (a, b):
        got = Received(a, "e")
        Received(b)
        b.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        got.hold = True
        event = Event("e", timeout_s=0.3)
        accepted = 0
        with pytest.raises(DeliveryTimeout, match=r"node 0 .connected"):
            for accepted in range(1000):
                b.emit(event, (accepted, bytes(1000)), {})
        got.release()
        assert [one[0] for one in got.of("e", accepted)] == list(range(accepted))
        assert b.traffic()["e"].blocked_s > 0
        assert b.traffic()["e"].sent == accepted


@pytest.mark.parametrize("key", [OTHER_KEY, None])
def test_a_wrong_key_ends_the_wait_for_peers(listen: str, key: bytes | None) -> None:
    with (
        Router(node_id=0, listen=listen, key=KEY) as learner,
        Router(node_id=1, dial=[learner.address], key=key, start_timeout_s=0.3) as collector,
        pytest.raises(HandshakeRefused, match="key"),
    ):
        collector.wait_for_peers(1, timeout_s=DEADLINE_S)


def test_a_node_that_is_refused_until_its_start_timeout_gives_the_reason(listen: str) -> None:
    with (
        Router(node_id=0, listen=listen, key=KEY) as learner,
        Router(
            node_id=1,
            dial=[learner.address],
            key=OTHER_KEY,
            expected_peers=1,
            start_timeout_s=0.5,
        ) as collector,
    ):
        with pytest.raises(WaitTimeout, match="does not have this run's key"):
            collector.wait_for_peers(1, timeout_s=0.3)
        with pytest.raises(HandshakeRefused, match="key"):
            collector.wait_until_ready()


def test_the_second_of_two_nodes_with_one_id_fails_at_its_start_timeout(listen: str) -> None:
    with two(listen) as (learner, first):
        first.wait_for_peers(1, timeout_s=DEADLINE_S)
        with (
            Router(node_id=1, dial=[learner.address], key=KEY, start_timeout_s=0.3) as second,
            pytest.raises(
                HandshakeRefused, match=r"another process is connected as node 1.* unique id"
            ),
        ):
            second.wait_for_peers(1, timeout_s=DEADLINE_S)
        assert first.peer_ids() == [0]
        assert (learner.incarnation, first.incarnation) == (1, 1)


class ClockWithoutDate(SystemClock):
    """A clock that measures time and does not know the date."""

    def wall(self) -> float:
        raise AssertionError("the date may differ between hosts")


def test_a_restarted_node_needs_no_clock_to_be_accepted(listen: str) -> None:
    with Router(node_id=0, listen=listen, key=KEY) as learner:
        for number in (1, 2, 3):
            clock = ClockWithoutDate()
            with Router(node_id=1, dial=[learner.address], key=KEY, clock=clock) as collector:
                collector.wait_for_peers(1, timeout_s=DEADLINE_S)
                assert collector.incarnation == number


def test_an_identity_too_long_for_a_handshake_is_refused_at_construction(listen: str) -> None:
    with pytest.raises(TopologyError, match=r"node 3: .* labels have 4\d\d\d bytes, .* most 3840"):
        Router(node_id=3, listen=listen, labels=["x" * 250] * 16)
    labels = ["x" * 240] * 15
    with (
        Router(node_id=0, listen=listen, labels=labels) as learner,
        Router(node_id=1, dial=[learner.address], labels=labels) as collector,
    ):
        (peer,) = collector.wait_for_peers(1, timeout_s=DEADLINE_S)
        assert list(peer.labels) == labels


def test_waiting_for_missing_peers_names_the_connected_ones(listen: str) -> None:
    with two(listen) as (learner, _):
        learner.wait_for_peers(1, timeout_s=DEADLINE_S)
        with pytest.raises(WaitTimeout, match=r"expected 2 peers.* only 1 connected \(nodes \[1\]"):
            learner.wait_for_peers(2, timeout_s=0.05)


def test_waiting_for_subscribers_is_not_over_when_a_peer_has_connected(listen: str) -> None:
    with two(listen) as (learner, collector):
        Received(learner)
        learner.wait_for_peers(1, timeout_s=DEADLINE_S)
        with pytest.raises(
            WaitTimeout, match=r"only 1 connected .* 0 subscribed to a, b \(nodes \["
        ):
            learner.wait_for_peers(1, timeout_s=0.05, events=["a", "b"])
        got = Received(collector, "a", "b")
        learner.wait_for_peers(1, timeout_s=DEADLINE_S, events=["a", "b"])
        learner.emit(Event("b"), (1,), {})
        assert got.of("b", 1) == [(1,)]


def test_an_address_beyond_this_host_needs_a_key() -> None:
    with pytest.raises(TopologyError, match="has no key"):
        Router(listen="tcp://0.0.0.0:5555")


@pytest.mark.parametrize("key", [b"", b"x", b"a" * 32, b"0123456" * 5, bytes(range(31))])
def test_a_key_that_can_be_guessed_is_refused(key: bytes) -> None:
    with pytest.raises(ConfigError, match=r"openssl rand -hex 32"):
        Router(listen="tcp://0.0.0.0:0", key=key)


def test_using_a_closed_router_raises(listen: str) -> None:
    router = Router(listen=listen, key=KEY)
    router.start()
    router.close()
    router.close()
    with pytest.raises(RouterStateError, match="closed"):
        router.emit(Event("e"), (), {})


@pytest.mark.parametrize("closes", [0, 1])
def test_a_delivery_callback_may_close_the_router(listen: str, closes: int) -> None:
    closed: queue.SimpleQueue[dict[int, int]] = queue.SimpleQueue()

    def take(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == "node.joined":
            closed.put(routers[closes].close(deadline_s=0.1))
        return True

    before = set(threading.enumerate())
    with Router(node_id=0, listen=listen, key=KEY) as listener:
        dialer = Router(node_id=1, key=KEY)
        routers = (listener, dialer)
        routers[closes].attach(accepting(take))
        dialer.dial(listener.address)
        with dialer:
            assert closed.get(timeout=DEADLINE_S) == {}
    wait_until(lambda: set(threading.enumerate()) <= before, "the router's threads to end")


def test_a_router_closed_before_its_start_cannot_be_started(listen: str) -> None:
    router = Router(listen=listen, key=KEY)
    router.close()
    with pytest.raises(RouterStateError, match="closed"):
        router.start()


def test_dialing_starts_and_ends_with_the_router(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    address = f"ipc://{tmp_path}/0.sock"
    unused = Router(node_id=2)
    unused.dial(address)
    unused.close()
    assert set(threading.enumerate()) <= before
    with Router(node_id=0, listen=address) as listener:
        dialer = Router(node_id=1)
        dialer.dial(address)
        with dialer:
            assert listener.wait_for_peers(1, timeout_s=DEADLINE_S)
        with pytest.raises(RouterStateError, match="closed"):
            dialer.dial(address)
    assert set(threading.enumerate()) <= before


def test_a_failed_start_may_be_retried(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/0.sock"
    second = Router(node_id=1, listen=address)
    with Router(node_id=0, listen=address):
        for _ in range(2):
            with pytest.raises(TransportError, match="already listening there"):
                second.start()
    with second:
        assert second.address == address


def test_waiting_for_room_ends_when_the_router_fails(tmp_path: Path) -> None:
    elsewhere = f"ipc://{tmp_path}/1.sock"
    release = threading.Event()
    errors: list[Exception] = []

    def take(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        release.wait(600.0)

    def fill(timeout_s: float) -> None:
        while True:
            router.emit(Event("e", timeout_s=timeout_s), (bytes(500),), {})

    def wait_for_room() -> None:
        try:
            fill(600.0)
        except HandshakeRefused as error:
            errors.append(error)

    def is_waiting() -> bool:
        assert emitting.ident is not None
        return sys._current_frames()[emitting.ident].f_code.co_name == "wait"

    with (
        Router(node_id=2, listen=elsewhere, run_id="other", key=KEY),
        two(f"ipc://{tmp_path}/0.sock", outbox_bytes=1000, inbox_bytes=1000) as (reader, router),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(release.set)
        reader.attach(accepting(take, waits=True))
        reader.subscribe("e", active=True)
        router.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        with pytest.raises(DeliveryTimeout):
            fill(0.2)
        emitting = threading.Thread(target=wait_for_room, daemon=True)
        emitting.start()
        wait_until(is_waiting, "the emitting thread to wait for room")
        router.dial(elsewhere)
        emitting.join(DEADLINE_S)
        assert len(errors) == 1


class Recording(NngStreamTransport):
    """Records the connections that it dials."""

    def __init__(self) -> None:
        super().__init__()
        self.dialed: list[Stream] = []

    def dial(self, address: str, *, timeout_s: float) -> Stream:
        stream = super().dial(address, timeout_s=timeout_s)
        self.dialed.append(stream)
        return stream


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_internal_error_while_dialing_ends_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: str, *, timeout_s: float) -> Stream:
        raise ValueError("a defect")

    transport = NngStreamTransport()
    monkeypatch.setattr(transport, "dial", fail)
    with (
        Router(dial=["ipc:///a"], transport=transport) as router,
        pytest.raises(RouterError, match=r"internal error: ValueError\('a defect"),
    ):
        router.wait_for_peers(1, timeout_s=600.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_internal_error_in_a_thread_ends_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(now: float) -> None:
        raise ValueError("a defect")

    router = Router()
    with locked_node(router) as node:
        monkeypatch.setattr(node, "tick", fail)
    with router, pytest.raises(RouterError, match=r"internal error: ValueError\('a defect"):
        router.wait_for_peers(1, timeout_s=DEADLINE_S)


def test_an_address_passed_twice_is_dialed_once(tmp_path: Path) -> None:
    address, transport = f"ipc://{tmp_path}/0.sock", Recording()
    with (
        Router(node_id=0, listen=address) as listener,
        Router(node_id=1, dial=[address, address], transport=transport) as dialer,
    ):
        dialer.dial(address)
        dialer.wait_for_peers(1, timeout_s=DEADLINE_S)
        assert len(transport.dialed) == 1
        assert listener.peer_ids() == [1]


def test_connections_that_break_lose_and_duplicate_nothing(
    router_endpoints: RouterEndpoints,
) -> None:
    with (
        Router(listen=router_endpoints.address, key=KEY, **router_endpoints.listens) as one,
        Router(node_id=1, dial=[one.address], key=KEY, **router_endpoints.dials) as other,
    ):
        received = [Received(router, "e") for router in (one, other)]
        for router in (one, other):
            router.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        for number in range(400):
            for router in (one, other):
                router.emit(Event("e"), (number, bytes(number % 7 * 10_000)), {})
            if number % 80 == 40:
                break_connection(*((one, 1) if number % 160 == 40 else (other, 0)))
        for got in received:
            assert [args[0] for args in got.of("e", 400)] == list(range(400))
        with locked_node(one) as node:
            assert node.n_sessions >= 3
        assert one.close() == other.close() == {}


def test_closing_leaves_no_thread_behind(listen: str) -> None:
    before = set(threading.enumerate())
    with two(listen) as (learner, _):
        learner.wait_for_peers(1, timeout_s=DEADLINE_S)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("fails", [False, True])
def test_a_router_leaves_nothing_when_it_has_closed(
    router_endpoints: RouterEndpoints, fails: bool
) -> None:
    start_nng()
    before, n_before = set(threading.enumerate()), n_descriptors()
    address = router_endpoints.address
    with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
        one = stack.enter_context(Router(listen=address, key=KEY, **router_endpoints.listens))
        other = stack.enter_context(
            Router(node_id=1, dial=[one.address], key=KEY, **router_endpoints.dials)
        )
        other.wait_for_peers(1, timeout_s=DEADLINE_S)
        if fails:
            raise KeyError
    assert set(threading.enumerate()) <= before
    # nng closes the descriptors of TLS connections in the background.
    wait_until(lambda: n_descriptors() <= n_before, "the descriptors to be closed")
    if address.startswith("ipc://"):
        socket_file = Path(address.removeprefix("ipc://"))
        assert not [one for one in socket_file.parent.iterdir() if one.is_socket()]


def test_a_folder_whose_lock_another_process_holds_is_named(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        started_at = time.monotonic()
        router = Router(listen=f"ipc://{tmp_path}/0.sock", key=KEY)
        with pytest.raises(TransportError, match=f"the lock of {tmp_path} "):
            router.start()
        assert time.monotonic() - started_at < 5.0
    finally:
        os.close(descriptor)
    with router:
        assert router.address


@pytest.mark.process
def test_a_forked_process_gets_an_error(listen: str) -> None:
    with two(listen) as (one, other):
        other.wait_for_peers(1, timeout_s=DEADLINE_S)
        child = os.fork()
        if not child:
            try:
                signal.alarm(int(DEADLINE_S))
                n_errors = 0
                for attempt in (
                    lambda: other.emit(Event("e"), (), {}),
                    lambda: other.dial("tcp://127.0.0.1:1"),
                    other.close,
                    one.start,
                ):
                    try:
                        attempt()
                    except RouterStateError:
                        n_errors += 1
                os._exit(n_errors)
            except BaseException:  # noqa: BLE001 (nothing of the test must run here)
                os._exit(99)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        assert other.peer_ids() == [0]


def test_an_event_whose_callback_raises_does_not_stop_later_events(
    listen: str, caplog: pytest.LogCaptureFixture
) -> None:
    with two(listen) as (learner, collector):
        got = Received(learner, "e")

        def choosy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if args == (0,):
                raise KeyError("what is this?")
            got.deliver(name, args, kwargs)

        learner.attach(accepting(choosy, waits=True))
        collector.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        for number in range(3):
            collector.emit(Event("e"), (number,), {})
        assert got.of("e", 2) == [(1,), (2,)]
    assert "the event 'e' was dropped" in caplog.text


def test_an_event_that_cannot_be_unpickled_is_counted_and_skipped(listen: str) -> None:
    def refuse(raw: bytes) -> Any:
        raise AttributeError("no such class here")

    with (
        Router(node_id=0, listen=listen, key=KEY, pickle=(pickle.dumps, refuse)) as learner,
        Router(
            node_id=1, dial=[learner.address], key=KEY, pickle=(pickle.dumps, refuse)
        ) as collector,
    ):
        got = Received(learner, "e")
        collector.wait_for_peers(1, timeout_s=DEADLINE_S, events=["e"])
        collector.emit(Event("e"), (slice(3),), {})
        collector.emit(Event("e"), (1,), {})
        assert got.of("e", 1) == [(1,)]
        assert learner.traffic()["e"].undecodable == 1


def framed(*frames: bytes) -> bytes:
    writer = FrameWriter()
    for frame in frames:
        writer.put(frame)
    return b"".join(piece for batch in iter(writer.next, []) for piece in batch)


def connect(address: str) -> socket.socket:
    """Connect to a listener, as anyone can."""
    made = socket.socket(socket.AF_UNIX if address.startswith("ipc:") else socket.AF_INET)
    made.settimeout(DEADLINE_S)
    if address.startswith("ipc:"):
        made.connect(address.removeprefix("ipc://"))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        made.connect((host, int(port)))
    return made


@pytest.mark.parametrize("sent", [framed(bytes(100)), b"GET / HTTP/1.1\r\n\r\n"])
def test_many_rejected_frames_log_few_warnings(
    listen: str, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with Router(node_id=0, listen=listen, key=KEY) as learner:
        for _ in range(40):
            with connect(learner.address) as stranger:
                stranger.sendall(sent)
                assert is_hung_up_on(stranger)
        wait_until(lambda: n_refused(learner) == 40, "40 refusals")
    assert 1 <= caplog.text.count("closed a connection") < 20
