"""Barriers of several nodes."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dmiddleware import WaitTimeout
from dmiddleware.pipeline import Context, Task, middleware
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.testing import Cluster
from middleware import Barrier, OnlineRLContext, Role
from middleware.barrier import Arrival, Arrivals
from tests.dmiddleware.launch.ditask_process import start
from tests.middleware.nodes import DEADLINE_S, run_nodes

ROOT = Path(__file__).parents[2]


@middleware(roles=[Role.LEARNER, Role.COLLECTOR])
def work(ctx: OnlineRLContext) -> None: ...


def test_no_node_passes_before_all_have_arrived(tmp_path: Path) -> None:
    passed = {0: 0, 1: 0, 2: 0}
    apart: list[int] = []

    def run(task: Task[Any]) -> None:
        node_id = task.router.node_id  # type: ignore[union-attr]

        @middleware(roles=[Role.LEARNER, Role.COLLECTOR])
        def count(ctx: OnlineRLContext) -> None:
            passed[node_id] += 1
            apart.append(max(passed.values()) - min(passed.values()))

        task.use(Barrier()).use(count).run(max_step=20)

    run_nodes(tmp_path, (Role.LEARNER, run), (Role.COLLECTOR, run), (Role.COLLECTOR, run))
    assert passed == {0: 20, 1: 20, 2: 20}
    # A node that has passed the barrier may be one round ahead of the others.
    assert max(apart) <= 1


def test_nodes_that_have_left_are_not_waited_for(tmp_path: Path) -> None:
    def run_learner(task: Task[Any]) -> int:
        task.use(Barrier(timeout_s=DEADLINE_S)).use(work).run(max_step=5)
        return task.ctx.total_step

    def run_other(task: Task[Any]) -> None:
        task.use(Barrier(timeout_s=DEADLINE_S)).use(work).run(max_step=2)

    assert run_nodes(tmp_path, (Role.LEARNER, run_learner), (Role.COLLECTOR, run_other))[0] == 4


TOPOLOGIES: list[TopologyName] = ["mesh", "star"]


class Visits:
    """A program whose nodes work for a while, meet at a barrier, and record when they passed it.

    Args:
        work_s: simulated seconds that each node works before the barrier, by node id.
        n_rounds: how often they meet.
        timeout_s: deadline of the barrier.
    """

    def __init__(
        self, work_s: dict[int, float], *, n_rounds: int = 1, timeout_s: float = 60.0
    ) -> None:
        self.passed: dict[int, list[float]] = {node_id: [] for node_id in work_s}
        self.errors: dict[int, str] = {}
        self.most_apart = 0
        self._work_s = work_s
        self._n_rounds = n_rounds
        self._timeout_s = timeout_s

    def __call__(self) -> None:
        with Task(OnlineRLContext()) as task:
            assert task.router is not None
            node_id = task.router.node_id
            self.passed[node_id].clear()
            nothing = threading.Condition()

            def work(ctx: OnlineRLContext) -> None:
                with nothing:
                    task.clock.wait_for(nothing, lambda: False, self._work_s[node_id])

            def record(ctx: OnlineRLContext) -> None:
                self.passed[node_id].append(round(task.clock.now(), 1))
                counts = [len(times) for times in self.passed.values()]
                self.most_apart = max(self.most_apart, max(counts) - min(counts))

            try:
                task.use(work).use(Barrier(timeout_s=self._timeout_s)).use(record)
                task.run(max_step=self._n_rounds)
            except WaitTimeout as error:
                self.errors[node_id] = str(error)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_node_waits_for_those_that_it_is_not_connected_to(topology: TopologyName) -> None:
    visits = Visits({0: 0.0, 1: 0.0, 2: 5.0, 3: 2.0}, n_rounds=3)
    with Cluster(visits, n=4, topology=topology, find_missed=True) as cluster:
        cluster.run()
    for times in visits.passed.values():
        assert times == pytest.approx([5.0, 10.0, 15.0], abs=0.3)
    # A node that has passed the barrier may be one round ahead of the others.
    assert visits.most_apart == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nodes_that_work_are_waited_for_and_named_once_per_deadline(
    topology: TopologyName, caplog: pytest.LogCaptureFixture
) -> None:
    visits = Visits({0: 0.0, 1: 0.0, 2: 80.0, 3: 85.0}, timeout_s=30.0)
    with Cluster(visits, n=4, topology=topology) as cluster:
        cluster.run()
    assert visits.errors == {}
    assert all(times == pytest.approx([85.0], abs=0.3) for times in visits.passed.values())
    for node_id in (0, 1):
        said = [text for text in caplog.messages if text.startswith(f"node {node_id} has waited")]
        assert len(said) == 3  # after 5, 30 and 60 seconds
        assert all("node(s) 2, 3 at barrier 'barrier'" in text for text in said)
        assert all("timeout_s=30" in text and "since" in text for text in said)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nodes_that_wait_for_each_other_name_all_missing_nodes_at_the_deadline(
    topology: TopologyName,
) -> None:
    errors: dict[int, str] = {}

    def program() -> None:
        with Task(OnlineRLContext()) as task:
            assert task.router is not None
            node_id = task.router.node_id
            name = "odd" if node_id % 2 else "even"
            try:
                task.use(Barrier(name=name, timeout_s=30.0)).run(max_step=1)
            except WaitTimeout as error:
                errors[node_id] = f"{task.clock.now():.0f} s: {error}"
                waiting = threading.Condition()
                with waiting:  # the others are to notice by themselves
                    task.clock.wait_for(waiting, lambda: False, 60.0)

    with Cluster(program, n=4, topology=topology) as cluster:
        cluster.run()
    # In a star, only the hub hears what all of them wait for.
    assert errors.keys() == ({0, 1, 2, 3} if topology == "mesh" else {0})
    for node_id, error in errors.items():
        others = ", ".join(str(other) for other in range(4) if other % 2 != node_id % 2)
        name = "odd" if node_id % 2 else "even"
        assert f"node(s) {others} at barrier '{name}' did not arrive within 30 s" in error
        assert 30 <= int(error.split()[0]) < 45


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_node_that_was_killed_is_not_waited_for(topology: TopologyName) -> None:
    # Twice, because the first node that ends its task ends that of the other one.
    visits = Visits({0: 0.0, 1: 0.0, 2: 10.0}, n_rounds=2)
    with Cluster(visits, n=3, topology=topology) as cluster:
        cluster.start()
        cluster.run_for(5.0)
        cluster.kill(2)
        cluster.join(0, 1)
    assert all(5.0 <= visits.passed[node_id][0] < 9.0 for node_id in (0, 1))


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("killed", [0, 2])
def test_a_restarted_node_continues_with_the_count_of_the_others(
    topology: TopologyName, killed: int
) -> None:
    visits = Visits({0: 1.0, 1: 1.0, 2: 1.0}, n_rounds=30)
    others = [node_id for node_id in range(3) if node_id != killed]
    with Cluster(visits, n=3, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: len(visits.passed[killed]) == 10, 60.0)
        cluster.kill(killed)
        cluster.start(killed)
        cluster.join(*others, timeout_s=60.0)
        # They pass together again after at most one more round.
        together = visits.passed[killed][2:]
        for node_id in others:
            assert visits.passed[node_id][-len(together) :] == pytest.approx(together, abs=0.2)
        assert len(together) >= 15


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_node_that_was_cut_off_passes_no_barrier_until_it_is_back(
    topology: TopologyName,
) -> None:
    visits = Visits({0: 1.0, 1: 1.0, 2: 1.0}, n_rounds=30)
    with Cluster(visits, n=3, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: len(visits.passed[2]) == 10, 60.0)
        cluster.cut(2)
        cluster.run_for(10.0)
        assert len(visits.passed[2]) == 10
        assert len(visits.passed[1]) > 12
        cluster.heal(2)
        cluster.join(0, 1, timeout_s=60.0)
    together = visits.passed[2][11:20]
    assert all(min(abs(at - other) for other in visits.passed[1]) < 0.3 for at in together)


def test_no_node_of_a_star_passes_while_its_hub_is_away() -> None:
    visits = Visits({0: 100.0, 1: 0.0, 2: 0.0})
    with Cluster(visits, n=3, topology="star") as cluster:
        cluster.start()
        cluster.run_for(5.0)
        cluster.kill(0)
        cluster.run_for(20.0)
        assert visits.passed == {0: [], 1: [], 2: []}
        cluster.run_for(60.0)
    message = "node(s) 0 at barrier 'barrier' did not arrive"
    assert all(visits.errors[node_id].startswith(message) for node_id in (1, 2))


@pytest.mark.slow
@pytest.mark.process
def test_processes_of_a_star_wait_for_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "passed"
    folder.mkdir()
    options = ["--main", "tests.middleware.barrier_program.main", "--topology", "star"]
    options += ["--roles", "learner=1,collector=2"]
    environment = {"BARRIER_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    with start(tmp_path, *options, env=environment) as process:
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    arrived, passed = (
        [float((folder / f"{what}-{node_id}").read_text()) for node_id in range(3)]
        for what in ("arrived", "passed")
    )
    assert min(passed) >= max(arrived)


class Network:
    """Arrivals of several nodes, whose messages are delivered one by one, in order per link."""

    def __init__(self, links: Iterable[tuple[int, int]]) -> None:
        self.links = {frozenset(link) for link in links}
        ids = sorted({node_id for link in self.links for node_id in link})
        self.nodes = {node_id: Arrivals(node_id, f"{node_id}a") for node_id in ids}
        self.queues: dict[tuple[int, int], list[Arrival]] = {}
        for one, other in itertools.permutations(ids, 2):
            if {one, other} in self.links:
                self.send(one, self.nodes[one].connect(other, is_new=True))

    def send(self, sender: int, to_send: list[tuple[Arrival, tuple[int, ...]]]) -> None:
        for arrival, targets in to_send:
            for target in targets:
                if {sender, target} in self.links:
                    self.queues.setdefault((sender, target), []).append(arrival)

    def deliver(self, choice: random.Random) -> bool:
        """Deliver one message of a random link; return whether there was one."""
        ready = [link for link, queue in self.queues.items() if queue]
        if not ready:
            return False
        sender, target = link = choice.choice(ready)
        self.send(target, self.nodes[target].receive(sender, self.queues[link].pop(0)))
        return True

    def restart(self, node_id: int) -> None:
        """Replace a node's process; what was on its way is lost."""
        old = self.nodes[node_id].own
        peers = [peer for peer in self.nodes if {node_id, peer} in self.links]
        for link in [link for link in self.queues if node_id in link]:
            del self.queues[link]
        self.nodes[node_id] = Arrivals(node_id, old.token + "a")
        for peer in peers:
            self.send(peer, self.nodes[peer].disconnect(node_id))
            self.send(peer, self.nodes[peer].connect(node_id, is_new=True))
            self.send(node_id, self.nodes[node_id].connect(peer, is_new=True))


