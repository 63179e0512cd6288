"""A host whose nodes do what a test says, and a clock that moves only when it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from dmiddleware.launch.child import Child
from dmiddleware.launch.hosts.interface import Ended, HostEvent, Reported, Started
from dmiddleware.launch.plan import NodeConfig, NodePlan, RunPlan
from dmiddleware.launch.status import NodeStatus
from dmiddleware.launch.supervisor import Supervisor, SupervisorOptions

__all__ = ["Notes", "ScriptedHost", "failed", "finished", "running", "supervised"]


class ScriptedHost:
    """Reports what happens at which second, and kills nodes when it is asked to.

    Args:
        script: the second and what happens then, in order; a number instead of an event is the
            length of a pause of the launcher, which begins then.
        lives_s: after how many seconds a test has waited in vain.

    Attributes:
        now: the time.
        starts: the nodes that were started, in order.
        killed: the nodes that were killed, and when.
        stopped: the nodes that were asked to stop.
    """

    def __init__(
        self, script: Sequence[tuple[float, HostEvent | float]], *, lives_s: float = 1000.0
    ) -> None:
        self.now = 0.0
        self.starts: list[int] = []
        self.killed: dict[int, float] = {}
        self.stopped: list[int] = []
        self._script = deque(script)
        self._next: list[HostEvent] = []
        self._lives_s = lives_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def start(self, config: NodeConfig, *, n_restarts: int) -> None:
        self.starts.append(config.plan.node_id)
        self._next.append(Started(config.plan.node_id, "process 1"))

    def events(self, timeout_s: float) -> Iterator[HostEvent]:
        self.now += timeout_s
        assert self.now < self._lives_s, "the run has not ended"
        while self._script and self._script[0][0] <= self.now:
            _, event = self._script.popleft()
            if isinstance(event, float):
                self.now += event
            else:
                self._next.append(event)
        events, self._next = self._next, []
        yield from events

    def stop(self, node_id: int, reason: str) -> None:
        self.stopped.append(node_id)

    def kill(self, node_id: int) -> None:
        self.killed[node_id] = self.now
        self._next.append(Ended(node_id, -9))

    def dump_stacks(self, node_id: int) -> None:
        pass

    def leave(self, reason: str, timeout_s: float) -> None:
        pass


@dataclass
class Notes:
    """A display that keeps the notes."""

    notes: list[str] = field(default_factory=list)

    def line(self, child: Child, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, children: Sequence[Child]) -> None: ...


def running(
    node_id: int, *, is_over: bool = False, idle_s: float = 0.0, peers: Sequence[str] = ("learner",)
) -> Reported:
    """Return the report of a node that runs.

    Args:
        node_id: the node.
        is_over: whether it knows that the run is over.
        idle_s: seconds since it made progress.
        peers: the roles of its peers.
    """
    status = NodeStatus(
        phase="running",
        step=5,
        idle_s=idle_s,
        run_is_over=is_over,
        reason="all done" if is_over else "",
        peers={100 + number: (role,) for number, role in enumerate(peers)},
    )
    return Reported(node_id, status)


def finished(node_id: int) -> list[Reported | Ended]:
    """Return how a node ends that has stopped with the run."""
    status = NodeStatus(phase="finished", step=9, run_is_over=True, reason="all done")
    return [Reported(node_id, status), Ended(node_id, 0)]


def failed(
    node_id: int, error: str = "ValueError: bad", *, step: int = 5
) -> list[Reported | Ended]:
    """Return how a node ends that has failed."""
    status = NodeStatus(phase="failed", step=step, error=error)
    return [Reported(node_id, status), Ended(node_id, 1)]


def supervised(
    host: ScriptedHost, nodes: Sequence[NodePlan], options: SupervisorOptions
) -> tuple[int, list[str]]:
    """Run a supervisor until it ends; return its exit code, and its notes and conclusion."""
    display = Notes()
    supervisor = Supervisor(
        [NodeConfig(run=RunPlan(nodes=(node,)), main="program.main", package="") for node in nodes],
        host=host,
        options=options,
        display=display,
        now=lambda: host.now,
    )
    with host:
        code = supervisor.run()
    return code, [*display.notes, *supervisor.conclusion]
