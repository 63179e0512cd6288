"""The sender: replies to parked polls, and frames on data channels."""

from __future__ import annotations

import pytest

from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session import ParkedPoll, PeerSession
from dmiddleware.router.protocol.streams import EventBatch
from dmiddleware.router.runtime.sender import POLL_TIMEOUT_S, Sender
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.frame import FrameType
from tests.dmiddleware.router.node_pairs import emit, exchange, join, make_node, taken


class Polls:
    """Polls of a dialer, parked at the listener's sender."""

    def __init__(self, dialer: NodeProtocol, listener: NodeProtocol, peer: PeerSession) -> None:
        self.dialer, self.listener, self.peer = dialer, listener, peer
        self.sender = Sender(listener)
        self.replies: list[WireBytes | None] = []

    def park(self, now: float = 0.0) -> None:
        raw = self.dialer.request(self.peer, FrameType.POLL)
        parked = self.listener.on_request(raw, now, cover_body=True)
        assert isinstance(parked, ParkedPoll)
        self.sender.park(parked, self.replies.append, now)

    def read(self, now: float = 0.0) -> list[FrameType]:
        kinds = []
        for answer in self.replies:
            assert answer is not None
            kinds.append(self.dialer.on_reply(self.peer, bytes(answer), now))
        self.replies.clear()
        return kinds


@pytest.fixture
def polls() -> Polls:
    dialer, listener = make_node("collector"), make_node("learner")
    peer = join(dialer, listener)
    exchange(dialer, listener, peer)
    assert taken(dialer) == taken(listener) == []
    return Polls(dialer, listener, peer)


def run(sender: Sender, now: float = 0.0, node_ids: tuple[str, ...] | None = None) -> int:
    sends = sender.take_sends(now, node_ids)
    for send in sends:
        send()
    return len(sends)


def test_a_parked_poll_gets_a_reply_when_there_is_something_to_send(polls: Polls) -> None:
    polls.park()
    assert run(polls.sender) == 0
    assert emit(polls.listener, "collector", "e", 1)
    assert run(polls.sender, node_ids=("somebody else",)) == 0
    assert run(polls.sender, node_ids=("collector",)) == 1
    assert polls.read() == [FrameType.DATA]
    assert taken(polls.dialer) == [("learner", "e", 1)]


def test_each_poll_gets_one_frame(polls: Polls) -> None:
    for number in range(3):
        assert emit(polls.listener, "collector", "e", b"%3d" % number + bytes(150))
    assert run(polls.sender) == 0
    raw = polls.dialer.request(polls.peer, FrameType.POLL)
    answer = polls.listener.on_request(raw, 0.0, cover_body=True)
    assert not isinstance(answer, ParkedPoll), "waiting events are sent at once"
    polls.replies.append(answer)
    assert run(polls.sender) == 0
    assert polls.read() == [FrameType.DATA]
    assert len(taken(polls.dialer)) == 1


def test_a_poll_that_was_parked_long_enough_gets_an_empty_reply(polls: Polls) -> None:
    polls.park(0.0)
    polls.park(0.5)
    for now, kinds in (
        (POLL_TIMEOUT_S - 0.1, []),
        (POLL_TIMEOUT_S, [FrameType.NOTHING]),
        (POLL_TIMEOUT_S + 0.1, []),
    ):
        for send in polls.sender.expire_polls(now):
            send()
        assert polls.read() == kinds
    assert emit(polls.listener, "collector", "e", 1)
    assert run(polls.sender) == 1


def test_polls_of_an_ended_session_are_refused(polls: Polls) -> None:
    polls.park()
    join(polls.dialer, polls.listener)
    assert run(polls.sender) == 1
    assert len(polls.replies) == 1
    assert emit(polls.listener, "collector", "e", 1)
    assert run(polls.sender) == 0


class FakeChannel:
    """A data channel with room for two frames."""

    def __init__(self, peer: PeerSession) -> None:
        self.peer = peer
        self.reserved = 0
        self.sent: list[EventBatch] = []

    @property
    def has_room(self) -> bool:
        return self.reserved < 2

    def reserve(self) -> None:
        self.reserved += 1

    def send(self, batch: EventBatch, raw: WireBytes) -> None:
        self.sent.append(batch)


def test_a_channel_gets_as_many_frames_as_it_has_room_for() -> None:
    roomy = NodeOptions(window=4, batch_bytes=200)
    dialer, listener = (make_node(name, options=roomy) for name in ("collector", "learner"))
    peer = join(dialer, listener)
    exchange(dialer, listener, peer)
    sender, way = Sender(dialer), FakeChannel(peer)
    for number in range(3):
        assert emit(dialer, "learner", "e", b"%3d" % number + bytes(150))
    assert run(sender) == 0
    sender.connect(way)
    assert run(sender) == 2
    assert run(sender) == 0
    way.reserved -= 1
    assert run(sender) == 1
    assert [batch.sequence for batch in way.sent] == [2, 3, 4], "1 is the announcement"
    assert emit(dialer, "learner", "e", bytes(200))
    sender.disconnect("learner")
    way.reserved = 0
    assert run(sender) == 0
    sender.connect(way)
    assert run(sender) == 1
