"""What is to be launched: the command line's options, checked together, as a plan per process.

Pure: nothing here starts a process or opens a socket.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from dmiddleware.errors import LaunchError, TopologyError
from dmiddleware.registry import nearest
from dmiddleware.router.protocol.topology import Protocol, TopologyName, is_loopback, plan

__all__ = [
    "FailurePolicy",
    "LaunchRequest",
    "NodePlan",
    "count_processes",
    "plan_nodes",
    "needs_key",
    "parse_roles",
]

FailurePolicy = Literal["abort", "continue", "restart"]

KNOWN_ROLES = ("learner", "collector", "evaluator")

_THIS_HOST = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What one call of ``ditask`` is to start.

    Attributes:
        main: the function to run in each process, ``package.module.function``.
        package: folder that is put first on the import path.
        roles: ``(role, count)`` in order; empty: the processes get roles by their place.
        parallel_workers: how many processes; None: as many as ``roles`` name, else one.
        protocol: ``ipc``, ``tcp``, ``tls+tcp`` or ``redis``.
        address: the host's address for tcp.
        ports: ports to listen on, one a listening process; empty: free ones.
        topology: ``mesh``, ``star`` or ``alone``.
        attach_to: addresses of nodes of a run that goes on already.
        node_ids: one a process; empty: counted from ``first_node_id``.
        first_node_id: the lowest node id of this launcher's processes.
        labels: free words for every process.
        run_dir: folder for the sockets of ipc, owned by the launcher.
        on_failure: what to do when a process fails.
        max_restarts: how often one process is started again at the most.
        redis: for redis, what addresses begin with.
        n_elsewhere: processes that other launchers start; this one's first process is whom all of
            them reach, and it waits for them.
    """

    main: str
    package: Path = field(default_factory=Path)
    roles: tuple[tuple[str, int], ...] = ()
    parallel_workers: int | None = None
    protocol: Protocol = "ipc"
    address: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    topology: TopologyName = "mesh"
    attach_to: tuple[str, ...] = ()
    node_ids: tuple[int, ...] = ()
    first_node_id: int = 0
    labels: tuple[str, ...] = ()
    run_dir: Path | None = None
    on_failure: FailurePolicy = "abort"
    max_restarts: int = 3
    redis: str = ""
    n_elsewhere: int = 0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one process is to do.

    Attributes:
        node_id: its number in the run.
        roles: its roles; empty: all of the chain, as in a run of one process.
        labels: its labels.
        listen: address to listen on; empty: none.
        dial: addresses to dial.
        n_peers: peers that it waits for before the first step.
    """

    node_id: int
    roles: tuple[str, ...]
    labels: tuple[str, ...]
    listen: str
    dial: tuple[str, ...]
    n_peers: int


def parse_roles(text: str) -> tuple[tuple[str, int], ...]:
    """Read ``learner=1,collector=2,evaluator=1``.

    Raises:
        LaunchError: for what is no such list; the part that is wrong is named.
    """
    roles = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        matched = re.fullmatch(r"([A-Za-z][\w-]*)(?:=(\d+))?", part)
        if matched is None:
            raise LaunchError(f"--roles: {part!r} is not of the form role=count, as in learner=1")
        roles.append((matched[1], 1 if matched[2] is None else int(matched[2])))
    names = [name for name, _ in roles]
    if len(set(names)) != len(names):
        raise LaunchError(f"--roles: a role is named twice in {text!r}; add the counts up")
    return tuple(roles)


def plan_nodes(request: LaunchRequest, *, free_ports: Sequence[int] = ()) -> list[NodePlan]:
    """Say what each process is to do.

    Args:
        request: what is to be started.
        free_ports: ports to use on tcp where the request names none.

    Raises:
        LaunchError: if options cannot work together; the reason is given.
    """
    _check_main(request.main)
    request = replace(request, attach_to=tuple(dict.fromkeys(request.attach_to)))
    roles = _roles(request)
    node_ids = _node_ids(request, len(roles))
    ports = _ports(request, free_ports)
    try:
        nodes = plan(
            request.topology,
            node_ids=[str(node_id) for node_id in node_ids],
            protocol=request.protocol,
            run_dir=request.run_dir,
            address=request.address,
            ports=ports,
            attach_to=request.attach_to,
            redis=request.redis,
        )
    except TopologyError as error:
        raise LaunchError(str(error)) from error
    return [
        NodePlan(
            node_id=node_id,
            roles=own_roles,
            labels=request.labels,
            listen=node.listen,
            dial=node.dial,
            n_peers=_n_peers(request, node.listen, len(node.dial), len(nodes))
            + (request.n_elsewhere if index == 0 else 0),
        )
        for index, (node_id, own_roles, node) in enumerate(zip(node_ids, roles, nodes, strict=True))
    ]


def count_processes(request: LaunchRequest) -> int:
    """Return how many processes a launcher starts.

    Raises:
        LaunchError: if its roles cannot work together.
    """
    return len(_roles(request))


def needs_key(plans: Sequence[NodePlan]) -> bool:
    """Tell whether other hosts can reach a process, so that a key must be given."""
    addresses = [address for one in plans for address in (one.listen, *one.dial) if address]
    return not all(map(is_loopback, addresses))


def _check_main(main: str) -> None:
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", main) is None:
        raise LaunchError(
            f"--main {main!r} is no function of a module; write it as package.module.function, "
            "for example examples.cartpole_dqn.main"
        )


def _roles(request: LaunchRequest) -> list[tuple[str, ...]]:
    count = request.parallel_workers
    if count is not None and count < 1:
        raise LaunchError(f"--parallel-workers must be at least 1, got {count}")
    if not request.roles:
        return _roles_by_place(1 if count is None else count)
    for name, n in request.roles:
        if n < 1:
            raise LaunchError(f"--roles: {name}={n} starts nothing; leave the role out")
        if name not in KNOWN_ROLES and (near := nearest(name, KNOWN_ROLES, n=1)):
            raise LaunchError(f"--roles: {name!r} is no role; did you mean {near[0]}?")
    named: list[tuple[str, ...]] = [(name,) for name, n in request.roles for _ in range(n)]
    if count is not None and count != len(named):
        raise LaunchError(
            f"--roles name {len(named)} processes and --parallel-workers {count}; give one of the "
            "two, or the same number"
        )
    return named


def _roles_by_place(count: int) -> list[tuple[str, ...]]:
    """Give each process a role: the first learns, the last evaluates, the others collect.

    With two processes the second collects and evaluates; one alone does everything.
    """
    if count == 1:
        return [()]
    if count == 2:
        return [("learner",), ("collector", "evaluator")]
    return [("learner",), *[("collector",)] * (count - 2), ("evaluator",)]


def _node_ids(request: LaunchRequest, count: int) -> list[int]:
    node_ids = list(request.node_ids)
    if not node_ids:
        return list(range(request.first_node_id, request.first_node_id + count))
    if len(node_ids) == 1:
        return list(range(node_ids[0], node_ids[0] + count))
    if len(node_ids) != count:
        raise LaunchError(f"--node-ids names {len(node_ids)} nodes for {count} processes")
    if len(set(node_ids)) != count:
        raise LaunchError(f"--node-ids names a node twice: {node_ids}")
    return node_ids


def _ports(request: LaunchRequest, free_ports: Sequence[int]) -> tuple[int, ...]:
    if request.protocol not in get_args(Protocol):
        raise LaunchError(f"--protocol must be one of {', '.join(get_args(Protocol))}")
    if request.protocol == "redis":
        if request.ports or request.address not in _THIS_HOST:
            raise LaunchError(
                "--ports and --address mean nothing with --mq-type redis, where only the redis "
                "server is reached; leave them out"
            )
        return ()
    if request.protocol == "ipc":
        if request.ports:
            raise LaunchError("--ports means nothing with --protocol ipc; use --protocol tcp")
        if request.address not in _THIS_HOST:
            raise LaunchError(
                f"--address {request.address} means nothing with --protocol ipc, which does not "
                "leave this host; use --protocol tcp"
            )
        return ()
    if request.ports:
        return request.ports
    return tuple(free_ports) if request.topology != "alone" else ()


def _n_peers(request: LaunchRequest, listen: str, n_dials: int, n_nodes: int) -> int:
    if request.topology == "alone":
        return n_dials
    if request.topology == "star":
        return n_nodes - 1 if listen else n_dials
    return n_nodes - 1 + len(request.attach_to)
