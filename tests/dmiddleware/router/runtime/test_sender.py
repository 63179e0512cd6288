"""The sender: replies to parked polls, and frames on data channels."""

from __future__ import annotations

import pytest

from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session import ParkedPoll, PeerSession, Request
from dmiddleware.router.runtime.sender import Sender
from dmiddleware.router.transport import Reply
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.envelope import encode_event
from dmiddleware.router.wire.frame import FrameType
from tests.dmiddleware.router.node_pairs import CODEC, emit, exchange, join, make_node, taken


class Polls:
    """Polls of a dialer, parked at the listener's sender."""

    def __init__(self, dialer: NodeProtocol, listener: NodeProtocol, peer: PeerSession) -> None:
        self.dialer, self.listener, self.peer = dialer, listener, peer
        self.sender = Sender(listener)
        self.requests: list[Request] = []
        self.replies: list[WireBytes | None] = []

    def park(self, now: float = 0.0) -> None:
        self.requests.append(self.dialer.request(self.peer, FrameType.POLL))
        parked, _ = self.listener.on_request(self.requests[-1].raw, now, cover_body=True)
        assert isinstance(parked, ParkedPoll)
        self.sender.park(parked, self._reply)

    def _reply(self, raw: WireBytes | None, *, urgent: bool = False) -> None:
        self.replies.append(raw)

    def read(self, now: float = 0.0) -> list[FrameType]:
        kinds = []
        for answer in self.replies:
            assert answer is not None
            request = self.requests.pop(0)
            kinds.append(self.dialer.on_reply(self.peer, request, bytes(answer), now))
        self.replies.clear()
        return kinds


@pytest.fixture
def polls() -> Polls:
    dialer, listener = make_node("1"), make_node("0")
    peer = join(dialer, listener)
    exchange(dialer, listener, peer)
    assert taken(dialer) == taken(listener) == []
    return Polls(dialer, listener, peer)


def run(sender: Sender, now: float = 0.0, node_ids: tuple[str, ...] | None = None) -> int:
    sends = sender.take_sends(now, ("1", "0") if node_ids is None else node_ids)
    for send in sends:
        send()
    return len(sends)


def test_a_parked_poll_gets_a_reply_when_there_is_something_to_send(polls: Polls) -> None:
    polls.park()
    assert run(polls.sender) == 0
    assert emit(polls.listener, "1", "e", 1)
    assert run(polls.sender, node_ids=("somebody else",)) == 0
    assert run(polls.sender, node_ids=("1",)) == 1
    assert polls.read() == [FrameType.DATA]
    assert taken(polls.dialer) == [("0", "e", 1)]


def test_each_poll_gets_one_frame(polls: Polls) -> None:
    for number in range(3):
        assert emit(polls.listener, "1", "e", b"%3d" % number + bytes(150))
    assert run(polls.sender) == 0
    polls.requests.append(polls.dialer.request(polls.peer, FrameType.POLL))
    answer, _ = polls.listener.on_request(polls.requests[-1].raw, 0.0, cover_body=True)
    assert not isinstance(answer, ParkedPoll), "waiting events are sent at once"
    polls.replies.append(answer)
    assert run(polls.sender) == 0
    assert polls.read() == [FrameType.DATA]
    assert len(taken(polls.dialer)) == 1


def test_polls_of_an_ended_session_are_refused(polls: Polls) -> None:
    polls.park()
    join(polls.dialer, polls.listener)
    assert run(polls.sender) == 1
    assert len(polls.replies) == 1
    assert emit(polls.listener, "1", "e", 1)
    assert run(polls.sender) == 0


class FakeChannel:
    """A data channel with room for two frames."""

    def __init__(self, peer: PeerSession) -> None:
        self.peer = peer
        self.reserved = 0
        self.sent: list[Request] = []

    @property
    def has_room(self) -> bool:
        return self.reserved < 2

    def reserve(self) -> None:
        self.reserved += 1

    def send(self, request: Request) -> None:
        self.sent.append(request)


def test_a_channel_gets_as_many_frames_as_it_has_room_for() -> None:
    roomy = NodeOptions(window=4, batch_bytes=200)
    dialer, listener = (make_node(name, options=roomy) for name in ("1", "0"))
    peer = join(dialer, listener)
    exchange(dialer, listener, peer)
    sender, way = Sender(dialer), FakeChannel(peer)
    for number in range(3):
        assert emit(dialer, "0", "e", b"%3d" % number + bytes(150))
    assert run(sender) == 0
    sender.connect(way)
    assert run(sender) == 1, "one action sends all frames of a peer"
    assert len(way.sent) == 2
    assert run(sender) == 0
    way.reserved -= 1
    assert run(sender) == 1
    sent = [request.batch.sequence for request in way.sent if request.batch is not None]
    assert sent == [2, 3, 4], "1 is the announcement"
    assert emit(dialer, "0", "e", bytes(200))
    sender.disconnect("0")
    way.reserved = 0
    assert run(sender) == 0
    sender.connect(way)
    assert run(sender) == 1


def test_two_threads_send_the_frames_of_a_peer_in_order(polls: Polls) -> None:
    """While one thread sends the first frame, another one makes and sends the second."""
    order: list[str] = []

    def reply(name: str) -> Reply:
        def note(raw: WireBytes | None, *, urgent: bool = False) -> None:
            if name == "first":
                for send in polls.sender.take_sends(0.0, ("1",)):
                    send()
            order.append(name)

        return note

    for name in ("first", "second"):
        request = polls.dialer.request(polls.peer, FrameType.POLL)
        parked, _ = polls.listener.on_request(request.raw, 0.0, cover_body=True)
        assert isinstance(parked, ParkedPoll)
        polls.sender.park(parked, reply(name))
    assert emit(polls.listener, "1", "e", 1)
    (send,) = polls.sender.take_sends(0.0, ("1",))
    polls.listener.peers["1"].outgoing.put_lossy(encode_event("e", [1], CODEC))
    send()
    assert order == ["first", "second"]


def test_peers_without_work_are_not_looked_at(polls: Polls) -> None:
    polls.park()
    assert run(polls.sender) == 0, "the session is new"
    assert polls.listener.unsent == {} and polls.sender.due == {}
    assert emit(polls.listener, "1", "e", 1)
    assert polls.sender.take_sends(0.0) == [], "its targets are passed by the engine"
    polls.listener.subscriptions.subscribe(["e"])
    assert list(polls.listener.unsent) == ["1"]
    assert len(polls.sender.take_sends(0.0)) == 1
    assert polls.sender.take_sends(0.0) == []
    assert list(polls.sender.due) == ["1"], "the frame is not acknowledged yet"
    assert polls.sender.overdue(0.5) == [] and polls.sender.overdue(1.0) == ["1"]
