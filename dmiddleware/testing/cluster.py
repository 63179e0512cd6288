"""A simulated cluster: one program runs as several nodes in one process."""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

from dmiddleware.launch.plan import LaunchRequest, NodePlan, assign_roles, plan_nodes
from dmiddleware.pipeline import CurrentNode, running_as
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.router.wire.frame import MAX_FRAME_BYTES, type_of
from dmiddleware.router.wire.stream_frames import FrameReader
from dmiddleware.seeding import derive_seed, seed_libraries
from dmiddleware.testing.simulation import Killed, SimulatedThread, Simulation, SimulationError
from dmiddleware.testing.stream_network import MemoryStream, StreamNetwork, frames_in
from dmiddleware.testing.tape import Tape

__all__ = ["Cluster", "ClusterNode", "Delivered"]

_IPC_DIR: Final = Path("cluster")
_KEY_BYTES: Final = 32


class Delivered(NamedTuple):
    """A frame that arrived.

    Attributes:
        at_s: when it arrived, in simulated seconds.
        source: the node that sent it.
        target: the node that received it.
        kind: the frame's type: ``"DATA"``, ``"STATE"``, ``"ASK"``, ``"HEARTBEAT"``, …
        size: its size in bytes.
    """

    at_s: float
    source: int
    target: int
    kind: str
    size: int


@dataclass(eq=False, slots=True)
class ClusterNode:
    """One node of a cluster; it can be killed and started again.

    Attributes:
        plan: its part in the run.
        incarnation: how often it was started.
        router: the router of its latest start.
        current_node: the :class:`~dmiddleware.pipeline.CurrentNode` of its latest start.
        result: the program's return value; None before it has returned.
        error: the program's error; None if it raised none.
        running: whether the program runs.
    """

    plan: NodePlan
    incarnation: int = 0
    router: Router | None = None
    current_node: CurrentNode | None = None
    result: Any = None
    error: BaseException | None = None
    running: bool = False
    thread: SimulatedThread | None = field(default=None, repr=False)

    @property
    def node_id(self) -> int:
        """Its number in the run."""
        return self.plan.node_id

    def __str__(self) -> str:
        return str(self.plan)


