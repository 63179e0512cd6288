"""The streams between two nodes: reliable, handled, latest and lossy events over connections."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import FrameError
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.streams import (
    HANDLED,
    LATEST,
    LOSSY,
    RELIABLE,
    EventBatch,
    IncomingStreams,
    OutgoingStreams,
)
from dmiddleware.router.wire.envelope import EncodedEvent, encode_event
from dmiddleware.router.wire.frame import FrameType, type_of
from tests.dmiddleware.router.node_pairs import (
    CODEC,
    exchange,
    join,
    make_node,
    reconnect,
    serve,
    taken,
)

OPTIONS = NodeOptions(
    batch_bytes=300,
    outbox_bytes=20_000,
    inbox_bytes=2_000,
    fragment_bytes=200,
    max_event_bytes=10_000,
)
LARGE = 1500
KINDS = ("reliable", "handled", "weights", "metric")


def event(name: str, value: object = 0) -> EncodedEvent:
    return encode_event(name, value, CODEC)


class Exchange:
    """Node 1 sends events of all kinds to node 0, and a ledger shows which have arrived."""

    def __init__(self, options: NodeOptions = OPTIONS) -> None:
        self.sender = make_node("1", options=options)
        self.receiver = make_node("0", options=options)
        self.connection = join(self.sender, self.receiver)
        self.offered: dict[str, list[int]] = {kind: [] for kind in KINDS}
        self.taken: dict[str, list[int]] = {kind: [] for kind in KINDS}

    def offer(self, kind: str, n_bytes: int = 0) -> None:
        number = len(self.offered[kind])
        encoded = event(kind, (number, bytes(n_bytes)))
        if kind == "weights":
            self.sender.subscriptions.put_latest(encoded, ["0"])
        elif kind == "metric":
            self.sender.subscriptions.put_lossy(encoded, ["0"])
        else:
            assert self.sender.offer("0", encoded, handled=kind == "handled")
        self.offered[kind].append(number)

    def offer_all(self) -> None:
        for n_bytes in (0, 0, LARGE, 0):
            for kind in KINDS:
                self.offer(kind, n_bytes)

    def take(self) -> None:
        for _, name, value in taken(self.receiver):
            self.taken[name].append(value[0])

    def run(self, rounds: int = 1_000_000) -> int:
        """Exchange and take up to some number of frames; return how many there were."""
        for n_frames in range(rounds):
            for side in (0, 1):
                self.connection.make_due(side)
            sides = [side for side in (0, 1) if self.connection.routes[side].frames]
            if not sides:
                return n_frames
            self.connection.deliver(sides[n_frames % len(sides)])
            assert not self.connection.errors
            self.take()
        return rounds

    def finish(self) -> None:
        """Exchange the rest, and check the ledgers."""
        for _ in range(3):
            self.run()
            for node in (self.sender, self.receiver):
                node.beat()
                serve(node)
        outgoing = self.sender.peers["0"].outgoing
        incoming = self.receiver.peers["1"].incoming
        assert outgoing.is_empty and incoming.large_bytes == 0
        for kind in ("reliable", "handled"):
            assert self.taken[kind] == self.offered[kind]
        assert self.taken["weights"] == sorted(set(self.taken["weights"]))
        assert self.taken["weights"][-1:] == self.offered["weights"][-1:]
        metrics = self.taken["metric"]
        assert metrics == sorted(set(metrics))
        n_dropped = outgoing.counters.dropped + incoming.counters.dropped
        assert len(metrics) + n_dropped == len(self.offered["metric"])


def test_without_interruptions_everything_arrives() -> None:
    world = Exchange()
    world.offer_all()
    world.finish()
    assert len(world.taken["metric"]) == 4


@pytest.mark.parametrize("listener_sends", [False, True])
def test_a_reconnect_after_any_frame_loses_and_repeats_nothing(listener_sends: bool) -> None:
    n_frames = 0
    cut_after = 0
    while cut_after <= n_frames:
        world = Exchange()
        if listener_sends:
            world.connection.cut()
            world.connection = join(world.receiver, world.sender)
        world.offer_all()
        if not cut_after:
            n_frames = world.run()
            assert n_frames > 30
        else:
            world.run(cut_after)
            world.connection = reconnect(world.connection)
            world.finish()
        cut_after += 1


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(KINDS), st.sampled_from((0, 0, 100, LARGE))),
            st.tuples(st.just("run"), st.integers(1, 12)),
            st.tuples(st.sampled_from(("suspend", "resume", "reconnect")), st.just(0)),
        ),
        max_size=50,
    )
)
def test_suspensions_and_reconnects_in_any_order_lose_and_repeat_nothing(
    steps: list[tuple[str, int]],
) -> None:
    world = Exchange()
    for what, n in steps:
        if what == "run":
            world.run(n)
        elif what == "reconnect":
            world.connection = reconnect(world.connection)
        elif what in ("suspend", "resume"):
            world.receiver.accepting = what == "resume"
            serve(world.receiver)
        elif world.sender.peers["0"].outgoing.n_bytes < 15_000:
            world.offer(what, n)
    world.receiver.accepting = True
    serve(world.receiver)
    world.finish()


@pytest.mark.parametrize("n_before", range(0, 60, 3))
@pytest.mark.parametrize("n_during", [0, 1, 2, 5, 1000])
def test_a_suspension_at_any_point_drops_and_later_has_all_sent_again(
    n_before: int, n_during: int
) -> None:
    world = Exchange()
    world.offer_all()
    world.run(n_before)
    world.receiver.accepting = False
    serve(world.receiver)
    before = {kind: list(numbers) for kind, numbers in world.taken.items()}
    world.run(n_during)
    assert world.taken == before
    world.offer_all()
    world.receiver.accepting = True
    serve(world.receiver)
    world.run(2)
    # It changes its mind again before the sender knows.
    world.receiver.accepting = False
    world.receiver.accepting = True
    serve(world.receiver)
    world.finish()


def test_while_a_peer_accepts_nothing_the_sender_keeps_a_bounded_number_of_lossy_events() -> None:
    world = Exchange(NodeOptions(max_lossy=5))
    world.run()
    world.receiver.accepting = False
    serve(world.receiver)
    world.run()
    sent = world.sender.peers["0"].counters.sent_frames
    for _ in range(100):
        world.offer("metric")
        world.run()
    assert world.sender.peers["0"].counters.sent_frames - sent < 5
    world.receiver.accepting = True
    serve(world.receiver)
    world.finish()
    assert world.taken["metric"] == [95, 96, 97, 98, 99]


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_is_sent_without_waiting_for_a_heartbeat(kind: str) -> None:
    world = Exchange()
    world.run()
    world.offer(kind)
    assert world.run() > 0
    assert world.taken[kind] == [0]


def test_events_are_dropped_until_the_sender_has_gone_back() -> None:
    world = Exchange()
    world.run()
    world.receiver.accepting = False
    world.offer("reliable")
    world.connection.fill(0)
    world.receiver.accepting = True
    serve(world.receiver)
    # The first frame was sent before the sender knew.
    assert type_of(world.connection.routes[0].frames[0]) is FrameType.DATA
    world.connection.deliver(0)
    assert taken(world.receiver) == []
    world.connection.deliver(1)
    sent = [type_of(frame) for frame in world.connection.routes[0].frames]
    assert sent[-2:] == [FrameType.AGAIN, FrameType.DATA]
    world.finish()


def test_a_mark_that_nobody_has_asked_for_is_refused() -> None:
    world = Exchange()
    world.connection.ends[0].owed[FrameType.AGAIN] = 1
    world.connection.fill(0)
    with pytest.raises(FrameError, match="AGAIN"):
        exchange(world.connection)


def open_streams(**options: int) -> tuple[OutgoingStreams, IncomingStreams]:
    outgoing = OutgoingStreams(max_bytes=10_000, batch_bytes=300, **options)
    incoming = IncomingStreams(max_bytes=1000)
    outgoing.on_connect(1000)
    outgoing.on_states(incoming.take_states())
    return outgoing, incoming


def batches(outgoing: OutgoingStreams) -> list[EventBatch]:
    sent = []
    while (batch := outgoing.next_batch()) is not None:
        sent.append(batch)
    return sent


def test_latest_events_go_first_then_reliable_ones_then_lossy_ones() -> None:
    outgoing, _ = open_streams()
    outgoing.put_lossy(event("lossy"))
    outgoing.outbox_handled.offer(event("handled"))
    outgoing.outbox.offer(event("reliable"))
    outgoing.put_latest(event("latest"))
    assert [batch.stream for batch in batches(outgoing)] == [LATEST, RELIABLE, HANDLED, LOSSY]


def test_nothing_is_sent_before_the_states_of_the_peer() -> None:
    outgoing = OutgoingStreams(max_bytes=1000)
    outgoing.put_latest(event("latest"))
    outgoing.put_lossy(event("lossy"))
    outgoing.outbox.offer(event("reliable"))
    assert batches(outgoing) == []
    outgoing.on_connect(1000)
    assert batches(outgoing) == []


def test_the_next_version_is_sent_when_the_last_one_has_arrived() -> None:
    outgoing, incoming = open_streams()
    for version in range(3):
        outgoing.put_latest(event("weights", version))
        assert len(batches(outgoing)) == (version == 0)
    incoming.on_events(LATEST, 1, [event("weights", 0)])
    assert incoming.is_due
    outgoing.on_states(incoming.take_states())
    (batch,) = batches(outgoing)
    assert batch.sequence == 2 and outgoing.counters.superseded == 1
    incoming.on_events(LATEST, 2, batch.events)
    assert incoming.counters.superseded == 1, "the first version was not taken"
    assert incoming.take(9) == ([], list(batch.events))


def test_lossy_events_that_a_connection_loses_are_counted_once() -> None:
    outgoing, incoming = open_streams()
    for _ in range(3):
        outgoing.put_lossy(event("metric"))
        batches(outgoing)
    incoming.on_events(LOSSY, 1, [event("metric")])
    for _ in range(2):
        outgoing.on_connect(1000)
        outgoing.on_states(incoming.take_states())
        assert outgoing.counters.dropped == 2


def test_lossy_events_that_are_not_taken_are_dropped_and_counted() -> None:
    incoming = IncomingStreams(max_bytes=1000, max_lossy=3)
    for number in range(5):
        incoming.on_events(LOSSY, number + 1, [event("metric", number)])
    assert incoming.counters.dropped == 2
    assert [CODEC.decode(e.skeleton, e.buffers) for e in incoming.take(9)[1]] == [2, 3, 4]


@pytest.mark.parametrize("stream", [RELIABLE, HANDLED, LATEST, LOSSY])
def test_frames_that_are_repeated_or_of_an_unknown_stream_are_refused(stream: int) -> None:
    _, incoming = open_streams()
    incoming.on_events(stream, 1, [event("e")])
    with pytest.raises(FrameError, match="after frame 1"):
        incoming.on_events(stream, 1, [event("e")])
    with pytest.raises(FrameError, match="unknown stream 4"):
        incoming.on_events(4, 1, [])


def test_two_connections_do_not_share_a_grant() -> None:
    """A grant that the old connection lost is asked for and given again."""
    world = Exchange()
    world.offer("reliable", LARGE)
    for side in (0, 1):
        world.connection.fill(side)
    while world.connection.routes[0].frames:
        world.connection.deliver(0)
    assert any(type_of(f) is FrameType.STATE for f in world.connection.routes[1].frames)
    world.connection = reconnect(world.connection)
    world.finish()
