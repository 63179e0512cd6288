"""The plan of a run: the command line's options, checked together, become one plan per node.

Pure: nothing here starts a process or opens a socket.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from dmiddleware.errors import LaunchError, TopologyError
from dmiddleware.launch.roles import (
    COORDINATOR,
    FEEDER,
    LEAD,
    UNDECIDED,
    check_role,
    has_role,
    leads,
    roles_by_position,
)
from dmiddleware.router.protocol.topology import (
    NodeAddresses,
    Scheme,
    TopologyName,
    check_address,
    is_loopback,
    plan,
)
from dmiddleware.router.transport.tls import TlsFiles
from dmiddleware.run_key import check_key, make_key

__all__ = [
    "DEFAULT_RUN_ID",
    "LaunchRequest",
    "NodeConfig",
    "NodePlan",
    "RANK_STORE",
    "RankPlan",
    "RunPlan",
    "assign_roles",
    "count_hubs",
    "default_topology",
    "hub_index",
    "listening_nodes",
    "needs_key",
    "plan_at",
    "plan_nodes",
    "plan_run",
]

DEFAULT_RUN_ID: Final = "run"
"""The name of a run that was given none."""

RANK_STORE: Final = "DITASK_RANK_STORE"
"""The variable that names the folder in which the ranks of one host meet."""

_THIS_HOST: Final = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The nodes that one launcher starts, and how they connect.

    Attributes:
        main: the function to run in each node, ``package.module.function``.
        roles: the roles of each node; a node without roles runs the whole chain, and the program
            decides on those of a node with ``UNDECIDED``.
        elsewhere: the roles of each node that the launchers on other hosts start.
        elsewhere_ids: the ids of these nodes.
        n_before: how many of these the launchers before this one start.
        has_hub: whether the hub, which the nodes of all other hosts dial, is started here. It is
            the learner if this launcher starts it, otherwise the first node.
        protocol: ``ipc``, ``tcp`` or ``tls+tcp``.
        address: this host's address for tcp.
        bind: the local address to listen on, if it differs from ``address``.
        ports: ports to listen on, first the hub's; empty: use free ones.
        topology: ``mesh``, ``star`` or ``alone``.
        attach_to: addresses of nodes that other launchers started.
        joins: whether the nodes join a run that was started before.
        node_ids: one id per node; empty: count up from ``first_node_id``.
        first_node_id: the lowest node id of this launcher.
        labels: labels of every node.
        run_dir: folder for the sockets of ipc, owned by the launcher.
        rendezvous_port: the port at which learners meet that learn as one.
    """

    main: str
    roles: tuple[tuple[str, ...], ...] = ((),)
    elsewhere: tuple[tuple[str, ...], ...] = ()
    elsewhere_ids: tuple[int, ...] = ()
    n_before: int = 0
    has_hub: bool = True
    protocol: Scheme = "ipc"
    address: str = "127.0.0.1"
    bind: str = ""
    ports: tuple[int, ...] = ()
    topology: TopologyName = "star"
    attach_to: tuple[str, ...] = ()
    joins: bool = False
    node_ids: tuple[int, ...] = ()
    first_node_id: int = 0
    labels: tuple[str, ...] = ()
    run_dir: Path | None = None
    rendezvous_port: int = 0


