"""The exchange between many nodes in simulated time: restarts of the learner, stops and traffic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware.data import as_tree
from dmiddleware.pipeline import Clock, Running, Task, current_node, middleware
from dmiddleware.policy import DQNPolicy
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.testing import Cluster
from middleware import (
    ContextExchanger,
    ModelExchanger,
    OnlineRLContext,
    Role,
    RunFolder,
    SnapshotSaver,
)
from tests.middleware.small_dqn import fill, make_policy
from tests.variants import mostly_slow

TOPOLOGIES: list[TopologyName] = ["mesh", "star"]
RESTARTED = 1000
"""Added to the weights of a learner that was restarted."""


class ClockBehind:
    """The clock of a host whose calendar is behind.

    Args:
        clock: the clock of the other hosts.
        behind_s: by how many seconds it is behind.
    """

    def __init__(self, clock: Clock, behind_s: float) -> None:
        self._clock = clock
        self._behind_s = behind_s

    def now(self) -> float:
        return self._clock.now()

    def wall(self) -> float:
        return self._clock.wall() - self._behind_s

    def wait_for(
        self,
        condition: threading.Condition,
        predicate: Callable[[], bool],
        timeout_s: float | None,
    ) -> bool:
        return self._clock.wait_for(condition, predicate, timeout_s)

    def spawn(self, function: Callable[[], None], *, name: str) -> Running:
        return self._clock.spawn(function, name=name)


class Training:
    """A learner whose weights are the number of its updates, and collectors that record them.

    Args:
        step_s: simulated seconds that a collector needs for a batch.
        max_policy_lag: of the exchange of weights.
        snapshots: where the learner saves its snapshots; None: it starts from scratch.
        stop_at: updates after which the learner stops the run.
    """

    def __init__(
        self,
        *,
        step_s: float = 0.1,
        max_policy_lag: int | None = None,
        snapshots: Path | None = None,
        stop_at: int = 10**6,
    ) -> None:
        self.n_updates = 0
        self.starts = 0
        self.loaded: dict[int, list[float]] = {}
        self.steps = 0
        self._step_s = step_s
        self._max_policy_lag = max_policy_lag
        self._snapshots = snapshots
        self._stop_at = stop_at

    def __call__(self) -> str | None:
        node = current_node()
        assert node is not None and node.clock is not None
        learns = Role.LEARNER in node.roles
        self.starts += learns
        is_restarted = learns and self.starts > 1
        clock = ClockBehind(node.clock, 60.0 if is_restarted else 0.0)
        with Task(OnlineRLContext(), clock=clock) as task:
            assert task.router is not None
            me = task.router.node_id
            policy = make_policy()
            task.use(ContextExchanger())
            task.use(ModelExchanger(policy, max_policy_lag=self._max_policy_lag))
            task.use(self._collector(me, policy))
            task.use(self._learner(policy, RESTARTED if is_restarted else 0))
            if self._snapshots is not None and learns:
                snapshots = SnapshotSaver(self._snapshots, every_train_iter=5)
                task.use(snapshots)
                snapshots.resume(task)
            task.run()
            return task.stop_reason

    def _collector(self, me: int, policy: DQNPolicy) -> Any:
        nothing = threading.Condition()

        @middleware(roles=[Role.COLLECTOR], writes=["trajectories"])
        def collect(ctx: OnlineRLContext) -> None:
            with nothing:
                ctx.task.clock.wait_for(nothing, lambda: False, self._step_s)
            self.loaded.setdefault(me, []).append(weight(policy))
            ctx.trajectories = as_tree({"done": torch.zeros(1, 1, dtype=torch.bool)})
            ctx.env_step += 1

        return collect

    def _learner(self, policy: DQNPolicy, offset: int) -> Any:
        @middleware(roles=[Role.LEARNER])
        def learn(ctx: OnlineRLContext) -> None:
            self.steps += 1
            ctx.train_iter += 1
            self.n_updates = ctx.train_iter
            fill(policy, offset + ctx.train_iter)
            if ctx.train_iter == self._stop_at:
                ctx.task.stop("enough")

        return learn


def weight(policy: DQNPolicy) -> float:
    return float(next(policy.model.parameters()).detach().flatten()[0])


@pytest.mark.parametrize(
    ("topology", "max_policy_lag", "resumes"),
    mostly_slow(
        [("mesh", None, True), ("mesh", 4, False), ("star", None, False), ("star", 4, True)],
        keep=[0, 3],
    ),
)
def test_weights_of_a_restarted_learner_whose_clock_is_behind_are_loaded(
    tmp_path: Path, topology: TopologyName, max_policy_lag: int | None, resumes: bool
) -> None:
    folder = RunFolder.create("run", root=tmp_path).path
    training = Training(max_policy_lag=max_policy_lag, snapshots=folder if resumes else None)
    with Cluster(training, roles={"learner": 1, "collector": 2}, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: training.n_updates >= 83, 60.0)
        cluster.kill(0)
        cluster.run_for(2.0)
        cluster.start(0)
        cluster.run_for(3.0)
        n_updates = training.n_updates
        assert n_updates > 83 if resumes else n_updates < 83
        for loaded in training.loaded.values():
            assert RESTARTED + n_updates - 8 <= loaded[-1] <= RESTARTED + n_updates


def test_the_learner_sends_to_the_collector_whose_batch_it_has_taken_only() -> None:
    n_updates = 200
    training = Training(stop_at=n_updates)
    with Cluster(training, roles={"learner": 1, "collector": 8}) as cluster:
        cluster.run()
        router = cluster.nodes[0].router
        assert router is not None
        traffic = router.traffic()
    assert traffic["exchange.consumed"].sent == training.steps == n_updates
    # Once at the start, or when a node has joined, but not in each step.
    assert traffic["exchange.learned"].sent <= 8 * 9
    assert traffic["exchange.model"].sent <= 8 * (n_updates + 2)


def test_the_lag_of_the_weights_is_announced_less_often_than_each_step() -> None:
    n_updates = 200
    training = Training(stop_at=n_updates, max_policy_lag=40)
    with Cluster(training, roles={"learner": 1, "collector": 8}) as cluster:
        cluster.run()
        router = cluster.nodes[0].router
        assert router is not None
        assert router.traffic()["exchange.learned"].sent <= 8 * (9 + n_updates // 20)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_collector_s_stop_reaches_all_nodes_once_with_its_reason(
    topology: TopologyName,
) -> None:
    training = Training()
    with Cluster(training, roles={"learner": 1, "collector": 3}, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: training.n_updates >= 5, 60.0)
        stop(cluster, 2, "solved")
        results = cluster.join(timeout_s=10.0)
        received = {
            node_id: node.router.traffic()["task.stopped"].received
            for node_id, node in cluster.nodes.items()
            if node.router is not None and node_id in (0, 1, 3)
        }
    assert results == {0: "node 2: solved", 1: "node 2: solved", 2: "solved", 3: "node 2: solved"}
    if topology == "star":
        assert received == {0: 1, 1: 1, 3: 1}


def test_a_hub_relays_a_stop_before_its_own_step_has_ended() -> None:
    waiting = threading.Condition()

    def program() -> str | None:
        with Task(OnlineRLContext()) as task:
            assert task.router is not None
            duration_s = 100.0 if task.router.node_id == 0 else 0.1

            def work(ctx: OnlineRLContext) -> None:
                with waiting:
                    task.clock.wait_for(waiting, lambda: False, duration_s)

            task.use(work).run()
            return task.stop_reason

    with Cluster(program, n=3, topology="star") as cluster:
        cluster.start()
        cluster.run_for(5.0)
        stop(cluster, 1, "solved")
        assert cluster.join(2, timeout_s=1.0) == {2: "node 1: solved"}


def test_a_node_that_joins_a_hub_that_has_been_stopped_is_stopped_too() -> None:
    waiting = threading.Condition()

    class SlowToClose:
        def __init__(self, task: Task[Any]) -> None:
            self.task = task

        def __call__(self, ctx: OnlineRLContext) -> None:
            with waiting:
                self.task.clock.wait_for(waiting, lambda: False, 0.1)

        def close(self) -> None:
            if is_hub(self.task):
                with waiting:
                    self.task.clock.wait_for(waiting, lambda: False, 10.0)

    def is_hub(task: Task[Any]) -> bool:
        return task.router is not None and task.router.node_id == 0

    def program() -> str | None:
        with Task(OnlineRLContext()) as task:
            task.use(SlowToClose(task)).run()
        return task.stop_reason

    with Cluster(program, n=3, topology="star") as cluster:
        cluster.start(0, 1)
        cluster.run_for(1.0)
        stop(cluster, 1, "it diverged")
        cluster.run_for(3.0)
        cluster.start(2)
        assert cluster.join(0, 2, timeout_s=60.0) == dict.fromkeys((0, 2), "node 1: it diverged")


def test_a_stop_reaches_a_node_whose_link_to_its_sender_is_cut() -> None:
    training = Training()
    with Cluster(training, roles={"learner": 1, "collector": 2}) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: training.n_updates >= 5, 60.0)
        cluster.cut(1, 2)
        stop(cluster, 1, "solved")
        assert cluster.join(0, 2, timeout_s=20.0) == dict.fromkeys((0, 2), "node 1: solved")


def stop(cluster: Cluster, node_id: int, reason: str) -> None:
    node = cluster.nodes[node_id].current_node
    assert node is not None
    node.stop(reason)
