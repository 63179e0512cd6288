"""Simulated clusters: delivery between nodes under delays, cuts, freezes and kills."""

from __future__ import annotations

import threading

import pytest

from dmiddleware.errors import DeliveryTimeout, WaitTimeout
from dmiddleware.pipeline import Context, Event, SystemClock, Task, current_node
from dmiddleware.router import NodeOptions
from dmiddleware.testing import Cluster, Delivered, SimulationError
from tests.dmiddleware.testing.number_exchange import N_EVENTS, NumberExchange


def test_every_event_arrives_once_and_in_order_whatever_the_delays() -> None:
    exchange = NumberExchange()
    with Cluster(exchange.program, n=3, delay_s=(0.0, 0.2), find_missed=True) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: exchange.all_taken(3), 60.0)
        exchange.check(3)


def test_the_tape_names_the_time_the_ends_and_the_size_of_each_frame() -> None:
    exchange = NumberExchange()
    with Cluster(exchange.program, n=2, delay_s=(0.0, 0.2)) as cluster:
        cluster.start()
        cluster.run_for(5.0)
    data = [one for one in cluster.tape if isinstance(one, Delivered) and one.kind == "DATA"]
    assert len(data) > 20
    assert all(0 < one.at_s <= 5.0 and one.size > 96 for one in data)
    assert {(one.source, one.target) for one in data} == {(0, 1), (1, 0)}


