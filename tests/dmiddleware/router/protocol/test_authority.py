"""Which process of a node id is the newest: the peers agree, whatever the order of arrival."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.errors import HandshakeRefused
from dmiddleware.router.protocol.handshake import Identity
from tests.dmiddleware.router.node_pairs import Connection, beat, join, make_node

N_NODES = 4
FRESH = bytes(16)


class Run:
    """Nodes that are killed, restarted and cut off from each other; node 0 is the hub of a star."""

    def __init__(self, *, star: bool) -> None:
        self.star = star
        self.n_starts = [1] * N_NODES
        self.live = [make_node(str(number)) for number in range(N_NODES)]
        self.connections: dict[frozenset[int], Connection] = {}
        self.believed: dict[tuple[int, int], tuple[int, int]] = {}

    def restart(self, number: int) -> None:
        for other in range(N_NODES):
            self.cut(other, number)
        self.n_starts[number] += 1
        self.live[number] = make_node(str(number), start=self.n_starts[number])
        for other in range(N_NODES):
            self.believed.pop((number, other), None)

    def cut(self, one: int, other: int) -> None:
        connection = self.connections.pop(frozenset((one, other)), None)
        if connection is not None:
            connection.cut()

    def connect(self, dialer: int, listener: int) -> None:
        if dialer == listener or (self.star and 0 not in (dialer, listener)):
            return
        here, there = self.live[dialer], self.live[listener]
        try:
            connection = join(here, there)
        except HandshakeRefused as refused:
            assert refused.code == "connected", refused
            return
        self.cut(dialer, listener)
        self.connections[frozenset((dialer, listener))] = connection
        assert self.known(dialer, listener) == there.incarnation
        assert self.known(listener, dialer) == here.incarnation
        self.check(dialer, listener)
        self.check(listener, dialer)
        beat(connection)

    def known(self, by: int, number: int) -> int:
        """Return the incarnation that a node believes another to have."""
        newcomer = Identity("run", str(number), FRESH)
        return self.live[by]._members.least_incarnation(newcomer) - 1

    def check(self, by: int, number: int) -> None:
        """Check that a new process has a larger incarnation than those that the peer knew."""
        start, incarnation = self.n_starts[number], self.known(by, number)
        earlier_start, earlier = self.believed.get((by, number), (0, 0))
        assert incarnation > earlier if start > earlier_start else incarnation >= earlier
        self.believed[by, number] = (start, incarnation)


numbers = st.integers(0, N_NODES - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("restart"), numbers, numbers),
        st.tuples(st.just("connect"), numbers, numbers),
        st.tuples(st.just("connect"), numbers, numbers),
        st.tuples(st.just("cut"), numbers, numbers),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(star=st.booleans(), steps=STEPS, order=st.permutations(range(N_NODES)))
def test_a_new_process_is_newer_for_every_peer_that_knew_an_older_one(
    star: bool, steps: list[tuple[str, int, int]], order: list[int]
) -> None:
    run = Run(star=star)
    for what, one, other in steps:
        if what == "restart":
            run.restart(one)
        elif what == "cut":
            run.cut(one, other)
        else:
            run.connect(one, other)
    # Once all can reach each other, all agree; a number may grow with each peer that is met.
    pairs = list(itertools.permutations(order, 2))
    for one, other in 3 * pairs:
        run.cut(one, other)
        run.connect(other, one)
    for one, other in pairs:
        if not star or 0 in (one, other):
            assert run.known(one, other) == run.live[other].incarnation


def test_a_restarted_hub_takes_the_number_that_its_dialers_know() -> None:
    run = Run(star=True)
    for start in range(1, 5):
        for dialer in range(1, N_NODES):
            run.connect(dialer, 0)
        assert run.live[0].incarnation == start
        assert [node.incarnation for node in run.live[1:]] == [1, 1, 1]
        run.restart(0)