@dataclass(frozen=True, slots=True)
class RankPlan:
    """A learner's place among the learners of its run, which learn as one.

    Attributes:
        rank: its number among them.
        size: how many there are.
        port: the port at which they meet.
        host: the address of the host of the first one, where they meet.
    """

    rank: int
    size: int
    port: int
    host: str = "127.0.0.1"

    def environment(self) -> dict[str, str]:
        """Return the variables that describe it to ``torch.distributed``."""
        return {
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
        }


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node's part in the run.

    Attributes:
        node_id: its number in the run.
        roles: its roles; empty: it runs the whole chain, as a run of one process does.
        labels: its labels.
        listen: the address to listen on; empty: it only dials.
        dial: the addresses to dial.
        advertise: the address that other hosts dial; empty: the same as ``listen``.
        n_peers: how many peers must connect before the first step.
        run_roles: the roles that nodes of the run have; None: unknown, because the node joins a
            run that others started.
        role_index: its number among the nodes of the run with the same roles; among those of its
            launcher if the node joins a run.
        ranks: its place among the learners; None: it is not one.
        decides: whether the program gives the node its roles, and has not done so yet.
    """

    node_id: int
    roles: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    listen: str = ""
    dial: tuple[str, ...] = ()
    advertise: str = ""
    n_peers: int = 0
    run_roles: tuple[str, ...] | None = None
    role_index: int = 0
    ranks: RankPlan | None = None
    decides: bool = False

    @property
    def learns(self) -> bool:
        """Whether the node is a learner, without which a run cannot succeed."""
        return not self.decides and (not self.roles or leads(self.roles))

    @property
    def leads_run(self) -> bool:
        """Whether it is the learner that decides what a run has one of, or one of its ranks."""
        return not self.decides and (not self.roles or LEAD in self.roles)

    def __str__(self) -> str:
        roles = "" if self.decides else f" ({'+'.join(self.roles) or 'all roles'})"
        return f"node {self.node_id}{roles}"


class RunPlan(msgspec.Struct, kw_only=True, frozen=True):
    """What the nodes of one launcher have in common, and the part of each.

    It holds the run's key: send it only through channels that nobody else can read.

    Attributes:
        nodes: the part of each node.
        run_id: names the run.
        run_token: shared by all nodes of one run, and different in every run.
        key_hex: the run's key; empty: none.
        start_timeout_s: how long to wait for peers.
        tls: certificates for ``tls+tcp``, or None.
        attached: whether the nodes joined a run of another launcher. When they are stopped, the
            other nodes continue.
        replaced: whether the platform starts a node again that its launcher has stopped. Its peers
            wait for the new one.
        may_grow: whether processes of other launchers may join the run.
        shared_memory: folder for arrays in shared memory; empty: none.
        max_event_bytes: the memory for large events of its peers; None: the router's default.
        launch: the options of the launcher that a run records, as texts.
        ding: whether the program is one of DI-engine.
    """

    nodes: tuple[NodePlan, ...]
    run_id: str = DEFAULT_RUN_ID
    run_token: str = ""
    key_hex: str = ""
    start_timeout_s: float = 60.0
    tls: TlsFiles | None = None
    attached: bool = False
    replaced: bool = False
    may_grow: bool = False
    shared_memory: str = ""
    max_event_bytes: int | None = None
    launch: dict[str, str | list[str] | bool] = {}
    ding: bool = False

    def __repr__(self) -> str:
        """Return a text without secrets, which tracebacks and logs may show."""
        return f"RunPlan(nodes={self.nodes!r}, run_id={self.run_id!r})"

    def node(self, node_id: int) -> NodePlan:
        """Return the part of a node.

        Raises:
            LaunchError: if the plan has no such node.
        """
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        node_ids = ", ".join(str(node.node_id) for node in self.nodes)
        raise LaunchError(f"the plan has no node {node_id!r}; it has the nodes {node_ids}")


class NodeConfig(msgspec.Struct, kw_only=True):
    """What a node's process needs to know; the launcher sends it as one line of JSON.

    The arguments and variables are not sent: the process is started with them.

    Attributes:
        run: the plan of the run, with this node only.
        main: the program: ``package.module.function``.
        pickled_program: the program itself, as cloudpickle has saved it; empty: it is imported.
        result_file: the file for what the program returns, as cloudpickle saves it; empty: none.
        package: folder to put first on the import path.
        directory: the working directory, if its host has it; empty: that of its process.
        arguments: the arguments of the program.
        variables: environment variables of the program.
        run_dir: the run's folder, which only this user can enter, and where learners that learn as
            one meet; empty: at their port.
        kill_after_s: how long the node may take to end after its launcher has died.
        log: the file that receives the node's output once its launcher has died; empty: none.
        mark: the mark of the node's processes.
        status_fd: the file descriptor to write :class:`~dmiddleware.launch.status.NodeStatus` to.
    """

    run: RunPlan
    main: str
    package: str
    directory: str = ""
    pickled_program: bytes = b""
    result_file: str = ""
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    run_dir: str = ""
    kill_after_s: float = 20.0
    log: str = ""
    mark: str = ""
    status_fd: int = -1

    @property
    def plan(self) -> NodePlan:
        """The node's part in the run."""
        return self.run.nodes[0]

    def __repr__(self) -> str:
        """Return a text without secrets, which tracebacks and logs may show."""
        return f"NodeConfig(plan={self.plan!r}, main={self.main!r})"


