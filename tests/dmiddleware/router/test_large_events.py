"""Large events between two routers, over every kind of connection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dmiddleware.errors import FrameTooLarge
from dmiddleware.pipeline import Event
from dmiddleware.router import NodeOptions, Router
from tests.accepting import accepting
from tests.dmiddleware.router.endpoints import RouterEndpoints

KEY = bytes(range(32))
DEADLINE_S = 60.0
MB = 1 << 20


class Received:
    """The events that a router delivers."""

    def __init__(self, router: Router, *names: str) -> None:
        self.changed = threading.Condition()
        self.events: list[tuple[str, Any]] = []
        for name in names:
            router.subscribe(name, active=True)
        router.attach(accepting(self.deliver, waits=True))

    def deliver(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.changed:
            if not name.startswith("node."):
                self.events.append((name, *args))
                self.changed.notify_all()

    def wait_for(self, n: int) -> list[tuple[str, Any]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.events) >= n, DEADLINE_S), self.events
            return self.events


@contextlib.contextmanager
def two(
    endpoints: RouterEndpoints, listens: NodeOptions, dials: NodeOptions
) -> Iterator[tuple[Router, Router, Received, Received]]:
    address = endpoints.address
    with (
        Router(listen=address, key=KEY, options=listens, **endpoints.listens) as one,
        Router(node_id=1, dial=[one.address], key=KEY, options=dials, **endpoints.dials) as other,
    ):
        received = (Received(one, "bulk", "small"), Received(other, "bulk", "small"))
        for router in (one, other):
            router.wait_for_peers(1, timeout_s=DEADLINE_S, events=("bulk", "small"))
        yield one, other, *received


def test_large_events_arrive_over_every_kind_of_connection(
    router_endpoints: RouterEndpoints,
) -> None:
    options = NodeOptions(fragment_bytes=50_000)
    array = np.random.default_rng(0).integers(0, 256, 3 * MB, dtype=np.uint8)
    with two(router_endpoints, options, options) as (one, other, at_one, at_other):
        for sender, received in ((one, at_other), (other, at_one)):
            for number, delivery in enumerate(("reliable", "latest", "lossy"), start=1):
                event = Event("bulk", delivery=delivery)  # type: ignore[arg-type]
                sender.emit(event, ({"w": array, "of": delivery},), {})
                name, got = received.wait_for(number)[-1]
                assert (name, got["of"]) == ("bulk", delivery)
                np.testing.assert_array_equal(got["w"], array)


def test_the_default_sizes_carry_events_of_any_size(router_endpoints: RouterEndpoints) -> None:
    with two(router_endpoints, NodeOptions(), NodeOptions()) as (_, other, at_one, _):
        array = np.arange(5 * MB, dtype=np.int32)
        other.emit(Event("bulk"), (array,), {})
        other.emit(Event("bulk"), (7,), {})
        (_, got), after = at_one.wait_for(2)
        np.testing.assert_array_equal(got, array)
        assert after == ("bulk", 7)


@pytest.mark.parametrize("dialer_sends", [True, False])
@pytest.mark.parametrize("delivery", ["reliable", "latest", "lossy"])
def test_an_event_above_the_stated_memory_is_refused_and_the_next_one_arrives(
    address: str, dialer_sends: bool, delivery: Any
) -> None:
    small, large = NodeOptions(max_event_bytes=MB), NodeOptions()
    endpoints = RouterEndpoints(address, {}, {})
    options = (small, large) if dialer_sends else (large, small)
    with two(endpoints, *options) as (one, other, at_one, at_other):
        sender, received = (other, at_one) if dialer_sends else (one, at_other)
        event = Event("bulk", delivery=delivery)
        with pytest.raises(FrameTooLarge, match=r"2097\d\d\d bytes.* at most 1048\d\d\d.*ditask"):
            sender.emit(event, (np.zeros(2 * MB, np.uint8),), {})
        sender.emit(event, (np.zeros(MB // 2, np.uint8),), {})
        assert len(received.wait_for(1)) == 1
