"""The reliable stream: once, in order and whole, whatever the network does."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import FrameError
from dmiddleware.router.protocol.streams import Inbox, Outbox, Verdict


@dataclass(frozen=True)
class Message:
    content: int
    size: int


def message(number: int, size: int = 10) -> Message:
    return Message(number, size)


def outbox(**options: object) -> Outbox[Message]:
    return Outbox(
        **{"max_bytes": 10_000, "window": 4, "batch_bytes": 30, "retry_s": 1.0, **options}
    )  # type: ignore[arg-type]


class BadNetwork:
    """Loses, duplicates and reorders frames."""

    def __init__(self, chance: random.Random, loss: float) -> None:
        self.chance = chance
        self.loss = loss
        self.inside: list[tuple[object, ...]] = []

    def put(self, *item: object) -> None:
        for _ in range(self.chance.choice([1, 1, 2])):
            if self.chance.random() >= self.loss:
                self.inside.append(item)

    def get(self) -> list[tuple[object, ...]]:
        self.chance.shuffle(self.inside)
        count = self.chance.randrange(len(self.inside) + 1)
        out, self.inside = self.inside[:count], self.inside[count:]
        return out


def answer(receiver: Inbox[Message], back: BadNetwork, sequence: object, messages: object) -> None:
    """Accept a frame, and send what a node sends back."""
    verdict = receiver.on_frame(sequence, messages)  # type: ignore[arg-type]
    if verdict is Verdict.BUSY:
        back.put("busy", sequence, 0)
    elif sequence > receiver.acknowledged:  # type: ignore[operator]
        back.put("kept", sequence, 0)
    else:
        back.put("ack", receiver.acknowledged, receiver.credit)


def read_answers(sender: Outbox[Message], back: BadNetwork, now: float) -> None:
    for kind, sequence, credit in back.get():
        if kind == "busy":
            sender.on_busy(sequence, 0.5, now)  # type: ignore[arg-type]
        elif kind == "kept":
            sender.on_kept(sequence)  # type: ignore[arg-type]
        else:
            sender.on_ack(sequence, credit)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_messages=st.integers(1, 80),
    window=st.integers(1, 6),
    max_unhandled=st.none() | st.integers(1, 8),
    loss=st.floats(0, 0.6),
    life=st.integers(1, 30),
)
def test_the_successor_of_a_receiver_that_dies_at_any_point_sees_no_gap(
    seed: int, n_messages: int, window: int, max_unhandled: int | None, loss: float, life: int
) -> None:
    chance = random.Random(seed)
    sender = outbox(window=window)
    to_offer = [message(number) for number in range(n_messages)]
    done = 0  # all messages before this one were accepted, or handled, by one of the receivers
    for lives_for in [chance.randrange(life) for _ in range(5)] + [20_000]:
        receiver = Inbox[Message](10_000, window, max_unhandled)
        there, back = BadNetwork(chance, loss), BadNetwork(chance, loss)
        accepted: list[int] = []
        n_handled = 0
        for now in range(lives_for):
            while to_offer and sender.offer(to_offer[0]):
                to_offer.pop(0)
            while (frame := sender.next_frame(float(now))) is not None:
                there.put(frame.sequence, frame.messages)
            for sequence, messages in there.get():
                answer(receiver, back, sequence, messages)
            accepted += [m.content for m in receiver.take(chance.randrange(4))]
            while max_unhandled and n_handled < len(accepted) and chance.random() < 0.7:
                receiver.on_handled()
                n_handled += 1
            # Heartbeats repeat the newest acknowledgment.
            back.put("ack", receiver.acknowledged, receiver.credit)
            read_answers(sender, back, float(now))
            if not to_offer and sender.empty:
                break
        if max_unhandled is None:
            accepted += [m.content for m in receiver.take()]
            n_handled = len(accepted)
        first = accepted[0] if accepted else done
        assert first <= done
        assert accepted == list(range(first, first + len(accepted)))
        done = max(done, first + n_handled)
        assert sender.counters.acknowledged <= done
        sender.on_reconnect(0.0)
        sender.on_new_peer()
    assert done == n_messages


def test_a_frame_that_arrives_early_is_neither_acknowledged_nor_sent_again() -> None:
    sender, receiver = outbox(), Inbox[Message](1000, 4)
    frames = []
    for number in range(3):
        sender.push(message(number, 30))
        frame = sender.next_frame(0.0)
        assert frame is not None
        frames.append(frame)
    for frame in frames[1:]:
        assert receiver.on_frame(frame.sequence, frame.messages) is Verdict.ACCEPTED
        assert receiver.acknowledged == 0
        sender.on_kept(frame.sequence)
    assert sender.n_messages == 3
    sender.on_reconnect(0.5)
    assert sender.next_frame(5.0) is frames[0]
    assert sender.next_frame(5.0) is None
    assert receiver.on_frame(1, frames[0].messages) is Verdict.ACCEPTED
    assert receiver.acknowledged == 3
    sender.on_ack(3, receiver.credit)
    assert sender.empty and sender.n_bytes == 0


def test_a_frame_is_acknowledged_when_all_its_messages_were_handled() -> None:
    box = Inbox[Message](1000, 8, 4)
    for sequence, count in ((1, 2), (2, 0), (3, 5)):
        box.on_frame(sequence, [message(0)] * count)
    assert len(box.take(100)) == 4
    assert not box.has_ready and box.take(100) == []
    assert not box.on_handled()
    assert box.on_handled() and box.acknowledged == 2
    assert box.has_ready and len(box.take(100)) == 2
    handled = [box.on_handled() for _ in range(4)]
    assert handled == [False] * 4
    assert len(box.take(100)) == 1
    assert box.on_handled() and box.acknowledged == 3


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=80),
    window=st.integers(1, 6),
    inbox_bytes=st.integers(1, 200),
    hold_bytes=st.integers(0, 50),
    loss=st.floats(0, 0.6),
)
def test_a_lossy_network_delivers_everything_once_in_order(
    seed: int, sizes: list[int], window: int, inbox_bytes: int, hold_bytes: int, loss: float
) -> None:
    chance = random.Random(seed)
    sender = Outbox[Message](
        max_bytes=100, window=window, batch_bytes=50, hold_bytes=hold_bytes, retry_s=1.0
    )
    receiver = Inbox[Message](inbox_bytes, window)
    there, back = BadNetwork(chance, loss), BadNetwork(chance, loss)
    to_offer = [Message(number, size) for number, size in enumerate(sizes)]
    got: list[int] = []
    for now in range(20_000):
        while to_offer and sender.offer(to_offer[0]):
            to_offer.pop(0)
        while (frame := sender.next_frame(float(now))) is not None:
            there.put(frame.sequence, frame.messages)
        for sequence, messages in there.get():
            answer(receiver, back, sequence, messages)
        read_answers(sender, back, float(now))
        assert receiver.n_bytes <= inbox_bytes + 2 * max(*sizes, 50)
        got += [m.content for m in receiver.take(chance.randrange(4))]
        if not to_offer and sender.empty:
            break
    got += [m.content for m in receiver.take()]
    assert got == list(range(len(sizes)))
    assert sender.counters.acknowledged == sender.counters.accepted == len(sizes)
    assert sender.n_bytes == receiver.n_bytes == 0


def test_messages_are_held_back_while_a_frame_is_pending_until_there_are_enough() -> None:
    box = outbox(hold_bytes=25)
    assert box.offer(message(0))
    first = box.next_frame(0.0)
    assert first is not None and len(first.messages) == 1, "with nothing pending it is sent at once"
    for number in (1, 2):
        assert box.offer(message(number))
        assert box.next_frame(0.1) is None
    assert box.offer(message(3))
    joined = box.next_frame(0.1)
    assert joined is not None and [m.content for m in joined.messages] == [1, 2, 3]
    assert box.offer(message(4))
    assert box.next_frame(0.1) is None
    box.on_ack(first.sequence, 1000)
    assert box.next_frame(0.1) is None
    box.on_ack(joined.sequence, 1000)
    last = box.next_frame(0.1)
    assert last is not None and [m.content for m in last.messages] == [4]


def test_waiting_bytes_are_recounted_for_a_new_peer() -> None:
    box = outbox(hold_bytes=25)
    for number in range(3):
        assert box.offer(message(number))
        box.next_frame(0.0)
    box.on_new_peer()
    frame = box.next_frame(0.0)
    assert frame is not None and [m.content for m in frame.messages] == [0, 1, 2]
    for number in (3, 4, 5):
        assert box.next_frame(0.1) is None
        assert box.offer(message(number))
    assert box.next_frame(0.1) is not None


def test_small_messages_share_a_frame_up_to_the_batch_size() -> None:
    box = outbox()
    for number in range(5):
        assert box.offer(message(number))
    first, second = box.next_frame(0.0), box.next_frame(0.0)
    assert first is not None and [m.content for m in first.messages] == [0, 1, 2]
    assert second is not None and [m.content for m in second.messages] == [3, 4]
    assert box.next_frame(0.0) is None


def test_a_full_outbox_refuses_until_an_acknowledgment_makes_room() -> None:
    box = outbox(max_bytes=25)
    assert box.offer(message(0)) and box.offer(message(1))
    assert not box.offer(message(2))
    frame = box.next_frame(0.0)
    assert frame is not None
    box.on_ack(frame.sequence, 100)
    assert box.offer(message(2))


def test_an_empty_outbox_accepts_a_message_of_any_size() -> None:
    assert outbox(max_bytes=5).offer(message(0, 100))


def test_the_window_bounds_the_number_of_unacknowledged_frames() -> None:
    box = outbox(batch_bytes=1, window=2)
    for number in range(3):
        box.offer(message(number))
    assert box.next_frame(0.0) is not None and box.next_frame(0.0) is not None
    assert box.next_frame(0.0) is None
    box.on_kept(2)
    assert box.next_frame(0.0) is None, "the receiver is still waiting for frame 1"
    box.on_ack(1, 1000)
    third = box.next_frame(0.0)
    assert third is not None and third.sequence == 3


def test_an_unacknowledged_frame_is_sent_again_under_its_number() -> None:
    box = outbox()
    box.offer(message(0))
    first = box.next_frame(0.0)
    assert first is not None and box.next_frame(0.9) is None
    assert box.next_time() == 1.0
    again = box.next_frame(1.0)
    assert again is not None
    assert (again.sequence, again.attempts, box.counters.retried_frames) == (1, 2, 1)


def test_a_frame_is_sent_to_a_busy_receiver_again_after_the_delay() -> None:
    box = outbox()
    box.offer(message(0))
    box.next_frame(0.0)
    box.on_busy(1, 0.2, 0.0)
    assert box.next_frame(0.1) is None
    assert box.next_frame(0.2) is not None


def test_without_credit_one_frame_is_sent_as_a_probe() -> None:
    box = outbox(batch_bytes=1)
    for number in range(3):
        box.offer(message(number))
    box.next_frame(0.0)
    box.on_ack(1, 0)
    asking = box.next_frame(0.0)
    assert asking is not None and asking.sequence == 2
    assert box.next_frame(0.0) is None


def test_all_pending_frames_are_sent_again_after_a_reconnect() -> None:
    box = outbox(batch_bytes=1)
    box.offer(message(0))
    box.offer(message(1))
    box.next_frame(0.0), box.next_frame(0.0)
    box.on_reconnect(0.1)
    again = [box.next_frame(0.1), box.next_frame(0.1)]
    assert [frame.sequence for frame in again if frame] == [1, 2]


def test_a_new_incarnation_gets_the_unacknowledged_messages_of_the_old_one() -> None:
    box = outbox(batch_bytes=1)
    for number in range(4):
        box.offer(message(number))
    for _ in range(3):
        box.next_frame(0.0)
    box.on_ack(1, 1000)
    box.on_new_peer()
    assert [m.content for m in box.unacknowledged()] == [1, 2, 3]
    frame = box.next_frame(0.0)
    assert frame is not None and (frame.sequence, frame.messages[0].content) == (1, 1)


def test_a_duplicate_is_acknowledged_and_not_delivered() -> None:
    box: Inbox[Message] = Inbox(100, 4)
    assert box.on_frame(1, [message(0)]) is Verdict.ACCEPTED
    assert box.on_frame(1, [message(0)]) is Verdict.DUPLICATE
    assert box.on_frame(3, [message(2)]) is Verdict.ACCEPTED
    assert box.on_frame(3, [message(2)]) is Verdict.DUPLICATE
    assert [m.content for m in box.take()] == [0]
    assert box.counters.duplicates == 2


def test_a_full_inbox_is_busy_and_accepts_the_frame_later() -> None:
    box: Inbox[Message] = Inbox(15, 4)
    assert box.on_frame(1, [message(0)]) is Verdict.ACCEPTED
    assert box.credit == 5
    assert box.on_frame(2, [message(1)]) is Verdict.BUSY
    box.take()
    assert box.on_frame(2, [message(1)]) is Verdict.ACCEPTED


def test_a_full_inbox_accepts_the_frame_that_fills_a_gap() -> None:
    box: Inbox[Message] = Inbox(10, 4)
    assert box.on_frame(2, [message(1)]) is Verdict.ACCEPTED
    assert box.on_frame(1, [message(0)]) is Verdict.ACCEPTED
    assert [m.content for m in box.take()] == [0, 1]


@pytest.mark.parametrize("sequence", [0, -1, 5, 2**63])
def test_a_number_outside_the_window_is_refused(sequence: int) -> None:
    with pytest.raises(FrameError, match="window of 4"):
        Inbox[Message](100, 4).on_frame(sequence, [])


def test_taking_large_messages_stops_at_the_byte_limit_but_returns_one() -> None:
    box: Inbox[Message] = Inbox(100, 4)
    box.on_frame(1, [message(number) for number in range(5)])
    assert [m.content for m in box.take(max_bytes=25)] == [0, 1]
    assert box.credit == 70
    assert [m.content for m in box.take(max_bytes=1)] == [2]
    assert [m.content for m in box.take(1, max_bytes=25)] == [3]
    assert [m.content for m in box.take()] == [4]