def assign_roles(
    roles: Sequence[tuple[str, int]],
    n_workers: int | None,
    *,
    host: int = 0,
    n_hosts: int = 1,
) -> tuple[tuple[str, ...], ...]:
    """Return the roles of each node that one host starts.

    Named roles give one node per count. Without them, the run's first node learns, its last one
    evaluates and the others collect; of two, the second collects and evaluates; a single node runs
    the whole chain. With ``UNDECIDED``, the program decides.

    Args:
        roles: ``(role, count)`` in order, for this host.
        n_workers: nodes per host; None: as many as ``roles`` names, or one.
        host: index of the host.
        n_hosts: hosts of the run, each with ``n_workers`` nodes.

    Raises:
        LaunchError: if the arguments contradict each other.
    """
    if n_workers is not None and n_workers < 1:
        raise LaunchError(f"--parallel-workers must be at least 1, got {n_workers}")
    if not roles:
        n_nodes = n_workers or 1
        by_position = roles_by_position(n_nodes * n_hosts)
        return tuple(by_position[host * n_nodes : (host + 1) * n_nodes])
    names = [name for name, _ in roles]
    if UNDECIDED in names:
        if len(names) > 1:
            raise LaunchError(
                f"--roles {UNDECIDED} lets the program decide on the roles of all processes, so it "
                f"cannot be together with {', '.join(name for name in names if name != UNDECIDED)}"
            )
        if n_workers is not None and roles[0][1] == 1:
            roles = ((UNDECIDED, n_workers),)
    for name, count in roles:
        if count < 1:
            raise LaunchError(f"--roles: {name}={count} starts no process; leave the role out")
        check_role(name)
        if name != LEAD and leads((name,)) and count > 1:
            raise LaunchError(
                f"--roles: {name}={count} would learn one part in {count} processes; a part of its "
                f"own learns in one, {name}=1"
            )
    by_role = tuple((name,) for name, count in roles for _ in range(count))
    if n_workers is not None and n_workers != len(by_role):
        raise LaunchError(
            f"--roles asks for {len(by_role)} processes, but --parallel-workers for {n_workers}; "
            "give only one of them"
        )
    # On several hosts, another one may have the learner.
    return _with_lead(by_role) if n_hosts == 1 else by_role


