"""Who listens where, and who dials whom."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dmiddleware.errors import TopologyError
from dmiddleware.registry import nearest
from dmiddleware.router.transport.redis_address import RedisAddress

__all__ = ["NodePlan", "Protocol", "TopologyName", "plan", "is_loopback", "check_address"]

TopologyName = Literal["mesh", "star", "alone"]
Protocol = Literal["ipc", "tcp", "tls+tcp", "redis"]

_MEMORY = "memory://"
"""What addresses begin with that lead nowhere out of their process."""

MAX_IPC_PATH = 107
"""Bytes of a Unix socket's path (``sockaddr_un`` on Linux)."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node's part in the network.

    Attributes:
        index: the node's place, from 0.
        node_id: its name.
        listen: the address to listen on; empty: it only dials.
        dial: addresses to dial.
    """

    index: int
    node_id: str
    listen: str
    dial: tuple[str, ...]


def plan(
    topology: TopologyName,
    *,
    node_ids: Sequence[str],
    protocol: Protocol = "ipc",
    run_dir: Path | None = None,
    address: str = "127.0.0.1",
    ports: Sequence[int] = (),
    attach_to: Sequence[str] = (),
    redis: str = "",
) -> list[NodePlan]:
    """Lay out the network of nodes that are started together.

    ``mesh``: each node listens, and dials those before it. ``star``: the first listens, the others
    dial it. ``alone``: nobody listens; nodes reach others through ``attach_to`` only.

    Args:
        topology: the form.
        node_ids: one name a node, all different.
        protocol: ``ipc`` on one host, ``tcp`` or ``tls+tcp`` across hosts, ``redis`` through a
            server that all can reach.
        run_dir: folder for the sockets of ``ipc``.
        address: the host's address, for tcp.
        ports: for tcp, one a listening node; fewer: counted on from the last one.
        attach_to: addresses of nodes that were started elsewhere; every node dials them.
        redis: for redis, what addresses begin with; a node's is followed by ``/`` and its id.

    Raises:
        TopologyError: if the arguments cannot work together.
    """
    if topology not in get_args(TopologyName):
        near = nearest(topology, get_args(TopologyName), n=1)
        raise TopologyError(
            f"no topology is called {topology!r}; "
            + (f"did you mean {near[0]}?" if near else "known are: mesh, star, alone")
        )
    if not node_ids or len(set(node_ids)) != len(node_ids):
        raise TopologyError(f"each node needs an id of its own, got {list(node_ids)}")
    for other in attach_to:
        check_address(other)
    n_listening = {"mesh": len(node_ids), "star": 1, "alone": 0}[topology]
    listening = node_ids[:n_listening]
    if protocol == "redis":
        addresses = [f"{redis}/{node_id}" for node_id in listening]
        for one in addresses:
            check_address(one)
    else:
        addresses = _addresses(listening, protocol, run_dir, address, ports)
    return [
        NodePlan(
            index,
            node_id,
            listen=addresses[index] if index < n_listening else "",
            dial=(*addresses[: min(index, n_listening)], *attach_to),
        )
        for index, node_id in enumerate(node_ids)
    ]


def check_address(address: str, *, any_port: bool = False) -> None:
    """Refuse an address that no transport understands.

    Args:
        address: what to look at.
        any_port: whether port 0 is allowed, which means one that is free.

    Raises:
        TopologyError: with what is wrong.
    """
    if address.startswith(_MEMORY) and address != _MEMORY:
        return
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in get_args(Protocol) or not rest:
        raise TopologyError(
            f"{address!r} is no address; write ipc:///path, tcp://host:port, tls+tcp://host:port "
            "or redis://host:port/db/name"
        )
    if scheme == "redis":
        RedisAddress.parse(address)
        return
    if scheme == "ipc":
        if len(rest.encode()) > MAX_IPC_PATH:
            raise TopologyError(
                f"the socket path {rest} has {len(rest.encode())} bytes, the system allows "
                f"{MAX_IPC_PATH}; use a shorter run folder, for example under /tmp"
            )
        return
    host, separator, port = rest.rpartition(":")
    if not host or not port.isdecimal() or not (not any_port) <= int(port) < 65536:
        raise TopologyError(f"{address!r} needs a host and a port from 1 to 65535, as in host:5555")


def is_loopback(address: str) -> bool:
    """Tell whether only this host can reach an address."""
    if address.startswith(_MEMORY):
        return True
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return True
    if scheme == "redis":
        host = RedisAddress.parse(address).host
    else:
        host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _addresses(
    node_ids: Sequence[str],
    protocol: Protocol,
    run_dir: Path | None,
    address: str,
    ports: Sequence[int],
) -> list[str]:
    if protocol == "ipc":
        if run_dir is None and node_ids:
            raise TopologyError("ipc needs a folder for its sockets; give run_dir")
        found = [f"ipc://{run_dir}/{index}.sock" for index, _ in enumerate(node_ids)]
    else:
        found = [f"{protocol}://{address}:{port}" for port in _ports(len(node_ids), ports)]
    for one in found:
        check_address(one)
    return found


def _ports(count: int, ports: Sequence[int]) -> list[int]:
    if count and not ports:
        raise TopologyError("tcp needs the ports to listen on; give at least the first one")
    if len(ports) > count:
        raise TopologyError(f"{len(ports)} ports were given for {count} listening node(s)")
    following = [ports[-1] + 1 + offset for offset in range(count - len(ports))] if count else []
    found = [*ports, *following]
    if len(set(found)) != len(found):
        raise TopologyError(f"each listening node needs a port of its own, got {found}")
    return found
