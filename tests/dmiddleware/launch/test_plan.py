"""The launch plan: options become one plan per node, or are refused with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import LaunchError
from dmiddleware.launch.options import parse_roles
from dmiddleware.launch.plan import (
    LaunchRequest,
    RankPlan,
    assign_roles,
    needs_key,
    plan_nodes,
)

MAIN = "examples.cartpole_dqn.main"
RUN_DIR = Path("/tmp/run")
COLLECTORS = (("collector",), ("collector",))


def request(*, n_workers: int | None = None, **options: Any) -> LaunchRequest:
    roles = assign_roles((), n_workers)
    return LaunchRequest(**{"main": MAIN, "run_dir": RUN_DIR, "roles": roles, **options})


def test_named_roles_become_nodes_in_order() -> None:
    roles = assign_roles(parse_roles("learner=1,collector=2,evaluator"), None)
    plans = plan_nodes(request(roles=roles))
    assert [plan.roles for plan in plans] == [
        ("learner",),
        ("collector",),
        ("collector",),
        ("evaluator",),
    ]
    assert [plan.node_id for plan in plans] == [0, 1, 2, 3]
    assert [plan.n_peers for plan in plans] == [3, 1, 1, 1]
    assert plans[0].run_roles == ("learner", "collector", "evaluator")


@pytest.mark.parametrize(
    ("count", "roles"),
    [
        (1, ((),)),
        (2, (("learner",), ("collector", "evaluator"))),
        (4, (("learner",), ("collector",), ("collector",), ("evaluator",))),
    ],
)
def test_without_named_roles_the_first_learns_and_the_last_evaluates(
    count: int, roles: tuple[tuple[str, ...], ...]
) -> None:
    assert assign_roles((), count) == roles


def test_without_named_roles_all_hosts_together_have_one_learner() -> None:
    hosts = [assign_roles((), 2, host=host, n_hosts=3) for host in range(3)]
    assert hosts == [(("learner",), ("collector",)), COLLECTORS, (("collector",), ("evaluator",))]


def test_in_a_mesh_each_node_waits_for_all_others() -> None:
    plans = plan_nodes(request(n_workers=4, topology="mesh"))
    assert {plan.n_peers for plan in plans} == {3}


def test_the_learner_is_the_hub_of_the_star_whatever_the_order_of_the_roles() -> None:
    roles = assign_roles(parse_roles("collector=2,evaluator,learner"), None)
    plans = plan_nodes(request(roles=roles, protocol="tcp", ports=(5000,)))
    assert [(plan.node_id, plan.listen, plan.n_peers) for plan in plans] == [
        (0, "", 1),
        (1, "", 1),
        (2, "", 1),
        (3, "tcp://127.0.0.1:5000", 3),
    ]
    assert {plan.dial for plan in plans[:3]} == {("tcp://127.0.0.1:5000",)}


def test_the_learner_of_a_mesh_has_the_first_port() -> None:
    roles = assign_roles(parse_roles("collector=2,learner"), None)
    plans = plan_nodes(request(roles=roles, protocol="tcp", ports=(5000,), topology="mesh"))
    assert [plan.listen[-4:] for plan in plans] == ["5001", "5002", "5000"]


def test_nodes_that_join_a_star_only_dial_its_hub() -> None:
    hub = "tcp://127.0.0.1:5000"
    plans = plan_nodes(request(roles=COLLECTORS, protocol="tcp", attach_to=(hub,), joins=True))
    assert [(plan.listen, plan.dial, plan.n_peers) for plan in plans] == [("", (hub,), 1)] * 2


def test_a_bind_address_is_dialled_on_this_host_and_the_other_one_elsewhere() -> None:
    roles = assign_roles(parse_roles("learner,collector"), None)
    learner, collector = plan_nodes(
        request(roles=roles, protocol="tcp", ports=(5000,), address="learner.lan", bind="0.0.0.0")
    )
    assert (learner.listen, learner.advertise) == ("tcp://0.0.0.0:5000", "tcp://learner.lan:5000")
    assert collector.dial == ("tcp://127.0.0.1:5000",)


def test_a_forwarded_local_port_needs_a_key() -> None:
    plans = plan_nodes(request(protocol="tcp", ports=(5000,), address="10.0.0.1", bind="127.0.0.1"))
    assert needs_key(plans)


def test_collectors_that_join_wait_for_the_nodes_that_they_dial() -> None:
    plans = plan_nodes(
        request(
            roles=COLLECTORS,
            protocol="tcp",
            topology="alone",
            attach_to=("tcp://127.0.0.1:5000",),
            joins=True,
            first_node_id=10,
        )
    )
    assert [(p.node_id, p.dial, p.n_peers, p.run_roles) for p in plans] == [
        (10, ("tcp://127.0.0.1:5000",), 1, None),
        (11, ("tcp://127.0.0.1:5000",), 1, None),
    ]


def test_without_named_ports_free_ones_are_used() -> None:
    tcp = request(n_workers=2, protocol="tcp", topology="mesh")
    plans = plan_nodes(tcp, free_ports=[5001, 5002])
    assert [plan.listen[-4:] for plan in plans] == ["5001", "5002"]


def test_an_address_that_other_hosts_can_reach_needs_a_key() -> None:
    local = plan_nodes(request(n_workers=2))
    remote = plan_nodes(request(n_workers=2, protocol="tcp", address="10.0.0.1", ports=(5,)))
    assert not needs_key(local)
    assert needs_key(remote)


@pytest.mark.parametrize(
    ("roles", "n_workers", "message"),
    [
        ("", 0, "at least 1"),
        ("learner=1", 4, "asks for 1 processes.*for 4"),
        ("learner=0", None, "starts no process"),
        ("colector=1", None, "did you mean collector"),
        ("cordinatr=1", None, "did you mean coordinator"),
    ],
)
def test_roles_that_cannot_be_assigned_are_refused(
    roles: str, n_workers: int | None, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        assign_roles(parse_roles(roles), n_workers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"main": "train"}, "package.module.function"),
        ({"main": "a.b-c"}, "package.module.function"),
        ({"n_workers": 2, "node_ids": (1, 2, 3)}, "3 ids for 2"),
        ({"n_workers": 2, "node_ids": (1, 1)}, "twice"),
        ({"ports": (5000,)}, "--protocol tcp"),
        ({"address": "10.0.0.1"}, "--protocol tcp"),
        ({"bind": "0.0.0.0"}, "--protocol tcp"),
        ({"topology": "ring"}, "ring"),
        ({"protocol": "tcp", "ports": (5, 6, 7), "n_workers": 2}, "3 ports"),
        ({"roles": COLLECTORS, "attach_to": ("nowhere",), "joins": True}, "nowhere"),
    ],
)
def test_contradictory_options_are_refused_with_a_remedy(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        plan_nodes(request(**options))


LEARNER = (("learner",),)


def test_learners_on_several_hosts_are_refused() -> None:
    asked = request(roles=LEARNER, elsewhere=(("collector",), *LEARNER))
    with pytest.raises(LaunchError, match=r"2 learners.*--platform-spec"):
        plan_nodes(asked)


def test_each_learner_needs_a_collector() -> None:
    with pytest.raises(LaunchError, match="collector=2 or more"):
        plan_nodes(request(roles=(*LEARNER * 2, ("collector",))))


@pytest.mark.parametrize("topology", ["star", "mesh"])
def test_learners_meet_at_one_port_and_are_connected_to_all_nodes(topology: str) -> None:
    roles = assign_roles(parse_roles("collector=2,learner=2,evaluator"), None)
    plans = plan_nodes(
        request(roles=roles, topology=topology, rendezvous_port=7000, protocol="tcp", ports=(5000,))
    )
    assert [plan.ranks for plan in plans] == [
        None,
        None,
        RankPlan(0, 2, 7000),
        RankPlan(1, 2, 7000),
        None,
    ]
    assert [plan.role_index for plan in plans] == [0, 1, 0, 1, 0]
    assert [plan.listen for plan in plans[2:4]] == ["tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001"]
    assert plans[3].dial == ("tcp://127.0.0.1:5000",)
    for number in (0, 1, 4):
        assert plans[number].dial[:2] == ("tcp://127.0.0.1:5000", "tcp://127.0.0.1:5001")
    if topology == "star":
        assert [plan.n_peers for plan in plans] == [2, 2, 4, 4, 2]


def test_the_variables_of_a_learner_are_those_of_torch_distributed() -> None:
    assert RankPlan(1, 2, 7000).environment() == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "7000",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }


def test_collectors_of_several_hosts_are_counted_together() -> None:
    plans = plan_nodes(
        request(
            roles=COLLECTORS,
            elsewhere=(*LEARNER * 2, *COLLECTORS, *COLLECTORS),
            n_before=4,
            has_hub=False,
            protocol="tcp",
            attach_to=("tcp://10.0.0.1:25515", "tcp://10.0.0.1:25516"),
        )
    )
    assert [plan.role_index for plan in plans] == [2, 3]
    assert [plan.n_peers for plan in plans] == [2, 2]


@pytest.mark.parametrize("roles", [LEARNER, ((),)])
def test_a_second_learner_cannot_join_a_run(roles: tuple[tuple[str, ...], ...]) -> None:
    address = "tcp://127.0.0.1:5000"
    with pytest.raises(LaunchError, match="--roles collector=2"):
        plan_nodes(request(roles=roles, attach_to=(address,), joins=True))


def test_a_peer_that_is_named_twice_is_dialled_and_awaited_once() -> None:
    address = "tcp://10.0.0.1:25515"
    (plan,) = plan_nodes(
        request(roles=COLLECTORS[:1], topology="alone", attach_to=(address, address), joins=True)
    )
    assert (plan.dial, plan.n_peers) == ((address,), 1)


@pytest.mark.parametrize("text", ["learner=x", "=1", "learner 1", "learner=1,learner=2"])
def test_malformed_roles_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--roles"):
        parse_roles(text)


def test_the_roles_of_the_classic_workers_and_custom_roles_are_assigned() -> None:
    roles = "coordinator=1,aggregator=1,elector=1,reflector=1"
    assert assign_roles(parse_roles(roles), None) == (
        ("coordinator",), ("aggregator",), ("elector",), ("reflector",),
    )  # fmt: skip


def test_the_first_learner_of_a_part_leads_the_run() -> None:
    roles = (("collector", 1), ("learner:blue", 1), ("learner:red", 1))
    assigned = assign_roles(roles, None)
    assert assigned == (("collector",), ("learner", "learner:blue"), ("learner:red",))
    nodes = plan_nodes(LaunchRequest(main="a.b", roles=assigned, run_dir=Path("/run")))
    assert [node.learns for node in nodes] == [False, True, True]
    assert [node.leads_run for node in nodes] == [False, True, False]
    # Everybody connects to both, and neither is a rank of the other.
    assert len(nodes[0].dial) == 2
    assert nodes[2].ranks is None
    assert nodes[1].ranks is not None
    assert nodes[1].ranks.size == 1
    assert nodes[0].run_roles == ("collector", "learner", "learner:blue", "learner:red")


def test_ranks_learn_what_has_no_process_of_its_own() -> None:
    assigned = assign_roles((("learner:blue", 1), ("learner", 2), ("collector", 2)), None)
    nodes = plan_nodes(LaunchRequest(main="a.b", roles=assigned, run_dir=Path("/run")))
    ranks = [None if node.ranks is None else node.ranks.rank for node in nodes]
    assert ranks == [None, 0, 1, None, None]
    assert [node.leads_run for node in nodes[:3]] == [False, True, True]


def test_learners_of_parts_on_several_hosts_need_a_learner_that_leads() -> None:
    roles = assign_roles((("learner:red", 1), ("learner:blue", 1)), None, n_hosts=2)
    collectors = (("collector",), ("collector",))
    with pytest.raises(LaunchError, match="add learner=1"):
        plan_nodes(request(roles=roles, elsewhere=collectors))
    roles = assign_roles((("learner", 1), ("learner:blue", 1)), None, n_hosts=2)
    assert len(plan_nodes(request(roles=roles, elsewhere=collectors))) == 2
    with pytest.raises(LaunchError, match="learners must share a host"):
        plan_nodes(request(roles=roles, elsewhere=(("learner:red",),)))
