"""Topologies: where each node listens, and which nodes it dials."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import TopologyError
from dmiddleware.router.protocol.topology import check_address, is_loopback, plan


def test_each_pair_of_a_mesh_is_connected_by_one_dial() -> None:
    nodes = plan("mesh", node_ids=["a", "b", "c", "d"], run_dir=Path("/tmp/run"))
    dials = [(node.listen, target) for node in nodes for target in node.dial]
    pairs = {frozenset(dial) for dial in dials}
    assert len(dials) == len(pairs) == 6
    assert pairs == {
        frozenset(pair) for pair in itertools.combinations([n.listen for n in nodes], 2)
    }


def test_the_nodes_of_a_star_dial_the_first_one() -> None:
    hub, *others = plan("star", node_ids=["a", "b", "c"], protocol="tcp", ports=[5000])
    assert (hub.listen, hub.dial) == ("tcp://127.0.0.1:5000", ())
    assert {(node.listen, node.dial) for node in others} == {("", ("tcp://127.0.0.1:5000",))}


def test_the_hub_of_a_star_can_be_elsewhere() -> None:
    hub = "tcp://10.0.0.1:5000"
    nodes = plan("star", node_ids=["b", "c"], protocol="tcp", attach_to=[hub])
    assert [(node.listen, node.dial) for node in nodes] == [("", (hub,))] * 2


@pytest.mark.parametrize("host", ["fd00::1", "[fd00::1]"])
def test_an_ipv6_address_is_put_in_brackets(host: str) -> None:
    hub, other = plan("star", node_ids="ab", protocol="tcp", address=host, ports=[5000])
    assert hub.listen == "tcp://[fd00::1]:5000"
    assert other.dial == ("tcp://[fd00::1]:5000",)


@pytest.mark.parametrize(
    ("bind", "listen", "local"),
    [
        ("0.0.0.0", "tcp://0.0.0.0:5000", "tcp://127.0.0.1:5000"),
        ("::", "tcp://[::]:5000", "tcp://[::1]:5000"),
        ("[::]", "tcp://[::]:5000", "tcp://[::1]:5000"),
        ("192.168.0.2", "tcp://192.168.0.2:5000", "tcp://192.168.0.2:5000"),
    ],
)
def test_nodes_of_one_host_dial_the_bind_address_and_other_hosts_the_advertised_one(
    bind: str, listen: str, local: str
) -> None:
    hub, other = plan(
        "star", node_ids="ab", protocol="tcp", address="203.0.113.5", bind=bind, ports=[5000]
    )
    assert (hub.listen, hub.advertise) == (listen, "tcp://203.0.113.5:5000")
    assert other.dial == (local,)


def test_without_a_bind_address_the_advertised_one_is_not_repeated() -> None:
    (hub,) = plan("star", node_ids="a", protocol="tcp", ports=[5000])
    assert hub.advertise == ""


def test_nodes_of_the_alone_topology_attach_to_others() -> None:
    (node,) = plan("alone", node_ids=["a"], attach_to=["tcp://10.0.0.1:5000"])
    assert (node.listen, node.dial) == ("", ("tcp://10.0.0.1:5000",))


def test_missing_ports_follow_the_last_one() -> None:
    nodes = plan("mesh", node_ids=["a", "b", "c"], protocol="tcp", ports=[5000, 6000])
    assert [node.listen[-4:] for node in nodes] == ["5000", "6000", "6001"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": "mash", "node_ids": ["a"]}, "did you mean mesh"),
        ({"topology": "mesh", "node_ids": ["a", "a"]}, "unique id"),
        ({"topology": "mesh", "node_ids": []}, "unique id"),
        ({"topology": "mesh", "node_ids": ["a"]}, "run_dir"),
        ({"topology": "mesh", "node_ids": ["a"], "protocol": "tcp"}, "ports"),
        ({"topology": "star", "node_ids": "ab", "protocol": "tcp", "ports": [1, 2]}, "2 ports"),
        ({"topology": "mesh", "node_ids": "ab", "protocol": "tcp", "ports": [65535]}, "1 to 65535"),
        (
            {"topology": "mesh", "node_ids": "ab", "protocol": "tcp", "ports": [9, 9]},
            "different port",
        ),
        (
            {"topology": "alone", "node_ids": ["a"], "attach_to": ["10.0.0.1:5"]},
            "not a valid address",
        ),
        ({"topology": "mesh", "node_ids": "a", "run_dir": Path("/tmp") / ("x" * 120)}, "shorter"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        plan(**arguments)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://host",
        "tcp://:80",
        "tcp://host:0",
        "ftp://host:1",
        "redis://host:6379/0/run",
        "",
        "tcp://::1:80",
        "tcp://fd00::1:80",
        "tcp://[::1]",
        "tcp://[::1:80",
        "tcp://[host]:80",
    ],
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(TopologyError):
        check_address(address)


@pytest.mark.parametrize("address", ["tcp://[::1]:80", "tls+tcp://[fe80::1%eth0]:80"])
def test_an_ipv6_address_in_brackets_is_valid(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(
    ("address", "only_here"),
    [
        ("ipc:///tmp/a.sock", True),
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.8.0.1:5", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://0.0.0.0:5", False),
        ("tls+tcp://10.0.0.1:5", False),
        ("tcp://learner.example:5", False),
    ],
)
def test_loopback_addresses_are_recognized(address: str, only_here: bool) -> None:
    assert is_loopback(address) is only_here