SHAPES = {
    "mesh": [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)],
    "star": [(0, 1), (0, 2), (0, 3)],
    "mesh with an attached node": [(0, 1), (0, 2), (1, 2), (0, 3)],
    "line": [(0, 1), (1, 2), (2, 3)],
    "ring": [(0, 1), (1, 2), (2, 3), (3, 0)],
}


def test_the_arrival_of_an_earlier_process_does_not_count_for_a_new_one() -> None:
    arrivals = Arrivals(0, "a")
    arrivals.connect(1, is_new=True)
    arrivals.connect(2, is_new=True)
    arrivals.receive(1, Arrival(1, "b", 5, 1, (0, 2)))
    arrivals.receive(2, Arrival(2, "c", 5, 1, (0, 1)))
    arrivals.disconnect(1)
    arrivals.connect(1, is_new=True)
    arrivals.arrive(())
    # Node 2 has not noticed yet that the process has changed.
    assert arrivals.missing() == [1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(20))
def test_arrivals_spread_in_any_network_and_delivery_order(shape: str, seed: int) -> None:
    choice = random.Random(seed)
    network = Network(SHAPES[shape])
    nodes = network.nodes
    waiting: set[int] = set()
    restarts = choice.sample(range(5, 200), 2)
    for step in range(400):
        if step in restarts:
            node_id = choice.choice(list(nodes))
            network.restart(node_id)
            waiting.discard(node_id)
        free = [node_id for node_id in nodes if node_id not in waiting]
        if free and choice.random() < 0.3:
            waiting.add(node_id := choice.choice(free))
            network.send(node_id, nodes[node_id].arrive(()))
        else:
            network.deliver(choice)
        waiting = {node_id for node_id in waiting if nodes[node_id].missing()}
    for _ in range(3):
        for node_id in nodes.keys() - waiting:
            waiting.add(node_id)
            network.send(node_id, nodes[node_id].arrive(()))
        while network.deliver(choice):
            waiting = {node_id for node_id in waiting if nodes[node_id].missing()}
    assert not waiting
    assert len({arrivals.own.n_times for arrivals in nodes.values()}) == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_no_node_passes_early_in_any_network(shape: str, seed: int) -> None:
    choice = random.Random(seed)
    network = Network(SHAPES[shape])
    while network.deliver(choice):
        pass
    passed = dict.fromkeys(network.nodes, 0)
    waiting: set[int] = set()
    for _ in range(500):
        free = [node_id for node_id in network.nodes if node_id not in waiting]
        if free and choice.random() < 0.3:
            waiting.add(node_id := choice.choice(free))
            network.send(node_id, network.nodes[node_id].arrive(()))
        else:
            network.deliver(choice)
        for node_id in list(waiting):
            if not network.nodes[node_id].missing():
                waiting.remove(node_id)
                passed[node_id] += 1
                counts = [arrivals.own.n_times for arrivals in network.nodes.values()]
                assert min(counts) >= passed[node_id]
    assert min(passed.values()) >= 5


def test_two_barriers_are_distinguished_by_name(tmp_path: Path) -> None:
    def run(task: Task[Any]) -> None:
        task.use(Barrier(name="first")).use(work).use(Barrier(name="second")).run(max_step=5)

    run_nodes(tmp_path, (Role.LEARNER, run), (Role.COLLECTOR, run))


def test_in_one_process_it_does_not_wait() -> None:
    with Task(Context()) as task:
        task.use(Barrier()).run(max_step=3)
        assert task.ctx.total_step == 2
