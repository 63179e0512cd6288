"""What a node refuses: impossible handshakes and frames, and more than its limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused, RouterError
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.subscriptions import MAX_GLOBS, OWN_EVENTS
from dmiddleware.router.wire.envelope import encode_event
from dmiddleware.router.wire.frame import (
    VERSION,
    FrameContents,
    FrameType,
    OutgoingFrame,
    decode_frame,
    type_of,
)
from tests.dmiddleware.router.node_pairs import (
    CODEC,
    KEY,
    Connection,
    beat,
    emit,
    exchange,
    join,
    make_node,
    reconnect,
    taken,
)

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.lists(st.text(max_size=3), max_size=100),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), keyed=st.booleans(), second=st.booleans())
def test_a_mutated_handshake_changes_nothing(
    data: st.DataObject, keyed: bool, second: bool
) -> None:
    key = KEY if keyed else None
    listener, dialer = make_node("0", key), make_node("1", key)
    connection = Connection(dialer, listener)
    if second:
        connection.deliver(0)
        connection.deliver(1)
    frame = decode_frame(connection.routes[0].pop())
    fields = message = msgspec.msgpack.decode(frame.metadata)
    if not second and data.draw(st.booleans()):
        fields = message[data.draw(st.sampled_from(["identity", "limits"]))]
    field = data.draw(st.sampled_from(sorted(fields)))
    old, fields[field] = fields[field], data.draw(VALUES)
    contents = FrameContents(msgspec.msgpack.encode(message))
    mutated = bytes(OutgoingFrame(frame.type, contents, None, max_size=1 << 20))
    kind = connection.receive(1, bytearray(mutated))
    # Without a key nothing protects a valid change.
    if connection.ends[1].session is None:
        if kind is None:
            assert isinstance(connection.errors[0], FrameError)
        elif kind is FrameType.REFUSED:
            assert listener.n_refused == 1 and connection.ends[1].is_over
        else:
            assert not second
        assert (listener.peers, listener.changes, listener.incarnation) == ({}, [], 1)
    else:
        assert second and (fields[field] == old or not keyed)
    connection.cut()
    join(dialer, listener)


def test_another_protocol_version_is_named_in_the_reply() -> None:
    connection = Connection(make_node("1"), make_node("0"))
    old = bytearray(connection.routes[0].pop())
    old[4:6] = (1).to_bytes(2, "little")
    assert connection.receive(1, old) is FrameType.REFUSED
    assert connection.nodes[1].n_refused == 1
    refusal = connection.routes[1].pop()
    assert type_of(refusal) is FrameType.REFUSED
    assert f"versions 1 and {VERSION}; install the same version".encode() in bytes(refusal)
    newer = bytearray(refusal)
    newer[4:6] = (VERSION + 1).to_bytes(2, "little")
    connection.receive(0, newer)
    with pytest.raises(HandshakeRefused, match=f"versions {VERSION + 1} and {VERSION}"):
        raise connection.errors[0]


def test_frames_of_a_session_mean_nothing_before_it() -> None:
    for kind in FrameType:
        if kind in (FrameType.HELLO, FrameType.AUTH):
            continue
        connection = Connection(make_node("1"), make_node("0"))
        raw = bytes(OutgoingFrame(kind, FrameContents(), None, max_size=1 << 20))
        for side in (0, 1):
            connection.receive(side, bytearray(raw))
            assert isinstance(connection.errors[side], FrameError)
        assert connection.nodes[0].peers == connection.nodes[1].peers == {}


def test_a_second_challenge_is_refused() -> None:
    connection = Connection(make_node("1"), make_node("0"))
    connection.deliver(0)
    challenge = bytes(connection.routes[1].frames[0])
    connection.deliver(1)
    connection.receive(0, bytearray(challenge))
    assert isinstance(connection.errors[0], FrameError)


def test_a_peer_too_many_is_refused_until_another_is_forgotten() -> None:
    listener = make_node("0", options=NodeOptions(max_peers=2))
    join(make_node("1"), listener)
    second = join(make_node("2"), listener)
    with pytest.raises(HandshakeRefused, match="max_peers") as refused:
        join(make_node("3"), listener)
    assert refused.value.verified and refused.value.code == "full"
    reconnect(second)
    listener.tick(4.0)
    with pytest.raises(HandshakeRefused, match="max_peers"):
        join(make_node("3"), listener, 5.0)
    listener.tick(300.0)
    join(make_node("3"), listener, 300.0)
    assert list(listener.peers) == ["3"]


def test_a_peer_cannot_make_up_event_names_without_end() -> None:
    dialer, listener = make_node("1"), make_node("0", options=NodeOptions(max_event_names=5))
    connection = join(dialer, listener)
    for number in range(5):
        emit(dialer, "0", f"name {number}", number)
    exchange(connection)
    assert len(taken(listener)) == 5
    emit(dialer, "0", "name 5", 5)
    with pytest.raises(FrameError, match="max_event_names"):
        exchange(connection)
    assert taken(listener) == []


@pytest.mark.parametrize("most", [5, 1024])
def test_one_event_name_too_many_is_refused_where_it_is_emitted(most: int) -> None:
    dialer, listener = make_node("1"), make_node("0", options=NodeOptions(max_event_names=most))
    connection = join(dialer, listener)
    for number in range(most):
        dialer.subscriptions.check(encode_event(f"name {number}", None, CODEC), ["0"])
        dialer.peers["0"].outgoing.put_lossy(encode_event(f"name {number}", 0, CODEC))
    with pytest.raises(RouterError, match=f"sent {most} other event names to node 0"):
        dialer.subscriptions.check(encode_event("one more", None, CODEC), ["0"])
    # The peer stays usable, also over new connections and for the peer's successor.
    for start in (1, 2):
        dialer.subscriptions.check(encode_event("name 0", None, CODEC), ["0"])
        emit(dialer, "0", "name 0", start)
        exchange(connection)
        assert "name 0" in {event.event for event, _, _ in listener.take(10_000)}
        connection.cut()
        listener = make_node("0", start=start + 1, options=listener.options)
        connection = join(dialer, listener)


def test_the_names_of_latest_events_count_for_a_newcomer_too() -> None:
    dialer, listener = make_node("1"), make_node("0", options=NodeOptions(max_event_names=5))
    for number in range(6):
        dialer.subscriptions.put_latest(encode_event(f"weights {number}", number, CODEC))
    connection = join(dialer, listener)
    listener.subscriptions.subscribe(["weights*"])
    for _ in range(3):
        exchange(connection)
        taken(dialer)
    assert len(taken(listener)) == 5
    assert dialer.peers["0"].outgoing.counters.dropped == 1


@pytest.mark.parametrize("name", sorted(OWN_EVENTS))
def test_events_of_the_routers_themselves_are_refused_at_both_ends(name: str) -> None:
    dialer, listener = make_node("1"), make_node("0")
    connection = join(dialer, listener)
    with pytest.raises(RouterError, match="emitted by the router itself"):
        dialer.subscriptions.check(encode_event(name, None, CODEC), ["0"])
    emit(dialer, "0", name, 7)
    with pytest.raises(FrameError, match="each router emits itself"):
        exchange(connection)
    assert taken(listener) == []


def test_a_peer_cannot_subscribe_to_events_without_end(caplog: pytest.LogCaptureFixture) -> None:
    dialer, listener = make_node("1"), make_node("0", options=NodeOptions(max_event_names=5))
    connection = join(dialer, listener)
    for n_patterns in (5, 6):
        dialer.subscriptions.subscribe(map(str, range(n_patterns)))
        exchange(connection)
        taken(listener)
    assert "max_event_names" in caplog.text
    assert listener.subscriptions.subscribers("4") == ("1",)
    assert listener.subscriptions.subscribers("5") == ()
    with pytest.raises(ValueError, match="max_event_names"):
        listener.subscriptions.subscribe(map(str, range(6)))


def test_too_many_globs_are_refused_at_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    dialer, listener = make_node("1"), make_node("0", options=NodeOptions())
    connection = join(dialer, listener)
    globs = [f"{number}*" for number in range(MAX_GLOBS + 1)]
    dialer.subscriptions.subscribe([*globs[1:], *map(str, range(900))])
    with pytest.raises(ValueError, match="65 globs are more than the 64"):
        dialer.subscriptions.subscribe(globs)
    exchange(connection)
    assert taken(listener) == [] and listener.subscriptions.subscribers("1x") == ("1",)
    skeleton = msgspec.msgpack.encode((True, globs))
    event = msgspec.structs.replace(encode_event("$wants", 0, CODEC), skeleton=skeleton)
    event.size += len(skeleton)
    dialer.offer("0", event)
    connection.fill(0)
    for _ in range(len(connection.routes[0].frames)):
        connection.deliver(0)
    assert taken(listener) == [] and listener.n_refused == 1 and "65 globs" in caplog.text
    assert listener.subscriptions.subscribers("0x") == ()


def test_a_huge_incarnation_is_refused_and_the_node_id_stays_usable() -> None:
    dialer, listener = make_node("1"), make_node("0")
    connection = join(dialer, listener)
    exchange(connection)
    end = connection.ends[0]
    assert end.session is not None
    raw = end.session.make(FrameType.HEARTBEAT, FrameContents(), incarnation=1 << 40)
    connection.receive(1, bytearray(bytes(raw)))
    with pytest.raises(FrameError, match="claims incarnation"):
        raise connection.errors[0]
    connection.cut()
    again = make_node("1", start=2)
    beat(join(again, listener))
    assert again.incarnation == 2 and listener.is_connected("1")


COUNTS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=3))
SMALL = COUNTS | st.integers(0, 4)
ROWS = st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL) | st.tuples(SMALL, SMALL, SMALL), max_size=4)


@settings(max_examples=150, deadline=None)
@given(inboxes=ROWS, latest=SMALL, lossy=SMALL, flags=st.tuples(SMALL, SMALL, SMALL), grants=ROWS)
def test_impossible_states_are_refused_or_ignored(
    inboxes: Any, latest: Any, lossy: Any, flags: Any, grants: Any
) -> None:
    dialer, listener = make_node("1"), make_node("0")
    connection = join(dialer, listener)
    exchange(connection)
    emit(dialer, "0", "e", 1)
    since = dialer.peers["0"].since
    flags = [since if flags[0] in (0, 1) else flags[0], True, flags[2] == 1]
    metadata = msgspec.msgpack.encode((inboxes, latest, lossy, *flags, grants))
    end = connection.ends[1]
    assert end.session is not None
    raw = end.session.make(FrameType.STATE, FrameContents(metadata), incarnation=1)
    connection.receive(0, bytearray(bytes(raw)))
    assert all(isinstance(error, FrameError) for error in connection.errors)
    connection.cut()
    outbox = dialer.peers["0"].outgoing.outbox
    assert outbox.n_messages <= 2 and outbox.n_bytes >= 0
    join(dialer, listener)


@settings(max_examples=150, deadline=None)
@given(
    stream=st.integers(0, 2**32 - 1) | st.integers(0, 3),
    sequence=st.integers(0, 2**64 - 1) | st.integers(0, 9),
    events=st.lists(st.tuples(st.text(max_size=9), st.binary(max_size=9), COUNTS), max_size=4),
)
def test_impossible_events_are_refused_or_delivered(
    stream: int, sequence: int, events: Any
) -> None:
    dialer, listener = make_node("1"), make_node("0")
    connection = join(dialer, listener)
    exchange(connection)
    end = connection.ends[0]
    assert end.session is not None
    raw = end.session.make(
        FrameType.DATA,
        FrameContents(msgspec.msgpack.encode(events)),
        incarnation=1,
        stream=stream,
        data_sequence=sequence,
    )
    connection.receive(1, bytearray(bytes(raw)))
    assert all(isinstance(error, FrameError) for error in connection.errors)
    listener.take(100)
    connection.cut()
    join(dialer, listener)


@pytest.mark.parametrize(
    "option", ["max_event_bytes", "inbox_bytes", "outbox_bytes", "max_peers", "max_event_names"]
)
def test_an_option_that_leaves_no_room_is_an_error(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        NodeOptions(**{option: 0})


def test_an_unauthenticated_frame_in_a_session_ends_it() -> None:
    connection = join(make_node("1"), make_node("0"))
    raw = bytes(OutgoingFrame(FrameType.BYE, FrameContents(), None, max_size=1 << 20))
    connection.receive(1, bytearray(raw))
    assert isinstance(connection.errors[0], AuthError)
    assert len(connection.nodes[1].peers) == 1
