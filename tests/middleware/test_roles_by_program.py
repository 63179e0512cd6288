"""A program that gives the processes of its run their roles, as programs of DI-engine do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from dmiddleware.errors import ChainError
from dmiddleware.pipeline import Task, current_node, middleware
from dmiddleware.testing import Cluster
from dmiddleware.testing.simulation import SimulationError
from middleware import Barrier, OnlineRLContext, Role, RunFolder

REVERSED = {0: Role.LEARNER, 1: Role.EVALUATOR, 2: Role.COLLECTOR}
ROLES = (Role.LEARNER, Role.COLLECTOR, Role.EVALUATOR)


class Program:
    """Each node gives itself a role, and notes what it and the others do.

    Args:
        roles: the role of each node.
        n_steps: how many steps each node runs.
    """

    def __init__(self, roles: Mapping[int, Role], n_steps: int = 2) -> None:
        self.roles, self.n_steps = roles, n_steps
        self.done: Counter[int] = Counter()
        self.ran: set[tuple[int, Role]] = set()
        self.has: dict[int, list[Role]] = {}
        self.had: dict[int, list[Role]] = {}
        self.peers: dict[int, dict[Role, list[int]]] = {}

    def __call__(self) -> None:
        node = current_node()
        assert node is not None
        number = node.node_id
        self.had[number] = [role for role in ROLES if node.has_role(role)]
        with Task(OnlineRLContext()) as task:
            if number in self.roles:
                task.add_role(self.roles[number])
            self.has[number] = [role for role in ROLES if node.has_role(role)]
            task.use(Barrier())
            for role in ROLES:
                task.use(self._part(number, role))
            task.run(max_step=self.n_steps)

    def _part(self, node_id: int, role: Role) -> Any:
        @middleware(roles=(role,))
        def work(ctx: OnlineRLContext) -> None:
            self.ran.add((node_id, role))
            self.done[node_id] += 1
            self.peers[node_id] = {asked: ctx.task.participants(asked) for asked in ROLES}

        return work


def refused(program: Program, n: int = 3) -> str:
    with Cluster(program, roles={"none": n}) as cluster:
        with pytest.raises(SimulationError) as caught:
            cluster.run()
        assert isinstance(caught.value.__cause__, ChainError)
        assert (0, Role.LEARNER) not in program.ran
        return str(caught.value.__cause__)


def test_each_node_has_exactly_the_role_that_the_program_has_given_to_it() -> None:
    program = Program(REVERSED)
    with Cluster(program, roles={"none": 3}) as cluster:
        cluster.run()
    assert program.ran == set(REVERSED.items())
    assert program.had == {0: [], 1: [], 2: []}
    assert program.has == {node_id: [role] for node_id, role in REVERSED.items()}


def test_the_nodes_know_the_roles_of_each_other() -> None:
    program = Program(REVERSED)
    with Cluster(program, roles={"none": 3}) as cluster:
        cluster.run()
    for node_id, peers in program.peers.items():
        expected = {role: [n for n, its in REVERSED.items() if its == role] for role in ROLES}
        assert peers == {role: [n for n in expected[role] if n != node_id] for role in ROLES}


@pytest.mark.parametrize("killed", [0, 2])
def test_a_restarted_node_gets_its_role_again(killed: int) -> None:
    program = Program(REVERSED, n_steps=200)
    with Cluster(program, roles={"none": 3}) as cluster:
        cluster.start()
        assert cluster.wait_until(lambda: program.done[killed] == 5, 60.0)
        cluster.kill(killed)
        cluster.start(killed)
        cluster.join(timeout_s=600.0)
    assert program.ran == set(REVERSED.items())
    assert program.done[killed] == 5 + 200
    assert program.peers[1][REVERSED[killed]] == [killed]


def test_a_node_without_a_role_is_refused_because_it_would_run_everything() -> None:
    text = refused(Program({0: Role.LEARNER, 1: Role.EVALUATOR}))
    assert "given node 2 none of the roles" in text and "task.add_role" in text


def test_two_learners_that_do_not_learn_as_one_are_refused() -> None:
    text = refused(Program({**REVERSED, 3: Role.LEARNER}), 4)
    assert "the role 'learner' to nodes 0, 3" in text


def test_a_part_whose_role_the_program_has_given_to_nobody_is_refused() -> None:
    text = refused(Program({**REVERSED, 1: Role.COLLECTOR}))
    assert "no process of the run has it" in text and "task.add_role('evaluator')" in text
    text = refused(Program({**REVERSED, 0: Role.COLLECTOR}))
    assert "for the role 'learner'" in text and "task.add_role('learner')" in text


def test_a_single_process_runs_the_whole_chain() -> None:
    program = Program({})
    with Cluster(program, roles={"none": 1}) as cluster:
        cluster.run()
    assert program.ran == {(0, role) for role in ROLES}


def test_a_chain_without_roles_runs_as_a_whole_in_each_process() -> None:
    steps = []

    def program() -> None:
        with Task(OnlineRLContext()) as task:
            task.use(lambda ctx: steps.append(task.router.node_id)).run(max_step=1)

    with Cluster(program, roles={"none": 2}) as cluster:
        cluster.run()
    assert sorted(steps) == [0, 1]


def test_only_the_learner_leads_a_run_folder_that_was_made_before_the_roles(
    tmp_path: Any,
) -> None:
    leads: dict[int, tuple[bool, bool]] = {}

    def program() -> None:
        node = current_node()
        assert node is not None
        folder = RunFolder.create("run", root=tmp_path)
        before = folder.is_lead
        with Task(OnlineRLContext()) as task:
            task.add_role(REVERSED[node.node_id])
            leads[node.node_id] = before, folder.is_lead

    with Cluster(program, roles={"none": 3}) as cluster:
        cluster.run()
    assert leads == {0: (False, True), 1: (False, False), 2: (False, False)}
