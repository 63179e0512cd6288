"""Topologies and addresses: where each node listens, and which nodes it dials."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dmiddleware.errors import TopologyError
from dmiddleware.registry import nearest

__all__ = [
    "NodeAddresses",
    "Scheme",
    "TopologyName",
    "check_address",
    "count_listening",
    "is_loopback",
    "plan",
    "socket_address",
]

TopologyName = Literal["mesh", "star", "alone"]
Scheme = Literal["ipc", "tcp", "tls+tcp"]

_MEMORY = "memory://"
"""The scheme of addresses within one process."""

MAX_IPC_PATH = 107
"""The longest path of a Unix socket in bytes (``sockaddr_un`` on Linux)."""

_HOST = r"(?P<host>\[[0-9a-fA-F:.]+(?:%[^\]\s]+)?\]|[^:/@\[\]\s]+)"
"""A name, an IPv4 address, or an IPv6 address in brackets, possibly with a zone."""

_HOST_AND_PORT = re.compile(_HOST + r":(?P<port>\d+)")

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""What a node of the same host dials if a listener uses all interfaces."""


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """One node's part in the network.

    Attributes:
        index: the node's index, from 0.
        node_id: the node's id.
        listen: the address to listen on; empty: the node only dials.
        dial: the addresses to dial.
        advertise: the address that nodes on other hosts dial; empty: the same as ``listen``.
    """

    index: int
    node_id: str
    listen: str
    dial: tuple[str, ...]
    advertise: str = ""


def plan(
    topology: TopologyName,
    *,
    node_ids: Sequence[str],
    protocol: Scheme = "ipc",
    run_dir: Path | None = None,
    address: str = "127.0.0.1",
    bind: str = "",
    ports: Sequence[int] = (),
    attach_to: Sequence[str] = (),
    n_hubs: int = 1,
) -> list[NodeAddresses]:
    """Plan the network of nodes that are started together.

    ``mesh``: each node listens and dials the nodes before it. ``star``: the first node listens and
    the others dial it, unless the hub was started elsewhere, at ``attach_to``; several hubs also
    dial each other. ``alone``: no node listens; they reach others through ``attach_to`` only.

    Args:
        topology: the topology.
        node_ids: the ids of the nodes, all different.
        protocol: ``ipc`` on one host, ``tcp`` or ``tls+tcp`` across hosts.
        run_dir: folder for the sockets of ``ipc``.
        address: the host's address, for ``tcp`` and ``tls+tcp``.
        bind: the local address to listen on, such as ``0.0.0.0`` for all interfaces, if it differs
            from ``address``. The planned nodes dial each other there.
        ports: for ``tcp`` and ``tls+tcp``, the ports of the listening nodes; if there are fewer,
            the numbers after the last one are used.
        attach_to: addresses of nodes that were started elsewhere; every node dials them.
        n_hubs: for ``star``, how many of the nodes are hubs, the first ones.

    Raises:
        TopologyError: if the arguments do not fit together.
    """
    if topology not in get_args(TopologyName):
        near = nearest(topology, get_args(TopologyName), n=1)
        raise TopologyError(
            f"unknown topology {topology!r}; "
            + (f"did you mean {near[0]}?" if near else "use mesh, star or alone")
        )
    if not node_ids or len(set(node_ids)) != len(node_ids):
        raise TopologyError(f"each node needs a unique id, got {list(node_ids)}")
    for other in attach_to:
        check_address(other)
    n_listening = count_listening(topology, len(node_ids), attach_to, n_hubs)
    if protocol == "ipc":
        if run_dir is None and n_listening:
            raise TopologyError("ipc needs a folder for its sockets; pass run_dir")
        advertised = listen = local = [
            f"ipc://{run_dir}/{index}.sock" for index in range(n_listening)
        ]
    else:
        chosen = _ports(n_listening, ports)
        bound = bind or address
        advertised, listen, local = (
            [socket_address(protocol, host, port) for port in chosen]
            for host in (address, bound, _LOOPBACK.get(bound.strip("[]"), bound))
        )
    for one in (*advertised, *listen):
        check_address(one)
    return [
        NodeAddresses(
            index,
            node_id,
            listen=listen[index] if index < n_listening else "",
            dial=(*local[: min(index, n_listening)], *attach_to),
            advertise=advertised[index] if index < n_listening and advertised != listen else "",
        )
        for index, node_id in enumerate(node_ids)
    ]


def count_listening(
    topology: TopologyName, n_nodes: int, attach_to: Sequence[str], n_hubs: int = 1
) -> int:
    """Return how many of the planned nodes listen; these are the first ones."""
    if topology == "star":
        return 0 if attach_to else n_hubs
    return n_nodes if topology == "mesh" else 0


def socket_address(scheme: str, host: str, port: int) -> str:
    """Return the address of a port, with brackets around an IPv6 host: ``tcp://[::1]:5555``."""
    host = host.strip("[]")
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_address(address: str, *, any_port: bool = False) -> None:
    """Check that an address is valid.

    Args:
        address: the address.
        any_port: whether port 0, which stands for a free port, is allowed.

    Raises:
        TopologyError: if it is not valid.
    """
    if address.startswith(_MEMORY) and address != _MEMORY:
        return
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in get_args(Scheme) or not rest:
        raise TopologyError(
            f"{address!r} is not a valid address; write ipc:///path, tcp://host:port or "
            "tls+tcp://host:port"
        )
    if scheme == "ipc":
        if len(rest.encode()) > MAX_IPC_PATH:
            raise TopologyError(
                f"the socket path {rest} has {len(rest.encode())} bytes, but the system allows "
                f"{MAX_IPC_PATH}; use a shorter run folder, for example with TMPDIR=/tmp"
            )
        return
    matched = _HOST_AND_PORT.fullmatch(rest)
    if matched is None or not (not any_port) <= int(matched["port"]) < 65536:
        raise TopologyError(
            f"{address!r} needs a host and a port from 1 to 65535, as in tcp://host:5555, and "
            "brackets around an IPv6 address, as in tcp://[::1]:5555"
        )


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached from this host only."""
    if address.startswith(_MEMORY):
        return True
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ports(count: int, ports: Sequence[int]) -> list[int]:
    if count and not ports:
        raise TopologyError("tcp needs ports to listen on; pass at least the first one")
    if len(ports) > count:
        raise TopologyError(
            f"got {len(ports)} ports for {count} listening node(s); pass at most one per node"
        )
    following = [ports[-1] + 1 + offset for offset in range(count - len(ports))] if count else []
    all_ports = [*ports, *following]
    if len(set(all_ports)) != len(all_ports):
        raise TopologyError(f"each listening node needs a different port, got {all_ports}")
    return all_ports