def test_the_same_seed_repeats_a_run_and_another_seed_does_not() -> None:
    runs = []
    for seed in (1, 1, 2):
        exchange = NumberExchange()
        with Cluster(exchange.program, n=3, seed=seed) as cluster:
            cluster.start()
            cluster.run_for(0.5)
            cluster.cut(0, 1)
            cluster.run_for(4.0)
            cluster.heal(0, 1)
            cluster.kill(2)
            cluster.start(2)
            cluster.run_for(1.0)
        runs.append((list(cluster.tape), exchange.taken, list(exchange.membership)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert len(runs[0][0]) > 100


def test_a_link_that_is_cut_for_a_while_loses_and_duplicates_nothing() -> None:
    exchange = NumberExchange()
    with Cluster(exchange.program, n=3, seed=5, find_missed=True) as cluster:
        cluster.start()
        cluster.run_for(0.5)
        cluster.cut(0, 1)
        cluster.run_for(40.0)
        assert {mark[:3] for mark in exchange.membership if mark[1] == "node.left"} == {
            (0, "node.left", 1),
            (1, "node.left", 0),
        }
        assert max(mark[3] for mark in exchange.membership) <= 0.5 + 4.0
        taken = sum(map(len, exchange.taken.values()))
        cluster.heal(0, 1)
        assert cluster.wait_until(lambda: exchange.all_taken(3), 5.0)
        assert sum(map(len, exchange.taken.values())) > taken
        exchange.check(3)


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_keep_breaking_lose_and_duplicate_nothing(seed: int) -> None:
    exchange = NumberExchange()
    with Cluster(
        exchange.program, n=3, seed=seed, delay_s=(0.0, 0.05), find_missed=True
    ) as cluster:
        cluster.start()
        for turn in range(15):
            cluster.run_for(0.15)
            cluster.disconnect(turn % 3)
        assert cluster.wait_until(lambda: exchange.all_taken(3), 30.0)
        exchange.check(3)


def test_a_frozen_node_is_noticed_and_misses_nothing_after_it_resumes() -> None:
    exchange = NumberExchange()
    with Cluster(exchange.program, n=3, seed=2, find_missed=True) as cluster:
        cluster.start()
        cluster.run_for(0.5)
        cluster.freeze(1)
        taken = len(exchange.taken[1])
        cluster.run_for(10.0)
        assert len(exchange.taken[1]) == taken
        assert {mark[:3] for mark in exchange.membership if mark[1] == "node.left"} == {
            (0, "node.left", 1),
            (2, "node.left", 1),
        }
        cluster.thaw(1)
        assert cluster.wait_until(lambda: exchange.all_taken(3), 10.0)
        exchange.check(3)


def test_a_killed_node_is_noticed_at_once_and_returns_as_a_new_one() -> None:
    exchange = NumberExchange()
    with Cluster(exchange.program, n=2, seed=3, find_missed=True) as cluster:
        cluster.start()
        cluster.run_for(0.5)
        cluster.kill(1)
        assert not cluster.nodes[1].running
        cluster.run_for(1.0)
        assert [mark[:3] for mark in exchange.membership if mark[1] == "node.left"] == [
            (0, "node.left", 1)
        ]
        cluster.start(1)
        assert cluster.nodes[1].incarnation == 2
        assert cluster.wait_until(lambda: (1, 2000 + N_EVENTS - 1) in exchange.taken[0], 10.0)
    of_first, of_second = (
        [number for _, number in exchange.taken[0] if number // 1000 == start] for start in (1, 2)
    )
    assert of_first == list(range(1000, 1000 + len(of_first)))
    assert 0 < len(of_first) < N_EVENTS
    assert of_second == list(range(2000, 2000 + N_EVENTS))


def test_a_run_returns_the_results_of_all_nodes() -> None:
    def program() -> tuple[int, tuple[str, ...]]:
        node = current_node()
        assert node is not None
        assert node.router is not None
        return node.router.node_id, node.roles

    with Cluster(program, roles={"learner": 1, "collector": 2}, topology="star") as cluster:
        assert cluster.run() == {
            0: (0, ("learner",)),
            1: (1, ("collector",)),
            2: (2, ("collector",)),
        }


def test_an_error_of_a_program_names_its_node() -> None:
    def program() -> None:
        node = current_node()
        if node is not None and node.roles == ("evaluator",):
            raise ValueError("no such thing")
        with Task(Context()) as task:
            task.wait_for("never", timeout_s=1e6)

    with (
        pytest.raises(SimulationError, match=r"node 1 \(evaluator\) failed: ValueError") as raised,
        Cluster(program, roles={"learner": 1, "evaluator": 1}) as cluster,
    ):
        cluster.run()
    assert isinstance(raised.value.__cause__, ValueError)
    assert isinstance(cluster.nodes[1].error, ValueError)


def test_a_run_that_does_not_end_reports_where_each_node_waits() -> None:
    def program() -> None:
        with Task(Context()) as task:
            task.wait_for("never", timeout_s=1e6)

    with (
        pytest.raises(
            SimulationError,
            match=r"after 50 simulated seconds: node 0 .*, node 1 .*\n(.*\n)*"
            r".*main of 0: waits until \S+ s at .*event_bus\.py",
        ),
        Cluster(program, n=2) as cluster,
    ):
        cluster.run(timeout_s=50.0)


def test_a_wait_without_its_event_ends_at_its_simulated_deadline() -> None:
    def program() -> float:
        with Task(Context()) as task:
            started_at = task.clock.now()
            with pytest.raises(WaitTimeout):
                task.wait_for("never", timeout_s=3600.0)
            return task.clock.now() - started_at

    with Cluster(program, n=1) as cluster:
        assert cluster.run() == {0: 3600.0}


def test_an_emitter_whose_peer_is_cut_off_waits_until_its_deadline() -> None:
    large = Event("large", timeout_s=7.0)

    def program() -> None:
        with Task(Context()) as task:
            task.on(large, lambda body: None)
            task.use(lambda ctx: task.emit(large, bytes(30 << 20), only_remote=True)).run()

    with Cluster(program, n=2, seed=1) as cluster:
        cluster.start()
        cluster.run_for(0.01)
        cluster.cut(0, 1)
        assert cluster.wait_until(lambda: not cluster.nodes[0].running, 20.0)
        assert isinstance(cluster.nodes[0].error, DeliveryTimeout)


def test_starting_a_running_node_is_refused() -> None:
    def program() -> None:
        with Task(Context()) as task:
            task.wait_for("never", timeout_s=1e6)

    with Cluster(program, n=2) as cluster:
        cluster.start()
        with pytest.raises(SimulationError, match=r"node 1 \(all roles\) is already running"):
            cluster.start(1)
        with pytest.raises(SimulationError, match=r"no nodes \[2\]; it has \[0, 1\]"):
            cluster.kill(2)


def test_leaving_the_cluster_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    exchange = NumberExchange()
    with Cluster(exchange.program, n=3) as cluster:
        cluster.start()
        cluster.run_for(0.5)
        # The program, its handlers, and three of the router: none for each peer.
        assert len(set(threading.enumerate()) - before) == 3 * 5
    assert set(threading.enumerate()) <= before


def test_a_task_uses_the_clock_of_its_node() -> None:
    def program() -> tuple[bool, bool]:
        with Task(Context()) as task, Task(Context(), clock=SystemClock()) as other:
            return task.clock is cluster.simulation, isinstance(other.clock, SystemClock)

    with Cluster(program, n=1) as cluster:
        assert cluster.run() == {0: (True, True)}


def test_a_dialer_whose_inbox_was_full_gets_more_as_soon_as_it_has_room() -> None:
    taken: list[int] = []

    def program() -> None:
        changed = threading.Condition()

        def take(number: int, body: bytes) -> None:
            taken.append(number)
            with changed:
                task.clock.wait_for(changed, lambda: False, 0.005)

        def send(ctx: Context) -> None:
            if task.router is not None and task.router.node_id == 0 and ctx.total_step < 60:
                task.emit(Event("body"), ctx.total_step, bytes(2000), only_remote=True)
            else:
                with changed:
                    task.clock.wait_for(changed, lambda: task.finish, 1.0)

        with Task(Context()) as task:
            if task.router is not None and task.router.node_id == 1:
                task.on(Event("body", capacity=1, timeout_s=600.0), take)
            task.use(send).run()

    small = NodeOptions(outbox_bytes=10_000, inbox_bytes=4_000, batch_bytes=4_000)
    with Cluster(program, n=2, options=small, find_missed=True) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: len(taken) == 60, 10.0)
        router = cluster.nodes[0].router
        assert router is not None
        assert router.traffic()["body"].blocked_s > 0.1
        assert cluster.now() < 1.0, "it did not wait for a heartbeat"
    assert taken == list(range(60))


def test_a_task_that_is_stopped_before_its_peers_are_ready_does_not_wait_for_them() -> None:
    steps = []

    def program() -> str | None:
        with Task(Context()) as task:
            task.use(steps.append).run()
            return task.stop_reason

    with Cluster(program, n=3) as cluster:
        cluster.start(0, 1)
        cluster.run_for(5.0)
        node = cluster.nodes[0].current_node
        assert node is not None
        node.stop("received SIGTERM")
        results = cluster.join(0, 1, timeout_s=3.0)
    assert results == {0: "received SIGTERM", 1: "node 0: received SIGTERM"}
    assert steps == []


def test_no_node_waits_for_a_peer_that_said_goodbye() -> None:
    def program() -> None:
        changed = threading.Condition()
        with Task(Context()) as task, changed:
            assert task.router is not None
            stays = task.router.node_id == 0
            task.use(lambda ctx: None).run(max_step=1)
            task.clock.wait_for(changed, lambda: False, 10.0 if stays else 1.0)

    for seed in range(3):
        with Cluster(program, n=2, seed=seed, find_missed=True) as cluster:
            cluster.run()


@pytest.mark.parametrize("topology", ["mesh", "star"])
@pytest.mark.parametrize("seed", range(3))
def test_restarted_nodes_get_larger_incarnations_without_a_clock(topology: str, seed: int) -> None:
    def program() -> None:
        with Task(Context()) as task:
            changed = threading.Condition()

            def wait(ctx: Context) -> None:
                with changed:
                    task.clock.wait_for(changed, lambda: task.finish, 1.0)

            task.use(wait).run()

    def incarnations() -> list[int]:
        routers = [cluster.nodes[number].router for number in range(3)]
        return [0 if router is None else router.incarnation for router in routers]

    def connected() -> bool:
        routers = [cluster.nodes[number].router for number in range(3)]
        counts = (2, 1, 1) if topology == "star" else (2, 2, 2)
        return all(
            router is not None and len(router.peer_ids()) == count
            for router, count in zip(routers, counts, strict=True)
        )

    with Cluster(program, n=3, topology=topology, seed=seed) as cluster:
        cluster.start()
        assert cluster.wait_until(connected, 20.0)
        assert incarnations() == [1, 1, 1]
        for number, expected in ((0, [2, 1, 1]), (0, [3, 1, 1]), (2, [3, 1, 2])):
            cluster.kill(number)
            cluster.start(number)
            assert cluster.wait_until(lambda e=expected: connected() and incarnations() == e, 20.0)
        cluster.cut(0)
        cluster.run_for(10.0)
        cluster.kill(1)
        cluster.start(1)
        cluster.run_for(2.0)
        cluster.heal(0)
        assert cluster.wait_until(lambda: connected() and incarnations() == [3, 2, 2], 30.0)
