"""Membership: which nodes are connected, which have left and why, and which returned."""

from __future__ import annotations

import pytest

from dmiddleware.router.protocol.handshake import Identity, PeerLimits, Session
from dmiddleware.router.protocol.membership import Membership, MembershipChange


def node(name: str, start: int = 1) -> Identity:
    return Identity("run", name, start.to_bytes(16, "big"))


def session(name: str, number: int, start: int = 1, incarnation: int | None = None) -> Session:
    """Return the session of a process that is the ``start``-th under its name."""
    return Session(
        number=number,
        identity=node(name, start),
        incarnation=incarnation or start,
        own_incarnation=1,
        key=None,
        limits=PeerLimits(1 << 20, 1 << 20, 1 << 20, 8),
    )


@pytest.fixture
def members() -> Membership:
    return Membership(node("learner"), heartbeat_s=1.0, missed=3)


def summary(changes: list[MembershipChange]) -> list[tuple[str, str]]:
    return [(change.kind, change.member.node_id) for change in changes]


def test_a_new_node_joins_once(members: Membership) -> None:
    assert summary(members.on_session(session("a", 1), 0.0)) == [("joined", "a")]
    assert summary(members.on_session(session("a", 2), 0.1)) == []
    assert [peer.node_id for peer in members] == ["a"]


def test_a_node_that_sends_heartbeats_stays_connected(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    for second in range(1, 20):
        members.on_heard("a", 1, float(second))
        assert members.tick(second + 0.9) == []


def test_a_silent_node_leaves_after_three_missed_heartbeats(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    assert members.tick(3.0) == []
    (change,) = members.tick(3.1)
    assert (change.kind, change.reason) == ("left", "no heartbeat for 3.1 s")
    assert members.tick(9.0) == [] and len(members) == 0


def test_a_node_whose_connection_carries_bytes_stays_connected_for_a_while(
    members: Membership,
) -> None:
    members.on_session(session("a", 1), 0.0)
    for second in range(1, 11):
        members.on_progress("a", float(second))
        assert members.tick(second + 0.9) == []
    members.on_progress("a", 10.5)
    assert summary(members.tick(13.1)) == [("left", "a")], "such bytes are not authenticated"
    members.on_progress("a", 14.0)
    assert len(members) == 0


def test_a_frame_ends_the_time_in_which_bytes_alone_count(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    for second in range(1, 30):
        members.on_progress("a", float(second))
        if second % 8 == 0:
            members.on_heard("a", 1, float(second))
        assert members.tick(second + 0.9) == []


def test_only_nodes_that_have_been_silent_for_a_while_are_quiet(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    members.on_session(session("b", 2), 1.0)
    assert members.quiet(1.4) == []
    assert members.quiet(1.6) == ["a"]
    assert members.quiet(2.9) == ["a", "b"]


def test_a_node_that_connects_again_rejoins_as_the_same_process(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    members.tick(10.0)
    (change,) = members.on_session(session("a", 2), 11.0)
    assert (change.kind, change.new_incarnation) == ("rejoined", False)


def test_a_newer_process_replaces_an_older_one(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    left, back = members.on_session(session("a", 2, 2), 0.5)
    assert (left.kind, left.reason) == ("left", "replaced by a new process")
    assert (back.kind, back.new_incarnation, back.member.incarnation) == (
        "rejoined",
        True,
        2,
    )


def test_leaving_is_reported_once_with_its_reason(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    (change,) = members.on_left("a", "finished")
    assert change.reason == "finished"
    assert members.on_left("a", "finished") == []
    assert members.on_left("unknown", "finished") == []


def test_the_listeners_own_node_id_is_refused(members: Membership) -> None:
    refusal = members.admit(node("learner"), 1)
    assert refusal is not None and refusal.code == "node_id_taken"


def test_a_new_process_takes_the_next_incarnation_once_the_old_one_has_left(
    members: Membership,
) -> None:
    assert members.least_incarnation(node("a")) == 1
    members.on_session(session("a", 1, start=5), 0.0)
    assert members.least_incarnation(node("a", 5)) == 5
    assert members.least_incarnation(node("a", 6)) == 6
    refusal = members.admit(node("a", 6), 1)
    assert refusal is not None and refusal.code == "duplicate"
    members.on_left("a", "its connection broke")
    assert members.admit(node("a", 6), 1) is None


def test_a_replaced_process_is_refused_for_good(members: Membership) -> None:
    members.on_session(session("a", 1, start=1), 0.0)
    members.on_left("a", "its connection broke")
    members.on_session(session("a", 2, start=2), 0.0)
    for _ in range(2):
        refusal = members.admit(node("a", 1), 99)
        assert refusal is not None and refusal.code == "replaced"
        members.on_left("a", "its connection broke")


def test_a_process_that_peers_elsewhere_know_as_newer_replaces_a_connected_one(
    members: Membership,
) -> None:
    members.on_session(session("a", 1, start=1), 0.0)
    assert members.admit(node("a", 2), 2) is None


def test_a_larger_incarnation_in_a_later_frame_is_remembered(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    members.on_heard("a", 7, 0.1)
    members.on_heard("a", 6, 0.2)
    assert members.least_incarnation(node("a", 2)) == 8


def test_a_node_that_said_goodbye_may_come_back(members: Membership) -> None:
    members.on_session(session("a", 1), 0.0)
    members.on_left("a", "said goodbye")
    assert summary(members.on_session(session("a", 2), 5.0)) == [("rejoined", "a")]


def test_the_nodes_that_left_first_are_forgotten_when_there_are_too_many() -> None:
    members = Membership(node("learner"), max_known=3)
    for number in range(3):
        members.on_session(session(f"{number}", number + 1, start=7), 0.0)
    members.on_left("1", "its connection broke")
    members.on_left("0", "its connection broke")
    members.on_session(session("3", 4), 0.0)
    assert members.least_incarnation(node("1")) == 1, "node 1 left first"
    assert members.least_incarnation(node("0")) == 8
    assert members.least_incarnation(node("2")) == 8
