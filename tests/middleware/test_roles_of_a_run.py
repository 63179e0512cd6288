"""Parts of the chain whose role no process of the run has."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import ChainError
from dmiddleware.pipeline import Task, current_node, middleware
from dmiddleware.testing import Cluster
from dmiddleware.testing.simulation import SimulationError
from middleware import Barrier, OnlineRLContext, Role
from tests.middleware.nodes import run_nodes


class Program:
    """Every node runs the whole chain, and notes in which parts it was active.

    Args:
        parts: the roles of each part.
        added: roles that the program adds to the task of a node.
        may_grow: whether processes may join the run.
    """

    def __init__(
        self, *parts: tuple[str, ...], added: dict[int, str] | None = None, may_grow: bool = False
    ) -> None:
        self.parts, self.added, self.may_grow = parts, added or {}, may_grow
        self.ran: set[tuple[int, tuple[str, ...]]] = set()
        self.steps = 0

    def __call__(self) -> None:
        node = current_node()
        assert node is not None
        node.may_grow = self.may_grow
        with Task(OnlineRLContext()) as task:
            if (role := self.added.get(node.node_id)) is not None:
                task.add_role(role)
            task.use(Barrier())
            for roles in self.parts:
                task.use(self._part(node.node_id, roles))
            task.run(max_step=3)

    def _part(self, node_id: int, roles: tuple[str, ...]) -> Any:
        @middleware(roles=roles)
        def work(ctx: OnlineRLContext) -> None:
            self.ran.add((node_id, roles))
            self.steps += 1

        return work


LEARN, COLLECT, EVALUATE, ANNOTATE = ((role,) for role in (*list(Role)[:3], "annotator"))


@pytest.mark.parametrize("topology", ["mesh", "star"])
@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        ({"learner": 1, "collector": 1}, "evaluator"),
        ({"learner": 1, "collector": 2}, "evaluator"),
        ({"learner": 1, "evaluator": 1}, "collector"),
        ({"learner": 1, "collector": 1, "evaluator": 1}, "annotator"),
    ],
)
def test_a_missing_role_is_refused_before_the_first_step(
    topology: Any, roles: dict[str, int], missing: str
) -> None:
    program = Program(LEARN, *((role,) for role in (*roles, missing) if role != "learner"))
    with Cluster(program, roles=roles, topology=topology) as cluster:
        with pytest.raises(SimulationError, match=f"is for the role '{missing}', but no") as caught:
            cluster.run()
        assert isinstance(caught.value.__cause__, ChainError)
        assert f"{missing}=1" in str(caught.value.__cause__)
    # The others wait for the learner, which has not taken a step.
    assert (0, LEARN) not in program.ran


def test_a_role_that_no_part_of_the_chain_has_is_refused() -> None:
    program = Program(LEARN, COLLECT)
    roles = {"learner": 1, "collector": 1, "annotator": 1}
    with (
        Cluster(program, roles=roles) as cluster,
        pytest.raises(SimulationError, match="the task has the role 'annotator'"),
    ):
        cluster.run()
    assert program.steps == 0


@pytest.mark.parametrize("node_id", [0, 1])
def test_a_role_that_the_program_gives_to_a_task_is_not_missing(node_id: int) -> None:
    program = Program(LEARN, COLLECT, ANNOTATE, added={node_id: "annotator"})
    with Cluster(program, roles={"learner": 1, "collector": 2}) as cluster:
        cluster.run()
    assert (node_id, ANNOTATE) in program.ran


def test_a_part_of_several_roles_needs_one_of_them() -> None:
    program = Program(LEARN, ("annotator", "collector"))
    with Cluster(program, roles={"learner": 1, "collector": 1}) as cluster:
        cluster.run()
    assert program.steps == 6


def test_a_run_that_others_may_join_warns_of_a_missing_role(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = Program(LEARN, COLLECT, EVALUATE, may_grow=True)
    with Cluster(program, roles={"learner": 1, "collector": 1}) as cluster:
        cluster.run()
    (message,) = [text for text in caplog.messages if "'evaluator'" in text]
    assert "does nothing until one joins" in message
    assert "--attach-to ADDRESS --roles evaluator=1" in message


def test_without_a_launcher_a_missing_role_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    met = threading.Barrier(2)

    @middleware(roles=LEARN + COLLECT)
    def work(ctx: OnlineRLContext) -> None:
        met.wait(20.0)

    @middleware(roles=EVALUATE)
    def evaluate(ctx: OnlineRLContext) -> None: ...

    def run(task: Task[Any]) -> None:
        task.use(work).use(evaluate).run(max_step=1)

    run_nodes(tmp_path, (Role.LEARNER, run), (Role.COLLECTOR, run))
    (message,) = [text for text in caplog.messages if "'evaluator'" in text]
    assert "no process of the run has it (the run's roles: collector, learner)" in message
