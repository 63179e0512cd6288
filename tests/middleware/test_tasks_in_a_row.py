"""Programs that run several tasks, one after the other, as nodes of one run."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmiddleware.data import as_tree
from dmiddleware.errors import TaskStateError
from dmiddleware.pipeline import Context, Task, current_node, middleware
from dmiddleware.policy import DQNPolicy
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.testing import Cluster
from middleware import Barrier, ContextExchanger, ModelExchanger, OnlineRLContext, Role
from tests.middleware.small_dqn import fill
from tests.variants import mostly_slow

TOPOLOGIES: list[TopologyName] = ["mesh", "star"]
MODEL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}


class Seeds:
    """A program that trains once for each of several seeds.

    The weights of the n-th training are 1000 n plus the number of updates, and each batch carries
    the number of its training.

    Args:
        n_tasks: how many trainings.
        n_updates: of each training.
        ends: how the learner ends a training: ``stops``, ``max_step`` or ``raises``, which
            the program catches, in all trainings but the last.
        collector_s: simulated seconds that a collector needs for a batch.
        pause_s: simulated seconds between two trainings, by node id.
    """

    def __init__(
        self,
        *,
        n_tasks: int = 3,
        n_updates: int = 5,
        ends: str = "stops",
        collector_s: float = 0.1,
        pause_s: dict[int, float] | None = None,
    ) -> None:
        self.n_tasks, self.n_updates, self.ends = n_tasks, n_updates, ends
        self.collector_s, self.pause_s = collector_s, pause_s or {}
        self.n_learned: dict[int, int] = {}
        self.loaded: dict[int, set[int]] = {}
        self.learned_from: dict[int, set[int]] = {}
        self.env_steps: dict[int, int] = {}
        self.evaluated: dict[int, list[float]] = {}

    def __call__(self) -> list[str | None]:
        reasons: list[str | None] = []
        for number in range(1, self.n_tasks + 1):
            with Task(OnlineRLContext()) as task:
                try:
                    self.train(task, number)
                except ZeroDivisionError:
                    assert self.ends == "raises"
                reasons.append(task.stop_reason)
            node = current_node()
            assert node is not None
            sleep(node.clock, self.pause_s.get(node.node_id, 0.0))
        return reasons

    def train(self, task: Task[Any], number: int) -> None:
        policy = DQNPolicy({"seed": 0, "model": MODEL})
        fill(policy, 1000 * number)

        @middleware(roles=[Role.COLLECTOR], writes=["trajectories"])
        def collect(ctx: OnlineRLContext) -> None:
            sleep(ctx.task.clock, self.collector_s)
            self.loaded.setdefault(number, set()).add(weight(policy))
            ctx.trajectories = as_tree({"number": torch.full((1, 1), number)})
            ctx.env_step += 1

        @middleware(roles=[Role.LEARNER], reads=["trajectories"])
        def learn(ctx: OnlineRLContext) -> None:
            self.learned_from.setdefault(number, set()).add(int(ctx.trajectories["number"].item()))
            ctx.train_iter += 1
            self.n_learned[number] = ctx.train_iter
            fill(policy, 1000 * number + ctx.train_iter)
            self.env_steps[number] = ctx.env_step
            if ctx.train_iter == self.n_updates and self.ends != "max_step":
                if self.ends == "raises" and number < self.n_tasks:
                    _ = 1 / 0
                ctx.task.stop("enough")

        @middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
        def evaluate(ctx: OnlineRLContext) -> None:
            ctx.eval_value = ctx.last_eval_value = float(weight(policy))
            self.evaluated.setdefault(number, []).append(ctx.eval_value)

        task.use(ContextExchanger()).use(ModelExchanger(policy))
        task.use(collect).use(learn)
        node = current_node()
        if node is not None and Role.EVALUATOR in (node.run_roles or ()):
            task.use(evaluate)
        is_limited = self.ends == "max_step" and task.has_role(Role.LEARNER)
        task.run(max_step=self.n_updates if is_limited else None)

    def check(self) -> None:
        numbers = range(1, self.n_tasks + 1)
        assert self.n_learned == dict.fromkeys(numbers, self.n_updates)
        assert self.learned_from == {number: {number} for number in numbers}
        assert self.env_steps == dict.fromkeys(numbers, self.n_updates)
        for number, weights in self.loaded.items():
            assert all(1000 * number <= one < 1000 * (number + 1) for one in weights)
        for number, weights_ in self.evaluated.items():
            assert all(1000 * number <= one < 1000 * (number + 1) for one in weights_)


def sleep(clock: Any, seconds: float) -> None:
    nothing = threading.Condition()
    with nothing:
        clock.wait_for(nothing, lambda: False, seconds)


def weight(policy: DQNPolicy) -> int:
    return int(next(policy.model.parameters()).detach().flatten()[0])


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("ends", ["stops", "max_step", "raises"])
def test_no_task_sees_the_data_or_weights_of_another(topology: TopologyName, ends: str) -> None:
    program = Seeds(ends=ends)
    roles = {"learner": 1, "collector": 2, "evaluator": 1}
    with Cluster(program, roles=roles, topology=topology) as cluster:
        cluster.run(timeout_s=600.0)
    program.check()


@pytest.mark.parametrize(
    ("late", "topology"), mostly_slow(itertools.product([0, 1, 2], TOPOLOGIES), keep=[2])
)
def test_a_node_that_comes_late_to_a_task_is_waited_for(topology: TopologyName, late: int) -> None:
    program = Seeds(pause_s={late: 400.0})  # longer than any deadline
    with Cluster(program, roles={"learner": 1, "collector": 2}, topology=topology) as cluster:
        cluster.run(timeout_s=3000.0)
    program.check()


@pytest.mark.parametrize(
    ("killed", "topology"), mostly_slow(itertools.product([1, 2], TOPOLOGIES), keep=[1])
)
def test_a_node_that_is_restarted_joins_the_task_in_which_the_others_are(
    topology: TopologyName, killed: int
) -> None:
    program = Seeds(n_tasks=2, n_updates=200)
    roles = {"learner": 1, "collector": 2}
    with Cluster(program, roles=roles, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: program.n_learned.get(2, 0) >= 10, 100.0)
        cluster.kill(killed)
        cluster.run_for(4.0)
        cluster.start(killed)
        results = cluster.join(timeout_s=60.0)
    assert results[killed] == ["the peers have gone on to task 2", "node 0: enough"]
    assert program.n_learned == {1: 200, 2: 200}
    assert program.learned_from == {1: {1}, 2: {2}}


def test_a_learner_that_is_restarted_joins_the_task_in_which_the_others_are() -> None:
    program = Seeds(n_tasks=2, n_updates=60)
    with Cluster(program, roles={"learner": 1, "collector": 2}) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: program.n_learned.get(2, 0) >= 10, 60.0)
        cluster.kill(0)
        cluster.run_for(1.0)
        cluster.start(0)
        results = cluster.join(timeout_s=60.0)
    assert results[0] == ["the peers have gone on to task 2", "enough"]
    assert program.n_learned == {1: 60, 2: 60}


def test_events_for_a_restarted_node_wait_until_it_has_come_to_their_task() -> None:
    got: list[tuple[int, int]] = []

    def program() -> None:
        for number in (1, 2):
            with Task(Context()) as task:
                assert task.router is not None
                task.on("number", lambda n, number=number: got.append((number, n)))
                is_sender = task.router.node_id == 0

                def work(ctx: Context, is_sender: bool = is_sender) -> None:
                    if is_sender:
                        ctx.task.emit("number", ctx.total_step, only_remote=True)
                    sleep(ctx.task.clock, 0.1)

                task.use(work)
                task.run(max_step=100 if is_sender else 1000)
                if is_sender:
                    task.stop("all sent")
                    task.run()

    with Cluster(program, n=2) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: (2, 20) in got, 60.0)
        cluster.kill(1)
        cluster.run_for(3.0)
        cluster.start(1)
        cluster.join(timeout_s=60.0)
    numbers = [n for number, n in got if number == 2]
    assert sorted(set(numbers)) == list(range(100))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_barrier_counts_from_zero_in_each_task(topology: TopologyName) -> None:
    passed: dict[int, list[tuple[int, float]]] = {0: [], 1: [], 2: []}

    def program() -> None:
        for number in (1, 2):
            with Task(OnlineRLContext()) as task:
                assert task.router is not None
                node_id = task.router.node_id

                def work(ctx: OnlineRLContext, node_id: int = node_id) -> None:
                    sleep(ctx.task.clock, float(node_id))

                def record(
                    ctx: OnlineRLContext, node_id: int = node_id, number: int = number
                ) -> None:
                    passed[node_id].append((number, round(ctx.task.clock.now())))

                task.use(work).use(Barrier()).use(record).run(max_step=3)

    with Cluster(program, n=3, topology=topology) as cluster:
        cluster.run(timeout_s=100.0)
    assert passed[0] == passed[1] == passed[2] == [(n // 3 + 1, 2 * n + 2) for n in range(6)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_stop_of_one_task_does_not_reach_the_next(topology: TopologyName) -> None:
    def program() -> list[tuple[str | None, int]]:
        ends = []
        for number in (1, 2, 3):
            with Task(OnlineRLContext()) as task:
                assert task.router is not None
                node_id = task.router.node_id

                def work(
                    ctx: OnlineRLContext, node_id: int = node_id, number: int = number
                ) -> None:
                    sleep(ctx.task.clock, 0.1 + node_id)
                    if node_id == number - 1 and ctx.total_step == 2:
                        ctx.task.stop(f"task {number} is done")

                task.use(work).run()
                ends.append((task.stop_reason, task.ctx.total_step))
        return ends

    with Cluster(program, n=3, topology=topology) as cluster:
        results = cluster.run(timeout_s=100.0)
    for node_id, ends in results.items():
        for number, (reason, _) in enumerate(ends, start=1):
            own = f"task {number} is done"
            assert reason == (own if node_id == number - 1 else f"node {number - 1}: {own}")


def test_the_second_task_may_have_another_chain_and_other_roles() -> None:
    seen: list[Any] = []

    def program() -> None:
        with Task(OnlineRLContext()) as task:
            task.use(Barrier()).run(max_step=2)
        with Task(OnlineRLContext()) as task:
            assert task.router is not None
            if task.router.node_id == 2:
                task.add_role("annotator")

            @middleware(roles=["annotator"])
            def annotate(ctx: OnlineRLContext) -> None:
                task.emit("label", ctx.total_step, only_remote=True)
                sleep(ctx.task.clock, 1.0)
                if ctx.total_step == 3:
                    task.stop("labeled")

            @middleware(roles=[Role.LEARNER, Role.COLLECTOR])
            def rest(ctx: OnlineRLContext) -> None:
                sleep(ctx.task.clock, 0.5)

            if task.has_role(Role.LEARNER):
                task.on("label", seen.append)
            task.use(annotate).use(rest).run()

    with Cluster(program, roles={"learner": 1, "collector": 2}) as cluster:
        cluster.run(timeout_s=100.0)
    assert seen == [0, 1, 2, 3]


def test_many_tasks_leave_nothing_behind() -> None:
    n_tasks = 120  # with all their event names, more than a router accepts from a peer
    program = Seeds(n_tasks=n_tasks, n_updates=1, collector_s=0.01)
    with Cluster(program, roles={"learner": 1, "collector": 1}) as cluster:
        cluster.start()
        cluster.join(timeout_s=3600.0)
        node = cluster.nodes[0]
        assert node.router is not None and node.current_node is not None
        names = {name for name in node.router.traffic() if "task" in name}
        assert names <= {"task.stopped", "task.ended"}
        assert node.current_node.progress().counters["updates"] == 1
    program.check()


def test_a_node_runs_one_task_at_a_time() -> None:
    def program() -> str:
        with Task(Context(), name="outer") as outer:

            def nest(ctx: Context) -> Iterator[None]:
                with Task(Context(), name="inner") as inner:
                    inner.use(lambda ctx: None).run(max_step=1)
                yield

            with pytest.raises(TaskStateError, match="node 0 has the task 'outer'"):
                outer.use(nest).run(max_step=1)
        with (
            Task(Context(), name="older") as older,
            Task(Context(), name="newer"),
            pytest.raises(TaskStateError, match="node 0 has the task 'newer'"),
        ):
            older.use(lambda ctx: None).run(max_step=1)
        return "refused"

    with Cluster(program, n=1) as cluster:
        assert cluster.run() == {0: "refused"}
