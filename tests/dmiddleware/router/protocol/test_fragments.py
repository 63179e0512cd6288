"""Large events between two nodes: their fragments, the memory for them, and what disturbs them."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, EncodeError, FrameError, FrameTooLarge
from dmiddleware.router import NodeOptions
from dmiddleware.router.protocol.fragments import Assembly, Fragment, Transfer, fragment_contents
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.wire.codec import MAX_DEPTH
from dmiddleware.router.wire.envelope import (
    EncodedEvent,
    encode_event,
    event_of_image,
    frame_contents,
    image_of,
)
from dmiddleware.router.wire.frame import (
    Frame,
    FrameContents,
    FrameType,
    OutgoingFrame,
    decode_frame,
)
from tests.dmiddleware.router.node_pairs import (
    CODEC,
    Connection,
    exchange,
    join,
    make_node,
    reconnect,
    serve,
    taken,
)

OPTIONS = NodeOptions(
    fragment_bytes=1000, batch_bytes=500, outbox_bytes=100_000, max_event_bytes=100_000
)
DELIVERIES = ("reliable", "handled", "latest", "lossy")


def pair(options: NodeOptions = OPTIONS) -> tuple[NodeProtocol, NodeProtocol, Connection]:
    """Return a dialer, and a listener that receives all of its events."""
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    connection = join(dialer, listener)
    for node in (dialer, listener):
        node.subscriptions.subscribe(["*"])
    exchange(connection)
    taken(listener), taken(dialer)
    return dialer, listener, connection


def send(node: NodeProtocol, to: str, delivery: str, value: Any, event: str = "e") -> EncodedEvent:
    encoded = encode_event(event, value, CODEC)
    node.subscriptions.check(encoded, [to])
    if delivery == "latest":
        node.subscriptions.put_latest(encoded)
    elif delivery == "lossy":
        node.subscriptions.put_lossy(encoded, [to])
    else:
        assert node.offer(to, encoded, handled=delivery == "handled")
    return encoded


def received(node: NodeProtocol) -> list[tuple[str, Any]]:
    """Take all events, and handle those that are acknowledged when handled."""
    return [(name, value) for _, name, value in taken(node)]


@pytest.mark.parametrize("dialer_sends", [True, False])
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_large_event_arrives_whole_under_each_contract(delivery: str, dialer_sends: bool) -> None:
    dialer, listener, connection = pair()
    sender, receiver = (dialer, listener) if dialer_sends else (listener, dialer)
    value = {"w": np.arange(5000.0), "n": [np.arange(k) for k in range(9)], "t": "x" * 3000}
    send(sender, "0" if dialer_sends else "1", delivery, value)
    exchange(connection)
    ((name, got),) = received(receiver)
    assert name == "e" and got["t"] == value["t"]
    np.testing.assert_array_equal(got["w"], value["w"])
    assert [len(one) for one in got["n"]] == list(range(9))
    exchange(connection)
    assert sender.peers["0" if dialer_sends else "1"].outgoing.is_empty
    assert sender.peers["0" if dialer_sends else "1"].counters.sent_frames > 40


@pytest.mark.parametrize("value", [b"x" * 20_000, "x" * 20_000, list(range(20_000)), {}, None])
def test_values_of_any_form_may_be_large(value: Any) -> None:
    dialer, listener, connection = pair()
    send(dialer, "0", "reliable", [value, b"y" * 5000])
    exchange(connection)
    assert received(listener) == [("e", [value, b"y" * 5000])]


@pytest.mark.parametrize("n_arrays", [8_191, 8_192, 100_000])
def test_an_event_may_have_any_number_of_arrays(n_arrays: int) -> None:
    dialer, listener, connection = pair(NodeOptions(inbox_bytes=1 << 24, outbox_bytes=1 << 24))
    arrays = [np.full(k % 3, k) for k in range(n_arrays)]
    send(dialer, "0", "reliable", arrays)
    exchange(connection)
    ((_, got),) = received(listener)
    assert len(got) == n_arrays
    assert all((one == k).all() and len(one) == k % 3 for k, one in enumerate(got))


def test_large_events_may_be_nested_as_deeply_as_small_ones_and_no_deeper() -> None:
    dialer, listener, connection = pair()
    for wrap in (lambda value: [value], lambda value: (value,), lambda value: {"k": value}):
        value: Any = np.arange(2000)
        for _ in range(MAX_DEPTH - 1):
            value = wrap(value)
        send(dialer, "0", "reliable", value)
        exchange(connection)
        assert len(received(listener)) == 1
        for depth in (2, 10_000):
            for _ in range(depth):
                value = wrap(value)
            with pytest.raises(EncodeError, match="levels deep"):
                encode_event("e", value, CODEC)


@pytest.mark.parametrize("delivery", ["reliable", "handled"])
def test_events_of_all_sizes_arrive_in_order(delivery: str) -> None:
    dialer, listener, connection = pair()
    sizes = [10, 20_000, 10, 10, 5000, 30_000, 10]
    for number, size in enumerate(sizes):
        send(dialer, "0", delivery, (number, bytes(size)))
    got: list[tuple[int, bytes]] = []
    for round_ in range(20):
        exchange(connection, round_ * 0.1)
        got += [value for _, value in received(listener)]
    assert [(number, len(data)) for number, data in got] == list(enumerate(sizes))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_small_events_of_other_streams_pass_a_large_one(delivery: str) -> None:
    dialer, listener, connection = pair()
    connection.routes[0].most = 1
    send(dialer, "0", delivery, bytes(50_000), event="bulk")
    exchange(connection, rounds=5)
    others = [other for other in DELIVERIES if other != delivery]
    for other in others:
        send(dialer, "0", other, other, event=other)
    exchange(connection, rounds=8)
    assert sorted(name for name, _ in received(listener)) == sorted(others)
    exchange(connection)
    assert [name for name, _ in received(listener)] == ["bulk"]


def test_a_large_event_continues_while_small_ones_are_always_waiting() -> None:
    dialer, listener, connection = pair()
    connection.routes[0].most = 1
    send(dialer, "0", "latest", bytes(50_000), event="bulk")
    got: list[str] = []
    for number in range(200):
        send(dialer, "0", "reliable", number, event="small")
        exchange(connection, rounds=1)
        got += [name for name, _ in received(listener)]
    assert "bulk" in got and got.count("small") > 100


def test_large_events_of_two_streams_take_turns() -> None:
    dialer, listener, connection = pair()
    connection.routes[0].most = 1
    send(dialer, "0", "latest", bytes(50_000), event="long")
    exchange(connection, rounds=3)
    send(dialer, "0", "reliable", bytes(10_000), event="short")
    exchange(connection, rounds=35)
    assert [name for name, _ in received(listener)] == ["short"]
    exchange(connection)
    assert [name for name, _ in received(listener)] == ["long"]


def test_fragments_follow_each_other_without_waiting_once_there_is_memory() -> None:
    dialer, _, connection = pair()
    send(dialer, "0", "reliable", bytes(50_000))
    connection.fill(0)
    assert len(connection.routes[0].frames) == 1, "it asks for the memory"
    exchange(connection, rounds=2)
    connection.fill(0)
    assert len(connection.routes[0].frames) > 40


def test_fragments_wait_while_the_connection_is_full() -> None:
    dialer, listener, connection = pair()
    connection.routes[0].most = 3
    send(dialer, "0", "reliable", bytes(50_000))
    for _ in range(200):
        connection.fill(0)
        connection.fill(1)
        assert len(connection.routes[0].frames) <= 3
        for side in (0, 1):
            if connection.routes[side].frames:
                connection.deliver(side)
    assert [len(value) for _, value in received(listener)] == [50_000]


@pytest.mark.parametrize("dialer_sends", [True, False])
@pytest.mark.parametrize("delivery", ["reliable", "handled", "latest"])
def test_a_large_event_continues_after_a_new_connection(delivery: str, dialer_sends: bool) -> None:
    dialer, listener, connection = pair()
    sender, receiver, to = (dialer, listener, "0") if dialer_sends else (listener, dialer, "1")
    send(sender, to, delivery, bytes(50_000))
    for side in (0, 1):
        connection.routes[side].most = 1
    exchange(connection, rounds=30)
    connection.fill(1 - dialer_sends)  # lost
    before = sender.peers[to].counters.sent_bytes
    assert 25_000 < before < 40_000
    exchange(reconnect(connection, 2.0), 2.0)
    assert [len(value) for _, value in received(receiver)] == [50_000]
    # The first part was not sent again.
    assert sender.peers[to].counters.sent_bytes - before < 35_000


def test_a_newer_version_takes_the_place_of_one_that_was_cut_off() -> None:
    dialer, listener, connection = pair()
    send(dialer, "0", "latest", (1, bytes(80_000)))
    connection.routes[0].most = 1
    exchange(connection, rounds=30)
    connection.cut(1.0)
    # Both do not fit into the memory at once.
    send(dialer, "0", "latest", (2, bytes(80_000)))
    exchange(join(dialer, listener, 2.0), 2.0)
    assert [value[0] for _, value in received(listener)] == [2]


def test_a_lossy_event_that_a_lost_connection_cuts_off_is_counted_as_dropped() -> None:
    dialer, listener, connection = pair()
    send(dialer, "0", "lossy", bytes(50_000))
    exchange(connection, rounds=10)
    connection = reconnect(connection, 2.0)
    assert listener.peers["1"].incoming.large_bytes == 0
    send(dialer, "0", "lossy", bytes(20_000))
    exchange(connection, 2.0)
    assert [len(value) for _, value in received(listener)] == [20_000]
    assert dialer.peers["0"].outgoing.counters.dropped == 1


@pytest.mark.parametrize("delivery", ["reliable", "handled", "latest"])
@pytest.mark.parametrize("n_before", [1, 20, 39])
def test_a_restarted_receiver_gets_the_whole_event(delivery: str, n_before: int) -> None:
    dialer, _, connection = pair()
    connection.routes[0].most = 1
    send(dialer, "0", delivery, np.arange(5000))
    send(dialer, "0", delivery, 7, event="after")
    exchange(connection, rounds=n_before)
    connection.cut(1.0)
    again = make_node("0", start=2, options=OPTIONS)
    again.subscriptions.subscribe(["*"])
    connection = join(dialer, again, 2.0)
    exchange(connection, 2.0)
    got = received(again)
    exchange(connection, 2.0)
    got += received(again)
    assert sorted(name for name, _ in got) == ["after", "e"]
    np.testing.assert_array_equal(dict(got)["e"], np.arange(5000))


def test_a_newer_large_version_follows_the_one_that_is_under_way() -> None:
    dialer, listener, connection = pair()
    for version in range(5):
        send(dialer, "0", "latest", (version, bytes(20_000)))
        exchange(connection, rounds=8)
    exchange(connection)
    versions = [value[0] for _, value in received(listener)]
    exchange(connection)
    versions += [value[0] for _, value in received(listener)]
    assert versions == sorted(set(versions)) and versions[-1] == 4


def dialers_of(listener: NodeProtocol, n: int) -> tuple[list[NodeProtocol], list[Connection]]:
    """Return nodes that have dialed a listener and know what it receives."""
    listener.subscriptions.subscribe(["*"])
    dialers = [make_node(str(number), options=OPTIONS) for number in range(1, n + 1)]
    connections = [join(dialer, listener) for dialer in dialers]
    for connection in connections:
        exchange(connection)
    return dialers, connections


def test_memory_is_granted_before_bytes_are_sent_in_the_order_of_the_questions() -> None:
    listener = make_node("0", options=OPTIONS)
    dialers, connections = dialers_of(listener, 4)
    for dialer, connection, size in zip(dialers, connections, (80, 70, 80, 10), strict=True):
        send(dialer, "0", "reliable", (dialer.identity.node_id, bytes(size * 1000)))
        exchange(connection)
    # The first event fills the memory until it is taken. Then a small event waits for its turn.
    for order in (["1"], ["2"], ["3", "4"]):
        for dialer, connection in zip(dialers, connections, strict=True):
            before = dialer.peers["0"].counters.sent_bytes
            exchange(connection, 1.0)
            if dialer.identity.node_id > order[-1]:
                assert dialer.peers["0"].counters.sent_bytes - before < 500
        held = sum(peer.incoming.large_bytes for peer in listener.peers.values())
        assert held <= OPTIONS.max_event_bytes
        assert [value[0] for _, value in received(listener)] == order


def test_a_question_is_forgotten_with_its_connection() -> None:
    listener = make_node("0", options=OPTIONS)
    dialers, connections = dialers_of(listener, 3)
    for dialer, connection in zip(dialers, connections, strict=True):
        send(dialer, "0", "reliable", (dialer.identity.node_id, bytes(80_000)))
        exchange(connection)
    # The second peer loses its turn, and asks again behind the third one.
    connections[1] = reconnect(connections[1], 1.0)
    exchange(connections[1], 1.0)
    for expected in ("1", "3", "2"):
        assert [value[0] for _, value in received(listener)] == [expected]
        for connection in connections:
            exchange(connection, 1.0)


def test_a_peer_that_is_gone_does_not_keep_the_memory() -> None:
    listener = make_node("0", options=OPTIONS)
    dialers, connections = dialers_of(listener, 2)
    for dialer, connection in zip(dialers, connections, strict=True):
        send(dialer, "0", "reliable", (dialer.identity.node_id, bytes(80_000)))
        connection.routes[0].most = 1
    exchange(connections[0], rounds=30)
    connections[0].cut(0.5)
    exchange(connections[1], 1.0)
    assert [value[0] for _, value in received(listener)] == ["2"]
    # The first one starts over.
    exchange(join(dialers[0], listener, 2.0), 2.0)
    assert [value[0] for _, value in received(listener)] == ["1"]


@pytest.mark.parametrize("delivery", ["reliable", "handled", "latest"])
def test_a_receiver_that_accepts_nothing_for_a_while_does_not_start_over(delivery: str) -> None:
    dialer, listener, connection = pair()
    connection.routes[0].most = 1
    send(dialer, "0", delivery, bytes(20_000))
    exchange(connection, rounds=10)
    listener.accepting = False
    serve(listener)
    exchange(connection, 0.5)
    assert received(listener) == []
    listener.accepting = True
    serve(listener)
    sent = dialer.peers["0"].counters.sent_bytes
    exchange(connection, 1.0)
    assert [len(value) for _, value in received(listener)] == [20_000]
    assert dialer.peers["0"].counters.sent_bytes - sent < 15_000


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_what_exceeds_the_memory_of_the_receiver_is_refused_with_both_sizes(delivery: str) -> None:
    dialer, listener, connection = pair()
    with pytest.raises(FrameTooLarge) as caught:
        send(dialer, "0", delivery, bytes(100_000))
    for part in ("100070", "99744", "--max-event-bytes", "max_event_bytes"):
        assert part in str(caught.value)
    send(dialer, "0", delivery, bytes(99_000))
    exchange(connection)
    assert [len(value) for _, value in received(listener)] == [99_000]


def send_fragment(connection: Connection, fragment: Fragment, data: bytes, **fields: int) -> None:
    """Send a signed frame with a fragment that an honest peer would not send."""
    session = connection.ends[0].session
    assert session is not None
    contents = FrameContents(msgspec.msgpack.encode(fragment), (data,) if data else ())
    numbers = {"stream": 0, "data_sequence": 2, **fields}
    frame = session.make(FrameType.FRAGMENT, contents, incarnation=1, **numbers)  # type: ignore[arg-type]
    connection.receive(1, bytearray(bytes(frame)))
    if connection.errors:
        raise connection.errors[0]


@pytest.mark.parametrize(
    ("fragment", "data", "fields"),
    [
        (Fragment(100_001, 0, 0), b"", {}),
        (Fragment(2**60, 0, 0), b"", {}),
        (Fragment(2000, 0, 10), b"x" * 9, {}),
        (Fragment(2000, 0, 0), b"x", {}),
        (Fragment(2000, 1995, 10), b"x" * 10, {}),
        (Fragment(2000, 2**59, 10), b"x" * 10, {}),
        (Fragment(2000, 0, 0), b"", {"stream": 9}),
        (Fragment(2000, 0, 0), b"", {"data_sequence": 100}),
        (Fragment(100, 0, 100), b"x" * 100, {}),
    ],
)
def test_fragments_that_no_honest_peer_sends_are_refused(
    fragment: Fragment, data: bytes, fields: dict[str, int]
) -> None:
    connection = pair()[2]
    with pytest.raises(FrameError):
        send_fragment(connection, fragment, data, **fields)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (Fragment(3000, 0, 1000), "2000"),
        (Fragment(2000, 1000, 1000), "byte 0 of 2000"),
    ],
)
def test_a_frame_cannot_change_its_length_or_have_gaps(second: Fragment, message: str) -> None:
    connection = pair()[2]
    send_fragment(connection, Fragment(2000, 0, 0), b"")
    with pytest.raises(FrameError, match=message):
        send_fragment(connection, second, b"x" * 1000)


def test_memory_cannot_be_asked_for_twice() -> None:
    listener = make_node("0", options=OPTIONS)
    dialers, connections = dialers_of(listener, 2)
    send(dialers[0], "0", "reliable", bytes(80_000))
    exchange(connections[0])
    send_fragment(connections[1], Fragment(80_000, 0, 0), b"", data_sequence=2)
    with pytest.raises(FrameError, match="asks twice"):
        send_fragment(connections[1], Fragment(80_000, 0, 0), b"", data_sequence=2)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=6),
    text=st.text(max_size=300),
    fragment_bytes=st.integers(1, 400),
    cuts=st.sets(st.integers(0, 60)),
)
def test_fragments_join_to_the_event_over_any_number_of_connections(
    sizes: list[int], text: str, fragment_bytes: int, cuts: set[int]
) -> None:
    value = [text, *(np.arange(size, dtype=np.uint8) for size in sizes)]
    event = encode_event("e", value, CODEC)
    assembly = Assembly(0, 1, image_of(event).total)
    n_sent = 0
    transfer = Transfer(event, fragment_bytes=fragment_bytes)
    while not assembly.is_complete:
        fragment = transfer.next_fragment()
        assert fragment is not None
        n_sent += 1
        if n_sent in cuts:
            transfer = Transfer(event, fragment_bytes=fragment_bytes)
        elif not fragment.length:
            assert transfer.next_fragment() is None
            transfer.on_grant(assembly.offset)
        else:
            contents = fragment_contents(event, fragment)
            raw = OutgoingFrame(FrameType.FRAGMENT, contents, None, max_size=1 << 20)
            frame: Frame = decode_frame(bytes(raw))
            assembly.add(Fragment.of(frame), frame)
    assert transfer.is_sent and transfer.next_fragment() is None
    got = CODEC.decode(assembly.event().skeleton, assembly.event().buffers)
    arrays: list[Any] = [*value[1:]]
    assert got[0] == text
    assert [array.tolist() for array in got[1:]] == [array.tolist() for array in arrays]


@pytest.mark.parametrize("offset", [-1, None, 10**6])
def test_a_grant_that_was_not_asked_for_is_refused(offset: int | None) -> None:
    transfer = Transfer(encode_event("e", bytes(1000), CODEC), fragment_bytes=100)
    if offset is not None:
        transfer.next_fragment()
    if offset == -1:
        transfer.on_grant(0)
    with pytest.raises(FrameError, match="not offered"):
        transfer.on_grant(max(0, offset or 0))


@settings(deadline=None)
@given(st.data())
def test_damaged_images_are_frame_errors(data: st.DataObject) -> None:
    event = encode_event("e", [np.arange(5), "x", np.arange(3)], CODEC)
    raw = bytearray(b"".join(image_of(event).pieces))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    if kind == "flip":
        raw[data.draw(st.integers(0, 150))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw += bytes(data.draw(st.integers(1, 100)))
    # AuthError: a signature where there must be none.
    with contextlib.suppress(FrameError, AuthError):
        event_of_image(memoryview(raw))


def test_an_event_is_laid_out_once_for_all_readers() -> None:
    event = encode_event("e", np.arange(5000), CODEC)
    assert image_of(event) is image_of(event)
    assert frame_contents((event,)) is event.contents
