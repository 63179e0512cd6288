"""Reliable delivery over connections that keep the order, and break."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import FrameError
from dmiddleware.router.protocol.delivery import Inbox, InboxState, MessageBatch, Outbox


@dataclass(frozen=True)
class Note:
    """A message that is a number."""

    number: int
    size: int = 10


def notes(*numbers: int) -> list[Note]:
    return [Note(number) for number in numbers]


def connected(capacity: int = 100, max_bytes: int = 1000, batch_bytes: int = 1) -> Outbox[Note]:
    outbox: Outbox[Note] = Outbox(max_bytes=max_bytes, batch_bytes=batch_bytes)
    outbox.on_connect(capacity)
    outbox.on_state(InboxState(0, 0, capacity))
    return outbox


def sequences(outbox: Outbox[Note]) -> list[int]:
    """Send what can be sent."""
    sent = []
    while (frame := outbox.next_frame()) is not None:
        sent.append(frame.sequence)
    return sent


class TestOutbox:
    def test_nothing_is_sent_before_the_peer_has_told_its_state(self) -> None:
        outbox: Outbox[Note] = Outbox(max_bytes=100, batch_bytes=10)
        assert outbox.offer(Note(1)) and outbox.is_blocked
        assert outbox.next_frame() is None
        outbox.on_connect(100)
        assert outbox.next_frame() is None
        outbox.on_state(InboxState(0, 0, 100))
        assert outbox.next_frame() == MessageBatch(1, (Note(1),), 10)
        assert not outbox.is_blocked and not outbox.is_empty

    def test_it_keeps_what_is_not_acknowledged_and_refuses_more_than_its_bound(self) -> None:
        outbox = connected(max_bytes=30)
        assert [outbox.offer(Note(number)) for number in range(4)] == [True, True, True, False]
        assert sequences(outbox) == [1, 2, 3]
        outbox.on_state(InboxState(2, 3, 100))
        assert outbox.unacknowledged() == notes(2) and outbox.n_bytes == 10
        assert outbox.offer(Note(4))
        # An empty one accepts a message of any size.
        outbox.on_state(InboxState(3, 3, 100))
        sequences(outbox)
        outbox.on_state(InboxState(4, 4, 100))
        assert outbox.is_empty and outbox.offer(Note(5, size=1000))

    def test_small_messages_share_a_frame(self) -> None:
        outbox = connected(batch_bytes=30)
        for number in range(7):
            outbox.offer(Note(number))
        frames = [outbox.next_frame() for _ in range(3)]
        assert [len(frame.messages) for frame in frames if frame] == [3, 3, 1]

    def test_no_more_is_on_its_way_than_the_peer_takes(self) -> None:
        outbox = connected(capacity=25)
        for number in range(5):
            outbox.offer(Note(number))
        assert sequences(outbox) == [1, 2] and outbox.is_blocked
        # It has one of them and takes 15 bytes more, of which the other one needs 10.
        outbox.on_state(InboxState(1, 1, 15))
        assert sequences(outbox) == []
        outbox.on_state(InboxState(2, 2, 15))
        assert sequences(outbox) == [3]

    def test_a_frame_larger_than_the_inbox_waits_until_that_is_empty(self) -> None:
        outbox = connected(capacity=25)
        outbox.offer(Note(1))
        outbox.offer(Note(2, size=500))
        assert sequences(outbox) == [1]
        outbox.on_state(InboxState(1, 1, 15))
        assert sequences(outbox) == [] and outbox.is_blocked
        outbox.on_state(InboxState(1, 1, 25))
        assert sequences(outbox) == [2]

    def test_after_a_new_connection_what_the_peer_does_not_have_is_sent_again(self) -> None:
        outbox = connected()
        for number in range(4):
            outbox.offer(Note(number))
        assert sequences(outbox) == [1, 2, 3, 4]
        outbox.on_state(InboxState(1, 1, 100))
        outbox.on_connect(100)
        assert sequences(outbox) == []
        # It has the second one too, but will acknowledge it later.
        outbox.on_state(InboxState(1, 2, 80))
        assert sequences(outbox) == [3, 4]
        assert outbox.unacknowledged() == notes(1, 2, 3)

    def test_a_new_process_gets_what_the_old_one_has_not_acknowledged(self) -> None:
        outbox = connected()
        for number in range(4):
            outbox.offer(Note(number))
        sequences(outbox)
        outbox.on_state(InboxState(2, 3, 100))
        outbox.on_new_peer()
        outbox.on_connect(100)
        outbox.on_state(InboxState(0, 0, 100))
        frames = [outbox.next_frame() for _ in range(2)]
        assert frames == [MessageBatch(1, (Note(2),), 10), MessageBatch(2, (Note(3),), 10)]

    def test_what_was_given_up_leaves_no_gap(self) -> None:
        outbox = connected()
        for number in range(3):
            outbox.offer(Note(number))
        sequences(outbox)
        outbox.on_state(InboxState(1, 1, 100))
        outbox.give_up()
        assert outbox.unacknowledged() == [] and outbox.n_bytes == 0
        outbox.on_connect(100)
        outbox.on_state(InboxState(1, 1, 100))
        outbox.offer(Note(9))
        frames = [outbox.next_frame() for _ in range(3)]
        assert [frame.messages for frame in frames if frame] == [(), (), (Note(9),)]

    @pytest.mark.parametrize("state", [(0, 2, 9), (3, 3, 9), (2, 1, 9), (1, 3, 9)])
    def test_a_state_that_cannot_be_true_is_refused(self, state: tuple[int, int, int]) -> None:
        outbox = connected()
        for number in range(3):
            outbox.offer(Note(number))
        outbox.next_frame()
        outbox.next_frame()
        outbox.on_state(InboxState(1, 2, 100))
        with pytest.raises(FrameError, match="protocol"):
            outbox.on_state(InboxState(*state))

    def test_the_peer_is_asked_once_after_each_frame_while_something_waits(self) -> None:
        outbox = connected(capacity=15, max_bytes=20)
        assert outbox.offer(Note(1)) and outbox.offer(Note(2))
        assert sequences(outbox) == [1] and outbox.is_blocked
        assert outbox.take_ask() and not outbox.take_ask()
        outbox.on_state(InboxState(1, 1, 5))
        assert outbox.is_blocked and not outbox.take_ask()
        outbox.on_state(InboxState(1, 1, 15))
        assert sequences(outbox) == [2] and not outbox.take_ask()
        assert not outbox.offer(Note(3, size=15))
        assert not outbox.take_ask(), "it sends its state when it has the second frame"

    @pytest.mark.parametrize(("size", "asks"), [(9, True), (10, False)])
    def test_with_a_full_outbox_the_peer_is_asked_unless_its_state_comes_anyway(
        self, size: int, asks: bool
    ) -> None:
        outbox, inbox = connected(max_bytes=40), Inbox[Note](100, peer_bytes=40)
        outbox.offer(Note(1, size=size))
        frame = outbox.next_frame()
        assert frame is not None and not outbox.offer(Note(2, size=40))
        assert outbox.take_ask() == asks
        inbox.on_frame(frame.sequence, frame.messages)
        assert inbox.is_due != asks
        # It has the frame, and acknowledges it later.
        outbox.on_state(InboxState(0, 1, 90))
        assert not outbox.offer(Note(2, size=40))
        assert outbox.take_ask() != asks, "it is asked once after each frame"

    def test_after_a_new_connection_the_peer_is_asked_again(self) -> None:
        outbox = connected(capacity=15)
        for number in (1, 2):
            outbox.offer(Note(number))
        assert sequences(outbox) == [1] and outbox.take_ask()
        # The connection breaks with the answer on its way; the peer has the frame.
        outbox.on_connect(15)
        assert not outbox.take_ask(), "its first state comes anyway"
        outbox.on_state(InboxState(1, 1, 5))
        assert outbox.is_blocked and outbox.take_ask()

    def test_a_sender_that_drains_asks_behind_its_last_frame(self) -> None:
        outbox = connected(capacity=15)
        for number in (1, 2):
            outbox.offer(Note(number))
        outbox.is_draining = True
        assert sequences(outbox) == [1] and outbox.take_ask()
        outbox.on_state(InboxState(1, 1, 15))
        assert sequences(outbox) == [2] and outbox.take_ask() and not outbox.take_ask()
        outbox.on_state(InboxState(2, 2, 15))
        assert not outbox.take_ask(), "nothing is left"

    def test_under_load_messages_wait_for_the_answer_or_until_there_are_enough(self) -> None:
        outbox: Outbox[Note] = Outbox(max_bytes=10_000, batch_bytes=1000, hold_bytes=50)
        outbox.on_connect(10_000)
        outbox.on_state(InboxState(0, 0, 10_000))
        asks = []
        for number in range(8):
            outbox.offer(Note(number))
            frame = outbox.next_frame()
            assert frame is not None and len(frame.messages) == 1
            asks.append(frame.asks)
        assert asks == 7 * [False] + [True]
        for number in range(4):
            outbox.offer(Note(number))
            assert outbox.next_frame() is None
        outbox.offer(Note(4))
        frame = outbox.next_frame()
        assert frame is not None and len(frame.messages) == 5 and not frame.asks
        outbox.offer(Note(5))
        assert outbox.next_frame() is None
        outbox.on_state(InboxState(9, 9, 10_000))
        assert outbox.next_frame() == MessageBatch(10, (Note(5),), 10)

    def test_a_message_that_was_held_back_is_sent_over_a_new_connection(self) -> None:
        outbox: Outbox[Note] = Outbox(max_bytes=10_000, batch_bytes=1000, hold_bytes=50)
        outbox.on_connect(10_000)
        outbox.on_state(InboxState(0, 0, 10_000))
        for number in range(9):
            outbox.offer(Note(number))
            if number < 8:
                outbox.next_frame()
        assert outbox.next_frame() is None
        outbox.on_connect(10_000)
        outbox.on_state(InboxState(8, 8, 10_000))
        assert sequences(outbox) == [9]


class TestInbox:
    def test_frames_are_accepted_in_order_only(self) -> None:
        inbox: Inbox[Note] = Inbox(100)
        inbox.on_frame(1, notes(1, 2))
        for sequence in (1, 3, 0):
            with pytest.raises(FrameError, match="after frame 1"):
                inbox.on_frame(sequence, notes(3))
        inbox.on_frame(2, notes(3))
        assert inbox.take() == notes(1, 2, 3)
        assert inbox.take_state() == InboxState(2, 2, 100)

    def test_more_than_the_credit_is_refused(self) -> None:
        inbox: Inbox[Note] = Inbox(25)
        inbox.on_frame(1, notes(1, 2))
        assert inbox.take_state().credit == 5
        with pytest.raises(FrameError, match="at most 5 more"):
            inbox.on_frame(2, notes(3))
        inbox.take()
        inbox.on_frame(2, [Note(3, size=500)])
        assert inbox.take_state().credit == 0

    def test_frames_may_be_acknowledged_when_their_messages_were_handled(self) -> None:
        inbox: Inbox[Note] = Inbox(1000, max_unhandled=4)
        inbox.on_frame(1, notes(1, 2))
        inbox.on_frame(2, notes(3, 4, 5))
        assert inbox.take() == notes(1, 2, 3, 4) and not inbox.has_ready
        assert inbox.take_state()[:2] == (0, 2)
        inbox.on_handled()
        assert inbox.acknowledged == 0 and not inbox.is_due
        inbox.on_handled()
        assert inbox.acknowledged == 1 and inbox.is_due and inbox.has_ready
        assert inbox.take() == notes(5)
        for _ in range(3):
            inbox.on_handled()
        assert inbox.take_state() == InboxState(2, 2, 1000)

    def test_the_state_is_sent_after_a_quarter_of_the_bytes(self) -> None:
        inbox: Inbox[Note] = Inbox(1000, peer_bytes=80)
        inbox.on_frame(1, notes(1))
        assert not inbox.is_due
        inbox.on_frame(2, notes(2))
        assert inbox.is_due
        inbox.take_state()
        assert not inbox.is_due
        inbox.take()
        assert inbox.is_due
        inbox.take_state()
        inbox.on_frame(3, notes(3))
        inbox.take()
        assert not inbox.is_due, "neither a quarter was accepted, nor a quarter taken"
        inbox.on_frame(4, notes(4))
        assert inbox.is_due

    def test_a_sender_that_asks_is_answered_at_once_and_when_the_inbox_is_empty(self) -> None:
        inbox: Inbox[Note] = Inbox(1000)
        inbox.on_frame(1, notes(1, 2))
        inbox.on_ask()
        assert inbox.is_due and inbox.take_state().credit == 980
        inbox.take(1)
        assert not inbox.is_due
        inbox.take(1)
        assert inbox.is_due and inbox.take_state().credit == 1000
        assert not inbox.is_due

    def test_messages_may_be_held_back_or_taken_out(self) -> None:
        inbox: Inbox[Note] = Inbox(1000)
        inbox.on_frame(1, notes(1, 2, 3, 4))
        assert inbox.take(holds=lambda note: note.number == 3) == notes(1, 2)
        assert inbox.take_out(lambda note: note.number == 4) == notes(4)
        assert list(inbox.waiting) == notes(3) and inbox.n_bytes == 10


class Transmission:
    """An outbox and an inbox, and the connections between them."""

    def __init__(self, rng: random.Random, *, handled: bool) -> None:
        self.rng = rng
        self.capacity = rng.choice((5, 30, 100))
        max_bytes = rng.choice((1, 40, 400))
        self.outbox: Outbox[Note] = Outbox(max_bytes=max_bytes, batch_bytes=rng.choice((1, 30)))
        self.inbox: Inbox[Note] = Inbox(
            self.capacity, max_unhandled=3 if handled else None, peer_bytes=max_bytes
        )
        self.handled = handled
        self.there: deque[MessageBatch[Note] | None] = deque()
        self.back: deque[InboxState] = deque()
        self.n_offered = 0
        self.taken: list[int] = []
        self.n_unhandled = 0
        self.connect()

    def connect(self) -> None:
        """Break the connection, with what is on its way, and make a new one."""
        self.there.clear()
        self.back.clear()
        self.outbox.on_connect(self.capacity)
        self.back.append(self.inbox.take_state())

    def offer(self) -> None:
        if self.outbox.offer(Note(self.n_offered, size=self.rng.choice((1, 10, 60)))):
            self.n_offered += 1

    def send(self) -> None:
        """Send a frame, or ask for the state."""
        if (frame := self.outbox.next_frame()) is not None:
            self.there.append(frame)
        elif self.outbox.take_ask():
            self.there.append(None)

    def arrive(self) -> None:
        if self.there:
            frame = self.there.popleft()
            if frame is None:
                self.inbox.on_ask()
            else:
                self.inbox.on_frame(frame.sequence, frame.messages)

    def take(self) -> None:
        taken = self.inbox.take(self.rng.choice((1, None)))
        self.taken += [note.number for note in taken]
        if self.handled:
            self.n_unhandled += len(taken)

    def handle(self) -> None:
        if self.n_unhandled:
            self.n_unhandled -= 1
            self.inbox.on_handled()

    def report(self) -> None:
        """Send the state if it is due, or, sometimes, with a heartbeat."""
        if self.inbox.is_due or self.rng.random() < 0.1:
            self.back.append(self.inbox.take_state())

    def learn(self) -> None:
        if self.back:
            self.outbox.on_state(self.back.popleft())

    def finish(self) -> None:
        """Let everything be delivered; a heartbeat is needed only for the last acknowledgments."""
        while not self.outbox.is_empty:
            before = self.progress()
            for step in (self.send, self.arrive, self.take, self.handle):
                step()
            if self.inbox.is_due:
                self.back.append(self.inbox.take_state())
            self.learn()
            if self.progress() == before and not self.there and not self.back:
                assert not self.outbox.is_blocked
                self.back.append(self.inbox.take_state())

    def progress(self) -> tuple[object, ...]:
        return (
            self.outbox.n_messages,
            len(self.there),
            len(self.back),
            self.inbox.accepted,
            self.inbox.acknowledged,
            len(self.taken),
            self.n_unhandled,
        )


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans(), st.integers(0, 200))
def test_everything_is_delivered_once_and_in_order_whatever_breaks(
    seed: int, handled: bool, n_steps: int
) -> None:
    rng = random.Random(seed)
    transmission = Transmission(rng, handled=handled)
    steps = [
        transmission.offer,
        transmission.offer,
        transmission.send,
        transmission.arrive,
        transmission.take,
        transmission.handle,
        transmission.report,
        transmission.learn,
    ]
    for _ in range(n_steps):
        rng.choice(steps)()
        if rng.random() < 0.03:
            transmission.connect()
        assert transmission.inbox.n_bytes <= max(transmission.capacity, 60)
    transmission.finish()
    while len(transmission.inbox):
        transmission.take()
    assert transmission.taken == list(range(transmission.n_offered))
    assert transmission.outbox.n_bytes == 0


def test_a_sender_never_waits_for_a_heartbeat() -> None:
    for seed in range(50):
        transmission = Transmission(random.Random(seed), handled=seed % 2 == 1)
        for _ in range(500):
            transmission.offer()
            for step in (
                transmission.send,
                transmission.arrive,
                transmission.take,
                transmission.handle,
            ):
                step()
            if transmission.inbox.is_due:
                transmission.back.append(transmission.inbox.take_state())
            transmission.learn()
        assert len(transmission.taken) > 100
