"""The protocol of a node: two nodes over any network, from the handshake to the goodbye."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, FrameError, FrameTooLarge, HandshakeRefused
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session import ParkedPoll, PeerSession, Request
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.envelope import EncodedEvent, encode_event
from dmiddleware.router.wire.frame import FrameType, OutgoingFrame
from tests.dmiddleware.router.node_pairs import (
    CODEC,
    OPTIONS,
    asked,
    emit,
    exchange,
    join,
    make_node,
    replied,
    taken,
)


@pytest.fixture
def pair() -> tuple[NodeProtocol, NodeProtocol, PeerSession]:
    dialer, listener = make_node("1"), make_node("0")
    return dialer, listener, join(dialer, listener)


def test_peers_learn_each_others_subscriptions(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    dialer.subscriptions.subscribe(["weights"])
    listener.subscriptions.subscribe(["traj*"])
    exchange(dialer, listener, peer)
    assert taken(dialer) == taken(listener) == []
    assert dialer.subscriptions.subscribers("trajectories") == ("0",)
    assert dialer.subscriptions.subscribers("weights") == ()
    assert listener.subscriptions.subscribers("weights") == ("1",)
    assert [change.kind for change in dialer.changes + listener.changes] == ["joined", "joined"]
    assert [identity.node_id for identity in listener.connected_peers()] == ["1"]


def test_invalid_announcements_are_counted_and_ignored(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    dialer.subscriptions.subscribe(["weights"])
    exchange(dialer, listener, peer)
    assert taken(listener) == []
    dialer.offer("0", EncodedEvent("$wants", b"\xc1", (), 1))
    emit(dialer, "0", "e", 1)
    exchange(dialer, listener, peer)
    assert taken(listener) == [("1", "e", 1)]
    assert listener.n_refused == 1
    assert listener.subscriptions.subscribers("weights") == ("1",)


def test_events_arrive_in_order_both_ways(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    for number in range(6):
        assert emit(dialer, "0", "up", number)
        assert emit(listener, "1", "down", number)
    exchange(dialer, listener, peer)
    assert taken(listener) == [("1", "up", number) for number in range(6)]
    assert taken(dialer) == [("0", "down", number) for number in range(6)]


class World:
    """A dialer and a listener over a network that loses and delays frames, and reconnects."""

    def __init__(self, seed: int, loss: float) -> None:
        self.chance = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.dialer, self.listener = make_node("1"), make_node("0")
        self.peer = join(self.dialer, self.listener)
        self.wire: list[Callable[[], None]] = []
        self.parked: list[tuple[ParkedPoll, Request]] = []

    def lost(self) -> bool:
        return self.chance.random() < self.loss

    def request(self, request: Request) -> None:
        def arrive() -> None:
            try:
                answer, _ = self.listener.on_request(bytes(request.raw), self.now, cover_body=True)
            except AuthError:
                return  # a duplicate
            if isinstance(answer, ParkedPoll):
                self.parked.append((answer, request))
            else:
                self.answer(answer, request)

        for _ in range(self.chance.choice([1, 1, 1, 2])):
            if not self.lost():
                self.wire.append(arrive)

    def answer(self, raw: WireBytes, request: Request) -> None:
        peer = self.peer

        def arrive() -> None:
            # Of an ended session, or a duplicate.
            with contextlib.suppress(HandshakeRefused, AuthError):
                self.dialer.on_reply(peer, request, bytes(raw), self.now)

        for _ in range(self.chance.choice([1, 1, 1, 2])):
            if not self.lost():
                self.wire.append(arrive)

    def step(self) -> None:
        self.now += 0.3
        if self.chance.random() < 0.02:
            self.peer = join(self.dialer, self.listener, self.now)
        while (request := self.dialer.data_request(self.peer, self.now)) is not None:
            self.request(request)
        self.request(self.dialer.request(self.peer, FrameType.POLL))
        self.parked = [parked for parked in self.parked if not self.resume(*parked)]
        self.chance.shuffle(self.wire)
        for _ in range(self.chance.randrange(len(self.wire) + 1)):
            self.wire.pop()()

    def resume(self, parked: ParkedPoll, request: Request) -> bool:
        answer = self.listener.resume(parked, self.now)
        if answer is not None:
            self.answer(answer, request)
        return answer is not None


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    loss=st.floats(0, 0.5),
    up=st.lists(st.integers(0, 300), max_size=30),
    down=st.lists(st.integers(0, 300), max_size=30),
)
def test_any_network_delivers_all_once_in_order_both_ways(
    seed: int, loss: float, up: list[int], down: list[int]
) -> None:
    world = World(seed, loss)
    to_send = {"0": list(enumerate(up)), "1": list(enumerate(down))}
    got: dict[str, list[Any]] = {"0": [], "1": []}
    nodes = {"0": world.listener, "1": world.dialer}
    for _ in range(20_000):
        for target, source in (("0", world.dialer), ("1", world.listener)):
            queue = to_send[target]
            while queue and emit(source, target, "e", (queue[0][0], bytes(queue[0][1]))):
                queue.pop(0)
            got[target] += [value[0] for _, _, value in taken(nodes[target])]
        if [len(got["0"]), len(got["1"])] == [len(up), len(down)]:
            break
        world.step()
    assert got == {"0": list(range(len(up))), "1": list(range(len(down)))}


def test_a_latest_event_replaces_one_that_was_not_sent(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    for version in range(5):
        listener.peers["1"].outgoing.put_latest(encode_event("weights", version, CODEC))
    exchange(dialer, listener, peer)
    assert taken(dialer) == [("0", "weights", 4)]
    assert listener.peers["1"].outgoing.counters.superseded == 4


def test_an_older_version_that_arrives_late_is_not_delivered(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    outgoing = dialer.peers["0"].outgoing
    outgoing.put_latest(encode_event("weights", 1, CODEC))
    first = dialer.data_request(peer, 0.0)
    outgoing.put_latest(encode_event("weights", 2, CODEC))
    second = dialer.data_request(peer, 2.0)
    assert first is not None and second is not None
    replied(listener, second.raw, 2.0)
    replied(listener, first.raw, 2.0)
    assert [value for _, event, value in taken(listener) if event == "weights"] == [2]


def test_lossy_events_over_the_bound_are_dropped_and_counted(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    outgoing = pair[0].peers["0"].outgoing
    for number in range(1030):
        outgoing.put_lossy(encode_event("metric", number, CODEC))
    assert outgoing.counters.dropped == 6


def test_a_full_outbox_refuses_and_a_slow_reader_makes_the_sender_wait(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    sent = 0
    for _ in range(100):
        while emit(dialer, "0", "e", (sent, bytes(100))):
            sent += 1
        request = dialer.data_request(peer, 0.0)
        if request is None:
            break
        dialer.on_reply(peer, request, replied(listener, request.raw, 0.0), 0.0)
    bound = OPTIONS.outbox_bytes + OPTIONS.inbox_bytes + 2 * OPTIONS.batch_bytes
    assert 0 < sent * 100 <= bound
    assert dialer.peers["0"].outgoing.outbox.counters.refused_frames > 0


def test_a_silent_peer_leaves_and_gets_the_accepted_events_when_it_rejoins(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    dialer.subscriptions.subscribe(["e"])
    exchange(dialer, listener, peer)
    taken(listener)
    assert listener.tick(4.0) == []
    assert [change.kind for change in listener.changes] == ["joined", "left"]
    assert listener.subscriptions.subscribers("e") == ("1",)
    emit(listener, "1", "e", "kept")
    peer = join(dialer, listener, 50.0)
    assert listener.changes[-1].kind == "rejoined"
    exchange(dialer, listener, peer, 50.0)
    assert ("0", "e", "kept") in taken(dialer)


def test_a_peer_that_is_gone_for_too_long_is_forgotten_and_may_rejoin(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    dialer.subscriptions.subscribe(["e"])
    exchange(dialer, listener, peer)
    taken(listener)
    emit(listener, "1", "e", "lost one")
    under_way = dialer.request(peer, FrameType.POLL)
    replied(listener, under_way.raw, 0.0)  # sent, and lost by the network
    listener.tick(4.0)
    assert listener.tick(200.0) == [("1", 1)]
    assert listener.subscriptions.subscribers("e") == ()
    peer = join(dialer, listener, 300.0)
    assert listener.subscriptions.subscribers("e") == ("1",)
    emit(listener, "1", "e", "after")
    exchange(dialer, listener, peer, 300.0)
    assert taken(dialer) == [("0", "e", "after")]


def test_a_forgotten_peer_gets_the_latest_event_when_it_rejoins(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    dialer.subscriptions.subscribe(["weights"])
    exchange(dialer, listener, peer)
    taken(listener)
    listener.subscriptions.put_latest(encode_event("weights", 1, CODEC))
    listener.tick(4.0)
    listener.tick(200.0)
    listener.subscriptions.put_latest(encode_event("weights", 2, CODEC))
    peer = join(dialer, listener, 300.0)
    exchange(dialer, listener, peer, 300.0)
    assert taken(dialer) == [("0", "weights", 2)]


def test_a_forgotten_peer_gets_new_subscriptions_when_it_rejoins(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    listener.tick(4.0)
    listener.subscriptions.subscribe(["early"])
    listener.tick(200.0)
    waiting = listener.peers["1"].outgoing.outbox.n_messages
    listener.subscriptions.subscribe(["early", "late"])
    assert listener.peers["1"].outgoing.outbox.n_messages == waiting
    peer = join(dialer, listener, 300.0)
    exchange(dialer, listener, peer, 300.0)
    assert taken(dialer) == []
    assert (
        dialer.subscriptions.subscribers("early")
        == dialer.subscriptions.subscribers("late")
        == ("0",)
    )


def test_a_forgotten_peer_may_continue_in_its_old_session(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    dialer.subscriptions.subscribe(["e", "weights"])
    exchange(dialer, listener, peer)
    taken(listener)
    listener.subscriptions.put_latest(encode_event("weights", 1, CODEC))
    listener.tick(4.0)
    listener.tick(200.0)
    assert listener.subscriptions.subscribers("e") == ()
    # Like a process that was stopped while its connection stayed open.
    replied(listener, dialer.request(peer, FrameType.HEARTBEAT).raw, 201.0)
    assert listener.changes[-1].kind == "rejoined"
    assert listener.subscriptions.subscribers("e") == ("1",)
    emit(listener, "1", "e", "after")
    exchange(dialer, listener, peer, 201.0)
    assert taken(dialer) == [("0", "weights", 1), ("0", "e", "after")]


def test_emitting_to_a_forgotten_peer_does_not_block(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    _, listener, _ = pair
    while emit(listener, "1", "e", bytes(500)):
        pass
    listener.tick(4.0)
    ((_, undelivered),) = listener.tick(200.0)
    assert undelivered == 3
    for _ in range(10):
        assert emit(listener, "1", "e", bytes(500)) is None
    assert listener.peers["1"].outgoing.empty
    assert listener.undelivered == {"1": {"e": 3}}


def test_a_restarted_peer_gets_the_events_that_waited_for_it(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    _, listener, _ = pair
    emit(listener, "1", "e", "waiting")
    listener.on_connection_lost("1", "its connection broke", 1.0)
    again = make_node("1", start=2)
    peer = join(again, listener, 1.0)
    exchange(again, listener, peer, 1.0)
    assert ("0", "e", "waiting") in taken(again)
    assert [change.kind for change in listener.changes] == ["joined", "left", "rejoined"]


def test_goodbye_ends_the_session(pair: tuple[NodeProtocol, NodeProtocol, PeerSession]) -> None:
    dialer, listener, peer = pair
    assert asked(dialer, listener, peer, FrameType.BYE) is FrameType.BYE
    assert listener.peers == {} and listener.changes[-1].reason == "said goodbye"
    with pytest.raises(HandshakeRefused) as refused:
        asked(dialer, listener, peer, FrameType.POLL)
    assert refused.value.code == "stale"


def test_events_for_a_peer_that_says_goodbye_are_dropped_and_counted(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    for number in range(3):
        emit(listener, "1", "e", number)
    assert asked(dialer, listener, peer, FrameType.BYE) is FrameType.BYE
    assert listener.changes[-1].reason == (
        "said goodbye; 3 events that it had not accepted were dropped"
    )
    assert listener.undelivered == {"1": {"e": 3}}
    assert emit(listener, "1", "e", 3) is None


def test_a_node_that_leaves_says_goodbye_whatever_is_still_waiting(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    emit(listener, "1", "e", "waiting")
    listener.say_goodbye()
    assert asked(dialer, listener, peer, FrameType.POLL) is FrameType.BYE
    assert dialer.peers == {}


def test_a_node_that_accepts_nothing_leaves_the_events_to_its_successor(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    dialer.subscriptions.subscribe(["e"])
    exchange(dialer, listener, peer)
    listener.accepting = False
    assert emit(dialer, "0", "e", "waiting")
    request = dialer.data_request(peer, 1.0)
    assert request is not None
    reply = replied(listener, request.raw, 1.0)
    assert dialer.on_reply(peer, request, reply, 1.0) is FrameType.BUSY
    dialer.on_connection_lost("0", "its connection broke", 2.0)
    again = make_node("0", start=2)
    peer = join(dialer, again, 2.0)
    exchange(dialer, again, peer, 2.0)
    assert ("1", "e", "waiting") in taken(again)


def test_a_successor_inherits_subscriptions_until_it_is_ready() -> None:
    dialer, listener = make_node("1"), make_node("0")
    peer = join(dialer, listener)
    dialer.subscriptions.subscribe(["a", "b"])
    exchange(dialer, listener, peer)
    taken(listener)
    listener.on_connection_lost("1", "its connection broke", 0.0)
    again = make_node("1", start=2)
    peer = join(again, listener)
    for patterns in ((), ("a",)):
        again.subscriptions.subscribe(patterns)
        exchange(again, listener, peer)
        taken(listener)
        assert listener.subscriptions.subscribers("b") == ("1",)
    again.subscriptions.announce_ready()
    exchange(again, listener, peer)
    taken(listener)
    assert listener.subscriptions.subscribers("a") == ("1",)
    assert listener.subscriptions.subscribers("b") == ()


def test_a_successor_gets_the_frames_that_its_predecessor_received_too_early() -> None:
    options = NodeOptions(retry_s=1.0, batch_bytes=200)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    peer = join(dialer, listener)
    exchange(dialer, listener, peer)
    requests = []
    for number in range(3):
        emit(dialer, "0", "e", [number, bytes(250)])
        request = dialer.data_request(peer, 0.0)
        assert request is not None
        requests.append(request)
    for request in requests[1:]:
        dialer.on_reply(peer, request, replied(listener, request.raw, 0.0), 0.0)
    assert dialer.data_request(peer, 10.0) is not None, "the first frame is sent again"
    assert dialer.data_request(peer, 10.0) is None, "the others have arrived"
    dialer.on_connection_lost("0", "it died", 10.0)
    again = make_node("0", start=2, options=options)
    peer = join(dialer, again, 11.0)
    exchange(dialer, again, peer, 11.0)
    assert [value[0] for _, event, value in taken(again) if event == "e"] == [0, 1, 2]


@pytest.mark.parametrize("listener_sends", [False, True])
@pytest.mark.parametrize("lost", [False, True])
def test_the_acknowledgment_of_handled_events_is_sent_at_once_and_with_each_heartbeat(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession], listener_sends: bool, lost: bool
) -> None:
    dialer, listener, peer = pair
    exchange(dialer, listener, peer)
    sender, receiver = (listener, dialer) if listener_sends else (dialer, listener)
    (name,) = sender.peers
    for number in range(3):
        assert emit(sender, name, "e", number, handled=True)
        exchange(dialer, listener, peer)
    emit(sender, name, "f", "not held up")
    exchange(dialer, listener, peer)
    outgoing = sender.peers[name].outgoing
    assert outgoing.outbox.empty and outgoing.n_messages == 3
    assert [event[1] for event in taken(receiver)] == ["f"]
    handled = receiver.take_handled(100)
    assert [event.event for _, event in handled] == ["e"] * 3
    for one, _ in handled:
        receiver.on_handled(one)
    if not lost:
        exchange(dialer, listener, peer)
    elif listener_sends:
        assert dialer.data_request(peer, 0.0) is not None
    else:
        replied(listener, dialer.request(peer, FrameType.POLL).raw, 0.0)
    assert outgoing.empty is not lost
    asked(dialer, listener, peer, FrameType.HEARTBEAT)
    assert outgoing.empty


@pytest.mark.parametrize("sender_leaves", [False, True])
def test_held_events_and_those_after_them_are_taken_later_and_in_order(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession], sender_leaves: bool
) -> None:
    dialer, listener, peer = pair
    listener.hold(lambda event: event.event == "early")
    for name in ("a", "early", "b"):
        emit(dialer, "0", name, 0)
    exchange(dialer, listener, peer)
    assert taken(listener) == [("1", "a", 0)]
    if sender_leaves:
        asked(dialer, listener, peer, FrameType.BYE)
    assert taken(listener) == []
    assert not listener.has_events
    listener.hold(None)
    assert listener.has_events
    assert taken(listener) == [("1", "early", 0), ("1", "b", 0)]


@pytest.mark.parametrize("returns", [False, True])
def test_events_sent_before_a_peer_left_are_delivered(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession], returns: bool
) -> None:
    dialer, listener, peer = pair
    emit(dialer, "0", "e", "last words")
    exchange(dialer, listener, peer)
    if returns:
        listener.on_connection_lost("1", "its connection broke", 1.0)
        join(make_node("1", start=2), listener, 1.0)
    else:
        replied(listener, dialer.request(peer, FrameType.BYE).raw, 0.0)
    assert listener.has_events
    assert taken(listener) == [("1", "e", "last words")]


def test_a_replayed_request_is_refused(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    raw = dialer.request(peer, FrameType.HEARTBEAT).raw
    replied(listener, raw, 0.0)
    with pytest.raises(AuthError, match="replay"):
        replied(listener, raw, 0.1)


def test_a_heartbeat_may_be_overtaken_by_thousands_of_requests(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    made_early = dialer.request(peer, FrameType.HEARTBEAT).raw
    for _ in range(4000):
        raw = dialer.request(peer, FrameType.HEARTBEAT).raw
        replied(listener, raw, 0.0)
    assert replied(listener, made_early, 0.0)
    for old in (made_early, raw):
        with pytest.raises(AuthError, match="replay"):
            replied(listener, old, 0.0)


def test_a_request_below_the_replay_window_is_refused(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    made_early = dialer.request(peer, FrameType.HEARTBEAT).raw
    peer.n_requests += 5000
    replied(listener, dialer.request(peer, FrameType.HEARTBEAT).raw, 0.0)
    with pytest.raises(AuthError, match="replay"):
        replied(listener, made_early, 0.0)


def test_a_reply_counts_once_and_only_for_its_request(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    first, second = (dialer.request(peer, FrameType.HEARTBEAT) for _ in range(2))
    reply = replied(listener, first.raw, 0.0)
    with pytest.raises(AuthError, match="replay"):
        dialer.on_reply(peer, second, reply, 0.0)
    assert dialer.on_reply(peer, first, reply, 0.0) is FrameType.HEARTBEAT
    with pytest.raises(AuthError, match="replay"):
        dialer.on_reply(peer, first, reply, 0.0)
    reply = replied(listener, second.raw, 0.0)
    assert dialer.on_reply(peer, second, reply, 0.0) is FrameType.HEARTBEAT


def test_replayed_answers_do_not_keep_a_dead_listener_connected(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, listener, peer = pair
    request = dialer.request(peer, FrameType.HEARTBEAT)
    recorded = replied(listener, request.raw, 0.0)
    dialer.on_reply(peer, request, recorded, 0.0)
    for second in range(1, 4):
        request = dialer.request(peer, FrameType.HEARTBEAT)
        with pytest.raises(AuthError):
            dialer.on_reply(peer, request, recorded, float(second))
    dialer.tick(3.1)
    assert not dialer.is_connected("0")


def test_a_response_names_the_session_that_its_request_belongs_to() -> None:
    dialer, listener = make_node("1"), make_node("0")
    handshake, hello = dialer.hello()
    challenge = listener.on_request(hello, 0.0, cover_body=True)
    auth = dialer.on_challenge(handshake, challenge.content)
    welcome = listener.on_request(auth, 0.0, cover_body=True)
    peer = dialer.on_welcome(handshake, welcome.content, 0.0, cover_body=True)
    heartbeat = dialer.request(peer, FrameType.HEARTBEAT)
    reply = listener.on_request(heartbeat.raw, 0.0, cover_body=True)
    assert challenge.session == 0
    assert welcome.session == reply.session == peer.session.number != 0
    peer.session = replace(peer.session, number=12345)
    unknown = dialer.request(peer, FrameType.HEARTBEAT)
    assert listener.on_request(unknown.raw, 0.0, cover_body=True).session == 0


def test_a_frame_cannot_be_sent_back_to_its_sender(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    dialer, _, peer = pair
    emit(dialer, "0", "e", 1)
    request = dialer.data_request(peer, 0.0)
    assert request is not None
    with pytest.raises(AuthError):
        dialer.on_reply(peer, request, bytes(request.raw), 0.0)


def test_a_large_frame_before_authentication_is_refused(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    _, listener, _ = pair
    with pytest.raises(FrameError, match="before authentication"):
        listener.on_request(bytes(100_000), 0.0, cover_body=True)


def test_if_two_nodes_dial_each_other_the_lower_ones_connection_is_kept() -> None:
    lower, higher = make_node("1"), make_node("2")
    join(higher, lower)
    # The lower node may dial second; after that the higher one may not.
    peer = join(lower, higher)
    with pytest.raises(HandshakeRefused, match="node 1 has already dialed node 2") as refused:
        join(higher, lower)
    assert refused.value.code == "dialed"
    emit(lower, "2", "e", 1)
    exchange(lower, higher, peer)
    assert taken(higher) == [("1", "e", 1)]
    # Once that connection or that process is gone, either may dial.
    lower.on_connection_lost("2", "its connection broke", 1.0)
    join(higher, lower, 1.0)
    join(lower, higher, 2.0)
    lower.on_connection_lost("2", "its connection broke", 3.0)
    join(make_node("2", start=2), lower, 3.0)


def test_a_restarted_listener_is_known_by_its_dialers_to_be_newer() -> None:
    dialers = [make_node("1"), make_node("2")]
    join(dialers[0], make_node("0"))
    dialers[0].on_connection_lost("0", "its connection broke", 1.0)
    again = make_node("0", start=2)
    join(dialers[1], again, 1.0)
    assert again.incarnation == 1, "no peer has known its predecessor so far"
    join(dialers[0], again, 1.0)
    assert again.incarnation == 2
    # Later frames give the new number to the others.
    peer = dialers[1].peers["0"]
    asked(dialers[1], again, peer, FrameType.HEARTBEAT, 2.0)
    dialers[1].on_connection_lost("0", "its connection broke", 3.0)
    third = make_node("0", start=3)
    join(dialers[1], third, 3.0)
    assert third.incarnation == 3


def test_a_second_process_with_a_connected_node_id_is_refused_until_the_first_has_left(
    pair: tuple[NodeProtocol, NodeProtocol, PeerSession],
) -> None:
    first, listener, peer = pair
    second = make_node("1", start=2)
    with pytest.raises(HandshakeRefused, match="another process is connected as node 1") as refused:
        join(second, listener)
    assert refused.value.verified and refused.value.code == "duplicate"
    assert asked(first, listener, peer, FrameType.HEARTBEAT) is FrameType.HEARTBEAT
    assert second.incarnation == 1
    listener.tick(9.0)
    join(second, listener, 9.0)
    assert second.incarnation == 2
    with pytest.raises(HandshakeRefused, match="newer process") as refused:
        join(first, listener, 9.0)
    assert refused.value.verified and refused.value.code == "replaced"


def test_a_wrong_key_is_refused_and_counted() -> None:
    listener = make_node("0")
    with pytest.raises(HandshakeRefused, match="key"):
        join(make_node("1", key=bytes(32)), listener)
    assert listener.n_refused == 1 and listener.peers == {}


@settings(max_examples=50)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_accepted(place: int, bit: int) -> None:
    dialer, listener = make_node("1"), make_node("0")
    peer = join(dialer, listener)
    emit(dialer, "0", "e", [1, 2, 3])
    request = dialer.data_request(peer, 0.0)
    assert request is not None
    raw = bytearray(bytes(request.raw))
    raw[place % len(raw)] ^= 1 << bit
    try:
        answer = listener.on_request(bytes(raw), 0.0, cover_body=True).content
    except (AuthError, FrameError):
        answer = None
    # A changed session number is refused with a reply, everything else without one.
    assert answer is None or answer[6] == FrameType.REFUSED
    assert taken(listener) == []


def test_large_events_stay_in_the_inbox_until_they_are_taken() -> None:
    options = NodeOptions(outbox_bytes=10 << 20, inbox_bytes=10 << 20)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    peer = join(dialer, listener)
    listener.subscriptions.subscribe(["e"])
    exchange(dialer, listener, peer)
    taken(dialer)
    for number in range(3):
        assert emit(dialer, "0", "e", (number, bytes(700_000)))
    exchange(dialer, listener, peer)
    numbers = [[value[0] for _, _, value in taken(listener)] for _ in range(3)]
    assert numbers == [[0], [1], [2]]


@pytest.mark.parametrize("listener_is_small", [True, False])
def test_an_event_too_large_for_its_peer_is_refused_at_the_emitter(
    listener_is_small: bool,
) -> None:
    small, large = (NodeOptions(max_event_bytes=size) for size in (100_000, 200_000))
    listener = make_node("0", options=small if listener_is_small else large)
    dialer = make_node("1", options=large if listener_is_small else small)
    join(dialer, listener)
    sender, to = (dialer, "0") if listener_is_small else (listener, "1")
    sender.subscriptions.check_size(encode_event("e", bytes(90_000), CODEC), [to])
    with pytest.raises(FrameTooLarge, match=rf"node {to} accepts at most 99744"):
        sender.subscriptions.check_size(encode_event("e", bytes(150_000), CODEC), [to])


def test_the_largest_allowed_event_is_delivered() -> None:
    options = NodeOptions(max_event_bytes=100_000)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    peer = join(dialer, listener)
    listener.subscriptions.subscribe(["e"])
    exchange(dialer, listener, peer)
    taken(dialer)
    for value in (bytes(99_600), [np.zeros(0)] * 1_100, [np.zeros(1)] * 1_000):
        event = encode_event("e", value, CODEC)
        dialer.subscriptions.check_size(event, ["0"])
        assert dialer.offer("0", event)
        exchange(dialer, listener, peer)
    assert [len(value) for _, _, value in taken(listener)] == [99_600, 1_100, 1_000]


def test_events_of_many_small_arrays_are_split_over_frames() -> None:
    options = NodeOptions(batch_bytes=64 << 20)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    peer = join(dialer, listener)
    listener.subscriptions.subscribe(["e"])
    exchange(dialer, listener, peer)
    taken(dialer)
    event = encode_event("e", [np.zeros(0)] * 100, CODEC)
    for _ in range(100):
        assert dialer.offer("0", event)
    exchange(dialer, listener, peer)
    assert len(taken(listener) + taken(listener)) == 100


def test_large_latest_events_are_split_over_frames() -> None:
    options = NodeOptions(batch_bytes=100_000)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    peer = join(dialer, listener)
    listener.subscriptions.subscribe(["*"])
    exchange(dialer, listener, peer)
    taken(dialer)
    for name in "abc":
        dialer.subscriptions.put_latest(encode_event(name, bytes(60_000), CODEC))
    exchange(dialer, listener, peer)
    assert [name for _, name, _ in taken(listener)] == ["a", "b", "c"]


def test_a_latest_event_too_large_for_a_newcomer_is_dropped_and_counted() -> None:
    listener = make_node("0", options=NodeOptions())
    dialer = make_node("1", options=NodeOptions(max_event_bytes=100_000))
    listener.subscriptions.put_latest(encode_event("large", bytes(200_000), CODEC))
    listener.subscriptions.put_latest(encode_event("small", 1, CODEC))
    peer = join(dialer, listener)
    dialer.subscriptions.subscribe(["large", "small"])
    exchange(dialer, listener, peer)
    taken(listener)
    exchange(dialer, listener, peer)
    assert [name for _, name, _ in taken(dialer)] == ["small"]
    assert listener.peers["1"].outgoing.counters.dropped == 1


def test_a_restarted_peer_misses_nothing_emitted_before_it_subscribes() -> None:
    dialer, listener = make_node("1"), make_node("0")
    model = encode_event("model", 7, CODEC)
    listener.subscriptions.put_latest(model)
    peer = join(dialer, listener)
    dialer.subscriptions.subscribe(["e", "model"])
    exchange(dialer, listener, peer)
    taken(listener)
    exchange(dialer, listener, peer)
    listener.on_connection_lost("1", "its connection broke", 0.0)
    again = make_node("1", start=2)
    peer = join(again, listener)
    assert listener.subscriptions.subscribers("e") == ("1",)
    assert emit(listener, "1", "e", "early")
    again.subscriptions.subscribe(["e", "model"])
    exchange(again, listener, peer)
    taken(listener)
    exchange(again, listener, peer)
    assert sorted(event[1:] for event in taken(again)) == [("e", "early"), ("model", 7)]


def test_a_silent_reader_keeps_no_old_version_in_memory() -> None:
    dialer, listener = make_node("1"), make_node("0")
    peer = join(dialer, listener)
    dialer.subscriptions.subscribe(["weights"])
    exchange(dialer, listener, peer)
    taken(listener)

    class Version(EncodedEvent, eq=False, weakref=True):
        """An event that can be referenced weakly."""

    def version(number: int) -> weakref.ref[Version]:
        made = encode_event("weights", number, CODEC)
        event = Version(made.event, made.skeleton, made.buffers, made.size)
        listener.subscriptions.put_latest(event)
        return weakref.ref(event)

    first = version(1)
    lost = dialer.request(peer, FrameType.POLL)
    replied(listener, lost.raw, 0.0)
    assert first() is not None, "it may have to be sent again"
    second = version(2)
    gc.collect()
    assert first() is None
    assert second() is not None
    later = 2 * OPTIONS.retry_s
    peer.outgoing.on_reconnect(later)
    asked(dialer, listener, peer, FrameType.POLL, later)
    assert taken(dialer) == [("0", "weights", 2)]


def test_a_broadcast_is_laid_out_once_and_copied_for_no_peer() -> None:
    listener = make_node("0", options=NodeOptions())
    for name in ("1", "2", "3"):
        dialer = make_node(name, options=NodeOptions())
        exchange(dialer, listener, join(dialer, listener))
    event = encode_event("e", np.zeros(1 << 20, np.uint8), CODEC)
    frames = []
    for name in ("1", "2", "3"):
        assert listener.offer(name, event)
        batch = listener.resume(ParkedPoll(name, listener.peers[name].session.number, 1), 0.0)
        assert isinstance(batch, OutgoingFrame)
        frames.append(batch)
    assert event.contents is not None
    assert all(frame.pieces[-1] is event.buffers[0] for frame in frames)
    assert len({frame.pieces[0] for frame in frames}) == 3, "each has its session's signature"
