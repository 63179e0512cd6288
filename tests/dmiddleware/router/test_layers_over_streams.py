"""All layers over byte streams together: handshake, session, delivery, over links that break."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

from dmiddleware.errors import AuthError
from dmiddleware.router.transport.nng_stream import NngStreamTransport
from dmiddleware.testing import Simulation
from dmiddleware.testing.stream_network import StreamNetwork
from tests.dmiddleware.router.certificates import Authority
from tests.dmiddleware.router.stream_ends import DEADLINE_S, start_nng
from tests.dmiddleware.router.stream_nodes import Link, StreamNode
from tests.dmiddleware.router.unix_sockets import comes_true, nothing_left

ADDRESS = "memory://0"


class Exchange:
    """Two nodes that send to each other over a simulated network, which is disturbed at random."""

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self.nodes = [StreamNode(0), StreamNode(1)]
        self.n_offered = [0, 0]
        self._simulation = simulation
        self._rng = rng
        self._network = StreamNetwork(
            clock=simulation, delay_s=lambda source, target: rng.uniform(0.0, 0.03)
        )
        self._network.transport("0").listen(
            ADDRESS, lambda stream: Link(self.nodes[0], stream, dials=False)
        )
        self._dials = self._network.transport("1")
        self._dialed = self._dial()

    def step(self, *, disturbs: bool) -> None:
        """Redial if needed, send and take a little, and perhaps break something."""
        if self._dialed.has_ended:
            self._dialed = self._dial()
        for index, node in enumerate(self.nodes):
            if disturbs and node.offer(self.n_offered[index], self._rng.choice((0, 100, 30_000))):
                self.n_offered[index] += 1
            node.take(self._rng.choice((0, 1, 10)))
            if self._rng.random() < 0.02 or not disturbs:
                node.heartbeat()
        if disturbs:
            self._disturb()
        self._simulation.run_for(self._rng.uniform(0.0, 0.02))

    def _disturb(self) -> None:
        if self._rng.random() < 0.03:
            self._network.disconnect("0", "1")
        if self._rng.random() < 0.01:
            self._network.cut("0", "1")
            self._simulation.run_for(self._rng.uniform(0.0, 1.0))
            self._network.heal("0", "1")

    def is_complete(self) -> bool:
        n_received = [len(node.received) for node in reversed(self.nodes)]
        return n_received == self.n_offered and all(node.outbox.is_empty for node in self.nodes)

    def _dial(self) -> Link:
        stream = self._dials.dial(ADDRESS, timeout_s=1.0)
        return Link(self.nodes[1], stream, dials=True)


@pytest.mark.parametrize("seed", range(10))
def test_messages_arrive_once_and_in_order_over_links_that_break(seed: int) -> None:
    with Simulation(seed=seed, find_missed=True) as simulation:
        exchange = Exchange(simulation, random.Random(seed))
        for _ in range(400):
            exchange.step(disturbs=True)
        for _ in range(1000):
            if not exchange.is_complete():
                exchange.step(disturbs=False)
        assert exchange.is_complete()
        for node, n_offered in zip(exchange.nodes, reversed(exchange.n_offered), strict=True):
            assert node.received == list(range(n_offered)) and n_offered > 50
            assert node.n_sessions > 3
            assert not node.errors


@pytest.mark.parametrize("kind", ["ipc", "tcp", "tls+tcp"])
def test_messages_arrive_once_and_in_order_over_nng(
    kind: str, tmp_path: Path, authority: Authority
) -> None:
    start_nng()
    rng = random.Random(1)
    listens, dials = (
        NngStreamTransport(tls=authority.files(name) if kind == "tls+tcp" else None)
        for name in ("one", "other")
    )
    here, there = StreamNode(0), StreamNode(1)
    accepted: list[Link] = []
    address = f"ipc://{tmp_path}/s" if kind == "ipc" else f"{kind}://127.0.0.1:0"
    with (
        nothing_left(),
        contextlib.closing(
            listens.listen(address, lambda stream: accepted.append(Link(here, stream, dials=False)))
        ) as listener,
    ):
        links: list[Link] = []
        n_offered = n_redials = 0
        deadline = time.monotonic() + 2 * DEADLINE_S
        while len(here.received) < 1000:
            assert time.monotonic() < deadline
            if not links or links[-1].has_ended:
                stream = dials.dial(listener.address, timeout_s=DEADLINE_S)
                links.append(Link(there, stream, dials=True))
            if n_offered < 1000 and there.offer(n_offered, rng.choice((0, 1_000, 15_000))):
                n_offered += 1
            here.take(3)
            if n_redials < 10 and len(here.received) > 90 * n_redials + 50:
                n_redials += 1
                rng.choice([links[-1], accepted[-1]]).framed.close()
                time.sleep(0.01)
        assert here.received == list(range(1000))
        assert here.n_sessions > 5
        assert not here.errors and not there.errors
        for link in (*links, *accepted):
            link.framed.close()


def test_a_peer_with_another_key_gets_no_session() -> None:
    with Simulation() as simulation:
        network = StreamNetwork(clock=simulation)
        here, stranger = StreamNode(0), StreamNode(1, key=bytes([1]) * 32)
        network.transport("0").listen(ADDRESS, lambda stream: Link(here, stream, dials=False))
        stranger.offer(1, 10)
        link = Link(stranger, network.transport("1").dial(ADDRESS, timeout_s=1.0), dials=True)
        simulation.run_for(1.0)
        assert link.has_ended and here.n_sessions == stranger.n_sessions == 0
        assert isinstance(here.errors[0], AuthError)
        assert comes_true(lambda: not here.received)