def _with_lead(assigned: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Give the first of the learners of parts the role of the learner, if no node has it."""
    of_parts = [index for index, names in enumerate(assigned) if leads(names)]
    if not of_parts or has_role(LEAD, assigned):
        return tuple(assigned)
    return tuple(
        (LEAD, *names) if index == of_parts[0] else names for index, names in enumerate(assigned)
    )


def plan_nodes(request: LaunchRequest, *, free_ports: Sequence[int] = ()) -> list[NodePlan]:
    """Plan each node of a launcher.

    Args:
        request: the nodes to start.
        free_ports: ports to use on tcp where the request names none.

    Raises:
        LaunchError: if options contradict each other, or the learners cannot learn as one.
    """
    _check_main(request.main)
    _check_learners(request)
    request = replace(request, attach_to=tuple(dict.fromkeys(request.attach_to)))
    node_ids = _node_ids(request)
    # Hubs are planned first: they get the first ports, and in a star only they listen.
    hubs = _hubs(request.roles)
    order = [*hubs, *(index for index in range(len(node_ids)) if index not in hubs)]
    try:
        nodes = plan(
            request.topology,
            node_ids=[str(node_ids[index]) for index in order],
            protocol=request.protocol,
            run_dir=request.run_dir,
            address=request.address,
            bind=request.bind,
            ports=_ports(request, free_ports),
            attach_to=request.attach_to,
            n_hubs=len(hubs),
        )
    except TopologyError as error:
        raise LaunchError(str(error)) from error
    run_roles = _run_roles(request)
    planned = {
        index: NodePlan(
            node_id=node_ids[index],
            **_roles_of(request.roles[index], may_decide=len(nodes) > 1 or _has_others(request)),
            labels=request.labels,
            listen=node.listen,
            dial=node.dial,
            advertise=node.advertise,
            n_peers=_n_peers(request, node, len(nodes)),
            run_roles=run_roles,
            role_index=_role_index(request, index),
            ranks=_rank_plan(request, index),
        )
        for index, node in zip(order, nodes, strict=True)
    }
    return [planned[index] for index in range(len(node_ids))]


def plan_run(
    roles: Mapping[str, int] | None = None,
    *,
    addresses: Sequence[str] = (),
    topology: TopologyName = "star",
    key: bytes = b"",
    run_id: str = DEFAULT_RUN_ID,
    **settings: Any,
) -> RunPlan:
    """Plan a run whose processes others start; each of them calls ``join_run``.

    Make the plan once, and hand it to all processes, on a channel that nobody else can read.

    Args:
        roles: number of nodes per role; None: a single node that runs the whole chain.
        addresses: where the nodes listen, such as ``tcp://10.0.0.1:25515``, in the order of the
            nodes. In a star the learners alone need one, and the addresses of others are ignored;
            in a mesh all do.
        topology: ``star``: all nodes connect to the learners, or to the first node if none learns;
            ``mesh``: each node connects to all others.
        key: the run's key; empty: a new one.
        run_id: the name of the run. Nodes of runs with other names are refused.
        **settings: further fields of :class:`RunPlan`, such as ``start_timeout_s``.

    Raises:
        LaunchError: if the roles cannot form a run, or an address is missing.
        ConfigError: if the key is too short.
        TopologyError: if an address is not valid.

    Example:
        >>> plan = plan_run({"learner": 1, "collector": 2}, addresses=["ipc:///tmp/learner.sock"])
        >>> [node.roles for node in plan.nodes]
        [('learner',), ('collector',), ('collector',)]
    """
    assigned = assign_roles(tuple((roles or {}).items()), None)
    listening = listening_nodes(assigned, topology)
    if len(assigned) == 1 and not addresses:
        listening = []
    missing = [index for index in listening if index >= len(addresses)]
    if missing:
        who = "all nodes" if topology == "mesh" else "the learners"
        raise LaunchError(
            f"in a {topology}, {who} listen; pass plan_run() the addresses of the nodes "
            f"{', '.join(map(str, missing))}"
        )
    nodes = plan_at(assigned, {index: addresses[index] for index in listening})
    return RunPlan(
        nodes=tuple(nodes),
        run_id=run_id,
        run_token=secrets.token_hex(16),
        key_hex=(check_key(key, source="plan_run(key=…)") if key else make_key()).hex(),
        **settings,
    )


def listening_nodes(assigned: Sequence[Sequence[str]], topology: TopologyName) -> list[int]:
    """Return the nodes that listen, in the order in which they dial each other: hubs first."""
    hubs = _hubs(assigned)
    if topology == "star":
        return hubs
    return [*hubs, *(index for index in range(len(assigned)) if index not in hubs)]


def plan_at(
    assigned: Sequence[tuple[str, ...]],
    listening: Mapping[int, str],
    *,
    labels: tuple[str, ...] = (),
) -> list[NodePlan]:
    """Plan nodes that listen at given addresses.

    Args:
        assigned: the roles of each node.
        listening: the addresses of the nodes that listen, as :func:`listening_nodes` orders them.
            Each dials those before it; all others dial all of them.
        labels: the labels of every node.

    Raises:
        TopologyError: if an address is not valid.
    """
    for address in listening.values():
        check_address(address)
    order = list(listening)
    roles = tuple(dict.fromkeys(itertools.chain.from_iterable(assigned)))
    nodes = []
    for index, names in enumerate(assigned):
        before = order[: order.index(index)] if index in listening else order
        nodes.append(
            NodePlan(
                node_id=index,
                **_roles_of(names, may_decide=len(assigned) > 1),
                labels=labels,
                listen=listening.get(index, ""),
                dial=tuple(listening[earlier] for earlier in before),
                n_peers=len(assigned) - 1 if index in listening else len(before),
                run_roles=None if _are_unknown(assigned) else roles,
                role_index=assigned[:index].count(names),
            )
        )
    return nodes


def default_topology(assigned: Sequence[Sequence[str]]) -> TopologyName:
    """Return how the nodes of a run connect by default, given the roles of each.

    A coordinator talks to all others, and which node is the learner is not known before the program
    has decided.
    """
    decides = len(assigned) > 1 and has_role(UNDECIDED, assigned)
    return "mesh" if decides or has_role(COORDINATOR, assigned) else "star"


def hub_index(roles: Sequence[Sequence[str]]) -> int:
    """Return the index of the learner, or 0: the node that a star's other nodes dial."""
    return _hubs(roles)[0]


def count_hubs(request: LaunchRequest) -> int:
    """Return how many of the nodes listen in a star: all learners, or the first node."""
    return len(_hubs(request.roles))


def _hubs(roles: Sequence[Sequence[str]]) -> list[int]:
    return [index for index, names in enumerate(roles) if leads(names)] or [0]


def _role_index(request: LaunchRequest, index: int) -> int:
    before = (*request.elsewhere[: request.n_before], *request.roles[:index])
    return before.count(request.roles[index])


def _rank_plan(request: LaunchRequest, index: int) -> RankPlan | None:
    ranks = [number for number, names in enumerate(request.roles) if LEAD in names]
    if index not in ranks:
        return None
    if has_role(COORDINATOR, (*request.roles, *request.elsewhere)):
        return None  # each learner then learns for itself
    return RankPlan(ranks.index(index), len(ranks), request.rendezvous_port)


def needs_key(plans: Sequence[NodePlan]) -> bool:
    """Return whether other hosts can reach a node; the user must then provide a key."""
    addresses = [a for plan in plans for a in (plan.listen, plan.advertise, *plan.dial) if a]
    return not all(map(is_loopback, addresses))


def _check_main(main: str) -> None:
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", main) is None:
        raise LaunchError(
            f"--main {main!r} does not name a function in a module; write it as "
            "package.module.function, for example examples.cartpole_dqn.main"
        )


def _check_learners(request: LaunchRequest) -> None:
    nodes = (*request.roles, *request.elsewhere)
    here, elsewhere = (sum(map(leads, hosts)) for hosts in (request.roles, request.elsewhere))
    if here and elsewhere:
        raise LaunchError(
            f"the run would have {here + elsewhere} learners on several hosts, but learners must "
            "share a host; give each host its roles in --platform-spec, with learner=N in only one "
            "of them"
        )
    if not request.joins and any(map(leads, nodes)) and not has_role(LEAD, nodes):
        of_part = next(role for roles in nodes for role in roles if leads((role,)))
        raise LaunchError(
            f"--roles names {of_part}, but no {LEAD}, and on several hosts it is not clear which "
            f"process leads the run; add {LEAD}=1, which learns the parts that have no process of "
            "their own"
        )
    learners = sum(LEAD in roles for roles in nodes)
    collectors = sum(FEEDER in roles for roles in nodes)
    if 0 < collectors < learners:
        raise LaunchError(
            f"each collector sends to one of the {learners} learners, so {collectors} would leave "
            f"some without data; use collector={learners} or more in --roles"
        )
    if request.joins and (any(map(leads, request.roles)) or () in request.roles):
        raise LaunchError(
            "--attach-to joins a run that already has its learner; name other roles for the "
            "processes that join, for example --roles collector=2"
        )


def _has_others(request: LaunchRequest) -> bool:
    return request.joins or bool(request.elsewhere)


def _roles_of(names: tuple[str, ...], *, may_decide: bool) -> dict[str, Any]:
    """Return the fields of a plan for the roles of a node; a node that is alone has them all."""
    if UNDECIDED in names:
        return {"roles": (), "decides": may_decide}
    return {"roles": names}


def _are_unknown(nodes: Collection[Sequence[str]]) -> bool:
    return () in nodes or has_role(UNDECIDED, nodes)


def _run_roles(request: LaunchRequest) -> tuple[str, ...] | None:
    nodes = (*request.roles, *request.elsewhere)
    if request.joins or _are_unknown(nodes):
        return None
    return tuple(dict.fromkeys(role for roles in nodes for role in roles))


def _node_ids(request: LaunchRequest) -> list[int]:
    count, node_ids = len(request.roles), list(request.node_ids)
    if not node_ids:
        return list(range(request.first_node_id, request.first_node_id + count))
    if len(node_ids) == 1:
        return list(range(node_ids[0], node_ids[0] + count))
    if len(node_ids) != count:
        raise LaunchError(
            f"--node-ids has {len(node_ids)} ids for {count} processes; give one id per process, "
            "or only the first"
        )
    if len(set(node_ids)) != count:
        raise LaunchError(f"--node-ids has an id twice: {node_ids}; all must differ")
    return node_ids


def _ports(request: LaunchRequest, free_ports: Sequence[int]) -> tuple[int, ...]:
    if request.protocol not in get_args(Scheme):
        raise LaunchError(
            f"--protocol must be one of {', '.join(get_args(Scheme))}, got {request.protocol!r}"
        )
    if request.protocol == "ipc":
        for option, is_set in (
            ("--ports", bool(request.ports)),
            (f"--address {request.address}", request.address not in _THIS_HOST),
            (f"--bind {request.bind}", bool(request.bind)),
        ):
            if is_set:
                raise LaunchError(
                    f"{option} has no effect with --protocol ipc, which connects processes of one "
                    "host; use --protocol tcp"
                )
        return ()
    if request.ports:
        return request.ports
    return tuple(free_ports)


def _n_peers(request: LaunchRequest, node: NodeAddresses, n_nodes: int) -> int:
    """Return how many peers a node waits for before its first step."""
    others = n_nodes - 1
    if request.topology == "mesh":
        others += len(request.attach_to)
    elif not node.listen:
        others = len(node.dial)
    is_hub = request.has_hub and not request.joins and node.index < count_hubs(request)
    return others + (len(request.elsewhere) if is_hub else 0)
