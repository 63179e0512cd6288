"""The network of byte streams within one process, under a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dmiddleware.errors import RouterError, TransportError
from dmiddleware.router.transport.stream import Stream
from dmiddleware.testing import Simulation
from dmiddleware.testing.stream_network import CAPACITY_BYTES, StreamNetwork

ADDRESS = "memory://a"


class Log:
    """Everything that arrives at one end of a connection, with the time."""

    def __init__(self, simulation: Simulation, stream: Stream, *, buffer_bytes: int = 1024) -> None:
        self.stream = stream
        self.arrived: list[tuple[float, bytes]] = []
        self.error: RouterError | None = None
        self.sent: list[RouterError | None] = []
        self._now = simulation.now
        if buffer_bytes:
            self.read(buffer_bytes)

    @property
    def content(self) -> bytes:
        return b"".join(part for _, part in self.arrived)

    def read(self, buffer_bytes: int) -> None:
        self._buffer = memoryview(bytearray(buffer_bytes))
        self.stream.receive([self._buffer], self._on_bytes)

    def send(self, content: bytes) -> bool:
        return self.stream.send([content], self.sent.append)

    def _on_bytes(self, outcome: int | RouterError) -> None:
        if isinstance(outcome, int):
            self.arrived.append((round(self._now(), 6), bytes(self._buffer[:outcome])))
            self.stream.receive([self._buffer], self._on_bytes)
        else:
            self.error = outcome


class World:
    """Two hosts, a listener on one of them, and a connection."""

    def __init__(
        self,
        simulation: Simulation,
        delay_s: Callable[[str, str], float] | None = None,
        *,
        buffer_bytes: int = 1024,
    ) -> None:
        self.network = StreamNetwork(clock=simulation, delay_s=delay_s)
        self.simulation = simulation
        self.accepted: list[Log] = []
        self.here = self.network.transport("a")
        self.there = self.network.transport("b")
        self.listener = self.here.listen(
            ADDRESS,
            lambda stream: self.accepted.append(Log(simulation, stream, buffer_bytes=buffer_bytes)),
        )
        self.dialer = self.dial()
        simulation.run_for(1.0)

    def dial(self, timeout_s: float = 5.0) -> Log:
        return Log(self.simulation, self.there.dial(ADDRESS, timeout_s=timeout_s))


def test_what_is_sent_arrives_after_the_delay() -> None:
    with Simulation() as simulation:
        world = World(simulation, lambda source, target: 0.2 if source == "b" else 0.1)
        assert world.dialer.send(b"hello")
        assert world.accepted[0].send(b"welcome")
        simulation.run_for(1.0)
        assert world.accepted[0].arrived == [(1.2, b"hello")]
        assert world.dialer.arrived == [(1.1, b"welcome")]


def run(seed: int) -> tuple[str, list[tuple[float, bytes]]]:
    """Send under random delays; return what happened."""
    rng = random.Random(seed)
    with Simulation(seed=seed) as simulation:
        world = World(simulation, lambda source, target: rng.uniform(0.0, 0.1))
        for number in range(50):
            world.dialer.send(b"%02d" % number)
            simulation.run_for(rng.uniform(0.0, 0.02))
        simulation.run_for(1.0)
        return simulation.history, world.accepted[0].arrived


def test_the_same_seed_gives_the_same_run() -> None:
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_nothing_overtakes_within_a_connection() -> None:
    for seed in range(5):
        _, arrived = run(seed)
        assert b"".join(part for _, part in arrived) == b"".join(b"%02d" % n for n in range(50))
        assert [at for at, _ in arrived] == sorted(at for at, _ in arrived)


def test_a_cut_link_holds_everything_back_until_it_is_healed() -> None:
    with Simulation() as simulation:
        world = World(simulation)
        world.network.cut("a", "b")
        for number in range(10):
            assert world.dialer.send(b"%d" % number)
        world.dialer.stream.close()
        simulation.run_for(100.0)
        assert not world.accepted[0].arrived and world.accepted[0].error is None
        world.network.heal("a", "b")
        simulation.run_for(1.0)
        assert world.accepted[0].content == b"0123456789"
        assert "has ended" in str(world.accepted[0].error)


def test_dialing_over_a_cut_link_fails_at_its_deadline() -> None:
    with Simulation() as simulation:
        world = World(simulation)
        world.network.cut("a", "b")
        late = world.dial(timeout_s=3.0)
        simulation.run_for(2.9)
        assert late.error is None
        simulation.run_for(0.2)
        assert "within 3 s" in str(late.error)
        late.stream.close()
        world.network.heal("a", "b")
        simulation.run_for(1.0)
        # The connection was made and closed, in this order.
        assert len(world.accepted) == 2 and world.accepted[1].error is not None


def test_the_peers_of_a_killed_host_see_their_connections_end() -> None:
    with Simulation() as simulation:
        world = World(simulation)
        world.accepted[0].send(b"the last words")
        world.network.remove("a")
        simulation.run_for(1.0)
        assert world.dialer.content == b"the last words"
        assert "has ended" in str(world.dialer.error)
        refused = world.dial()
        simulation.run_for(1.0)
        assert "refused" in str(refused.error)
        with pytest.raises(TransportError, match="removed"):
            world.here.listen(ADDRESS, lambda stream: None)


def test_a_killed_host_can_be_replaced() -> None:
    with Simulation() as simulation:
        world = World(simulation)
        world.network.remove("a")
        again: list[Log] = []
        world.network.transport("a").listen(
            ADDRESS, lambda stream: again.append(Log(simulation, stream))
        )
        dialer = world.dial()
        dialer.send(b"hello again")
        simulation.run_for(1.0)
        assert again[0].content == b"hello again"
        assert not world.accepted[0].arrived


def test_both_sides_of_a_broken_connection_are_notified() -> None:
    with Simulation() as simulation:
        world = World(simulation)
        world.network.disconnect("a", "b")
        simulation.run_for(1.0)
        assert "reset" in str(world.dialer.error) and "reset" in str(world.accepted[0].error)


def test_a_sender_waits_for_a_receiver_that_is_slow() -> None:
    content = random.Random(1).randbytes(3 * CAPACITY_BYTES)
    with Simulation() as simulation:
        world = World(simulation, buffer_bytes=0)
        assert not world.dialer.send(content)
        simulation.run_for(10.0)
        assert not world.dialer.sent
        world.accepted[0].read(100_000)
        simulation.run_for(1.0)
        assert world.dialer.sent == [None]
        assert world.accepted[0].content == content


def test_a_frozen_host_receives_later() -> None:
    with Simulation() as simulation:
        network = StreamNetwork(clock=simulation)
        accepted: list[Log] = []

        def serve() -> None:
            network.transport("a").listen(
                ADDRESS, lambda stream: accepted.append(Log(simulation, stream))
            )

        simulation.spawn(serve, name="serve", group="a")
        simulation.run_for(0.1)
        dialer = Log(simulation, network.transport("b").dial(ADDRESS, timeout_s=1.0))
        simulation.run_for(0.1)
        simulation.freeze("a")
        dialer.send(b"hello")
        simulation.run_for(5.0)
        assert not accepted[0].arrived and dialer.error is None
        simulation.thaw("a")
        simulation.run_for(0.1)
        assert accepted[0].arrived == [(5.2, b"hello")]
