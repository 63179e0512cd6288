"""The node: two nodes over any network, from handshake to goodbye."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import AuthError, FrameError, FrameTooLarge, HandshakeRefused
from dmiddleware.router.protocol.handshake import Identity
from dmiddleware.router.protocol.limits import NodeOptions
from dmiddleware.router.protocol.node import Node
from dmiddleware.router.protocol.session import Link, Parked
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import EncodedEvent, decode_event, encode_event
from dmiddleware.router.wire.frame import FrameType

KEY = bytes(range(32))
CODEC = Codec()
OPTIONS = NodeOptions(retry_s=1.0, window=4, batch_bytes=200, outbox_bytes=2000, inbox_bytes=500)


def make_node(
    name: str, key: bytes | None = KEY, incarnation: int = 1, options: NodeOptions = OPTIONS
) -> Node:
    numbers = itertools.count(1)
    secrets = random.Random(f"{name}{incarnation}")
    return Node(
        Identity("run", name, incarnation),
        key,
        options=options,
        nonce=lambda: secrets.randbytes(32),
        session_number=lambda: next(numbers),
    )


def join(dialer: Node, listener: Node, now: float = 0.0) -> Link:
    handshake, hello = dialer.hello()
    auth = dialer.on_challenge(handshake, answered(listener, hello, now))
    return dialer.on_welcome(handshake, answered(listener, auth, now), now, cover_body=True)


def answered(listener: Node, raw: bytes | bytearray, now: float) -> bytearray:
    answer = listener.on_request(bytes(raw), now, cover_body=True)
    return listener.nothing(answer) if isinstance(answer, Parked) else answer


def emit(node: Node, to: str, event: str, value: Any) -> bool:
    return node.offer(to, encode_event(event, value, CODEC))


def taken(node: Node) -> list[tuple[str, str, Any]]:
    return [(who, e.event, decode_event(e, CODEC)) for who, e in node.take(100)]


def exchange(dialer: Node, listener: Node, link: Link, now: float = 0.0) -> None:
    """Move everything that is waiting, both ways, over a perfect network."""
    while (made := dialer.data_request(link, now)) is not None:
        sending, raw = made
        dialer.on_answer(link, answered(listener, raw, now), now, sent=sending)
    kind = FrameType.DATA
    while kind is FrameType.DATA:
        raw = dialer.request(link, FrameType.POLL)
        kind = dialer.on_answer(link, answered(listener, raw, now), now)


@pytest.fixture
def pair() -> tuple[Node, Node, Link]:
    dialer, listener = make_node("collector"), make_node("learner")
    return dialer, listener, join(dialer, listener)


def test_peers_learn_of_each_other_and_of_what_they_want(pair: tuple[Node, Node, Link]) -> None:
    dialer, listener, link = pair
    dialer.audience.want(["weights"])
    listener.audience.want(["traj*"])
    exchange(dialer, listener, link)
    assert taken(dialer) == taken(listener) == []
    assert dialer.audience.targets("trajectories") == ("learner",)
    assert dialer.audience.targets("weights") == ()
    assert listener.audience.targets("weights") == ("collector",)
    assert [change.kind for change in dialer.changes + listener.changes] == ["joined", "joined"]
    assert [identity.node_id for identity in listener.peers()] == ["collector"]


def test_wants_that_cannot_be_read_are_counted_and_harm_nothing_else(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    dialer.audience.want(["weights"])
    exchange(dialer, listener, link)
    assert taken(listener) == []
    dialer.offer("learner", EncodedEvent("$wants", b"\xc1", (), 1))
    emit(dialer, "learner", "e", 1)
    exchange(dialer, listener, link)
    assert taken(listener) == [("collector", "e", 1)]
    assert listener.refused == 1
    assert listener.audience.targets("weights") == ("collector",)


def test_events_arrive_in_order_both_ways(pair: tuple[Node, Node, Link]) -> None:
    dialer, listener, link = pair
    for number in range(6):
        assert emit(dialer, "learner", "up", number)
        assert emit(listener, "collector", "down", number)
    exchange(dialer, listener, link)
    assert taken(listener) == [("collector", "up", number) for number in range(6)]
    assert taken(dialer) == [("learner", "down", number) for number in range(6)]


class World:
    """A dialer and a listener over a network that loses and delays, and breaks connections."""

    def __init__(self, seed: int, loss: float) -> None:
        self.chance = random.Random(seed)
        self.loss = loss
        self.now = 0.0
        self.dialer, self.listener = make_node("collector"), make_node("learner")
        self.link = join(self.dialer, self.listener)
        self.wire: list[Callable[[], None]] = []
        self.parked: list[Parked] = []

    def lost(self) -> bool:
        return self.chance.random() < self.loss

    def request(self, raw: bytearray, sent: Any = None) -> None:
        def arrive() -> None:
            try:
                answer = self.listener.on_request(bytes(raw), self.now, cover_body=True)
            except AuthError:
                return  # it came twice
            if isinstance(answer, Parked):
                self.parked.append(answer)
            else:
                self.answer(answer, sent)

        for _ in range(self.chance.choice([1, 1, 1, 2])):
            if not self.lost():
                self.wire.append(arrive)

    def answer(self, raw: bytearray, sent: Any = None) -> None:
        link = self.link

        def arrive() -> None:
            with contextlib.suppress(HandshakeRefused, AuthError):  # of a session that is over
                self.dialer.on_answer(link, bytes(raw), self.now, sent=sent)

        if not self.lost():
            self.wire.append(arrive)

    def step(self) -> None:
        self.now += 0.3
        if self.chance.random() < 0.02:
            self.link = join(self.dialer, self.listener, self.now)
        while (made := self.dialer.data_request(self.link, self.now)) is not None:
            self.request(made[1], made[0])
        self.request(self.dialer.request(self.link, FrameType.POLL))
        self.parked = [parked for parked in self.parked if not self.resume(parked)]
        self.chance.shuffle(self.wire)
        for _ in range(self.chance.randrange(len(self.wire) + 1)):
            self.wire.pop()()

    def resume(self, parked: Parked) -> bool:
        answer = self.listener.resume(parked, self.now)
        if answer is not None:
            self.answer(answer)
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
    to_send = {"learner": list(enumerate(up)), "collector": list(enumerate(down))}
    got: dict[str, list[Any]] = {"learner": [], "collector": []}
    nodes = {"learner": world.listener, "collector": world.dialer}
    for _ in range(20_000):
        for target, source in (("learner", world.dialer), ("collector", world.listener)):
            queue = to_send[target]
            while queue and emit(source, target, "e", (queue[0][0], bytes(queue[0][1]))):
                queue.pop(0)
            got[target] += [value[0] for _, _, value in taken(nodes[target])]
        if [len(got["learner"]), len(got["collector"])] == [len(up), len(down)]:
            break
        world.step()
    assert got == {"learner": list(range(len(up))), "collector": list(range(len(down)))}


def test_the_latest_replaces_what_was_not_sent_yet(pair: tuple[Node, Node, Link]) -> None:
    dialer, listener, link = pair
    for version in range(5):
        listener.links["collector"].outgoing.put_latest(encode_event("weights", version, CODEC))
    exchange(dialer, listener, link)
    assert taken(dialer) == [("learner", "weights", 4)]
    assert listener.links["collector"].outgoing.counters.superseded == 4


def test_an_older_version_that_comes_late_is_not_delivered(pair: tuple[Node, Node, Link]) -> None:
    dialer, listener, link = pair
    outgoing = dialer.links["learner"].outgoing
    outgoing.put_latest(encode_event("weights", 1, CODEC))
    first = dialer.data_request(link, 0.0)
    outgoing.put_latest(encode_event("weights", 2, CODEC))
    second = dialer.data_request(link, 2.0)
    assert first is not None and second is not None
    answered(listener, second[1], 2.0)
    answered(listener, first[1], 2.0)
    assert [value for _, event, value in taken(listener) if event == "weights"] == [2]


def test_lossy_events_over_the_bound_are_dropped_and_counted(
    pair: tuple[Node, Node, Link],
) -> None:
    outgoing = pair[0].links["learner"].outgoing
    for number in range(1030):
        outgoing.put_lossy(encode_event("metric", number, CODEC))
    assert outgoing.counters.dropped == 6


def test_a_full_outbox_refuses_and_a_slow_reader_makes_the_sender_wait(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    sent = 0
    for _ in range(100):
        while emit(dialer, "learner", "e", (sent, bytes(100))):
            sent += 1
        made = dialer.data_request(link, 0.0)
        if made is None:
            break
        dialer.on_answer(link, answered(listener, made[1], 0.0), 0.0, sent=made[0])
    bound = OPTIONS.outbox_bytes + OPTIONS.inbox_bytes + 2 * OPTIONS.batch_bytes
    assert 0 < sent * 100 <= bound
    assert dialer.links["learner"].outgoing.outbox.counters.refused_frames > 0


def test_a_silent_peer_leaves_and_what_was_accepted_for_it_is_kept_for_its_return(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    dialer.audience.want(["e"])
    exchange(dialer, listener, link)
    taken(listener)
    assert listener.tick(4.0) == []
    assert [change.kind for change in listener.changes] == ["joined", "left"]
    assert listener.audience.targets("e") == ("collector",)
    emit(listener, "collector", "e", "kept")
    link = join(dialer, listener, 50.0)
    assert listener.changes[-1].kind == "rejoined"
    exchange(dialer, listener, link, 50.0)
    assert ("learner", "e", "kept") in taken(dialer)


def test_a_peer_that_is_gone_for_too_long_is_forgotten_and_may_come_back_all_the_same(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    dialer.audience.want(["e"])
    exchange(dialer, listener, link)
    taken(listener)
    emit(listener, "collector", "e", "lost one")
    under_way = dialer.request(link, FrameType.POLL)
    answered(listener, under_way, 0.0)  # sent, and lost on the way
    listener.tick(4.0)
    assert listener.tick(200.0) == [("collector", 1)]
    assert listener.audience.targets("e") == ()
    link = join(dialer, listener, 300.0)
    assert listener.audience.targets("e") == ("collector",)
    emit(listener, "collector", "e", "after")
    exchange(dialer, listener, link, 300.0)
    assert taken(dialer) == [("learner", "e", "after")]


def test_a_peer_that_was_forgotten_gets_the_newest_when_it_is_back(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    dialer.audience.want(["weights"])
    exchange(dialer, listener, link)
    taken(listener)
    listener.audience.put_latest(encode_event("weights", 1, CODEC))
    listener.tick(4.0)
    listener.tick(200.0)
    listener.audience.put_latest(encode_event("weights", 2, CODEC))
    link = join(dialer, listener, 300.0)
    exchange(dialer, listener, link, 300.0)
    assert taken(dialer) == [("learner", "weights", 2)]


def test_a_peer_that_was_forgotten_hears_what_is_wanted_meanwhile(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    listener.tick(4.0)
    listener.audience.want(["early"])
    listener.tick(200.0)
    waiting = listener.links["collector"].outgoing.outbox.n_messages
    listener.audience.want(["early", "late"])
    assert listener.links["collector"].outgoing.outbox.n_messages == waiting
    link = join(dialer, listener, 300.0)
    exchange(dialer, listener, link, 300.0)
    assert taken(dialer) == []
    assert dialer.audience.targets("early") == dialer.audience.targets("late") == ("learner",)


def test_a_peer_that_was_forgotten_may_go_on_in_its_old_session(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    dialer.audience.want(["e", "weights"])
    exchange(dialer, listener, link)
    taken(listener)
    listener.audience.put_latest(encode_event("weights", 1, CODEC))
    listener.tick(4.0)
    listener.tick(200.0)
    assert listener.audience.targets("e") == ()
    # As a process does that was stopped, and whose connection outlived it.
    answered(listener, dialer.request(link, FrameType.HEARTBEAT), 201.0)
    assert listener.changes[-1].kind == "rejoined"
    assert listener.audience.targets("e") == ("collector",)
    emit(listener, "collector", "e", "after")
    exchange(dialer, listener, link, 201.0)
    assert taken(dialer) == [("learner", "weights", 1), ("learner", "e", "after")]


def test_a_peer_that_is_forgotten_takes_nothing_and_makes_nobody_wait(
    pair: tuple[Node, Node, Link],
) -> None:
    _, listener, _ = pair
    while emit(listener, "collector", "e", bytes(500)):
        pass
    listener.tick(4.0)
    ((_, undelivered),) = listener.tick(200.0)
    assert undelivered == 3
    for _ in range(10):
        assert emit(listener, "collector", "e", bytes(500))
    assert listener.links["collector"].outgoing.empty


def test_a_new_start_of_a_peer_gets_what_the_old_one_did_not(
    pair: tuple[Node, Node, Link],
) -> None:
    _, listener, _ = pair
    emit(listener, "collector", "e", "waiting")
    again = make_node("collector", incarnation=2)
    link = join(again, listener, 1.0)
    exchange(again, listener, link, 1.0)
    assert ("learner", "e", "waiting") in taken(again)
    assert [change.kind for change in listener.changes] == ["joined", "left", "rejoined"]


def test_goodbye_ends_the_link(pair: tuple[Node, Node, Link]) -> None:
    dialer, listener, link = pair
    raw = dialer.request(link, FrameType.BYE)
    assert dialer.on_answer(link, answered(listener, raw, 0.0), 0.0) is FrameType.BYE
    assert listener.links == {} and listener.changes[-1].reason == "said goodbye"
    with pytest.raises(HandshakeRefused) as refused:
        raw = dialer.request(link, FrameType.POLL)
        dialer.on_answer(link, answered(listener, raw, 0.0), 0.0)
    assert refused.value.code == "stale"


@pytest.mark.parametrize("returns", [False, True])
def test_what_a_peer_sent_before_it_left_is_still_delivered(
    pair: tuple[Node, Node, Link], returns: bool
) -> None:
    dialer, listener, link = pair
    emit(dialer, "learner", "e", "last words")
    exchange(dialer, listener, link)
    if returns:
        join(make_node("collector", incarnation=2), listener, 1.0)
    else:
        answered(listener, dialer.request(link, FrameType.BYE), 0.0)
    assert listener.has_mail
    assert taken(listener) == [("collector", "e", "last words")]


def test_a_request_is_not_answered_twice(pair: tuple[Node, Node, Link]) -> None:
    dialer, listener, link = pair
    raw = dialer.request(link, FrameType.HEARTBEAT)
    answered(listener, raw, 0.0)
    with pytest.raises(AuthError, match="came twice"):
        answered(listener, raw, 0.1)


def test_a_heartbeat_may_be_overtaken_by_thousands_of_requests(
    pair: tuple[Node, Node, Link],
) -> None:
    dialer, listener, link = pair
    made_early = dialer.request(link, FrameType.HEARTBEAT)
    for _ in range(4000):
        raw = dialer.request(link, FrameType.HEARTBEAT)
        answered(listener, raw, 0.0)
    assert answered(listener, made_early, 0.0)
    for old in (made_early, raw):
        with pytest.raises(AuthError, match="came twice"):
            answered(listener, old, 0.0)


def test_a_request_that_is_far_behind_is_not_taken(pair: tuple[Node, Node, Link]) -> None:
    dialer, listener, link = pair
    made_early = dialer.request(link, FrameType.HEARTBEAT)
    link.requests += 5000
    answered(listener, dialer.request(link, FrameType.HEARTBEAT), 0.0)
    with pytest.raises(AuthError, match="came twice"):
        answered(listener, made_early, 0.0)


def test_a_frame_cannot_be_sent_back_to_who_sent_it(pair: tuple[Node, Node, Link]) -> None:
    dialer, _, link = pair
    emit(dialer, "learner", "e", 1)
    made = dialer.data_request(link, 0.0)
    assert made is not None
    with pytest.raises(AuthError):
        dialer.on_answer(link, bytes(made[1]), 0.0)


def test_a_stranger_with_data_is_not_read(pair: tuple[Node, Node, Link]) -> None:
    _, listener, _ = pair
    with pytest.raises(FrameError, match="is not read"):
        listener.on_request(bytes(100_000), 0.0, cover_body=True)


def test_of_two_nodes_that_dial_each_other_the_lower_ones_connection_stays() -> None:
    lower, higher = make_node("1"), make_node("2")
    join(higher, lower)
    # The lower one may come second all the same, and the higher one no more.
    link = join(lower, higher)
    with pytest.raises(HandshakeRefused, match="node 1 has dialed node 2") as refused:
        join(higher, lower)
    assert refused.value.code == "dialed"
    emit(lower, "2", "e", 1)
    exchange(lower, higher, link)
    assert taken(higher) == [("1", "e", 1)]
    # When that connection is gone, or the process, anybody's is good.
    lower.on_lost("2", "its connection broke", 1.0)
    join(higher, lower, 1.0)
    join(lower, higher, 2.0)
    join(make_node("2", incarnation=2), lower, 3.0)


def test_a_wrong_key_is_refused_and_counted() -> None:
    listener = make_node("learner")
    with pytest.raises(HandshakeRefused, match="key"):
        join(make_node("collector", key=bytes(32)), listener)
    assert listener.refused == 1 and listener.links == {}


@settings(max_examples=50)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_flipped_bit_gets_in(place: int, bit: int) -> None:
    dialer, listener = make_node("collector"), make_node("learner")
    link = join(dialer, listener)
    emit(dialer, "learner", "e", [1, 2, 3])
    made = dialer.data_request(link, 0.0)
    assert made is not None
    raw = bytearray(bytes(made[1]))
    raw[place % len(raw)] ^= 1 << bit
    try:
        answer = listener.on_request(bytes(raw), 0.0, cover_body=True)
    except (AuthError, FrameError):
        answer = None
    # A changed session number is answered by a refusal, everything else by nothing.
    assert answer is None or answer[6] == FrameType.REFUSED
    assert taken(listener) == []


def test_large_events_stay_in_the_inbox_until_their_turn() -> None:
    dialer, listener = make_node("1"), make_node("0")
    link = join(dialer, listener)
    listener.audience.want(["e"])
    exchange(dialer, listener, link)
    taken(dialer)
    link.outgoing.outbox._max_bytes = listener.links["1"].incoming.inbox.max_bytes = 10 << 20
    for number in range(3):
        assert emit(dialer, "0", "e", (number, bytes(700_000)))
    exchange(dialer, listener, link)
    numbers = [[value[0] for _, _, value in taken(listener)] for _ in range(3)]
    assert numbers == [[0], [1], [2]]


@pytest.mark.parametrize("listener_is_small", [True, False])
def test_an_event_too_large_for_its_peer_is_refused_where_it_is_emitted(
    listener_is_small: bool,
) -> None:
    small, large = (NodeOptions(max_frame_bytes=size) for size in (100_000, 200_000))
    listener = make_node("0", options=small if listener_is_small else large)
    dialer = make_node("1", options=large if listener_is_small else small)
    join(dialer, listener)
    sender, to = (dialer, "0") if listener_is_small else (listener, "1")
    sender.audience.check_size(encode_event("e", bytes(90_000), CODEC), [to])
    with pytest.raises(FrameTooLarge, match=rf"and node {to} takes at most 99744"):
        sender.audience.check_size(encode_event("e", bytes(150_000), CODEC), [to])


def test_the_largest_event_that_is_let_through_fits_into_a_frame() -> None:
    options = NodeOptions(max_frame_bytes=100_000)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    link = join(dialer, listener)
    listener.audience.want(["e"])
    exchange(dialer, listener, link)
    taken(dialer)
    for value in (bytes(99_600), [np.zeros(0)] * 1_100, [np.zeros(1)] * 1_000):
        event = encode_event("e", value, CODEC)
        dialer.audience.check_size(event, ["0"])
        assert dialer.offer("0", event)
        exchange(dialer, listener, link)
    assert [len(value) for _, _, value in taken(listener)] == [99_600, 1_100, 1_000]


def test_more_arrays_than_a_frame_has_room_for_are_refused() -> None:
    node = make_node("0", options=NodeOptions())
    node.audience.check_size(encode_event("e", [np.zeros(1)] * 8_191, CODEC), [])
    with pytest.raises(FrameTooLarge, match="8192 arrays, at most 8191"):
        node.audience.check_size(encode_event("e", [np.zeros(1)] * 8_192, CODEC), [])


def test_events_of_many_small_arrays_share_a_frame_only_as_far_as_it_has_room() -> None:
    options = NodeOptions(batch_bytes=64 << 20)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    link = join(dialer, listener)
    listener.audience.want(["e"])
    exchange(dialer, listener, link)
    taken(dialer)
    event = encode_event("e", [np.zeros(0)] * 100, CODEC)
    for _ in range(100):
        assert dialer.offer("0", event)
    exchange(dialer, listener, link)
    assert len(taken(listener) + taken(listener)) == 100


def test_the_newest_of_many_events_travel_in_as_many_frames_as_they_need() -> None:
    options = NodeOptions(max_frame_bytes=100_000)
    dialer, listener = make_node("1", options=options), make_node("0", options=options)
    link = join(dialer, listener)
    listener.audience.want(["*"])
    exchange(dialer, listener, link)
    taken(dialer)
    for name in "abc":
        dialer.audience.put_latest(encode_event(name, bytes(60_000), CODEC))
    exchange(dialer, listener, link)
    assert [name for _, name, _ in taken(listener)] == ["a", "b", "c"]


def test_a_newcomer_that_takes_less_is_spared_a_newest_event_that_is_too_large() -> None:
    listener = make_node("0", options=NodeOptions())
    dialer = make_node("1", options=NodeOptions(max_frame_bytes=100_000))
    listener.audience.put_latest(encode_event("large", bytes(200_000), CODEC))
    listener.audience.put_latest(encode_event("small", 1, CODEC))
    link = join(dialer, listener)
    dialer.audience.want(["large", "small"])
    exchange(dialer, listener, link)
    taken(listener)
    exchange(dialer, listener, link)
    assert [name for _, name, _ in taken(dialer)] == ["small"]
    assert listener.links["1"].outgoing.counters.dropped == 1


def test_what_is_emitted_before_a_restarted_peer_says_what_it_wants_reaches_it() -> None:
    dialer, listener = make_node("1"), make_node("0")
    model = encode_event("model", 7, CODEC)
    listener.audience.put_latest(model)
    link = join(dialer, listener)
    dialer.audience.want(["e", "model"])
    exchange(dialer, listener, link)
    taken(listener)
    exchange(dialer, listener, link)
    again = make_node("1", incarnation=2)
    link = join(again, listener)
    assert listener.audience.targets("e") == ("1",)
    assert emit(listener, "1", "e", "early")
    again.audience.want(["e", "model"])
    exchange(again, listener, link)
    taken(listener)
    exchange(again, listener, link)
    assert sorted(event[1:] for event in taken(again)) == [("e", "early"), ("model", 7)]


def test_a_reader_that_does_not_answer_keeps_no_old_version_alive() -> None:
    dialer, listener = make_node("1"), make_node("0")
    link = join(dialer, listener)
    dialer.audience.want(["weights"])
    exchange(dialer, listener, link)
    taken(listener)

    class Version(EncodedEvent, frozen=True, weakref=True):
        """One that can be watched."""

    def version(number: int) -> weakref.ref[Version]:
        made = encode_event("weights", number, CODEC)
        event = Version(made.event, made.skeleton, made.buffers, made.size)
        listener.audience.put_latest(event)
        return weakref.ref(event)

    first = version(1)
    answered(listener, dialer.request(link, FrameType.POLL), 0.0)  # sent, and lost on the way
    assert first() is not None, "it may have to be sent again"
    second = version(2)
    gc.collect()
    assert first() is None
    assert second() is not None
    later = 2 * OPTIONS.retry_s
    link.outgoing.on_reconnect(later)
    dialer.on_answer(link, answered(listener, dialer.request(link, FrameType.POLL), later), later)
    assert taken(dialer) == [("0", "weights", 2)]