class Cluster:
    """Runs one program as several nodes, as ``ditask`` does, but in one process and simulated time.

    Every node has its own threads and router, and the program runs in it as in a separate process:
    ``Task(ctx)`` connects to the other nodes. The whole cluster is one
    :class:`~dmiddleware.testing.Simulation`: one thread runs at a time, waiting takes no real time,
    and the same seed gives the same run, message by message. Failures of many nodes can be tested
    in seconds, and every failing run can be repeated.

    The nodes share memory and the libraries' global random generators, which are seeded at the
    start. Code that waits without its task's clock (a process pool, real sockets) blocks the
    simulation, but does not advance its clock.

    Args:
        main: the program; called without arguments in each node.
        roles: number of nodes per role, as in ``ditask --roles``; with ``{"none": 3}``, the program
            gives them their roles.
        n: number of nodes without roles, instead of ``roles``; each of them runs the whole chain.
        topology: ``mesh``: every node connects to every other; ``star``: all connect to the first.
        seed: determines the order of the threads, the delays, and the routers' random values.
        delay_s: minimum and maximum delay of a message; each message's delay is drawn uniformly.
        options: limits and timeouts of the routers.
        run_token: identifies the run to its nodes; see :class:`~dmiddleware.pipeline.CurrentNode`.
            Empty: a random one.
        start_timeout_s: how long a task waits for its peers before its first step.
        patience_s: real seconds after which a thread that computes counts as stuck.
        find_missed: look for threads that should have been notified; see
            :class:`~dmiddleware.testing.Simulation`.

    Raises:
        LaunchError: if ``roles`` and ``n`` contradict each other, or there are several learners.
        SimulationError: from every method that lets the nodes run; see
            :class:`~dmiddleware.testing.Simulation`.

    Example:
        >>> from dmiddleware.pipeline import Context, Task
        >>> def program() -> int:
        ...     with Task(Context()) as task:
        ...         task.use(lambda ctx: task.emit("hello", task.router.node_id))
        ...         task.run(max_step=3)
        ...     return task.ctx.total_step
        >>> with Cluster(program, n=2) as cluster:
        ...     cluster.run()
        {0: 2, 1: 2}
    """

    def __init__(
        self,
        main: Callable[[], Any],
        *,
        roles: Mapping[str, int] | None = None,
        n: int | None = None,
        topology: TopologyName = "mesh",
        seed: int = 0,
        delay_s: tuple[float, float] = (0.0002, 0.002),
        options: NodeOptions | None = None,
        run_token: str = "",
        start_timeout_s: float = 60.0,
        patience_s: float = 60.0,
        find_missed: bool = False,
    ) -> None:
        self.simulation = Simulation(
            seed=derive_seed(seed, "cluster", "order"),
            patience_s=patience_s,
            find_missed=find_missed,
        )
        self.tape = Tape()
        self.nodes = {plan.node_id: ClusterNode(plan) for plan in _plans(roles, n, topology)}
        self._main = main
        self._n_ended = 0
        self._seed = seed
        self._options = options
        self._run_token = run_token or secrets.token_hex(8)
        self._start_timeout_s = start_timeout_s
        delays = random.Random(derive_seed(seed, "cluster", "delays"))
        self._readers: WeakKeyDictionary[MemoryStream, FrameReader] = WeakKeyDictionary()
        self.network = StreamNetwork(
            clock=self.simulation,
            delay_s=lambda source, target: delays.uniform(*delay_s),
            observe=self._record,
        )
        self._key = random.Random(derive_seed(seed, "cluster", "key")).randbytes(_KEY_BYTES)

    def __enter__(self) -> Self:
        seed_libraries(derive_seed(self._seed, "cluster", "libraries"))
        self.simulation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kill the nodes that are still running."""
        self.simulation.__exit__(kind, error, traceback)

    def run(self, *, timeout_s: float = 86_400.0) -> dict[int, Any]:
        """Start all nodes, wait for their programs, and return the results by node id.

        Raises:
            SimulationError: if a program raises, or is still running after ``timeout_s`` simulated
                seconds; the message lists where each thread waits.
        """
        self.start()
        return self.join(timeout_s=timeout_s)

    def start(self, *node_ids: int) -> None:
        """Start or restart nodes; without arguments, all."""
        for node in self._named(node_ids):
            if node.running:
                raise SimulationError(f"{node} is already running; kill it before restarting it")
            node.incarnation += 1
            node.running = True
            node.result = node.error = None
            node.thread = self.simulation.spawn(
                functools.partial(self._live, node), name="main", group=_group(node.node_id)
            )

    def join(self, *node_ids: int, timeout_s: float = 86_400.0) -> dict[int, Any]:
        """Wait for programs to end, and return their results; without arguments, all.

        Raises:
            SimulationError: if a program raises, or is still running after ``timeout_s`` simulated
                seconds; the message lists where each thread waits.
        """
        nodes = self._named(node_ids)
        n_seen = -1

        def ended() -> bool:
            nonlocal n_seen
            if n_seen == self._n_ended:
                return False
            n_seen = self._n_ended
            return any(node.error for node in nodes) or not any(node.running for node in nodes)

        done = self.wait_until(ended, timeout_s)
        for node in nodes:
            if node.error is not None:
                raise SimulationError(f"{node} failed: {node.error!r}") from node.error
        if not done:
            running = ", ".join(str(node) for node in nodes if node.running)
            raise SimulationError(
                f"still running after {timeout_s:g} simulated seconds: {running}\n"
                f"{self.simulation.describe()}"
            )
        return {node.node_id: node.result for node in nodes}

    def kill(self, *node_ids: int) -> None:
        """End nodes like ``kill -9``: they send nothing more, and their connections break.

        Their ``finally`` blocks do run, but can neither wait nor reach other nodes.
        """
        for node in self._named(node_ids):
            self.network.remove(_group(node.node_id))
            self.simulation.kill(_group(node.node_id))
            node.running = False
            self._n_ended += 1

    def freeze(self, *node_ids: int) -> None:
        """Suspend nodes like SIGSTOP; their peers get no notice."""
        for node in self._named(node_ids):
            self.simulation.freeze(_group(node.node_id))

    def thaw(self, *node_ids: int) -> None:
        """Resume frozen nodes."""
        for node in self._named(node_ids):
            self.simulation.thaw(_group(node.node_id))

    def cut(self, one: int, *others: int) -> None:
        """Hold back all messages between a node and others; without others, between it and all.

        Neither side is notified, also not of connections that the other one closes or dials
        meanwhile. :meth:`heal` delivers what has been held back, in order.
        """
        for peer in self._others(one, others):
            self.network.cut(_group(one), _group(peer))

    def heal(self, one: int, *others: int) -> None:
        """Undo :meth:`cut` between a node and others; without others, between it and all."""
        for peer in self._others(one, others):
            self.network.heal(_group(one), _group(peer))

    def disconnect(self, one: int, *others: int) -> None:
        """Break a node's connections to others, or to all; they may reconnect at once."""
        for peer in self._others(one, others):
            self.network.disconnect(_group(one), _group(peer))

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self.simulation.now()

    def run_for(self, seconds: float) -> None:
        """Let the nodes run for a number of simulated seconds."""
        self.simulation.run_for(seconds)

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Let the nodes run until the predicate holds, and return whether it does.

        Args:
            predicate: evaluated after each run of a thread.
            timeout_s: the maximum number of simulated seconds.
        """
        return self.simulation.wait_until(predicate, timeout_s)

    def _live(self, node: ClusterNode) -> None:
        plan = node.plan
        numbers = random.Random(
            derive_seed(self._seed, "cluster", "router", plan.node_id, node.incarnation)
        )
        router = Router(
            node_id=plan.node_id,
            roles=plan.roles,
            labels=plan.labels,
            listen=_in_memory(plan.listen),
            dial=[_in_memory(address) for address in plan.dial],
            key=self._key,
            transport=self.network.transport(_group(plan.node_id)),
            options=self._options,
            clock=self.simulation,
            random_bytes=numbers.randbytes,
            expected_peers=plan.n_peers,
            start_timeout_s=self._start_timeout_s,
        )
        node.router = router
        node.current_node = CurrentNode(
            router=router,
            roles=plan.roles,
            decides_roles=plan.decides,
            labels=plan.labels,
            clock=self.simulation,
            run_token=self._run_token,
            run_roles=plan.run_roles,
            role_index=plan.role_index,
            n_ranks=1 if plan.ranks is None else plan.ranks.size,
        )
        incarnation = node.incarnation
        try:
            with router, running_as(node.current_node):
                result = self._main()
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 (raised by join)
            if node.incarnation == incarnation and node.running:
                node.error, node.running = error, False
        else:
            node.result, node.running = result, False
        self._n_ended += 1

    def _record(self, stream: MemoryStream, content: bytes) -> None:
        """Record the frames that are complete now."""
        reader = self._readers.get(stream)
        if reader is None:
            reader = self._readers[stream] = FrameReader(MAX_FRAME_BYTES)
        source, target = int(stream.peer_host or ""), int(stream.host)
        for raw in frames_in(content, reader):
            kind = type_of(raw).name
            self.tape(Delivered(self.simulation.now(), source, target, kind, len(raw)))

    def _named(self, node_ids: tuple[int, ...]) -> list[ClusterNode]:
        unknown = [node_id for node_id in node_ids if node_id not in self.nodes]
        if unknown:
            raise SimulationError(f"the cluster has no nodes {unknown}; it has {list(self.nodes)}")
        return [self.nodes[node_id] for node_id in node_ids or self.nodes]

    def _others(self, one: int, others: tuple[int, ...]) -> list[int]:
        node_ids = [node.node_id for node in self._named((one, *others))[1:]]
        return node_ids or [node_id for node_id in self.nodes if node_id != one]


def _plans(
    roles: Mapping[str, int] | None, n: int | None, topology: TopologyName
) -> list[NodePlan]:
    assigned = assign_roles(tuple((roles or {}).items()), n)
    return plan_nodes(
        LaunchRequest(
            main="cluster.main",
            roles=assigned if roles else ((),) * len(assigned),
            topology=topology,
            run_dir=_IPC_DIR,
        )
    )


def _group(node_id: int) -> str:
    return str(node_id)


def _in_memory(address: str) -> str:
    """Return the in-memory address that replaces an ipc address."""
    return address.replace("ipc://", "memory://")
