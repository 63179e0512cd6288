"""Named parts of a chain in several processes: their learners, and their messages."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware.data import as_tree
from dmiddleware.errors import LaunchError
from dmiddleware.pipeline import Task, current_node, middleware
from dmiddleware.policy import DQNPolicy
from dmiddleware.testing import Cluster
from dmiddleware.testing.simulation import SimulationError
from middleware import (
    ContextExchanger,
    ModelExchanger,
    OnlineRLContext,
    Role,
    SnapshotSaver,
    TerminationChecker,
)
from tests.middleware.small_dqn import fill, make_policy

PARTS = {"red": 1, "blue": 1000}
"""For each part, what an update adds to the weights."""


class Program:
    """Two parts, whose weights count their updates, and collectors that note the weights.

    Args:
        limits: named updates after which the run stops.
        pace: the rows to draw per collected row; None: no pace.
        folder: where the run is saved and resumed; None: nowhere.

    Attributes:
        resumed: the updates of each part with which a learner has begun.
    """

    def __init__(
        self,
        limits: dict[str | None, int],
        pace: float | None = None,
        folder: Path | None = None,
    ) -> None:
        self.limits, self.pace, self.folder = limits, pace, folder
        self.resumed: dict[str, int] = {}
        self.learned: dict[int, set[str]] = {}
        self.loaded: dict[int, dict[str, list[float]]] = {}
        self.received: dict[str, set[float]] = {}
        self.counters: dict[int, dict[str, int]] = {}
        self.leads: set[int] = set()
        self.peers: dict[int, dict[str, list[int]]] = {}
        self.logged: dict[int, set[str]] = {}

    def __call__(self) -> str | None:
        node = current_node()
        assert node is not None
        if node.has_role(Role.LEARNER):
            self.leads.add(node.node_id)
        with Task(OnlineRLContext()) as task:
            for name in PARTS:
                policy = make_policy()
                fill(policy, 0)
                task.use(ContextExchanger(name=name, samples_per_insert=self.pace))
                task.use(ModelExchanger(policy, name=name))
                task.use(self._collector(node.node_id, name, policy))
                task.use(self._learner(node.node_id, name, policy))
            for limited, limit in self.limits.items():
                task.use(TerminationChecker(max_train_iter=limit, name=limited))
            if self.folder is not None:
                snapshots = SnapshotSaver(self.folder)
                task.use(snapshots)
                if snapshots.resume(task):
                    updates = {name: task.ctx.part(name).train_iter for name in PARTS}
                    self.resumed.update({name: n for name, n in updates.items() if n})
            task.run()
            self.counters[node.node_id] = task.ctx.counters()
            return task.stop_reason

    def _collector(self, me: int, name: str, policy: DQNPolicy) -> Any:
        nothing = threading.Condition()
        loaded = self.loaded.setdefault(me, {})

        @middleware(part_name=name, roles=(Role.COLLECTOR,), writes=("trajectories", "env_step"))
        def collect(ctx: OnlineRLContext) -> None:
            with nothing:
                ctx.task.clock.wait_for(nothing, lambda: False, 0.1)
            loaded.setdefault(name, []).append(weight(policy))
            sign = torch.full((1, 1), float(PARTS[name]))
            ctx.trajectories = as_tree({"reward": sign, "done": sign > 1e9})
            ctx.env_step += 1

        return collect

    def _learner(self, me: int, name: str, policy: DQNPolicy) -> Any:
        @middleware(
            part_name=name,
            roles=(Role.LEARNER,),
            reads=("trajectories",),
            writes=("train_output", "train_iter"),
        )
        def learn(ctx: OnlineRLContext) -> None:
            self.learned.setdefault(me, set()).add(name)
            self.logged.setdefault(me, set()).update(ctx.whole.logged)
            self.peers.setdefault(me, {})[name] = ctx.task.participants(Role.COLLECTOR)
            if ctx.trajectories is not None:
                rewards = ctx.trajectories["reward"].flatten().tolist()
                self.received.setdefault(name, set()).update(rewards)
            ctx.train_iter += 1
            ctx.trained_env_step += 1
            fill(policy, PARTS[name] * ctx.train_iter)

        return learn


def weight(policy: DQNPolicy) -> float:
    return float(next(policy.model.parameters()).detach().flatten()[0])


@pytest.mark.parametrize(
    ("roles", "learned", "collecting"),
    [
        ({"learner": 1, "collector": 2}, {0: {"red", "blue"}}, {1: PARTS, 2: PARTS}),
        (
            {"learner:red": 1, "learner:blue": 1, "collector": 2},
            {0: {"red"}, 1: {"blue"}},
            {2: PARTS, 3: PARTS},
        ),
        (
            {"learner:blue": 1, "learner": 1, "collector:red": 1, "collector:blue": 1},
            {0: {"blue"}, 1: {"red"}},
            {2: {"red"}, 3: {"blue"}},
        ),
    ],
)
@pytest.mark.parametrize("topology", ["star", "mesh"])
def test_each_part_exchanges_its_data_with_its_learner(
    roles: dict[str, int], learned: Any, collecting: Any, topology: Any
) -> None:
    program = Program({"red": 20})
    with Cluster(program, roles=roles, topology=topology) as cluster:
        cluster.run()
    assert program.learned == learned
    assert program.received == {"red": {1.0}, "blue": {1000.0}}
    for node_id, parts in collecting.items():
        assert program.loaded[node_id].keys() == set(parts)
        for name in parts:
            updates = [value / PARTS[name] for value in program.loaded[node_id][name][1:]]
            # Another part's weights would not be whole numbers, or out of range.
            assert all(value == int(value) and value <= 40 for value in updates)
            assert updates[-1] > 1
    (lead,) = program.leads
    assert "red" in learned[lead] or "blue" in learned[lead]
    for node_id, names in learned.items():
        # It does not wait for what it does not learn.
        assert {text.partition("/")[0] for text in program.logged[node_id]} == names
        for name in names:
            expected = [peer for peer, parts in collecting.items() if name in parts]
            assert sorted(program.peers[node_id][name]) == expected


def test_the_lead_is_the_first_learner_of_a_part_or_the_learner() -> None:
    for roles, lead in (
        ({"collector": 1, "learner:blue": 1, "learner:red": 1}, 1),
        ({"learner:blue": 1, "learner": 1, "collector": 1}, 1),
    ):
        program = Program({"red": 3, "blue": 3})
        with Cluster(program, roles=roles) as cluster:
            cluster.run()
        assert program.leads == {lead}


def test_a_limit_of_a_part_ends_the_whole_run_and_says_so() -> None:
    program = Program({"blue": 5})
    roles = {"learner:red": 1, "learner:blue": 1, "collector": 1}
    with Cluster(program, roles=roles) as cluster:
        cluster.run()
        reasons = {node.node_id: node.result for node in cluster.nodes.values()}
    assert all("train_iter of blue reached 5" in str(reason) for reason in reasons.values())


def test_each_learner_resumes_its_own_snapshots(tmp_path: Path) -> None:
    roles = {"learner:red": 1, "learner:blue": 1, "collector": 1}
    before = Program({"red": 8, "blue": 50}, folder=tmp_path)
    with Cluster(before, roles=roles) as cluster:
        cluster.run()
    assert before.resumed == {}
    ended = {name: before.counters[node][f"{name} updates"] for node, name in enumerate(PARTS)}
    after = Program({"red": 16, "blue": 100}, folder=tmp_path)
    with Cluster(after, roles=roles) as cluster:
        cluster.run()
    assert after.resumed == ended
    # One learner for both would begin the one whose snapshots are elsewhere from scratch.
    with (
        Cluster(Program({"red": 20}, folder=tmp_path), roles={"learner": 1, "collector": 1}) as one,
        pytest.raises(SimulationError, match="learned red, and this one learns red and blue"),
    ):
        one.run()


@middleware(
    part_name="red",
    roles=(Role.EVALUATOR,),
    writes=("eval_value", "eval_output", "last_eval_iter", "last_eval_value"),
)
def evaluate(ctx: OnlineRLContext) -> None:
    ctx.eval_value = ctx.last_eval_value = 7.0
    ctx.last_eval_iter = ctx.train_iter


def collects(name: str, *, within_s: float) -> Any:
    """Return a collector that has a row after a while, and stops the run in its second step."""
    nothing = threading.Condition()

    @middleware(part_name=name, roles=(Role.COLLECTOR,), writes=("trajectories",))
    def collect(ctx: OnlineRLContext) -> None:
        task = ctx.task
        with nothing:
            task.clock.wait_for(nothing, lambda: task.finish, within_s)
        if ctx.total_step:
            task.stop("it has collected twice")
        done = torch.ones(1, 1, dtype=torch.bool)
        ctx.trajectories = as_tree({"reward": done.float(), "done": done})

    return collect


def learns(name: str) -> Any:
    @middleware(
        part_name=name,
        roles=(Role.LEARNER,),
        reads=("trajectories",),
        writes=("train_output", "train_iter"),
    )
    def learn(ctx: OnlineRLContext) -> None:
        ctx.train_iter += 1

    return learn


def test_an_evaluation_is_seen_although_a_stop_ends_the_step_that_takes_it() -> None:
    seen = []

    @middleware(roles=(Role.LEARNER,), last_step=True)
    def observe(ctx: OnlineRLContext) -> Any:
        yield
        seen.append(ctx.part("red").eval_value)

    def program() -> None:
        with Task(OnlineRLContext()) as task:
            for name in PARTS:
                task.use(ContextExchanger(name=name))
            # The evaluation arrives before the row of red, and that of blue never does.
            task.use(evaluate).use(collects("red", within_s=1.0)).use(learns("red"))
            task.use(collects("blue", within_s=60.0)).use(learns("blue")).use(observe).run()

    roles = {"learner": 1, "collector:red": 1, "collector:blue": 1, "evaluator": 1}
    with Cluster(program, roles=roles) as cluster:
        cluster.run()
    assert seen == [7.0]


def test_a_process_that_learns_all_parts_counts_all_of_them() -> None:
    program = Program({None: 20})
    with Cluster(program, roles={"learner": 1, "collector": 1}) as cluster:
        cluster.run()
    assert program.counters[0]["updates"] == 20
    assert program.counters[0]["red updates"] == program.counters[0]["blue updates"] == 10
    assert program.counters[0]["env steps"] == 20


def test_a_limit_of_all_parts_is_refused_where_another_process_learns_one() -> None:
    program = Program({None: 20})
    roles = {"learner:red": 1, "learner:blue": 1, "collector": 1}
    with (
        Cluster(program, roles=roles) as cluster,
        pytest.raises(SimulationError, match=r"'blue' learns in another process.*name='blue'"),
    ):
        cluster.run()


def test_collectors_of_several_parts_cannot_keep_a_pace() -> None:
    program = Program({"red": 20}, pace=1.0)
    with (
        Cluster(program, roles={"learner": 1, "collector": 1}) as cluster,
        pytest.raises(SimulationError, match="--roles collector:red=1"),
    ):
        cluster.run()
    program = Program({"red": 20}, pace=1.0)
    roles = {"learner": 1, "collector:red": 1, "collector:blue": 1}
    with Cluster(program, roles=roles) as cluster:
        cluster.run()
    assert program.received == {"red": {1.0}, "blue": {1000.0}}


def test_a_part_without_a_process_is_refused() -> None:
    program = Program({"red": 20})
    with (
        Cluster(program, roles={"learner": 1, "collector:red": 1}) as cluster,
        pytest.raises(SimulationError, match=r"collect:blue.*is for the role 'collector'"),
    ):
        cluster.run()


def test_a_role_for_a_part_that_the_chain_does_not_have_is_refused() -> None:
    program = Program({"red": 20})
    with (
        Cluster(program, roles={"learner": 1, "learner:rad": 1, "collector": 1}) as cluster,
        pytest.raises(SimulationError, match="the task has the role 'learner:rad'"),
    ):
        cluster.run()


@pytest.mark.parametrize(
    ("role", "count", "message"),
    [
        ("learner:red", 2, "learns in one, learner:red=1"),
        ("leaner:red", 1, "did you mean learner:red"),
        ("learner:", 1, "write it as role:name"),
        ("learner:a/b", 1, "write it as role:name"),
        ("none:red", 1, "write it as role:name"),
    ],
)
def test_a_role_that_names_no_part_is_refused(role: str, count: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Cluster(Program({}), roles={role: count, "collector": 1})
