"""The pump: what waits goes out when there is a way, and ways that wait too long are given back."""

from __future__ import annotations

import pytest

from dmiddleware.router.protocol.limits import NodeOptions
from dmiddleware.router.protocol.node import Node
from dmiddleware.router.protocol.outgoing import Sending
from dmiddleware.router.protocol.session import Link, Parked
from dmiddleware.router.runtime.sender import PARK_S, Pump
from dmiddleware.router.wire.byte_pieces import Raw
from dmiddleware.router.wire.frame import FrameType
from tests.dmiddleware.router.test_node import emit, exchange, join, make_node, taken


class Polls:
    """A dialer's polls, parked at the listener's pump."""

    def __init__(self, dialer: Node, listener: Node, link: Link) -> None:
        self.dialer, self.listener, self.link = dialer, listener, link
        self.pump = Pump(listener)
        self.answers: list[Raw | None] = []

    def park(self, now: float = 0.0) -> None:
        raw = self.dialer.request(self.link, FrameType.POLL)
        parked = self.listener.on_request(raw, now, cover_body=True)
        assert isinstance(parked, Parked)
        self.pump.park(parked, self.answers.append, now)

    def read(self, now: float = 0.0) -> list[FrameType]:
        kinds = []
        for answer in self.answers:
            assert answer is not None
            kinds.append(self.dialer.on_answer(self.link, bytes(answer), now))
        self.answers.clear()
        return kinds


@pytest.fixture
def polls() -> Polls:
    dialer, listener = make_node("collector"), make_node("learner")
    link = join(dialer, listener)
    exchange(dialer, listener, link)
    assert taken(dialer) == taken(listener) == []
    return Polls(dialer, listener, link)


def run(pump: Pump, now: float = 0.0, node_ids: tuple[str, ...] | None = None) -> int:
    moves = pump.moves(now, node_ids)
    for move in moves:
        move()
    return len(moves)


def test_a_parked_poll_is_answered_when_there_is_something_to_send(polls: Polls) -> None:
    polls.park()
    assert run(polls.pump) == 0
    assert emit(polls.listener, "collector", "e", 1)
    assert run(polls.pump, node_ids=("somebody else",)) == 0
    assert run(polls.pump, node_ids=("collector",)) == 1
    assert polls.read() == [FrameType.DATA]
    assert taken(polls.dialer) == [("learner", "e", 1)]


def test_no_more_goes_out_than_there_are_polls(polls: Polls) -> None:
    for number in range(3):
        assert emit(polls.listener, "collector", "e", b"%3d" % number + bytes(150))
    assert run(polls.pump) == 0
    raw = polls.dialer.request(polls.link, FrameType.POLL)
    answer = polls.listener.on_request(raw, 0.0, cover_body=True)
    assert not isinstance(answer, Parked), "a poll is answered at once if something waits"
    polls.answers.append(answer)
    assert run(polls.pump) == 0
    assert polls.read() == [FrameType.DATA]
    assert len(taken(polls.dialer)) == 1


def test_a_poll_that_was_parked_long_enough_is_told_that_there_was_nothing(polls: Polls) -> None:
    polls.park(0.0)
    polls.park(0.5)
    for now, kinds in ((PARK_S - 0.1, []), (PARK_S, [FrameType.NOTHING]), (PARK_S + 0.1, [])):
        for move in polls.pump.end_waits(now):
            move()
        assert polls.read() == kinds
    assert emit(polls.listener, "collector", "e", 1)
    assert run(polls.pump) == 1


def test_polls_of_a_session_that_is_over_are_refused(polls: Polls) -> None:
    polls.park()
    join(polls.dialer, polls.listener)
    assert run(polls.pump) == 1
    assert len(polls.answers) == 1
    assert emit(polls.listener, "collector", "e", 1)
    assert run(polls.pump) == 0


class Way:
    """A connection that takes two frames at a time."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.reserved = 0
        self.sent: list[Sending] = []

    @property
    def has_room(self) -> bool:
        return self.reserved < 2

    def reserve(self) -> None:
        self.reserved += 1

    def send(self, sending: Sending, raw: Raw) -> None:
        self.sent.append(sending)


def test_a_connection_gets_as_many_frames_as_it_takes() -> None:
    roomy = NodeOptions(window=4, batch_bytes=200)
    dialer, listener = (make_node(name, options=roomy) for name in ("collector", "learner"))
    link = join(dialer, listener)
    exchange(dialer, listener, link)
    pump, way = Pump(dialer), Way(link)
    for number in range(3):
        assert emit(dialer, "learner", "e", b"%3d" % number + bytes(150))
    assert run(pump) == 0
    pump.connect(way)
    assert run(pump) == 2
    assert run(pump) == 0
    way.reserved -= 1
    assert run(pump) == 1
    assert [sending.sequence for sending in way.sent] == [2, 3, 4], "the first told the wants"
    assert emit(dialer, "learner", "e", bytes(200))
    pump.disconnect("learner")
    way.reserved = 0
    assert run(pump) == 0
    pump.connect(way)
    assert run(pump) == 1
