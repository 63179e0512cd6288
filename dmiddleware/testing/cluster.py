"""A cluster: one program as several nodes, in one process and in simulated time."""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from dmiddleware.launch.plan import LaunchRequest, NodePlan, assign_roles, plan_nodes
from dmiddleware.pipeline import CurrentNode, running_as
from dmiddleware.router import NodeOptions, Router
from dmiddleware.router.protocol.topology import TopologyName
from dmiddleware.router.transport.memory import MemoryNetwork
from dmiddleware.router.wire.frame import type_of
from dmiddleware.seeding import derive_seed, seed_libraries
from dmiddleware.testing.simulated_threads import Killed, SimulatedThread, SimulationError
from dmiddleware.testing.simulation import Simulation
from dmiddleware.testing.tape import Tape

__all__ = ["Cluster", "ClusterNode", "Delivered"]

_IPC_DIR: Final = Path("cluster")
_KEY_BYTES: Final = 32


class Delivered(NamedTuple):
    """A message that arrived.

    Attributes:
        at_s: when, in simulated seconds.
        source: the node that sent it.
        target: the node that got it.
        kind: what it was for: ``"DATA"``, ``"POLL"``, ``"ACK"``, ``"HEARTBEAT"``, …
        size: its bytes.
    """

    at_s: float
    source: int
    target: int
    kind: str
    size: int


