"""The receiver: events reach the task in order, if possible on the receiving thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dmiddleware.pipeline import SystemClock
from dmiddleware.router.protocol.counters import TrafficCounters
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.runtime.receiver import DecodedEvent, Receiver
from tests.accepting import accepting
from tests.dmiddleware.router.node_pairs import CODEC, emit, exchange, join, make_node
from tests.waiting import wait_until

DEADLINE_S = 20.0
LARGE = NodeOptions(batch_bytes=2000, outbox_bytes=1 << 24, inbox_bytes=1 << 24)


class Scene:
    """A node that gets events, and its receiver with the blocking thread."""

    def __init__(self) -> None:
        self.remote, self.node = make_node("1", options=LARGE), make_node("0", options=LARGE)
        self.connection = join(self.remote, self.node)
        self.lock = threading.RLock()
        self.n_announcements = 0
        self.taken: list[tuple[Any, str]] = []
        self.changed = threading.Condition()
        self.traffic = TrafficCounters()
        self.receiver = Receiver(
            self.node,
            self.lock,
            codec=CODEC,
            traffic=self.traffic,
            clock=SystemClock(),
            on_subscriptions_changed=self.count_announcement,
            on_taken=lambda: None,
            on_handled=lambda peer: self.node.on_handled(peer),
        )
        self.thread = threading.Thread(target=self.receiver.run, name="waits")

    def count_announcement(self) -> None:
        self.n_announcements += 1

    def receive(self, *values: Any) -> None:
        with self.lock:
            for value in values:
                assert emit(self.remote, "0", "e", [[value], {}])
            exchange(self.connection)

    def take(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        with self.changed:
            self.taken.append((args[0], threading.current_thread().name))
            self.changed.notify_all()
        return True

    def await_values(self, count: int) -> list[Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.taken) >= count, DEADLINE_S)
            return [value for value, _ in self.taken]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    made.thread.start()
    try:
        yield made
    finally:
        with made.lock:
            made.receiver.close()
        made.thread.join(DEADLINE_S)
        assert not made.thread.is_alive()


HERE = threading.current_thread().name


def test_an_event_accepted_without_blocking_is_delivered_on_the_receiving_thread(
    scene: Scene,
) -> None:
    scene.receiver.attach(accepting(scene.take))
    scene.receive(1, 2)
    assert scene.taken == []
    scene.receiver.deliver_ready()
    assert scene.taken == [(1, HERE), (2, HERE)]
    assert scene.traffic["e"].received == 2


def test_a_blocking_callback_runs_in_a_separate_thread(scene: Scene) -> None:
    scene.receiver.attach(accepting(scene.take, waits=True))
    for value in range(3):
        scene.receive(value)
        scene.receiver.deliver_ready()
    assert scene.await_values(3) == [0, 1, 2]
    assert {name for _, name in scene.taken} == {"waits"}


def test_a_refused_event_and_later_ones_are_delivered_in_order_by_the_blocking_thread(
    scene: Scene,
) -> None:
    refused: list[Any] = []
    room = threading.Event()

    def accept(
        name: str, args: tuple[Any, ...], kwargs: dict[str, Any], done: object, may_wait: bool
    ) -> bool:
        if may_wait:
            return room.wait(0.05) and scene.take(name, args, kwargs)
        if args[0] == 2 and not room.is_set():
            refused.append(args[0])
            return False
        return scene.take(name, args, kwargs)

    scene.receiver.attach(accept)
    scene.receive(1, 2, 3)
    scene.receiver.deliver_ready()
    scene.receive(4)
    scene.receiver.deliver_ready()
    assert scene.await_values(1) == [1]
    assert refused == [2], "it must not be offered again"
    room.set()
    assert scene.await_values(4) == [1, 2, 3, 4]
    assert [name for _, name in scene.taken] == [HERE, "waits", "waits", "waits"]
    assert scene.traffic["e"].received == 4
    # The thread sleeps again once nothing is left.
    for value in range(5, 200):
        scene.receive(value)
        scene.receiver.deliver_ready()
        scene.await_values(value)
        if scene.taken[-1][1] == HERE:
            break
    assert scene.taken[-1][1] == HERE


def test_once_delivers_one_batch_and_leaves_the_rest(scene: Scene) -> None:
    scene.receiver.attach(accepting(scene.take))
    scene.receive(*range(300))
    scene.receiver.deliver_ready(once=True)
    assert 0 < len(scene.taken) < 300
    scene.receiver.deliver_ready()
    assert scene.await_values(300) == list(range(300))


def test_many_threads_deliver_one_at_a_time_and_in_order(scene: Scene) -> None:
    inside, pause = threading.Lock(), threading.Event()

    def offer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        assert inside.acquire(blocking=False), "two threads deliver at the same time"
        try:
            pause.wait(0.0002)
            return scene.take(name, args, kwargs)
        finally:
            inside.release()

    scene.receiver.attach(accepting(offer))
    values = iter(range(400))

    def work() -> None:
        while True:
            with scene.lock:
                value = next(values, None)
                if value is None:
                    return
                scene.receive(value)
            scene.receiver.deliver_ready()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert scene.await_values(400) == list(range(400))


def test_an_interrupted_delivery_leaves_the_rest_to_other_threads(scene: Scene) -> None:
    def offer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if args[0] == 1:
            raise KeyboardInterrupt
        return scene.take(name, args, kwargs)

    scene.receiver.attach(accepting(offer))
    scene.receive(0, 1, 2, 3)
    with pytest.raises(KeyboardInterrupt):
        scene.receiver.deliver_ready()
    assert scene.await_values(3) == [0, 2, 3]
    scene.receive(4)
    scene.receiver.deliver_ready()
    assert scene.await_values(4) == [0, 2, 3, 4]


def test_membership_events_wait_until_a_callback_is_attached(scene: Scene) -> None:
    with scene.lock:
        scene.receiver.add(DecodedEvent("node.joined", (7,), {}))
    scene.receive("for no one")
    scene.receiver.deliver_ready()
    assert scene.taken == []
    scene.receiver.attach(accepting(scene.take))
    assert scene.taken == [(7, HERE)]


def test_announcements_are_processed_without_a_callback(scene: Scene) -> None:
    with scene.lock:
        scene.remote.subscriptions.subscribe(["weights"])
        exchange(scene.connection)
    scene.receiver.deliver_ready()
    wait_until(lambda: scene.n_announcements >= 1, "an announcement")
    assert scene.node.subscriptions.subscribers("weights") == ("1",)
