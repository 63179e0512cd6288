"""Waits for nodes that are slow, lost, stuck, or have ended their part."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

from dmiddleware import WaitTimeout
from dmiddleware.data import as_tree
from dmiddleware.pipeline import Task, current_node, middleware
from dmiddleware.policy import DQNPolicy
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.testing import Cluster
from middleware import ContextExchanger, ModelExchanger, OnlineRLContext, Role
from tests.variants import mostly_slow

TOPOLOGIES: list[TopologyName] = ["mesh", "star"]
ROLES = {"learner": 1, "collector": 1, "evaluator": 1}
SLOW_S = 500.0  # much longer than any deadline
MODEL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}


class Program:
    """A run in which one role, in one phase, needs very long.

    Args:
        slow: the role.
        phase: ``start`` (before its task), ``setup`` (of its chain) or ``step``.
        samples_per_insert: the pace of the exchange.
        evaluator_ends: how the evaluator's task ends after two evaluations: ``no``, ``raises`` and
            then the process works on, or ``returns`` likewise.
        n_updates: after which the learner stops.
    """

    def __init__(
        self,
        slow: str = "",
        phase: str = "step",
        *,
        samples_per_insert: float | None = None,
        max_policy_lag: int | None = None,
        ends: dict[str, str] | None = None,
        n_updates: int = 4,
    ) -> None:
        self.slow, self.phase, self.n_updates = slow, phase, n_updates
        self.samples_per_insert, self.max_policy_lag = samples_per_insert, max_policy_lag
        self.ends = ends or {}
        self.errors: dict[str, str] = {}
        self.n_learned = 0

    def __call__(self) -> str | None:
        node = current_node()
        assert node is not None
        (role,) = node.roles
        self.work("start", role)
        try:
            with Task(OnlineRLContext()) as task:
                self.run(task, role)
                return task.stop_reason
        except (WaitTimeout, ZeroDivisionError) as error:
            self.errors[role] = f"{type(error).__name__}: {error}"
            sleep(3 * SLOW_S)  # the process lives on
            return None

    def work(self, phase: str, role: str) -> None:
        node = current_node()
        assert node is not None
        sleep(SLOW_S if (role, phase) == (self.slow, self.phase) else 0.05)

    def run(self, task: Task[Any], role: str) -> None:
        policy = DQNPolicy({"seed": 0, "model": MODEL})

        @middleware(setup=lambda _: self.work("setup", role))
        def work(ctx: OnlineRLContext) -> None:
            self.work("step" if ctx.total_step == 1 else "", role)
            if self.ends.get(role) == "raises" and ctx.total_step == 2:
                _ = 1 / 0

        @middleware(roles=[Role.COLLECTOR], writes=["trajectories"])
        def collect(ctx: OnlineRLContext) -> None:
            ctx.trajectories = as_tree({"done": torch.zeros(1, 1, dtype=torch.bool)})
            ctx.env_step += 1

        @middleware(roles=[Role.LEARNER])
        def learn(ctx: OnlineRLContext) -> None:
            ctx.train_iter += 1
            if hasattr(ctx, "trained_env_step"):
                ctx.trained_env_step += 1
            self.n_learned = ctx.train_iter
            if ctx.train_iter == self.n_updates:
                task.stop("enough")

        @middleware(roles=[Role.EVALUATOR], writes=["eval_value"])
        def evaluate(ctx: OnlineRLContext) -> None:
            ctx.eval_value = 0.0

        task.use(ContextExchanger(samples_per_insert=self.samples_per_insert, timeout_s=30.0))
        task.use(ModelExchanger(policy, max_policy_lag=self.max_policy_lag, timeout_s=30.0))
        task.use(work).use(collect).use(learn)
        node = current_node()
        assert node is not None and node.run_roles is not None
        if Role.EVALUATOR in node.run_roles:
            task.use(evaluate)
        task.run(max_step=3 if self.ends.get(role) == "returns" else None)
        if self.ends.get(role) == "returns":
            task.close()
            sleep(3 * SLOW_S)


def sleep(seconds: float) -> None:
    node, nothing = current_node(), threading.Condition()
    assert node is not None
    with nothing:
        node.clock.wait_for(nothing, lambda: False, seconds)


@pytest.mark.parametrize(
    ("slow", "phase", "topology"),
    mostly_slow(
        itertools.product(ROLES, ["start", "setup", "step"], TOPOLOGIES),
        keep=[4, 7, 10, 15],  # each role, phase and topology
    ),
)
def test_a_living_node_is_waited_for_however_slow_it_is(
    slow: str, phase: str, topology: TopologyName, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(slow, phase)
    with Cluster(program, roles=ROLES, topology=topology) as cluster:
        results = cluster.run(timeout_s=10 * SLOW_S)
    assert program.errors == {}
    assert results[0] == "enough"
    assert results[1] == "node 0: enough"
    said = [text for text in caplog.messages if " has waited " in text]
    if slow != "evaluator" or phase != "step":  # nobody waits for evaluations
        slow_id = list(ROLES).index(slow)
        assert len(said) >= SLOW_S // 60
        assert any(f"node {slow_id} ({slow})" in text or "timeout_s=30" in text for text in said)


@pytest.mark.parametrize("slow", mostly_slow(["learner", "collector"], keep=1))
def test_a_slow_node_is_also_waited_for_to_keep_the_pace(slow: str) -> None:
    program = Program(slow, samples_per_insert=1.0, max_policy_lag=1)
    with Cluster(program, roles=ROLES) as cluster:
        cluster.run(timeout_s=10 * SLOW_S)
    assert program.errors == {}
    assert program.n_learned == 4


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_frozen_node_is_lost_and_ends_the_wait_at_the_deadline(topology: TopologyName) -> None:
    program = Program(n_updates=10**6)
    with Cluster(program, roles={"learner": 1, "collector": 1}, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: program.n_learned >= 5, 60.0)
        cluster.freeze(1)
        frozen_at = cluster.now()
        assert cluster.wait_until(lambda: "learner" in program.errors, 60.0)
        assert 30.0 <= cluster.now() - frozen_at <= 36.0
    error = program.errors["learner"]
    assert "collected data did not arrive within 30 s" in error
    assert "disconnected: node 1 (no heartbeat for" in error


DIVIDED = "(ZeroDivisionError: division by zero)"
ENDS = [
    ({"collector": "raises"}, "learner", f"node 1 {DIVIDED}", "mesh"),
    ({"collector": "raises"}, "learner", f"node 1 {DIVIDED}", "star"),
    ({"collector": "returns"}, "learner", "ended their task: node 1", "mesh"),
    ({"collector": "returns"}, "learner", "ended their task: node 1", "star"),
    ({"learner": "raises"}, "collector", f"node 0 {DIVIDED}", "mesh"),
    ({"learner": "raises"}, "evaluator", f"node 0 {DIVIDED}", "star"),
    ({"learner": "raises"}, "collector", f"node 0 {DIVIDED}", "star"),
    ({"learner": "raises"}, "evaluator", f"node 0 {DIVIDED}", "mesh"),
]


@pytest.mark.parametrize(("ends", "waits", "cause", "topology"), mostly_slow(ENDS, keep=6))
def test_a_node_whose_task_has_ended_ends_the_wait_with_the_cause_although_it_lives(
    ends: dict[str, str], waits: str, cause: str, topology: TopologyName
) -> None:
    program = Program(ends=ends, n_updates=10**6)
    with Cluster(program, roles=ROLES, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: waits in program.errors, 60.0)
    assert "did not arrive within 30 s" in program.errors[waits]
    assert cause in program.errors[waits]


def test_a_restarted_collector_does_not_wait_for_a_learner_whose_task_has_ended() -> None:
    program = Program(ends={"learner": "returns"})
    with Cluster(program, roles={"learner": 1, "collector": 1}) as cluster:
        cluster.start()
        cluster.join(1, timeout_s=60.0)
        cluster.start(1)
        assert cluster.wait_until(lambda: "collector" in program.errors, 100.0)
    assert "did not arrive within 30 s" in program.errors["collector"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nodes_that_wait_for_each_other_end_at_the_deadline(topology: TopologyName) -> None:
    """Like a program whose learner lacks a ModelExchanger, while the others wait for weights."""
    errors: dict[str, tuple[float, str]] = {}

    def program() -> None:
        policy = DQNPolicy({"seed": 0, "model": MODEL})
        with Task(OnlineRLContext()) as task:
            task.use(ContextExchanger(timeout_s=30.0))
            if not task.has_role(Role.LEARNER):
                task.use(ModelExchanger(policy, timeout_s=30.0))
            task.use(middleware(roles=[Role.LEARNER, Role.COLLECTOR])(lambda ctx: None))
            try:
                task.run()
            except WaitTimeout as error:
                errors["".join(task.roles)] = task.clock.now(), str(error)
                raise

    with Cluster(program, roles={"learner": 1, "collector": 1}, topology=topology) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: bool(errors), 100.0)
    for at_s, text in errors.values():
        assert 30.0 <= at_s <= 45.0
        assert "did not arrive within 30 s" in text


def test_an_evaluator_that_is_gone_is_named(caplog: pytest.LogCaptureFixture) -> None:
    program = Program(n_updates=200)
    with Cluster(program, roles=ROLES) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: program.n_learned >= 5, 60.0)
        cluster.kill(2)
        cluster.join(0, 1, timeout_s=100.0)
    (message,) = [text for text in caplog.messages if "evaluat" in text]
    assert "node 2 has left" in message
    assert "no process evaluates" in message
