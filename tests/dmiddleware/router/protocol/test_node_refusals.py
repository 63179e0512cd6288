"""What a node refuses: impossible handshakes, replies and counts, and more than its limits."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import FrameError, HandshakeRefused
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.wire.frame import (
    FrameContents,
    FrameType,
    OutgoingFrame,
    decode_frame,
    type_of,
)
from tests.dmiddleware.router.node_pairs import (
    KEY,
    emit,
    exchange,
    join,
    make_node,
    replied,
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
    handshake, raw = dialer.hello()
    if second:
        raw = dialer.on_challenge(handshake, replied(listener, raw, 0.0))
    frame = decode_frame(raw)
    fields = message = msgspec.msgpack.decode(frame.metadata)
    if not second and data.draw(st.booleans()):
        fields = message["identity"]
    field = data.draw(st.sampled_from(sorted(fields)))
    old, fields[field] = fields[field], data.draw(VALUES)
    contents = FrameContents(msgspec.msgpack.encode(message))
    mutated = bytes(OutgoingFrame(frame.type, contents, None, max_size=1 << 20))
    n_refused = listener.n_refused
    try:
        response = listener.on_request(mutated, 0.0, cover_body=True)
    except FrameError:
        response = None
    # Without a key nothing protects a valid change.
    if response is None or not response.session:
        refused = listener.n_refused > n_refused
        assert response is None or refused or type_of(response.content) is FrameType.CHALLENGE
        assert (listener.peers, listener.changes, listener.incarnation) == ({}, [], 1)
    else:
        assert second and (fields[field] == old or not keyed)
    join(dialer, listener)


def test_another_protocol_version_is_named_in_the_reply() -> None:
    dialer, listener = make_node("1"), make_node("0")
    handshake, hello = dialer.hello()
    old = bytearray(hello)
    old[4:6] = (1).to_bytes(2, "little")
    refusal = bytes(replied(listener, old, 0.0))
    assert type_of(refusal) is FrameType.REFUSED and listener.n_refused == 1
    assert b"same version of dmiddleware" in refusal
    newer = bytearray(refusal)
    newer[4:6] = (4).to_bytes(2, "little")
    with pytest.raises(FrameError, match="protocol version 4, this side 3"):
        dialer.on_challenge(handshake, newer)


def test_a_peer_too_many_is_refused_until_another_is_forgotten() -> None:
    listener = make_node("0", options=NodeOptions(max_peers=2))
    join(make_node("1"), listener)
    join(make_node("2"), listener)
    with pytest.raises(HandshakeRefused, match="max_peers") as refused:
        join(make_node("3"), listener)
    assert refused.value.verified and refused.value.code == "full"
    join(make_node("2"), listener)
    listener.tick(4.0)
    with pytest.raises(HandshakeRefused, match="max_peers"):
        join(make_node("3"), listener, 5.0)
    listener.tick(300.0)
    join(make_node("3"), listener, 300.0)
    assert list(listener.peers) == ["3"]


def test_a_peer_cannot_make_up_event_names_without_end() -> None:
    dialer, listener = make_node("1"), make_node("0", options=NodeOptions(max_event_names=5))
    peer = join(dialer, listener)
    for number in range(4):
        emit(dialer, "0", f"name {number}", number)
    exchange(dialer, listener, peer)
    assert len(taken(listener)) == 4
    emit(dialer, "0", "name 4", 4)
    with pytest.raises(FrameError, match="max_event_names"):
        exchange(dialer, listener, peer)
    assert taken(listener) == []


def test_a_peer_cannot_subscribe_to_events_without_end(caplog: pytest.LogCaptureFixture) -> None:
    dialer, listener = make_node("1"), make_node("0", options=NodeOptions(max_event_names=5))
    peer = join(dialer, listener)
    for n_patterns in (5, 6):
        dialer.subscriptions.subscribe(map(str, range(n_patterns)))
        exchange(dialer, listener, peer)
        taken(listener)
    assert "max_event_names" in caplog.text
    assert listener.subscriptions.subscribers("4") == ("1",)
    assert listener.subscriptions.subscribers("5") == ()
    with pytest.raises(ValueError, match="max_event_names"):
        listener.subscriptions.subscribe(map(str, range(6)))


COUNTS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=3))
ROWS = st.lists(st.tuples(COUNTS, COUNTS, COUNTS) | st.tuples(COUNTS), max_size=4)


@settings(max_examples=150, deadline=None)
@given(acks=ROWS, busy=ROWS)
def test_impossible_acknowledgments_are_refused_or_ignored(acks: Any, busy: Any) -> None:
    dialer, listener = make_node("1"), make_node("0")
    peer = join(dialer, listener)
    emit(dialer, "0", "e", 1)
    assert dialer.data_request(peer, 0.0) is not None
    request = dialer.request(peer, FrameType.HEARTBEAT)
    reply = OutgoingFrame(
        FrameType.ACK,
        FrameContents(msgspec.msgpack.encode((acks, busy))),
        listener.peers["1"].sign,
        max_size=1 << 20,
        session=peer.session.number,
        sequence=request.number,
    )
    with contextlib.suppress(FrameError):
        dialer.on_reply(peer, request, bytes(reply), 0.0)
    due_at = dialer.due_at("0")
    assert due_at is None or 0 <= due_at <= 10


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
    peer = join(dialer, listener)
    frame = OutgoingFrame(
        FrameType.DATA,
        FrameContents(msgspec.msgpack.encode(events)),
        peer.sign,
        max_size=1 << 20,
        session=peer.session.number,
        stream=stream,
        sequence=peer.next_number(),
        data_sequence=sequence,
    )
    with contextlib.suppress(FrameError):
        listener.on_request(bytes(frame), 0.0, cover_body=True)
    listener.take(100)
    join(dialer, listener)


@pytest.mark.parametrize("option", ["max_event_bytes", "window", "max_peers", "max_event_names"])
def test_an_option_that_leaves_no_room_is_an_error(option: str) -> None:
    with pytest.raises(ValueError, match=option):
        NodeOptions(**{option: 0})
