"""``--roles none``: the launcher learns the roles that the program has given to the nodes."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from dmiddleware.errors import LaunchError
from dmiddleware.launch.display import PlainDisplay, make_table
from dmiddleware.launch.hosts.interface import Ended, HostEvent, Reported
from dmiddleware.launch.options import LaunchOptions, parse_roles
from dmiddleware.launch.other_nodes import OtherNodes
from dmiddleware.launch.plan import (
    LaunchRequest,
    NodeConfig,
    NodePlan,
    RunPlan,
    assign_roles,
    default_topology,
    plan_nodes,
    plan_run,
)
from dmiddleware.launch.resources import check_resource_roles
from dmiddleware.launch.status import NodeStatus
from dmiddleware.launch.supervisor import Supervisor, SupervisorOptions
from dmiddleware.launch.variables import node_variables
from tests.dmiddleware.launch.scripted_host import ScriptedHost, finished, running, supervised

MAIN = "ding.example.dqn.main"
NONE = ("none",)


def plans(count: int) -> list[NodePlan]:
    roles = assign_roles(parse_roles("none"), count)
    return plan_nodes(LaunchRequest(main=MAIN, roles=roles, protocol="tcp", ports=(5000,)))


@pytest.mark.parametrize(("text", "workers"), [("none", 3), ("none=3", None), ("none=3", 3)])
def test_processes_without_roles_are_counted_as_others(text: str, workers: int | None) -> None:
    assert assign_roles(parse_roles(text), workers) == (NONE,) * 3


@pytest.mark.parametrize("text", ["none,learner", "collector=2,none=1"])
def test_the_program_decides_on_all_roles_or_on_none(text: str) -> None:
    with pytest.raises(LaunchError, match="all processes"):
        assign_roles(parse_roles(text), None)
    with pytest.raises(LaunchError, match="asks for 3 processes"):
        assign_roles(parse_roles("none=3"), 4)


def test_nodes_know_that_the_program_decides() -> None:
    nodes = plans(2)
    assert [(node.roles, node.decides, node.run_roles) for node in nodes] == [((), True, None)] * 2
    assert [str(node) for node in nodes] == ["node 0", "node 1"]
    assert not any(node.learns for node in nodes)
    assert [node.decides for node in plan_run({"none": 1}).nodes] == [False]


def test_a_process_that_is_alone_has_all_roles() -> None:
    (node,) = plans(1)
    assert not node.decides and node.learns
    assert str(node) == "node 0 (all roles)"


def test_all_nodes_are_connected_because_any_may_become_the_learner() -> None:
    assert default_topology((NONE, NONE)) == "mesh"
    assert default_topology((NONE,)) == default_topology((("learner",), ("collector",))) == "star"
    assert default_topology((("coordinator",), ("learner",))) == "mesh"


def test_a_program_of_di_engine_decides_unless_roles_are_given() -> None:
    assert LaunchOptions(main=MAIN, ding=True).role_counts == (("none", 1),)
    assert LaunchOptions(main=MAIN).role_counts == ()
    given = parse_roles("learner=1,collector=2")
    assert LaunchOptions(main=MAIN, ding=True, roles=given).role_counts == given


def test_nodes_that_join_a_run_may_get_their_roles_from_the_program() -> None:
    address = "tcp://127.0.0.1:5000"
    (node,) = plan_nodes(
        LaunchRequest(main=MAIN, roles=(NONE,), protocol="tcp", attach_to=(address,), joins=True)
    )
    assert node.decides


def test_what_is_for_a_role_is_refused_where_the_roles_come_later() -> None:
    nodes = plans(2)
    with pytest.raises(LaunchError, match="1:A=1"):
        node_variables(["collector:A=1"], nodes)
    assert node_variables(["1:A=1", "B=2"], nodes) == [{"B": "2"}, {"A": "1", "B": "2"}]
    for assigned in ((NONE, NONE), ((), ())):
        with pytest.raises(LaunchError, match="when it starts"):
            check_resource_roles({"learner": {"gpu": 1.0}}, assigned)


def has(node_id: int, *roles: str, **more: object) -> Reported:
    """Return the report of a running node to which the program has given roles."""
    status = NodeStatus(phase="running", step=5, roles=roles, peers={100: ()}, **more)  # type: ignore[arg-type]
    return Reported(node_id, status)


REVERSED = [has(0, "learner"), has(1, "evaluator"), has(2, "collector")]


def supervise(
    *script: tuple[float, Sequence[HostEvent]], on_failure: str = "continue"
) -> tuple[int, str]:
    host = ScriptedHost([(at, event) for at, events in script for event in events])
    options = SupervisorOptions(on_failure=on_failure, kill_after_s=5.0)  # type: ignore[arg-type]
    code, notes = supervised(host, plans(3), options)
    return code, "\n".join(notes)


def fails(node_id: int, *roles: str) -> list[HostEvent]:
    status = NodeStatus(phase="failed", step=5, error="ValueError: bad", roles=roles or None)
    return [Reported(node_id, status), Ended(node_id, 1)]


def test_the_node_that_the_program_has_made_the_learner_ends_the_run() -> None:
    learner_is_2 = [has(0, "collector"), has(1, "evaluator"), has(2, "learner")]
    code, text = supervise((1.0, learner_is_2), (9.0, fails(2, "learner")))
    assert code == 1 and "no learner is left" in text
    assert text.splitlines()[-1].startswith("the run failed: node 2 (learner) failed")


def test_a_run_continues_without_a_node_that_is_not_the_learner() -> None:
    ends = [*finished(0), *finished(1)]
    code, text = supervise((1.0, REVERSED), (9.0, fails(2, "collector")), (20.0, ends))
    assert code == 0
    assert "node 2 (collector) failed: ValueError: bad; the run continues without it" in text


def test_a_run_whose_nodes_all_fail_before_they_have_a_role_fails() -> None:
    code, text = supervise((1.0, fails(0)), (1.0, fails(1)), (1.0, fails(2)))
    assert code == 1
    assert "the run failed: node 0 failed: ValueError: bad" in text


def test_a_run_is_over_for_a_restarted_node_once_the_learner_has_finished() -> None:
    done: list[HostEvent] = [
        Reported(0, NodeStatus(phase="finished", step=9, roles=("learner",))),
        Ended(0, 0),
    ]
    late: list[HostEvent] = [*done, *fails(2, "collector"), *finished(1)]
    code, text = supervise((1.0, REVERSED), (9.0, late), on_failure="restart")
    assert code == 0
    assert "node 2 (collector) is no longer needed: the run is over" in text


def test_a_node_keeps_its_role_in_messages_while_it_is_restarted() -> None:
    again: list[HostEvent] = [running(2, peers=()), *finished(0), *finished(1), *finished(2)]
    code, text = supervise(
        (1.0, REVERSED), (9.0, fails(2, "collector")), (12.0, again), on_failure="restart"
    )
    assert code == 0, text
    assert "node 2 (collector) failed: ValueError: bad; restarting it in 0.5 s" in text


def test_the_status_shows_the_roles_that_the_program_has_given() -> None:
    host = ScriptedHost([])
    out, at = io.StringIO(), 0.0
    display = PlainDisplay(out, now=lambda: at)
    supervisor = Supervisor(
        [NodeConfig(run=RunPlan(nodes=(node,)), main=MAIN, package="") for node in plans(3)],
        host=host,
        options=SupervisorOptions(),
        display=display,
    )
    children = supervisor.children
    for child, report in zip(children, REVERSED[:2], strict=False):
        child.is_started = True
        child.take_status(report.status, 0.0)
    at = 10.0
    display.update(children)
    assert [line.partition(":")[0] for line in out.getvalue().splitlines()] == [
        "[ditask] node 0 (learner)",
        "[ditask] node 1 (evaluator)",
    ]
    console = Console(file=io.StringIO(), width=200)
    console.print(make_table(children, lambda child: {}))
    rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [row.split("│")[2].strip() for row in rows[3:6]] == ["learner", "evaluator", ""]


def test_nodes_of_others_are_named_once_although_they_get_their_roles_later() -> None:
    nodes = OtherNodes(own={0}, attached=False, decides=True)

    def changes(now: float, *roles: str) -> list[str]:
        return list(nodes.changes([NodeStatus(phase="running", peers={8: roles})], now))

    assert changes(0.0) == ["joined the run: node 8"]
    assert changes(1.0, "collector") == changes(9.0, "collector") == []
    gone = nodes.changes([NodeStatus(phase="running")], 20.0)
    assert list(gone) == ["left the run: node 8 (collector)"]
