"""Messages about the nodes that other launchers have started."""

from __future__ import annotations

from dmiddleware.launch.other_nodes import GONE_S, OtherNodes
from dmiddleware.launch.status import NodeStatus

LEARNER, COLLECTOR = ("learner",), ("collector",)


def status(*collectors: int, phase: str = "running") -> NodeStatus:
    return NodeStatus(phase=phase, peers={1: COLLECTOR, **dict.fromkeys(collectors, COLLECTOR)})


def test_nodes_that_join_and_leave_are_named_once() -> None:
    nodes = OtherNodes(own={0, 1}, attached=False)
    assert list(nodes.changes([status()], 0.0)) == []
    joined = ["joined the run: node 8 (collector), node 9 (collector)"]
    assert list(nodes.changes([status(8, 9), status(8)], 1.0)) == joined
    assert list(nodes.changes([status(8, 9)], 2.0)) == []
    assert list(nodes.changes([status(8)], 2.0 + GONE_S)) == []
    assert list(nodes.changes([status(8)], 2.1 + GONE_S)) == ["left the run: node 9 (collector)"]
    assert list(nodes.changes([status(8, 9)], 9.0)) == ["joined the run: node 9 (collector)"]


def test_launchers_that_joined_name_the_nodes_that_they_connect_to() -> None:
    nodes = OtherNodes(own={8}, attached=True)
    learner = NodeStatus(phase="running", peers={0: LEARNER})
    assert list(nodes.changes([learner], 0.0)) == ["connected to node 0 (learner)"]
    gone = ["no longer connected to node 0 (learner)"]
    assert list(nodes.changes([NodeStatus(phase="running")], 1.0 + GONE_S)) == gone


def test_nodes_do_not_leave_because_the_launchers_own_node_is_restarted() -> None:
    nodes = OtherNodes(own={0, 1}, attached=False)
    list(nodes.changes([status(8)], 0.0))
    assert list(nodes.changes([NodeStatus(phase="starting")], 60.0)) == []
    assert list(nodes.changes([status(8)], 61.0)) == []


def test_a_message_names_only_a_few_of_many_nodes() -> None:
    nodes = OtherNodes(own={0, 1}, attached=False)
    (text,) = nodes.changes([status(*range(100, 140))], 0.0)
    assert text.endswith("node 103 (collector) and 36 more")
