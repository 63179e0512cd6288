"""The launch request: options that work together become a plan per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import LaunchError
from dmiddleware.launch.plan import LaunchRequest, needs_key, parse_roles, plan_nodes

MAIN = "examples.cartpole_dqn.main"
RUN_DIR = Path("/tmp/run")


def request(**options: Any) -> LaunchRequest:
    return LaunchRequest(**{"main": MAIN, "run_dir": RUN_DIR, **options})


def test_named_roles_become_processes_in_order() -> None:
    plans = plan_nodes(request(roles=parse_roles("learner=1,collector=2,evaluator")))
    assert [plan.roles for plan in plans] == [
        ("learner",),
        ("collector",),
        ("collector",),
        ("evaluator",),
    ]
    assert [plan.node_id for plan in plans] == [0, 1, 2, 3]
    assert {plan.n_peers for plan in plans} == {3}


@pytest.mark.parametrize(
    ("count", "roles"),
    [
        (1, [()]),
        (2, [("learner",), ("collector", "evaluator")]),
        (4, [("learner",), ("collector",), ("collector",), ("evaluator",)]),
    ],
)
def test_workers_without_named_roles_get_them_by_their_place(
    count: int, roles: list[tuple[str, ...]]
) -> None:
    assert [plan.roles for plan in plan_nodes(request(parallel_workers=count))] == roles


def test_in_a_star_the_others_wait_for_the_hub_only() -> None:
    plans = plan_nodes(request(parallel_workers=4, topology="star"))
    assert [plan.n_peers for plan in plans] == [3, 1, 1, 1]


def test_collectors_that_attach_wait_for_whom_they_dial() -> None:
    plans = plan_nodes(
        request(
            roles=(("collector", 2),),
            protocol="tcp",
            topology="alone",
            attach_to=("tcp://127.0.0.1:5000",),
            first_node_id=10,
        )
    )
    assert [(p.node_id, p.dial, p.n_peers) for p in plans] == [
        (10, ("tcp://127.0.0.1:5000",), 1),
        (11, ("tcp://127.0.0.1:5000",), 1),
    ]


def test_free_ports_are_used_where_none_is_named() -> None:
    plans = plan_nodes(request(parallel_workers=2, protocol="tcp"), free_ports=[5001, 5002])
    assert [plan.listen[-4:] for plan in plans] == ["5001", "5002"]


def test_an_address_that_others_reach_needs_a_key() -> None:
    local = plan_nodes(request(parallel_workers=2))
    remote = plan_nodes(request(parallel_workers=2, protocol="tcp", address="10.0.0.1", ports=(5,)))
    assert not needs_key(local)
    assert needs_key(remote)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"main": "train"}, "package.module.function"),
        ({"main": "a.b-c"}, "package.module.function"),
        ({"parallel_workers": 0}, "at least 1"),
        ({"roles": (("learner", 1),), "parallel_workers": 4}, "name 1 processes.*4"),
        ({"roles": (("learner", 0),)}, "starts nothing"),
        ({"roles": (("colector", 1),)}, "did you mean collector"),
        ({"parallel_workers": 2, "node_ids": (1, 2, 3)}, "3 nodes for 2"),
        ({"parallel_workers": 2, "node_ids": (1, 1)}, "twice"),
        ({"ports": (5000,)}, "nothing with --protocol ipc"),
        ({"address": "10.0.0.1"}, "does not leave this host"),
        ({"topology": "ring"}, "ring"),
        ({"protocol": "tcp", "ports": (5, 6, 7), "parallel_workers": 2}, "3 ports"),
        ({"attach_to": ("nowhere",)}, "is no address"),
    ],
)
def test_options_that_cannot_work_together_are_refused_with_the_reason(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        plan_nodes(request(**options))


def test_a_node_that_is_named_twice_is_attached_to_and_waited_for_once() -> None:
    address = "tcp://10.0.0.1:25515"
    (plan,) = plan_nodes(request(topology="alone", attach_to=(address, address)))
    assert (plan.dial, plan.n_peers) == ((address,), 1)


@pytest.mark.parametrize("text", ["learner=x", "=1", "learner 1", "learner=1,learner=2"])
def test_a_list_of_roles_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--roles"):
        parse_roles(text)
