"""The bounded queue, whose items are acknowledged when they are taken, and its senders' windows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.flow_control import FairQueue, ItemId, Window

DEADLINE_S = 30.0


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Start a thread that records what the function returns."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread, results


class Watched(threading.Condition):
    """A condition that reports that a thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None or timeout > 0:
            self.entered.set()
        return super().wait(timeout)

    def wait_until_entered(self) -> None:
        """Wait until a thread waits for the condition."""
        assert self.entered.wait(DEADLINE_S)
        with self:
            pass  # it has released the lock, so it waits


def test_items_are_taken_in_order() -> None:
    queue = FairQueue[str]()
    for item in "abc":
        assert queue.put(item)
    assert (len(queue), queue.first) == (3, "a")
    assert [queue.take() for _ in range(4)] == ["a", "b", "c", None]
    assert queue.first is None


def test_an_item_is_acknowledged_when_it_is_taken_and_not_before() -> None:
    queue = FairQueue[str]()
    tape: list[str] = []
    for item in "ab":
        queue.put(item, acknowledge=partial(tape.append, item))
    assert queue.first == "a"
    assert tape == []
    assert queue.take() == "a"
    assert tape == ["a"]
    assert queue.drain() == ["b"]
    assert tape == ["a"], "what is dropped is not acknowledged"
    assert len(queue) == 0


def test_an_acknowledgment_is_sent_without_the_lock() -> None:
    queue = FairQueue[str]()

    def acknowledge() -> None:
        thread, results = in_thread(lambda: len(queue.drain()))
        thread.join(DEADLINE_S)
        assert results == [0]

    queue.put("a", acknowledge=acknowledge)
    assert queue.take() == "a"


def test_a_producer_waits_while_the_queue_is_full() -> None:
    changed = Watched()
    queue = FairQueue[str](capacity=2, changed=changed)
    assert queue.put("a") and queue.put("b")
    assert not queue.put("c", timeout_s=0.0)
    thread, results = in_thread(lambda: queue.put("c"))
    changed.wait_until_entered()
    assert results == []
    assert queue.take() == "a"
    thread.join(DEADLINE_S)
    assert results == [True]
    assert queue.drain() == ["b", "c"]


def test_a_consumer_waits_for_an_item() -> None:
    changed = Watched()
    queue = FairQueue[str](changed=changed)
    thread, results = in_thread(lambda: queue.take(None))
    changed.wait_until_entered()
    queue.put("a")
    thread.join(DEADLINE_S)
    assert results == ["a"]
    assert queue.take(0.01) is None


@pytest.mark.parametrize("waits", ["put", "take"])
def test_closing_ends_waits(waits: str) -> None:
    changed = Watched()
    queue = FairQueue[str](capacity=1, changed=changed)
    if waits == "put":
        queue.put("a")
    waiting = (lambda: queue.put("b")) if waits == "put" else (lambda: queue.take(None))
    thread, results = in_thread(waiting)
    changed.wait_until_entered()
    queue.close()
    queue.close()
    thread.join(DEADLINE_S)
    assert results == [False if waits == "put" else None]


def test_a_closed_queue_accepts_nothing_and_returns_what_is_left() -> None:
    queue = FairQueue[str]()
    queue.put("a")
    queue.close()
    assert not queue.put("b")
    assert [queue.take(None), queue.take(None)] == ["a", None]


def test_senders_take_turns() -> None:
    queue = FairQueue[str]()
    for item in ("a1", "a2", "a3", "b1"):
        queue.put(item, sender=item[0])
    queue.put("c1", sender="c")
    assert [queue.take() for _ in range(5)] == ["a1", "b1", "c1", "a2", "a3"]


@pytest.mark.parametrize("make", [lambda: FairQueue(capacity=0), lambda: Window(0)])
def test_nothing_can_be_sent_without_room(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make()


def test_a_window_opens_when_its_items_are_taken() -> None:
    window = Window(2)
    first, second = window.send(), window.send()
    assert first == ItemId(window.token, 1)
    assert not window.has_room
    window.acknowledge(*first)
    assert window.has_room
    window.send()
    assert not window.has_room
    window.acknowledge(*second)
    window.acknowledge(*first)
    assert (window.sent, window.taken) == (3, 2)


def test_acknowledgments_for_another_process_do_not_open_a_window() -> None:
    before, window = Window(1), Window(1)
    window.send()
    window.acknowledge(*before.send())
    assert not window.has_room
    window.acknowledge(window.token, 7)
    assert window.taken == 1, "what was not sent cannot be taken"
    window.send()
    assert not window.has_room


def test_a_new_receiver_has_nothing_of_the_old_one() -> None:
    window = Window(2)
    window.send()
    late = window.send()
    window.forget()
    assert window.has_room
    window.send()
    window.acknowledge(*late)
    assert (window.sent, window.taken) == (3, 2)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["send", "take", "answer"]))),
    st.integers(1, 3),
)
def test_whatever_happens_no_sender_has_more_in_transit_than_its_window_and_all_is_in_order(
    steps: list[tuple[int, str]], size: int
) -> None:
    queue = FairQueue[tuple[int, int]]()
    windows = [Window(size) for _ in range(3)]
    answers: deque[tuple[int, ItemId]] = deque()
    taken: list[tuple[int, int]] = []
    for sender, step in steps:
        window = windows[sender]
        if step == "send" and window.has_room:
            item_id = window.send()
            acknowledge = partial(answers.append, (sender, item_id))
            queue.put((sender, item_id.number), sender=sender, acknowledge=acknowledge)
        elif step == "take" and (item := queue.take()) is not None:
            taken.append(item)
        elif step == "answer" and answers:
            answered, answer = answers.popleft()
            windows[answered].acknowledge(*answer)
        assert len(queue) + len(answers) == sum(one.sent - one.taken for one in windows)
        assert all(one.sent - one.taken <= size for one in windows)
    for sender in range(3):
        numbers = [number for who, number in taken if who == sender]
        assert numbers == list(range(1, len(numbers) + 1))


def test_what_is_put_back_is_taken_first_although_the_queue_is_full_or_closed() -> None:
    queue = FairQueue[str](capacity=2)
    for item in "ab":
        queue.put(item)
    taken = [queue.take(), queue.take()]
    for item in "cd":
        queue.put(item)
    queue.close()
    queue.put_back([one for one in taken if one is not None])
    assert len(queue) == 4 and "a" in queue and "e" not in queue
    assert [queue.take() for _ in range(5)] == ["a", "b", "c", "d", None]
