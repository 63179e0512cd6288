"""The protocol of a node: two nodes over any network, from the handshake to the goodbye."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, FrameError, FrameTooLarge, HandshakeRefused
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.wire.envelope import EncodedEvent, encode_event
from dmiddleware.router.wire.frame import FrameType, OutgoingFrame, type_of
from tests.dmiddleware.router.node_pairs import (
    BROKE,
    CODEC,
    KEY,
    OPTIONS,
    Connection,
    beat,
    emit,
    exchange,
    handle,
    join,
    kinds,
    make_node,
    reconnect,
    serve,
    taken,
)

Pair = tuple[NodeProtocol, NodeProtocol, Connection]


@pytest.fixture
def pair() -> Pair:
    dialer, listener = make_node("1"), make_node("0")
    return dialer, listener, join(dialer, listener)


def subscribed(options: NodeOptions = OPTIONS, *names: str) -> Pair:
    """Return a dialer and a listener that each know what the other one receives."""
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    connection = join(dialer, listener)
    for node in (dialer, listener):
        node.subscriptions.subscribe(names)
    exchange(connection)
    assert taken(dialer) == taken(listener) == []
    return dialer, listener, connection


def test_peers_learn_each_others_subscriptions(pair: Pair) -> None:
    dialer, listener, connection = pair
    dialer.subscriptions.subscribe(["weights"])
    listener.subscriptions.subscribe(["traj*"])
    exchange(connection)
    assert taken(dialer) == taken(listener) == []
    assert dialer.subscriptions.subscribers("trajectories") == ("0",)
    assert dialer.subscriptions.subscribers("weights") == ()
    assert listener.subscriptions.subscribers("weights") == ("1",)
    assert kinds((dialer, listener)) == [["joined"], ["joined"]]
    assert [identity.node_id for identity in listener.connected_peers()] == ["1"]


def test_invalid_announcements_are_counted_and_ignored(pair: Pair) -> None:
    dialer, listener, connection = pair
    dialer.subscriptions.subscribe(["weights"])
    exchange(connection)
    assert taken(listener) == []
    dialer.offer("0", EncodedEvent("$wants", b"\xc1", (), 71))
    emit(dialer, "0", "e", 1)
    exchange(connection)
    assert taken(listener) == [("1", "e", 1)]
    assert listener.n_refused == 1
    assert listener.subscriptions.subscribers("weights") == ("1",)


def test_events_arrive_in_order_both_ways(pair: Pair) -> None:
    dialer, listener, connection = pair
    for number in range(6):
        assert emit(dialer, "0", "up", number)
        assert emit(listener, "1", "down", number)
    exchange(connection)
    assert taken(listener) == [("1", "up", number) for number in range(6)]
    assert taken(dialer) == [("0", "down", number) for number in range(6)]


def test_announcements_count_as_many_bytes_at_both_sides() -> None:
    options = NodeOptions(inbox_bytes=150, outbox_bytes=2000)
    dialer, listener, connection = subscribed(options)
    for number in range(4):
        dialer.subscriptions.subscribe([f"{number} {'x' * 10}"])
        exchange(connection)
    # The inbox is full, and the sender knows it.
    assert dialer.peers["0"].outgoing.outbox.is_blocked
    for _ in range(4):
        taken(listener)
        exchange(connection)
    assert dialer.peers["0"].outgoing.is_empty


def test_a_latest_event_replaces_one_that_was_not_sent(pair: Pair) -> None:
    dialer, listener, connection = pair
    for version in range(5):
        listener.peers["1"].outgoing.put_latest(encode_event("weights", version, CODEC))
    exchange(connection)
    assert taken(dialer) == [("0", "weights", 4)]
    assert listener.peers["1"].outgoing.counters.superseded == 4


def test_a_version_that_a_lost_connection_drops_is_sent_again_unless_there_is_a_newer_one(
    pair: Pair,
) -> None:
    dialer, listener, connection = pair
    exchange(connection)
    outgoing = dialer.peers["0"].outgoing
    for version, expected in ((1, 1), (2, 3)):
        outgoing.put_latest(encode_event("weights", version, CODEC))
        connection.fill(0)
        if expected != version:
            outgoing.put_latest(encode_event("weights", expected, CODEC))
        connection = reconnect(connection)
        exchange(connection)
        assert taken(listener) == [("1", "weights", expected)]
    exchange(connection)
    # One that has arrived is not sent again.
    outgoing.put_latest(encode_event("weights", 4, CODEC))
    connection.fill(0)
    while connection.routes[0].frames:
        connection.deliver(0)
    exchange(reconnect(connection))
    assert taken(listener) == [("1", "weights", 4)]


@pytest.mark.parametrize("handled", [False, True])
def test_a_connection_is_filled_again_only_when_it_has_more_than_is_held_back(
    handled: bool,
) -> None:
    sender, receiver, connection = subscribed(NodeOptions(batch_bytes=500))
    n_sent = 0
    while emit(sender, "0", "e", n_sent, handled=handled) and sender.unsent:
        serve(sender)
        n_sent += 1
    # The last one has asked for the state of the peer, so the next ones wait for it.
    n_frames = len(connection.routes[0].frames)
    assert n_frames == n_sent
    n_offered = n_sent + 1
    while not sender.unsent:
        emit(sender, "0", "e", n_offered, handled=handled)
        n_offered += 1
    assert n_offered - n_sent > 3, "these fill a frame"
    serve(sender)
    assert len(connection.routes[0].frames) == n_frames + 1
    emit(sender, "0", "e", n_offered, handled=handled)
    assert not sender.unsent
    exchange(connection)
    assert [value for _, _, value in taken(receiver)] == [*range(n_offered + 1)]


def test_lossy_events_over_the_bound_are_dropped_and_counted(pair: Pair) -> None:
    outgoing = pair[0].peers["0"].outgoing
    for number in range(1030):
        outgoing.put_lossy(encode_event("metric", number, CODEC))
    assert outgoing.counters.dropped == 6


def test_a_full_outbox_refuses_and_a_slow_reader_makes_the_sender_wait(pair: Pair) -> None:
    dialer, listener, connection = pair
    sent = 0
    for _ in range(100):
        while emit(dialer, "0", "e", (sent, bytes(100))):
            sent += 1
        exchange(connection)
    bound = OPTIONS.outbox_bytes + OPTIONS.inbox_bytes + 2 * OPTIONS.batch_bytes
    assert 0 < sent * 100 <= bound
    assert listener.peers["1"].incoming.inbox.n_bytes <= OPTIONS.inbox_bytes
    numbers: list[int] = []
    while events := taken(listener):
        numbers += [value[0] for _, _, value in events]
        exchange(connection)
    assert numbers == list(range(sent))
    assert emit(dialer, "0", "e", 0)


def test_a_silent_peer_leaves_and_gets_the_accepted_events_when_it_rejoins(pair: Pair) -> None:
    dialer, listener, connection = pair
    dialer.subscriptions.subscribe(["e"])
    exchange(connection)
    taken(listener)
    assert listener.tick(4.0) == []
    assert kinds([listener]) == [["joined", "left"]]
    serve(listener)
    assert connection.routes[1].is_closed
    assert listener.subscriptions.subscribers("e") == ("1",)
    emit(listener, "1", "e", "kept")
    connection = reconnect(connection, 50.0)
    assert listener.changes[-1].kind == "rejoined"
    exchange(connection, 50.0)
    assert ("0", "e", "kept") in taken(dialer)


def test_bytes_that_move_keep_a_peer_connected_for_a_while(pair: Pair) -> None:
    _, listener, _ = pair
    assert listener.quiet_peers(2.0) == ["1"]
    listener.on_progress("1", 2.9)
    listener.tick(5.0)
    assert listener.is_connected("1") and listener.tick_at == 5.9
    listener.tick(6.0)
    assert not listener.is_connected("1")


def test_a_peer_that_is_gone_for_too_long_is_forgotten_and_may_rejoin(pair: Pair) -> None:
    dialer, listener, connection = pair
    dialer.subscriptions.subscribe(["e"])
    exchange(connection)
    taken(listener)
    emit(listener, "1", "e", "lost one")
    connection.fill(1)  # sent, and lost by the network
    listener.tick(4.0)
    assert listener.tick_at == 124.0
    assert listener.tick(200.0) == [("1", 1)]
    assert listener.subscriptions.subscribers("e") == ()
    connection = reconnect(connection, 300.0)
    assert listener.subscriptions.subscribers("e") == ("1",)
    emit(listener, "1", "e", "after")
    exchange(connection, 300.0)
    assert taken(dialer) == [("0", "e", "after")]


def test_a_forgotten_peer_gets_the_latest_event_when_it_rejoins(pair: Pair) -> None:
    dialer, listener, connection = pair
    dialer.subscriptions.subscribe(["weights"])
    exchange(connection)
    taken(listener)
    listener.subscriptions.put_latest(encode_event("weights", 1, CODEC))
    listener.tick(4.0)
    listener.tick(200.0)
    listener.subscriptions.put_latest(encode_event("weights", 2, CODEC))
    connection = reconnect(connection, 300.0)
    exchange(connection, 300.0)
    assert taken(dialer) == [("0", "weights", 2)]


def test_a_forgotten_peer_gets_new_subscriptions_when_it_rejoins(pair: Pair) -> None:
    dialer, listener, connection = pair
    listener.tick(4.0)
    listener.subscriptions.subscribe(["early"])
    listener.tick(200.0)
    waiting = listener.peers["1"].outgoing.outbox.n_messages
    listener.subscriptions.subscribe(["early", "late"])
    assert listener.peers["1"].outgoing.outbox.n_messages == waiting
    connection = reconnect(connection, 300.0)
    exchange(connection, 300.0)
    assert taken(dialer) == []
    assert (
        dialer.subscriptions.subscribers("early")
        == dialer.subscriptions.subscribers("late")
        == ("0",)
    )


def test_a_forgotten_process_that_was_stopped_continues_over_a_new_connection() -> None:
    dialer, listener, connection = subscribed(OPTIONS, "e", "weights")
    listener.subscriptions.put_latest(encode_event("weights", 1, CODEC))
    listener.tick(4.0)
    listener.tick(200.0)
    assert listener.subscriptions.subscribers("e") == ()
    # It says something over its old connection, which the listener has closed.
    dialer.beat()
    serve(dialer)
    assert connection.deliver(0, 201.0) is FrameType.BYE, "ignored"
    assert not listener.is_connected("1")
    connection = reconnect(connection, 201.0)
    assert listener.changes[-1].kind == "rejoined"
    assert listener.subscriptions.subscribers("e") == ("1",)
    emit(listener, "1", "e", "after")
    exchange(connection, 201.0)
    assert taken(dialer) == [("0", "weights", 1), ("0", "e", "after")]


def test_emitting_to_a_forgotten_peer_does_not_block(pair: Pair) -> None:
    _, listener, _ = pair
    while emit(listener, "1", "e", bytes(500)):
        pass
    listener.tick(4.0)
    ((_, undelivered),) = listener.tick(200.0)
    assert undelivered == 3
    for _ in range(10):
        assert emit(listener, "1", "e", bytes(500)) is None
    assert listener.peers["1"].outgoing.is_empty
    assert listener.undelivered == {"1": {"e": 3}}


def test_a_restarted_peer_gets_the_events_that_waited_for_it(pair: Pair) -> None:
    _, listener, connection = pair
    emit(listener, "1", "e", "waiting")
    connection.cut(1.0)
    again = make_node("1", start=2)
    exchange(join(again, listener, 1.0), 1.0)
    assert ("0", "e", "waiting") in taken(again)
    assert kinds([listener]) == [["joined", "left", "rejoined"]]
    assert [change.reason for change in listener.changes] == ["", BROKE, ""]


@pytest.mark.parametrize("n_given_back", range(4))
def test_a_successor_gets_what_was_not_acknowledged(n_given_back: int) -> None:
    dialer, listener, connection = subscribed()
    for number in range(4):
        emit(dialer, "0", "e", number)
        if number >= n_given_back:
            continue
        connection.fill(0)
        while connection.routes[0].frames:
            connection.deliver(0)
    listener.beat()
    serve(listener)
    while connection.routes[1].frames:
        connection.deliver(1)
    connection.cut()
    again = make_node("0", start=2)
    exchange(join(dialer, again))
    assert [value for _, _, value in taken(again)] == list(range(n_given_back, 4))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_goodbye_ends_the_session(pair: Pair, both: bool, side: int) -> None:
    connection = pair[2]
    exchange(connection)
    nodes = connection.nodes
    emit(nodes[side], nodes[1 - side].identity.node_id, "e", "last words")
    connection.fill(side)
    connection.deliver(side)
    for node in nodes if both else (nodes[side],):
        node.say_goodbye()
        serve(node)
    exchange(connection, 1.0)
    assert connection.has_ended == [True, True]
    for node in nodes:
        assert node.peers == {} and kinds([node]) == [["joined", "left"]]
        reason = node.changes[-1].reason
        # Of two that leave at once, one closes the connection before the other has read all.
        assert reason.startswith("said goodbye") or (both and reason == BROKE)
    assert [value for _, _, value in taken(nodes[1 - side])] == ["last words"]


def test_frames_after_a_goodbye_do_not_bring_the_peer_back(pair: Pair) -> None:
    dialer, listener, connection = pair
    exchange(connection)
    dialer.say_goodbye()
    dialer.beat()
    serve(dialer)
    assert [connection.deliver(0) for _ in range(2)][-1] is FrameType.BYE
    dialer.beat()
    serve(dialer)
    assert connection.deliver(0) is FrameType.BYE, "ignored"
    assert listener.peers == {} and kinds([listener]) == [["joined", "left"]]
    connection.cut()
    assert kinds([listener]) == [["joined", "left"]]


def test_a_closing_node_admits_nobody(pair: Pair) -> None:
    _, listener, connection = pair
    listener.closing = True
    connection.cut()
    with pytest.raises(HandshakeRefused, match="closing") as refused:
        join(*connection.nodes)
    assert refused.value.code == "closing"


def test_events_for_a_peer_that_says_goodbye_are_dropped_and_counted(pair: Pair) -> None:
    dialer, listener, connection = pair
    exchange(connection)
    connection.routes[1].most = 0
    for number in range(3):
        emit(listener, "1", "e", number)
    dialer.say_goodbye()
    serve(dialer)
    while (kind := connection.deliver(0)) is FrameType.STATE:
        pass
    assert kind is FrameType.BYE
    assert listener.changes[-1].reason == (
        "said goodbye; 3 events that it had not accepted were dropped"
    )
    assert listener.undelivered == {"1": {"e": 3}}
    assert emit(listener, "1", "e", 3) is None


def test_a_node_that_leaves_says_goodbye_behind_what_can_be_sent(pair: Pair) -> None:
    dialer, listener, connection = pair
    exchange(connection)
    connection.routes[1].most = 0
    emit(listener, "1", "e", "waiting")
    listener.say_goodbye()
    serve(listener)
    assert FrameType.BYE not in map(type_of, connection.routes[1].frames)
    assert connection.ends[1].is_stalled
    connection.routes[1].most = 9
    exchange(connection)
    assert taken(dialer) == [("0", "e", "waiting")] and dialer.peers == {}


def test_a_node_that_leaves_need_not_wait_for_a_heartbeat() -> None:
    dialer, listener, connection = subscribed()
    beat(connection)
    for is_handled in (False, True):
        emit(dialer, "0", "e", 1, handled=is_handled)
    exchange(connection)
    events = listener.take(100)
    serve(listener)
    outgoing = dialer.peers["0"].outgoing
    assert outgoing.n_messages == 2
    dialer.drain()
    serve(dialer)
    exchange(connection)
    assert outgoing.n_messages == 1
    handle(listener, events)
    exchange(connection)
    assert outgoing.is_empty
    # The same for what is emitted meanwhile.
    emit(dialer, "0", "e", 1)
    exchange(connection)
    assert outgoing.is_empty


def test_a_node_that_accepts_nothing_leaves_the_events_to_its_successor() -> None:
    dialer, listener, connection = subscribed(OPTIONS, "e")
    listener.accepting = False
    assert emit(dialer, "0", "e", "waiting")
    exchange(connection, 1.0)
    assert taken(listener) == []
    connection.cut(2.0)
    again = make_node("0", start=2)
    exchange(join(dialer, again, 2.0), 2.0)
    assert ("1", "e", "waiting") in taken(again)


def test_a_successor_inherits_subscriptions_until_it_is_ready() -> None:
    dialer, listener = make_node("1"), make_node("0")
    connection = join(dialer, listener)
    dialer.subscriptions.subscribe(["a", "b"])
    exchange(connection)
    taken(listener)
    connection.cut()
    again = make_node("1", start=2)
    connection = join(again, listener)
    for patterns in ((), ("a",)):
        again.subscriptions.subscribe(patterns)
        exchange(connection)
        taken(listener)
        assert listener.subscriptions.subscribers("b") == ("1",)
    again.subscriptions.announce_ready()
    exchange(connection)
    taken(listener)
    assert listener.subscriptions.subscribers("a") == ("1",)
    assert listener.subscriptions.subscribers("b") == ()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("listener_sends", [False, True])
def test_the_acknowledgment_of_handled_events_is_sent_at_once_and_with_each_heartbeat(
    pair: Pair, listener_sends: bool, lost: bool
) -> None:
    dialer, listener, connection = pair
    exchange(connection)
    sender, receiver = (listener, dialer) if listener_sends else (dialer, listener)
    (name,) = sender.peers
    for number in range(3):
        assert emit(sender, name, "e", number, handled=True)
        exchange(connection)
    emit(sender, name, "f", "not held up")
    exchange(connection)
    beat(connection)
    outgoing = sender.peers[name].outgoing
    assert outgoing.outbox.is_empty and outgoing.n_messages == 3
    events = receiver.take(100)
    assert [one.event.event for one in events] == ["e"] * 3 + ["f"]
    handle(receiver, events)
    if lost:
        connection = reconnect(connection)
        assert outgoing.n_messages == 3
    exchange(connection)
    assert outgoing.is_empty


@pytest.mark.parametrize("sender_leaves", [False, True])
def test_held_events_and_those_after_them_are_taken_later_and_in_order(
    pair: Pair, sender_leaves: bool
) -> None:
    dialer, listener, connection = pair
    listener.hold(lambda event: event.event == "early")
    for name in ("a", "early", "b"):
        emit(dialer, "0", name, 0)
    exchange(connection)
    assert taken(listener) == [("1", "a", 0)]
    if sender_leaves:
        dialer.say_goodbye()
        serve(dialer)
        exchange(connection)
    assert taken(listener) == []
    assert not listener.with_events
    listener.hold(None)
    assert listener.with_events
    assert taken(listener) == [("1", "early", 0), ("1", "b", 0)]


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("is_handled", [False, True])
def test_events_sent_before_a_peer_left_are_delivered(returns: bool, is_handled: bool) -> None:
    dialer, listener, connection = subscribed(NodeOptions(), "e")
    # More than may wait for their handlers.
    for number in range(100):
        emit(dialer, "0", "e", number, handled=is_handled)
    exchange(connection)
    if returns:
        connection.cut(1.0)
        join(make_node("1", start=2), listener, 1.0)
    else:
        dialer.say_goodbye()
        serve(dialer)
        exchange(connection)
    got = taken(listener) + taken(listener)
    assert got == [("1", "e", number) for number in range(100)]
    assert not listener.with_events


def test_a_process_that_has_ended_is_forgotten_once_its_events_are_handled() -> None:
    dialer, listener, connection = subscribed(NodeOptions(), "e")
    # More than may wait for their handlers.
    for number in range(100):
        emit(dialer, "0", "e", number, handled=True)
    exchange(connection)
    dialer.say_goodbye()
    serve(dialer)
    exchange(connection)
    (session,) = listener.with_events
    first, nothing = listener.take(100), listener.take(100)
    assert len(first) == 64 and nothing == []
    handle(listener, first)
    handle(listener, listener.take(100))
    assert listener.take(100) == [] and listener.peers == {}
    ended = weakref.ref(session.incoming)
    del session, first, connection
    gc.collect()
    assert ended() is None


def test_a_replayed_frame_ends_the_connection(pair: Pair) -> None:
    dialer, listener, connection = pair
    exchange(connection)
    dialer.beat()
    serve(dialer)
    raw = bytes(connection.routes[0].frames[0])
    connection.deliver(0)
    connection.receive(1, bytearray(raw))
    (error,) = connection.errors
    assert isinstance(error, FrameError) and "replay" in str(error)
    # In a later session it is not even a frame of it.
    connection = reconnect(connection)
    connection.receive(1, bytearray(raw))
    assert isinstance(connection.errors[0], AuthError)
    assert listener.n_refused == 0, "the connections count them"


def test_replayed_frames_do_not_keep_a_dead_peer_connected(pair: Pair) -> None:
    dialer, listener, connection = pair
    exchange(connection)
    listener.beat()
    serve(listener)
    recorded = bytes(connection.routes[1].frames[0])
    connection.deliver(1)
    for second in range(1, 4):
        with pytest.raises((AuthError, FrameError)):
            dialer.on_frame(connection.ends[0], memoryview(recorded), float(second))
    dialer.tick(3.1)
    assert not dialer.is_connected("0")


def test_a_frame_cannot_be_sent_back_to_its_sender(pair: Pair) -> None:
    dialer, _, connection = pair
    exchange(connection)
    emit(dialer, "0", "e", 1)
    connection.fill(0)
    with pytest.raises(AuthError):
        dialer.on_frame(connection.ends[0], connection.routes[0].pop(), 0.0)


def test_a_restarted_listener_is_known_by_its_dialers_to_be_newer() -> None:
    dialers = [make_node("1"), make_node("2")]
    join(dialers[0], make_node("0")).cut(1.0)
    again = make_node("0", start=2)
    second = join(dialers[1], again, 1.0)
    assert again.incarnation == 1, "no peer has known its predecessor so far"
    join(dialers[0], again, 1.0)
    assert again.incarnation == 2
    # Later frames give the new number to the others.
    beat(second, 2.0)
    second.cut(3.0)
    third = make_node("0", start=3)
    join(dialers[1], third, 3.0)
    assert third.incarnation == 3


def test_a_second_process_with_a_connected_node_id_is_refused_until_the_first_has_left(
    pair: Pair,
) -> None:
    first, listener, connection = pair
    second = make_node("1", start=2)
    with pytest.raises(HandshakeRefused, match="another process is connected as node 1") as refused:
        join(second, listener)
    assert refused.value.verified and refused.value.code == "duplicate"
    beat(connection)
    assert connection.is_open and listener.is_connected("1")
    assert second.incarnation == 1
    listener.tick(9.0)
    join(second, listener, 9.0)
    assert second.incarnation == 2
    connection.cut(9.0)
    with pytest.raises(HandshakeRefused, match="newer process") as refused:
        join(first, listener, 9.0)
    assert refused.value.verified and refused.value.code == "replaced"


def test_a_wrong_key_is_refused_and_counted() -> None:
    listener = make_node("0")
    with pytest.raises(HandshakeRefused, match="key"):
        join(make_node("1", key=bytes(32)), listener)
    assert listener.n_refused == 1 and listener.peers == {}


@pytest.mark.parametrize("key", [KEY, None], ids=["challenged", "refused"])
def test_a_stranger_may_not_go_on_sending_frames(key: bytes | None) -> None:
    """Neither hellos over and over, nor anything after it was refused."""
    connection = Connection(make_node("1", key), make_node("0"))
    (hello,) = connection.routes[0].frames
    first = connection.receive(1, hello)
    assert first is (FrameType.HELLO if key else FrameType.REFUSED)
    connection.receive(1, hello)
    assert isinstance(connection.errors[0], FrameError)
    assert connection.routes[1].is_closed
    connection.cut()


@settings(max_examples=50, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_accepted(place: int, bit: int) -> None:
    dialer, listener, connection = subscribed()
    emit(dialer, "0", "e", [1, 2, 3])
    connection.fill(0)
    raw = bytearray(connection.routes[0].frames[0])
    raw[place % len(raw)] ^= 1 << bit
    connection.receive(1, raw)
    assert len(connection.errors) == 1 and taken(listener) == []


def test_large_events_stay_in_the_inbox_until_they_are_taken() -> None:
    options = NodeOptions(outbox_bytes=10 << 20, inbox_bytes=10 << 20)
    dialer, listener, connection = subscribed(options, "e")
    for number in range(3):
        assert emit(dialer, "0", "e", (number, bytes(700_000)))
    exchange(connection)
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
    sender.subscriptions.check(encode_event("e", bytes(90_000), CODEC), [to])
    with pytest.raises(FrameTooLarge, match=rf"node {to} accepts at most 99744"):
        sender.subscriptions.check(encode_event("e", bytes(150_000), CODEC), [to])


def test_the_largest_allowed_event_is_delivered() -> None:
    dialer, listener, connection = subscribed(NodeOptions(max_event_bytes=100_000), "e")
    for value in (bytes(99_600), [np.zeros(0)] * 1_100, [np.zeros(1)] * 1_000):
        event = encode_event("e", value, CODEC)
        dialer.subscriptions.check(event, ["0"])
        assert dialer.offer("0", event)
        exchange(connection)
    assert [len(value) for _, _, value in taken(listener)] == [99_600, 1_100, 1_000]


def test_events_of_many_small_arrays_are_split_over_frames() -> None:
    dialer, listener, connection = subscribed(NodeOptions(batch_bytes=64 << 20), "e")
    event = encode_event("e", [np.zeros(0)] * 100, CODEC)
    for _ in range(100):
        assert dialer.offer("0", event)
    exchange(connection)
    assert len(taken(listener) + taken(listener)) == 100


def test_large_latest_events_are_split_over_frames() -> None:
    dialer, listener, connection = subscribed(NodeOptions(batch_bytes=100_000), "*")
    for name in "abc":
        dialer.subscriptions.put_latest(encode_event(name, bytes(60_000), CODEC))
    exchange(connection)
    assert [name for _, name, _ in taken(listener)] == ["a", "b", "c"]


def test_a_latest_event_too_large_for_a_newcomer_is_dropped_and_counted() -> None:
    listener = make_node("0", options=NodeOptions())
    dialer = make_node("1", options=NodeOptions(max_event_bytes=100_000))
    listener.subscriptions.put_latest(encode_event("large", bytes(200_000), CODEC))
    listener.subscriptions.put_latest(encode_event("small", 1, CODEC))
    connection = join(dialer, listener)
    dialer.subscriptions.subscribe(["large", "small"])
    exchange(connection)
    taken(listener)
    exchange(connection)
    assert [name for _, name, _ in taken(dialer)] == ["small"]
    assert listener.peers["1"].outgoing.counters.dropped == 1


def test_a_restarted_peer_misses_nothing_emitted_before_it_subscribes() -> None:
    dialer, listener = make_node("1"), make_node("0")
    listener.subscriptions.put_latest(encode_event("model", 7, CODEC))
    connection = join(dialer, listener)
    dialer.subscriptions.subscribe(["e", "model"])
    exchange(connection)
    taken(listener)
    exchange(connection)
    connection.cut()
    again = make_node("1", start=2)
    connection = join(again, listener)
    assert listener.subscriptions.subscribers("e") == ("1",)
    assert emit(listener, "1", "e", "early")
    again.subscriptions.subscribe(["e", "model"])
    exchange(connection)
    taken(listener)
    exchange(connection)
    assert sorted(event[1:] for event in taken(again)) == [("e", "early"), ("model", 7)]


def test_a_silent_reader_keeps_no_old_version_in_memory() -> None:
    dialer, listener, connection = subscribed(OPTIONS, "weights")

    class Version(EncodedEvent, eq=False, weakref=True):
        """An event that can be referenced weakly."""

    def version(number: int) -> weakref.ref[Version]:
        made = encode_event("weights", number, CODEC)
        event = Version(made.event, made.skeleton, made.buffers, made.size)
        listener.subscriptions.put_latest(event)
        return weakref.ref(event)

    first = version(1)
    connection.fill(1)
    connection.routes[1].frames.clear()  # lost
    assert first() is not None, "it may have to be sent again"
    second = version(2)
    gc.collect()
    assert first() is None
    assert second() is not None
    exchange(reconnect(connection))
    assert taken(dialer) == [("0", "weights", 2)]


def test_a_broadcast_is_laid_out_once_and_copied_for_no_peer() -> None:
    listener = make_node("0", options=NodeOptions())
    event = encode_event("e", np.zeros(1 << 20, np.uint8), CODEC)
    frames: list[Any] = []
    for name in ("1", "2", "3"):
        connection = join(make_node(name, options=NodeOptions()), listener)
        exchange(connection)
        assert listener.offer(name, event)
        route = connection.routes[1]
        route.put = lambda frame, urgent=False: frames.append(frame)  # type: ignore[method-assign, misc]
        connection.fill(1)
    assert len(frames) == 3 and all(isinstance(frame, OutgoingFrame) for frame in frames)
    assert event.contents is not None
    assert all(frame.pieces[-1] is event.buffers[0] for frame in frames)
    assert len({frame.pieces[0] for frame in frames}) == 3, "each has its session's signature"


def test_under_load_there_is_one_frame_for_each_answer_and_nothing_is_held_forever() -> None:
    options = NodeOptions(batch_bytes=1 << 16)
    dialer, listener, connection = subscribed(options, "e")
    frames = connection.routes[0].frames
    n_frames = n_answers = n_sent = 0
    for _ in range(50):
        for _ in range(40):
            emit(dialer, "0", "e", n_sent)
            n_sent += 1
            connection.fill(0)
        n_frames += sum(type_of(frame) is FrameType.DATA for frame in frames)
        while frames:
            connection.deliver(0)
        n_answers += len(connection.routes[1].frames)
        while connection.routes[1].frames:
            connection.deliver(1)
    assert n_frames <= n_answers + 10 + 50 and n_answers <= 52, (n_frames, n_answers)
    # Without a further event, and without a heartbeat, all are delivered.
    exchange(connection)
    numbers: list[int] = []
    while events := taken(listener):
        numbers += [value for _, _, value in events]
    assert numbers == list(range(n_sent))


def test_without_load_each_event_is_sent_at_once_and_not_answered() -> None:
    dialer, listener, connection = subscribed(NodeOptions(), "e")
    n_answers = 0
    for number in range(100):
        emit(dialer, "0", "e", number)
        connection.fill(0)
        assert len(connection.routes[0].frames) == 1
        connection.deliver(0)
        n_answers += len(connection.routes[1].frames)
        assert [value for _, _, value in taken(listener)] == [number]
        while connection.routes[1].frames:
            connection.deliver(1)
    assert n_answers <= 100 / 8
