"""Large events between two nodes: their fragments, the memory for them, and what disturbs them."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, EncodeError, FrameError, FrameTooLarge
from dmiddleware.router import NodeOptions
from dmiddleware.router.protocol.fragments import Assembly, Fragment, Transfer, fragment_contents
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.session import ParkedPoll, PeerSession
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
from tests.dmiddleware.router.node_pairs import CODEC, exchange, join, make_node, replied, taken

OPTIONS = NodeOptions(
    fragment_bytes=1000, batch_bytes=500, outbox_bytes=100_000, max_event_bytes=100_000
)
DELIVERIES = ("reliable", "handled", "latest", "lossy")


def pair(options: NodeOptions = OPTIONS) -> tuple[NodeProtocol, NodeProtocol, PeerSession]:
    """Return a dialer, and a listener that receives all of its events."""
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    peer = join(dialer, listener)
    for node in (dialer, listener):
        node.subscriptions.subscribe(["*"])
    exchange(dialer, listener, peer)
    taken(listener), taken(dialer)
    return dialer, listener, peer


def send(node: NodeProtocol, to: str, delivery: str, value: Any, event: str = "e") -> EncodedEvent:
    encoded = encode_event(event, value, CODEC)
    node.subscriptions.check_size(encoded, [to])
    if delivery == "latest":
        node.subscriptions.put_latest(encoded)
    elif delivery == "lossy":
        node.peers[to].outgoing.put_lossy(encoded)
    else:
        assert node.offer(to, encoded, handled=delivery == "handled")
    return encoded


def received(node: NodeProtocol) -> list[tuple[str, Any]]:
    """Take all events, and handle those that are acknowledged when handled."""
    events = []
    for peer, event in node.take_handled(100):
        events.append((event.event, CODEC.decode(event.skeleton, event.buffers)))
        node.on_handled(peer)
    return events + [(name, value) for _, name, value in taken(node)]


def deliver(
    dialer: NodeProtocol, listener: NodeProtocol, peer: PeerSession, n: int, now: float = 0.0
) -> None:
    """Deliver up to ``n`` requests with events from the dialer."""
    for _ in range(n):
        request = dialer.data_request(peer, now)
        if request is not None:
            dialer.on_reply(peer, request, replied(listener, request.raw, now), now)


@pytest.mark.parametrize("dialer_sends", [True, False])
@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_large_event_arrives_whole_under_each_contract(delivery: str, dialer_sends: bool) -> None:
    dialer, listener, peer = pair()
    sender, receiver = (dialer, listener) if dialer_sends else (listener, dialer)
    value = {"w": np.arange(5000.0), "n": [np.arange(k) for k in range(9)], "t": "x" * 3000}
    send(sender, "0" if dialer_sends else "1", delivery, value)
    exchange(dialer, listener, peer)
    ((name, got),) = received(receiver)
    assert name == "e" and got["t"] == value["t"]
    np.testing.assert_array_equal(got["w"], value["w"])
    assert [len(one) for one in got["n"]] == list(range(9))
    exchange(dialer, listener, peer)
    assert sender.peers["0" if dialer_sends else "1"].outgoing.empty
    assert sender.peers["0" if dialer_sends else "1"].counters.sent_frames > 40


@pytest.mark.parametrize("value", [b"x" * 20_000, "x" * 20_000, list(range(20_000)), {}, None])
def test_values_of_any_form_may_be_large(value: Any) -> None:
    dialer, listener, peer = pair()
    send(dialer, "0", "reliable", [value, b"y" * 5000])
    exchange(dialer, listener, peer)
    assert received(listener) == [("e", [value, b"y" * 5000])]


@pytest.mark.parametrize("n_arrays", [8_191, 8_192, 100_000])
def test_an_event_may_have_any_number_of_arrays(n_arrays: int) -> None:
    dialer, listener, peer = pair(NodeOptions(inbox_bytes=1 << 24, outbox_bytes=1 << 24))
    arrays = [np.full(k % 3, k) for k in range(n_arrays)]
    send(dialer, "0", "reliable", arrays)
    exchange(dialer, listener, peer)
    ((_, got),) = received(listener)
    assert len(got) == n_arrays
    assert all((one == k).all() and len(one) == k % 3 for k, one in enumerate(got))


def test_large_events_may_be_nested_as_deeply_as_small_ones_and_no_deeper() -> None:
    dialer, listener, peer = pair()
    for wrap in (lambda value: [value], lambda value: (value,), lambda value: {"k": value}):
        value: Any = np.arange(2000)
        for _ in range(MAX_DEPTH - 1):
            value = wrap(value)
        send(dialer, "0", "reliable", value)
        exchange(dialer, listener, peer)
        assert len(received(listener)) == 1
        for depth in (2, 10_000):
            for _ in range(depth):
                value = wrap(value)
            with pytest.raises(EncodeError, match="levels deep"):
                encode_event("e", value, CODEC)


@pytest.mark.parametrize("delivery", ["reliable", "handled"])
def test_events_of_all_sizes_arrive_in_order(delivery: str) -> None:
    dialer, listener, peer = pair()
    sizes = [10, 20_000, 10, 10, 5000, 30_000, 10]
    for number, size in enumerate(sizes):
        send(dialer, "0", delivery, (number, bytes(size)))
    got: list[tuple[int, bytes]] = []
    for round_ in range(20):
        exchange(dialer, listener, peer, round_ * 0.1)
        got += [value for _, value in received(listener)]
    assert [(number, len(data)) for number, data in got] == list(enumerate(sizes))


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_small_events_of_other_streams_pass_a_large_one(delivery: str) -> None:
    dialer, listener, peer = pair()
    send(dialer, "0", delivery, bytes(50_000), event="bulk")
    deliver(dialer, listener, peer, 5)
    others = [other for other in DELIVERIES if other != delivery]
    for other in others:
        send(dialer, "0", other, other, event=other)
    deliver(dialer, listener, peer, 8)
    assert sorted(name for name, _ in received(listener)) == sorted(others)
    exchange(dialer, listener, peer)
    assert [name for name, _ in received(listener)] == ["bulk"]


def test_a_large_event_continues_while_small_ones_are_always_waiting() -> None:
    dialer, listener, peer = pair()
    send(dialer, "0", "latest", bytes(50_000), event="bulk")
    got: list[str] = []
    for number in range(200):
        send(dialer, "0", "reliable", number, event="small")
        deliver(dialer, listener, peer, 1)
        got += [name for name, _ in received(listener)]
    assert "bulk" in got and got.count("small") > 100


def test_large_events_of_two_streams_take_turns() -> None:
    dialer, listener, peer = pair()
    send(dialer, "0", "latest", bytes(50_000), event="long")
    deliver(dialer, listener, peer, 3)
    send(dialer, "0", "reliable", bytes(10_000), event="short")
    exchange(dialer, listener, peer)
    deliver(dialer, listener, peer, 0)
    assert {name for name, _ in received(listener)} == {"long", "short"}


def test_one_fragment_is_on_its_way_at_a_time() -> None:
    dialer, _, peer = pair()
    send(dialer, "0", "reliable", bytes(50_000))
    assert dialer.data_request(peer, 0.0) is not None
    assert dialer.data_request(peer, 0.0) is None


@pytest.mark.parametrize("dialer_sends", [True, False])
@pytest.mark.parametrize("delivery", ["reliable", "handled", "latest"])
def test_a_large_event_continues_after_a_new_connection(delivery: str, dialer_sends: bool) -> None:
    dialer, listener, peer = pair()
    sender, receiver, to = (dialer, listener, "0") if dialer_sends else (listener, dialer, "1")
    send(sender, to, delivery, bytes(50_000))
    if dialer_sends:
        deliver(dialer, listener, peer, 30)
        assert dialer.data_request(peer, 0.0) is not None  # lost
    else:
        for _ in range(30):
            request = dialer.request(peer, FrameType.POLL)
            dialer.on_reply(peer, request, replied(listener, request.raw, 0.0), 0.0)
    before = sender.peers[to].counters.sent_bytes
    assert 25_000 < before < 40_000
    for node, name in ((dialer, "0"), (listener, "1")):
        node.on_connection_lost(name, "the connection broke", 1.0)
    peer = join(dialer, listener, 2.0)
    exchange(dialer, listener, peer, 2.0)
    assert [len(value) for _, value in received(receiver)] == [50_000]
    # The first part was not sent again.
    assert sender.peers[to].counters.sent_bytes - before < 35_000


def test_a_lossy_event_that_a_lost_connection_cuts_off_is_counted_as_dropped() -> None:
    dialer, listener, peer = pair()
    send(dialer, "0", "lossy", bytes(50_000))
    deliver(dialer, listener, peer, 10)
    dialer.on_connection_lost("0", "the connection broke", 1.0)
    peer = join(dialer, listener, 2.0)
    send(dialer, "0", "lossy", bytes(20_000))
    exchange(dialer, listener, peer, 2.0)
    assert [len(value) for _, value in received(listener)] == [20_000]
    assert dialer.peers["0"].outgoing.counters.dropped == 1


@pytest.mark.parametrize("delivery", ["reliable", "handled", "latest"])
@pytest.mark.parametrize("n_before", [1, 20, 39])
def test_a_restarted_receiver_gets_the_whole_event(delivery: str, n_before: int) -> None:
    dialer, listener, peer = pair()
    send(dialer, "0", delivery, np.arange(5000))
    send(dialer, "0", delivery, 7, event="after")
    deliver(dialer, listener, peer, n_before)
    dialer.on_connection_lost("0", "the connection broke", 1.0)
    again = make_node("0", start=2, options=OPTIONS)
    again.subscriptions.subscribe(["*"])
    peer = join(dialer, again, 2.0)
    exchange(dialer, again, peer, 2.0)
    got = received(again)
    exchange(dialer, again, peer, 2.0)
    got += received(again)
    assert sorted(name for name, _ in got) == ["after", "e"]
    np.testing.assert_array_equal(dict(got)["e"], np.arange(5000))


def test_a_newer_large_version_follows_the_one_that_is_under_way() -> None:
    dialer, listener, peer = pair()
    for version in range(5):
        send(dialer, "0", "latest", (version, bytes(20_000)))
        deliver(dialer, listener, peer, 8)
    exchange(dialer, listener, peer)
    versions = [value[0] for _, value in received(listener)]
    exchange(dialer, listener, peer)
    versions += [value[0] for _, value in received(listener)]
    assert versions == sorted(set(versions)) and versions[-1] == 4


def test_memory_is_granted_before_bytes_are_sent() -> None:
    listener = make_node("0", options=OPTIONS)
    listener.subscriptions.subscribe(["*"])
    dialers = [make_node(str(n), options=OPTIONS) for n in (1, 2)]
    peers = [join(dialer, listener) for dialer in dialers]
    for dialer, peer in zip(dialers, peers, strict=True):
        exchange(dialer, listener, peer)
        send(dialer, "0", "reliable", bytes(80_000))
    exchange(dialers[0], listener, peers[0])
    before = dialers[1].peers["0"].counters.sent_bytes
    exchange(dialers[1], listener, peers[1])
    # The first event fills the memory until it is taken.
    assert dialers[1].peers["0"].counters.sent_bytes - before < 500
    assert dialers[1].peers["0"].outgoing.n_messages == 1
    assert [len(value) for _, value in received(listener)] == [80_000]
    exchange(dialers[1], listener, peers[1], 1.0)
    assert [len(value) for _, value in received(listener)] == [80_000]


def test_a_peer_that_is_gone_does_not_keep_the_memory() -> None:
    listener = make_node("0", options=OPTIONS)
    listener.subscriptions.subscribe(["*"])
    dialers = [make_node(str(n), options=OPTIONS) for n in (1, 2)]
    peers = [join(dialer, listener) for dialer in dialers]
    for dialer, peer in zip(dialers, peers, strict=True):
        exchange(dialer, listener, peer)
        send(dialer, "0", "reliable", (dialer.identity.node_id, bytes(80_000)))
    deliver(dialers[0], listener, peers[0], 30)
    listener.on_connection_lost("1", "the connection broke", 0.5)
    exchange(dialers[1], listener, peers[1], 1.0)
    assert [value[0] for _, value in received(listener)] == ["2"]
    # The first one starts over.
    peer = join(dialers[0], listener, 2.0)
    exchange(dialers[0], listener, peer, 2.0)
    assert [value[0] for _, value in received(listener)] == ["1"]


def test_a_receiver_that_accepts_nothing_for_a_while_does_not_start_over() -> None:
    dialer, listener, peer = pair()
    listener.accepting = True
    send(dialer, "0", "reliable", bytes(20_000))
    deliver(dialer, listener, peer, 10)
    listener.accepting = False
    exchange(dialer, listener, peer, 0.5)
    assert received(listener) == []
    listener.accepting = True
    sent = dialer.peers["0"].counters.sent_bytes
    exchange(dialer, listener, peer, 1.0)
    assert [len(value) for _, value in received(listener)] == [20_000]
    assert dialer.peers["0"].counters.sent_bytes - sent < 15_000


def test_lost_questions_and_fragments_are_made_up_for() -> None:
    dialer, listener, peer = pair()
    send(dialer, "0", "reliable", bytes(20_000))
    now, n_lost = 0.0, 0
    for attempt in range(200):
        now += OPTIONS.retry_s
        request = dialer.data_request(peer, now)
        if request is None:
            break
        if attempt % 3 == 0:
            n_lost += 1  # on the way to the listener
            continue
        reply = replied(listener, request.raw, now)
        if attempt % 3 == 1:
            dialer.on_reply(peer, request, reply, now)
    assert [len(value) for _, value in received(listener)] == [20_000]


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_what_exceeds_the_memory_of_the_receiver_is_refused_with_both_sizes(delivery: str) -> None:
    dialer, listener, peer = pair()
    with pytest.raises(FrameTooLarge) as caught:
        send(dialer, "0", delivery, bytes(100_000))
    for part in ("100070", "99744", "--max-event-bytes", "max_event_bytes"):
        assert part in str(caught.value)
    send(dialer, "0", delivery, bytes(99_000))
    exchange(dialer, listener, peer)
    assert [len(value) for _, value in received(listener)] == [99_000]


def fragment_frame(
    dialer: NodeProtocol, peer: PeerSession, fragment: Fragment, data: bytes, **fields: int
) -> bytes:
    """Return a signed frame with a fragment that an honest peer would not send."""
    return bytes(
        OutgoingFrame(
            FrameType.FRAGMENT,
            FrameContents(msgspec.msgpack.encode(fragment), (data,) if data else ()),
            peer.sign,
            max_size=1 << 20,
            session=peer.session.number,
            incarnation=dialer.incarnation,
            sequence=peer.next_number(),
            **{"stream": 0, "data_sequence": 2, **fields},
        )
    )


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
    dialer, listener, peer = pair()
    raw = fragment_frame(dialer, peer, fragment, data, **fields)
    with pytest.raises(FrameError):
        listener.on_request(raw, 0.0, cover_body=True)


def test_a_frame_cannot_change_its_length_or_have_gaps() -> None:
    dialer, listener, peer = pair()
    listener.on_request(
        fragment_frame(dialer, peer, Fragment(2000, 0, 0), b""), 0.0, cover_body=True
    )
    with pytest.raises(FrameError, match="2000"):
        raw = fragment_frame(dialer, peer, Fragment(3000, 0, 0), b"")
        listener.on_request(raw, 0.0, cover_body=True)
    raw = fragment_frame(dialer, peer, Fragment(2000, 1000, 1000), b"x" * 1000)
    reply = listener.on_request(raw, 0.0, cover_body=True).content
    assert not isinstance(reply, ParkedPoll)
    acknowledgments = msgspec.msgpack.decode(decode_frame(bytes(reply), peer.check).metadata)
    assert acknowledgments[3] == [[0, 2, 0]]


@given(
    sizes=st.lists(st.integers(0, 300), max_size=6),
    text=st.text(max_size=300),
    fragment_bytes=st.integers(1, 400),
    lost=st.sets(st.integers(0, 60)),
)
def test_fragments_join_to_the_event_whatever_is_lost(
    sizes: list[int], text: str, fragment_bytes: int, lost: set[int]
) -> None:
    value = [text, *(np.arange(size, dtype=np.uint8) for size in sizes)]
    event = encode_event("e", value, CODEC)
    transfer = Transfer(event, fragment_bytes=fragment_bytes, retry_s=1.0)
    assembly = Assembly(0, 1, image_of(event).total)
    n_sent, now = 0, 0.0
    while not assembly.complete:
        fragment = transfer.next_fragment(now)
        if fragment is None:
            now += 1.0
            continue
        n_sent += 1
        if n_sent in lost:
            continue
        contents = fragment_contents(event, fragment)
        raw = OutgoingFrame(FrameType.FRAGMENT, contents, None, max_size=1 << 20)
        frame: Frame = decode_frame(bytes(raw))
        assembly.add(Fragment.of(frame), frame)
        if n_sent + 1 not in lost:
            transfer.on_progress(assembly.offset)
    got = CODEC.decode(assembly.event().skeleton, assembly.event().buffers)
    assert got[0] == text and [one.tolist() for one in got[1:]] == [
        one.tolist() for one in value[1:]
    ]


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