@dataclass(eq=False, slots=True)
class ClusterNode:
    """One node of a cluster, through all its lives.

    Attributes:
        plan: what it is to do.
        incarnation: how many lives it has begun.
        router: that of its present or last life.
        current_node: what its program runs as, in its present or last life.
        result: what the program has returned; None before.
        error: what the program has raised; None if nothing.
        running: whether the program is at work.
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
        roles = ", ".join(self.plan.roles) or "all roles"
        return f"node {self.node_id} ({roles})"


class Cluster:
    """Runs one program as several nodes, as ``ditask`` does, in one process and simulated time.

    Every node has threads and a router of its own, and the program runs in it as it would in a
    process of its own: ``Task(ctx)`` joins the network. All of it is one
    :class:`~dmiddleware.testing.Simulation`: one thread runs at a time, waiting takes no real
    time, and the same seed gives the same run, message by message. So failures of many nodes can be
    tested in seconds, and one that was seen once can be seen again.

    The nodes share the process's memory, and the libraries' global random generators, which are
    seeded at the start. What waits by other means than its task's clock (a process pool, real
    sockets) holds up the simulation, but not its clock.

    Args:
        main: the program; called without arguments in each node.
        roles: how many nodes play each role, as for ``ditask --roles``.
        n: how many nodes there are, if ``roles`` does not say it; these have no roles, so each
            runs all of its chain.
        topology: who dials whom: ``mesh`` or ``star``.
        seed: decides the order of the threads, the delays, and what is random in the routers.
        delay_s: the least and the most seconds that a message takes; each takes another time.
        options: bounds and times of the routers.
        stamp: what all nodes take the run for, and no other run; see
            :class:`~dmiddleware.pipeline.CurrentNode`. Empty: a word that is never given twice.
        start_timeout_s: how long a task waits for its peers before its first step.
        patience_s: real seconds after which a thread that computes counts as stuck.
        find_missed: look for threads that should have been notified; see
            :class:`~dmiddleware.testing.Simulation`.

    Raises:
        LaunchError: if roles and number do not go together.
        SimulationError: from whatever lets the nodes run; see
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
        stamp: str = "",
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
        self._seed = seed
        self._options = options
        self._stamp = stamp or secrets.token_hex(8)
        self._start_timeout_s = start_timeout_s
        delays = random.Random(derive_seed(seed, "cluster", "delays"))
        self.network = MemoryNetwork(
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
        """Kill the nodes that still run."""
        self.simulation.__exit__(kind, error, traceback)

    # Nodes ------------------------------------------------------------------------------------

    def run(self, *, timeout_s: float = 86_400.0) -> dict[int, Any]:
        """Start all nodes, wait until their programs are done, and return their results.

        Raises:
            SimulationError: if a program raises; or if one is not done after so many simulated
                seconds, with where each thread waits.
        """
        self.start()
        return self.join(timeout_s=timeout_s)

    def start(self, *node_ids: int) -> None:
        """Start nodes, or start them again in a new life; without arguments, all."""
        for node in self._named(node_ids):
            if node.running:
                raise SimulationError(f"{node} runs already; kill it before starting it again")
            node.incarnation += 1
            node.running = True
            node.result = node.error = None
            node.thread = self.simulation.spawn(
                functools.partial(self._live, node), name="main", group=_group(node.node_id)
            )

    def join(self, *node_ids: int, timeout_s: float = 86_400.0) -> dict[int, Any]:
        """Wait until programs are done, and return their results; without arguments, all.

        Raises:
            SimulationError: if one of them raises; or if one is not done after so many simulated
                seconds, with where each thread waits.
        """
        nodes = self._named(node_ids)
        done = self.wait_until(
            lambda: any(node.error for node in nodes) or not any(node.running for node in nodes),
            timeout_s,
        )
        for node in nodes:
            if node.error is not None:
                raise SimulationError(f"{node} failed: {node.error!r}") from node.error
        if not done:
            running = ", ".join(str(node) for node in nodes if node.running)
            raise SimulationError(
                f"after {timeout_s:g} simulated seconds {running} had not ended:\n"
                f"{self.simulation.describe()}"
            )
        return {node.node_id: node.result for node in nodes}

    def kill(self, *node_ids: int) -> None:
        """End nodes as ``kill -9`` would: no goodbye, nothing more is sent, connections break.

        Their ``finally`` blocks do run, but can wait for nothing and reach no one.
        """
        for node in self._named(node_ids):
            self.network.remove(_group(node.node_id))
            self.simulation.kill(_group(node.node_id))
            node.running = False

    def freeze(self, *node_ids: int) -> None:
        """Let nodes stand still, as SIGSTOP would; their peers are not told."""
        for node in self._named(node_ids):
            self.simulation.freeze(_group(node.node_id))

    def thaw(self, *node_ids: int) -> None:
        """Let nodes go on."""
        for node in self._named(node_ids):
            self.simulation.thaw(_group(node.node_id))

    # Links ------------------------------------------------------------------------------------

    def cut(self, one: int, *others: int) -> None:
        """Let nothing through between a node and others; without others, between it and all."""
        for other in self._others(one, others):
            self.network.cut(_group(one), _group(other))

    def heal(self, one: int, *others: int) -> None:
        """Let messages through again between a node and others; without others, and all."""
        for other in self._others(one, others):
            self.network.heal(_group(one), _group(other))

    def disconnect(self, one: int, *others: int) -> None:
        """Break a node's connections to others, or to all; they may connect anew at once."""
        for other in self._others(one, others):
            self.network.disconnect(_group(one), _group(other))

    # Time -------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return self.simulation.now()

    def run_for(self, seconds: float) -> None:
        """Let the nodes run for so many simulated seconds."""
        self.simulation.run_for(seconds)

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Let the nodes run until something holds, and tell whether it does.

        Args:
            predicate: called whenever a thread has run.
            timeout_s: the most simulated seconds.
        """
        return self.simulation.wait_until(predicate, timeout_s)

    # Within -----------------------------------------------------------------------------------

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
            incarnation=node.incarnation,
            random_bytes=numbers.randbytes,
            expected_peers=plan.n_peers,
            start_timeout_s=self._start_timeout_s,
        )
        node.router = router
        node.current_node = CurrentNode(
            router=router,
            roles=plan.roles,
            labels=plan.labels,
            clock=self.simulation,
            stamp=self._stamp,
            run_roles=plan.run_roles,
        )
        life = node.incarnation
        try:
            with router, running_as(node.current_node):
                result = self._main()
        except Killed:
            raise
        except BaseException as error:  # noqa: BLE001 (raised by who joins the node)
            if node.incarnation == life and node.running:
                node.error, node.running = error, False
        else:
            node.result, node.running = result, False

    def _record(self, source: str, target: str, raw: memoryview) -> None:
        self.tape(
            Delivered(
                self.simulation.now(),
                int(source),
                int(target),
                type_of(raw).name,
                len(raw),
            )
        )

    def _named(self, node_ids: tuple[int, ...]) -> list[ClusterNode]:
        unknown = [node_id for node_id in node_ids if node_id not in self.nodes]
        if unknown:
            raise SimulationError(f"the cluster has the nodes {list(self.nodes)}, not {unknown}")
        return [self.nodes[node_id] for node_id in node_ids or self.nodes]

    def _others(self, one: int, others: tuple[int, ...]) -> list[int]:
        named = [node.node_id for node in self._named((one, *others))[1:]]
        return named or [node_id for node_id in self.nodes if node_id != one]


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
    """Return the address in memory that stands for one of ipc."""
    return address.replace("ipc://", "memory://")
