"""Three nodes whose connections break at any point, which are killed, restarted and suspended.

Ledgers of what was offered and of what was taken show whether anything was lost, repeated or
overtaken.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dmiddleware.errors import HandshakeRefused
from dmiddleware.router.protocol.node import NodeProtocol, TakenEvent
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.wire.envelope import EncodedEvent, encode_event
from tests.dmiddleware.router.node_pairs import CODEC, Connection, make_node, serve

N_NODES = 3
OPTIONS = NodeOptions(
    batch_bytes=300,
    outbox_bytes=3000,
    inbox_bytes=900,
    fragment_bytes=100,
    max_event_bytes=8192,
    max_lossy=5,
)
SIZES = (0, 0, 0, 100, 100, 600, 3000)
USUAL_REFUSALS = {"connected", "stale", "duplicate", "replaced"}

Process = tuple[int, int]
"""A node, and which of its processes."""


@dataclass
class Ledger:
    """What one process has offered to a node, or has taken from a process."""

    reliable: list[int] = field(default_factory=list)
    handled: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    metric: list[int] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """Three nodes, and the connections between them."""

    @initialize(seed=st.integers(0, 1 << 32))
    def start(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.starts = [1] * N_NODES
        self.nodes = [self.make(number) for number in range(N_NODES)]
        self.connections: list[Connection] = []
        # By the process that sends and the node that receives; by the two processes.
        self.offered: dict[tuple[Process, int], Ledger] = {}
        self.taken: dict[tuple[Process, Process], Ledger] = {}
        self.n_versions = 0
        self.suspended: set[int] = set()
        # The events that were taken and wait for their handlers, by node.
        self.pending: list[list[TakenEvent]] = [[] for _ in range(N_NODES)]
        self.dial_all()
        self.deliver(1000)

    def make(self, number: int) -> NodeProtocol:
        node = make_node(str(number), start=self.starts[number], options=OPTIONS)
        node.subscriptions.subscribe(["weights*"])
        node.subscriptions.announce_ready()
        return node

    def process(self, number: int) -> Process:
        return number, self.starts[number]

    # Connections.

    @rule(dialer=st.integers(0, N_NODES - 1), listener=st.integers(0, N_NODES - 1))
    def dial(self, dialer: int, listener: int) -> None:
        if dialer != listener:
            self.connections.append(
                Connection(self.nodes[dialer], self.nodes[listener], chance=self.chance)
            )

    @rule()
    def dial_all(self) -> None:
        for one, other in itertools.combinations(range(N_NODES), 2):
            if not self.is_linked(one, other):
                self.dial(one, other)

    @rule(n=st.integers(1, 60))
    def deliver(self, n: int) -> None:
        for _ in range(n):
            self.connections = [c for c in self.connections if c.has_ended != [True, True]]
            steps = [(c, side) for c in self.connections for side in (0, 1) if c.can_deliver(side)]
            if not steps:
                break
            connection, side = self.chance.choice(steps)
            connection.deliver(side, self.now)
            self.check_errors(connection)

    @rule()
    def break_one(self) -> None:
        """Close one side of a connection; the other one gets what is under way, and the end."""
        if self.connections:
            connection = self.chance.choice(self.connections)
            connection.end(self.chance.randrange(2), self.now)

    def check_errors(self, connection: Connection) -> None:
        for error in connection.errors:
            assert isinstance(error, HandshakeRefused) and error.code in USUAL_REFUSALS, error

    # Processes.

    @rule(number=st.integers(0, N_NODES - 1))
    def kill(self, number: int) -> None:
        # The process has accepted these, and they are lost with it.
        self.take(number, 1000)
        for connection in self.connections:
            if self.nodes[number] in connection.nodes:
                connection.end(connection.nodes.index(self.nodes[number]), self.now)
        self.starts[number] += 1
        self.nodes[number] = self.make(number)
        self.suspended.discard(number)
        self.pending[number] = []

    @rule(number=st.integers(0, N_NODES - 1), suspends=st.booleans())
    def suspend(self, number: int, suspends: bool) -> None:
        self.nodes[number].accepting = not suspends
        (self.suspended.add if suspends else self.suspended.discard)(number)
        serve(self.nodes[number])

    @rule(seconds=st.floats(0, 2))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            node.beat()
            assert node.tick(self.now) == []
            serve(node)

    # Events.

    @rule(
        source=st.integers(0, N_NODES - 1),
        receiver=st.integers(0, N_NODES - 1),
        n=st.integers(1, 12),
        handled=st.booleans(),
    )
    def offer(self, source: int, receiver: int, n: int, handled: bool) -> None:
        name = "handled" if handled else "reliable"
        ledger = self.offered.setdefault((self.process(source), receiver), Ledger())
        numbers = getattr(ledger, name)
        for _ in range(n):
            value = (self.process(source), len(numbers), bytes(self.chance.choice(SIZES)))
            event = encode_event(name, value, CODEC)
            if self.nodes[source].offer(str(receiver), event, handled=handled):
                numbers.append(len(numbers))
        self.fill(source)

    @rule(source=st.integers(0, N_NODES - 1), receiver=st.integers(0, N_NODES - 1))
    def put_lossy(self, source: int, receiver: int) -> None:
        peer = self.nodes[source].peers.get(str(receiver))
        if peer is not None:
            ledger = self.offered.setdefault((self.process(source), receiver), Ledger())
            value = (self.process(source), len(ledger.metric), bytes(self.chance.choice(SIZES)))
            peer.outgoing.put_lossy(encode_event("metric", value, CODEC))
            ledger.metric.append(len(ledger.metric))
            self.fill(source)

    @rule(source=st.integers(0, N_NODES - 1))
    def publish(self, source: int) -> None:
        self.n_versions += 1
        value = (self.process(source), self.n_versions, bytes(self.chance.choice(SIZES)))
        event = encode_event(f"weights {source}", value, CODEC)
        self.nodes[source].subscriptions.put_latest(event)
        for receiver in range(N_NODES):
            ledger = self.offered.setdefault((self.process(source), receiver), Ledger())
            ledger.weights.append(self.n_versions)
        self.fill(source)

    @rule(number=st.integers(0, N_NODES - 1), n=st.sampled_from((1, 3, 1000)))
    def take(self, number: int, n: int) -> None:
        node = self.nodes[number]
        for taken in node.take(n):
            if taken.acknowledges:
                self.pending[number].append(taken)
            else:
                self.note(number, taken.event)
        serve(node)

    @rule(number=st.integers(0, N_NODES - 1), n=st.integers(1, 20))
    def handle(self, number: int, n: int) -> None:
        for event, peer, _ in self.pending[number][:n]:
            self.note(number, event)
            self.nodes[number].on_handled(peer)
        del self.pending[number][:n]
        serve(self.nodes[number])

    def note(self, number: int, event: EncodedEvent) -> None:
        source, index, _ = CODEC.decode(event.skeleton, event.buffers)
        key = (tuple(source), self.process(number))
        ledger = self.taken.setdefault(key, Ledger())
        numbers: list[int] = getattr(ledger, event.event.split()[0])
        if event.event.startswith("weights"):
            # A successor may get one twice: as its predecessor's, and because it subscribes.
            assert not numbers or index >= numbers[-1], "versions only go up"
        elif event.event == "metric":
            assert not numbers or index > numbers[-1], "in order, once"
        elif numbers:
            assert index == numbers[-1] + 1, "all of them, in order, once"
        else:
            # The first one for this process: at most what no process before it has had.
            before = [
                getattr(self.taken[key[0], (number, start)], event.event)[-1]
                for start in range(1, self.starts[number])
                if getattr(self.taken.get((key[0], (number, start)), Ledger()), event.event)
            ]
            assert index <= max(before, default=-1) + 1, "no gap"
        numbers.append(index)

    def fill(self, number: int) -> None:
        for peer in self.nodes[number].peers.values():
            if peer.connection is not None:
                self.nodes[number].fill(peer.connection)

    # What always holds.

    @invariant()
    def memory_is_bounded(self) -> None:
        for node in getattr(self, "nodes", ()):
            held = sum(peer.incoming.large_bytes for peer in node.peers.values())
            assert held <= OPTIONS.max_event_bytes
            for peer in node.peers.values():
                for inbox in (peer.incoming.inbox, peer.incoming.inbox_handled):
                    assert inbox.n_bytes <= max(OPTIONS.inbox_bytes, 3300)

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        for number in range(N_NODES):
            self.suspend(number, suspends=False)
        for _ in range(300):
            self.pass_time(0.2)
            self.deliver(300)
            for number in range(N_NODES):
                self.take(number, 1000)
                self.handle(number, 1000)
            for one, other in itertools.combinations(range(N_NODES), 2):
                if not self.is_linked(one, other) and not self.is_greeting(one, other):
                    self.dial(one, other)
            if self.is_complete():
                break
        self.check_complete()

    def is_linked(self, one: int, other: int) -> bool:
        peer = self.nodes[one].peers.get(str(other))
        return peer is not None and peer.connection is not None

    def is_greeting(self, one: int, other: int) -> bool:
        pair = {self.nodes[one], self.nodes[other]}
        return any(set(connection.nodes) == pair for connection in self.connections)

    def is_complete(self) -> bool:
        return (
            not any(c.can_deliver(side) for c in self.connections for side in (0, 1))
            and not any(map(len, self.pending))
            and not any(bool(node.with_events) for node in self.nodes)
            and all(
                len(node.connected_peers()) == N_NODES - 1
                and all(peer.outgoing.is_empty for peer in node.peers.values())
                for node in self.nodes
            )
        )

    def check_complete(self) -> None:
        assert self.is_complete()
        assert len([c for c in self.connections if c.is_open]) == 3 == len(self.connections)
        for (source, receiver), offered in self.offered.items():
            if source != self.process(source[0]):
                continue
            got = [
                self.taken.get((source, (receiver, start)), Ledger())
                for start in range(1, self.starts[receiver] + 1)
            ]
            for name in ("reliable", "handled"):
                everything = set(itertools.chain(*(getattr(ledger, name) for ledger in got)))
                assert everything == set(getattr(offered, name))
            if receiver != source[0] and offered.weights:
                assert got[-1].weights[-1] == offered.weights[-1]
            if self.starts[receiver] == 1 and offered.metric:
                at_sender = self.nodes[source[0]].peers[str(receiver)].outgoing.counters.dropped
                at_receiver = self.nodes[receiver].peers[str(source[0])].incoming.counters.dropped
                if source[1] == 1:
                    assert len(got[-1].metric) + at_sender + at_receiver == len(offered.metric)


TestAnyNetwork = Machine.TestCase
TestAnyNetwork.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
