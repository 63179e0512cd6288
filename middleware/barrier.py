"""A barrier: a point in the chain that all processes reach before any continues."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from dmiddleware.metric_names import as_metric_name
from dmiddleware.pipeline import Context, Task
from dmiddleware.pipeline.peers import ENDED
from dmiddleware.router.protocol.membership import SAID_GOODBYE
from dmiddleware.settings import Positive, Settings, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.exchange.events import REACHED
from middleware.exchange.waiting import Waiting

__all__ = ["Barrier", "BarrierSettings"]


class BarrierSettings(Settings):
    """The options of :class:`Barrier`."""

    name: str = "barrier"
    """The name of the barrier, if a chain has several."""
    timeout_s: Positive = 60.0
    """How long to wait while no missing node is reachable, or all of them wait too."""


class Barrier(BaseMiddleware[Context], TakesSettings[BarrierSettings]):
    """Wait until all processes of the run have reached this point of the chain equally often.

    All connected processes take part, also those that are connected through another one only, like
    the collectors of a star. Each of them needs the barrier in its chain.

    A process that joins later or is restarted continues with the count of the others; it may pass
    once more before it has caught up. A process that has left is not waited for. A process that
    has lost its connections to all others waits until one of them is back.

    Args:
        settings: the options, each by keyword; see :class:`BarrierSettings`.

    Raises:
        ConfigError: if an option is not valid.
        WaitTimeout: at the deadline; the message names the missing nodes.
    """

    settings: BarrierSettings

    @takes_options(BarrierSettings)
    def __init__(self, settings: BarrierSettings) -> None:
        self.settings = settings
        self._side: BarrierSide | None = None

    def setup(self, task: Task[Any]) -> None:
        """Ask the other processes how often they have reached the barrier."""
        if task.router is not None:
            self._side = BarrierSide(task, self.settings.name, timeout_s=self.settings.timeout_s)

    def __call__(self, ctx: Context) -> None:
        """Wait for the other processes."""
        if self._side is not None:
            blocked_s = self._side.wait()
            ctx.log(f"exchange/{as_metric_name(self.settings.name)}_blocked_s", blocked_s)


class BarrierSide:
    """The part of a :class:`Barrier` in one of several processes.

    Args:
        task: the task, which has a router.
        name: the barrier's name.
        timeout_s: how long to wait while no missing node is reachable, or all of them wait too.
    """

    def __init__(self, task: Task[Any], name: str, *, timeout_s: float) -> None:
        self._name = name
        self._waiting = waiting = Waiting(task, timeout_s=timeout_s, needs_learner=False)
        self._arrivals = arrivals = Arrivals(waiting.router.node_id, secrets.token_hex(8))

        def on_reached(name: str, sender: int, *arrival: Any) -> None:
            if name == self._name:
                self._update(lambda: arrivals.receive(sender, Arrival(*arrival)))

        def on_left(node_id: int, *_: Any, **__: Any) -> None:
            self._update(lambda: arrivals.disconnect(node_id))

        def on_joined(node_id: int, *, new_incarnation: bool = True, **_: Any) -> None:
            if node_id in task.participants():
                self._update(lambda: arrivals.connect(node_id, is_new=new_incarnation))

        task.on(REACHED, on_reached)
        task.on("node.left", on_left)
        task.on(ENDED, on_left)
        task.on("node.joined", on_joined)
        task.on("node.rejoined", on_joined)
        peers = task.participants()
        self._update(lambda: arrivals.announce(peers))

    def wait(self) -> float:
        """Arrive, and wait for the others; return how long, in seconds."""
        # The events of the newest connections may not have been handled yet.
        peers = self._waiting.task.participants()
        self._update(lambda: self._arrivals.arrive(peers))
        with self._waiting.changed:
            return self._waiting.until(
                lambda: not self._missing(),
                missing=lambda: (
                    f"node(s) {', '.join(map(str, self._missing()))} at barrier {self._name!r}"
                ),
                awaited=self._reachable,
            )

    def _update(self, change: Callable[[], ToSend]) -> None:
        """Apply a change with the lock held, and send what it returns without the lock."""
        waiting = self._waiting
        with waiting.changed:
            to_send = change()
            waiting.changed.notify_all()
        sender = waiting.router.node_id
        for arrival, targets in to_send:
            waiting.task.emit(REACHED, self._name, sender, *arrival, only_remote=True, to=targets)

    def _missing(self) -> list[int]:
        if not self._arrivals.own.peers:
            reasons = self._waiting.outlook.left.items()
            return sorted(node_id for node_id, why in reasons if not why.startswith(SAID_GOODBYE))
        return self._arrivals.missing()

    def _reachable(self) -> list[int]:
        """Return the missing nodes that are alive, or that a connected node knows."""
        missing, connected = self._missing(), self._arrivals.own.peers
        alive = self._waiting.task.participants()
        return [
            node_id
            for node_id in missing
            if node_id in alive or (connected and node_id not in connected)
        ]


class Arrival(NamedTuple):
    """How often one process has reached a barrier, and its connections.

    Attributes:
        node_id: its node id.
        token: identifies the process among those with the same node id.
        number: a newer arrival of the same node id has a larger number.
        n_times: how often it has reached the barrier.
        peers: the nodes that it is connected to.
    """

    node_id: int
    token: str
    number: int
    n_times: int
    peers: tuple[int, ...]

    @property
    def order(self) -> tuple[int, str]:
        """Orders the arrivals of a node; the token decides between two processes."""
        return self.number, self.token


ToSend: TypeAlias = "list[tuple[Arrival, tuple[int, ...]]]"
"""Arrivals, each with the peers to send it to."""


class Arrivals:
    """The newest arrival of each node, as one process knows them. Pure: no lock, no sending.

    A process sends its own arrivals to its peers. They pass them on to those of their peers that
    the first process is not connected to, so every process knows the arrivals and connections of
    the whole run, in every topology.

    Args:
        node_id: this node.
        token: identifies this process.

    Attributes:
        own: the newest arrival of this process.
    """

    def __init__(self, node_id: int, token: str) -> None:
        self.own = Arrival(node_id, token, 1, 0, ())
        self._others: dict[int, Arrival] = {}

    def announce(self, peers: Iterable[int]) -> ToSend:
        """Ask the connected peers for their arrivals, with which this process continues."""
        self._change(peers=self._with(peers))
        return [(self.own, self.own.peers)]

    def arrive(self, peers: Iterable[int]) -> ToSend:
        """Note that this process has reached the barrier, and which peers are connected."""
        n_times = max(self.own.n_times + 1, *self._counts().values())
        return self._change(n_times=n_times, peers=self._with(peers))

    def connect(self, node_id: int, *, is_new: bool) -> ToSend:
        """Note that a peer has connected; ``is_new``: as a process that has not arrived yet."""
        if is_new:
            self._reset([node_id])
        to_send = self._change(peers=self._with([node_id]))
        # A connection that was interrupted may have lost arrivals.
        missed = () if is_new else self._others.values()
        to_send += [(arrival, (node_id,)) for arrival in missed]
        return to_send or [(self.own, (node_id,))]

    def disconnect(self, node_id: int) -> ToSend:
        """Note that a peer has disconnected."""
        return self._change(peers=tuple(peer for peer in self.own.peers if peer != node_id))

    def receive(self, sender: int, arrival: Arrival) -> ToSend:
        """Store an arrival that a peer has sent."""
        node_id = arrival.node_id
        if node_id == self.own.node_id:
            if arrival.token == self.own.token or arrival.order < self.own.order:
                return []
            # From an earlier process of this node, after whose numbers those of this one continue.
            return self._change(number=arrival.number + 1)
        previous = self._others.get(node_id)
        is_new = previous is None or previous.token != arrival.token
        to_send: ToSend = []
        if is_new and sender == node_id:
            # A new process has missed what was sent before.
            missed = (self.own, *self._others.values())
            to_send = [
                (missed_arrival, (sender,))
                for missed_arrival in missed
                if missed_arrival.n_times or missed_arrival is previous
            ]
        is_back = previous is not None and arrival.order == previous.order and not previous.n_times
        if previous is not None and arrival.order <= previous.order and not is_back:
            # A new process may not know the numbers of the one before.
            return [(previous, (sender,))] if is_new and sender != node_id else to_send
        before = self._counts().keys()
        self._others[node_id] = arrival
        self._reset(before - self._counts().keys())
        reached = {sender, *arrival.peers}
        targets = tuple(peer for peer in self.own.peers if peer not in reached)
        # A new process that has not arrived yet is news only where an earlier one is known.
        if targets and (arrival.n_times or previous is not None):
            to_send.append((arrival, targets))
        return to_send

    def missing(self) -> list[int]:
        """Return the nodes of the run that have reached the barrier less often than this node."""
        return sorted(node for node, count in self._counts().items() if count < self.own.n_times)

    def _change(self, **changes: Any) -> ToSend:
        """Change this process's own arrival; the others are notified after the first one."""
        before = self._counts().keys()
        self.own = self.own._replace(**{"number": self.own.number + 1, **changes})
        self._reset(before - self._counts().keys())
        return [(self.own, self.own.peers)] if self.own.n_times else []

    def _with(self, peers: Iterable[int]) -> tuple[int, ...]:
        return tuple({*self.own.peers, *peers})

    def _counts(self) -> dict[int, int]:
        """Return the counts of this node and of all that it is connected to, also indirectly."""
        counts: dict[int, int] = {}
        node_ids = [self.own.node_id]
        while node_ids:
            node_id = node_ids.pop()
            if node_id in counts:
                continue
            arrival = self.own if node_id == self.own.node_id else self._others.get(node_id)
            counts[node_id] = 0 if arrival is None else arrival.n_times
            node_ids += () if arrival is None else arrival.peers
        return counts

    def _reset(self, node_ids: Iterable[int]) -> None:
        """Discard the counts of nodes that have left; the same arrival counts if it comes again."""
        for node_id in node_ids:
            if (arrival := self._others.get(node_id)) is not None:
                self._others[node_id] = arrival._replace(n_times=0, peers=())
