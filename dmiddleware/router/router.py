"""The router: one node of the network, with its threads, clock and transport."""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from dmiddleware.errors import (
    RouterError,
    RouterStateError,
    TopologyError,
    WaitTimeout,
)
from dmiddleware.event_names import base_name, scoped_name, task_number
from dmiddleware.event_values import Adapter
from dmiddleware.pipeline import Clock, Event, Patience, Running, SystemClock
from dmiddleware.pipeline.event_bus import Accept, PeerTask
from dmiddleware.router import transport as transports
from dmiddleware.router.protocol.counters import EventTraffic, PeerTraffic
from dmiddleware.router.protocol.handshake import INSTANCE_SIZE, Identity
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.peer import READY_EVENT, Peer
from dmiddleware.router.protocol.topology import check_address, is_loopback
from dmiddleware.router.runtime.connections import Connections
from dmiddleware.router.runtime.engine import Engine
from dmiddleware.router.transport.shared_memory import SharedMemory
from dmiddleware.router.transport.stream import Transport
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import SUBSCRIPTIONS_EVENT, EncodedEvent
from dmiddleware.run_key import check_key

__all__ = ["Router"]

_logger = logging.getLogger(__name__)

GOODBYE_S: Final = 2.0
"""How long closing waits until the peers have received a goodbye."""

CHECK_S: Final = 0.2
"""How often a wait checks whether the task has been stopped."""

SUSPEND_S: Final = 1.0
"""How long a router that is suspended may take to deliver what it has accepted."""


class Router:
    """Carries events between this process and its peers.

    Use it as a context manager and pass it to a task: ``Task(ctx, router=router)``. In addition to
    the peers' events, handlers receive ``node.joined(node_id, roles)``,
    ``node.left(node_id, reason)``, ``node.rejoined(node_id, new_incarnation)`` and
    ``node.forgotten(node_id, undelivered)``.

    Args:
        node_id: this process's number, unique in the run.
        run_id: nodes of different runs refuse each other.
        roles: the roles of this process, announced to peers.
        labels: arbitrary labels, announced to peers.
        listen: the address to listen on; empty: peers cannot dial this node.
        advertise: the address that peers dial, if it differs from ``listen``, as with NAT.
        dial: addresses of peers to dial; the peers may start later.
        key: the run's secret key; without one only loopback addresses are allowed.
        transport: moves the bytes; None: nng without certificates, for ipc and tcp.
        shared_memory: carries large arrays to and from peers of this host that have the same
            folder; None: everything goes over the transport. It is closed with the router.
        options: limits and timeouts.
        clock: times deadlines and starts the threads.
        random_bytes: returns the given number of unpredictable bytes; replaced in tests only.
        adapters: for types beyond the built-in ones.
        pickle: ``(dumps, loads)`` for values that nothing else can encode; both ends must opt in.
        expected_peers: how many peers must be ready before the task's first step.
        start_timeout_s: how long the first step waits for peers that are not connected, and how
            long a peer may refuse this node before the router fails.

    Raises:
        TopologyError: if an address is not valid, or is reachable from other hosts without a key;
            or if the run id, roles and labels are too long.
        ConfigError: if the key can be guessed; see :func:`dmiddleware.run_key.check_key`.
    """

    def __init__(
        self,
        *,
        node_id: int = 0,
        run_id: str = "run",
        roles: Iterable[str] = (),
        labels: Iterable[str] = (),
        listen: str = "",
        advertise: str = "",
        dial: Sequence[str] = (),
        key: bytes | None = None,
        transport: Transport | None = None,
        shared_memory: SharedMemory | None = None,
        options: NodeOptions | None = None,
        clock: Clock | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        adapters: Iterable[Adapter] = (),
        pickle: tuple[Callable[[Any], bytes], Callable[[bytes], Any]] | None = None,
        expected_peers: int = 0,
        start_timeout_s: float = 60.0,
    ) -> None:
        for address in dial:
            check_address(address)
        if listen:
            check_address(listen, any_port=True)
        if advertise:
            check_address(advertise)
        reachable = next(
            (address for address in (listen, advertise) if address and not is_loopback(address)), ""
        )
        if reachable and key is None:
            raise TopologyError(
                f"{reachable} can be reached from other hosts, but the router has no key; give all "
                "nodes of the run the same key, from a file or the environment"
            )
        if key is not None:
            check_key(key, source="Router(key=…)")
        if clock is None:
            clock = SystemClock()
        self._identity = Identity(
            run_id, str(node_id), random_bytes(INSTANCE_SIZE), tuple(roles), tuple(labels)
        )
        try:
            self._identity.check()
        except ValueError as error:
            raise TopologyError(f"peers would refuse node {node_id}: {error}") from error
        self._node_id = node_id
        self._expected_peers = expected_peers
        self._start_timeout_s = start_timeout_s
        self._node = NodeProtocol(
            self._identity,
            key,
            options=options if options is not None else NodeOptions(),
            nonce=lambda: random_bytes(32),
            session_number=lambda: (int.from_bytes(random_bytes(8), "little") >> 2) + 1,
        )
        self._engine = Engine(
            self._node,
            codec=Codec(adapters, pickle=pickle),
            clock=clock,
            memory=shared_memory,
        )
        self._memory = shared_memory
        self._connections = Connections(
            self._engine,
            transport if transport is not None else transports.NngStreamTransport(),
            memory=shared_memory,
            start_timeout_s=start_timeout_s,
        )
        self._listen_address = listen
        self._advertise = advertise
        self._dial_addresses = tuple(dict.fromkeys(dial))
        self._pid = os.getpid()
        self._subscribed: dict[str, bool] = {}
        self._hold_until: float | None = math.inf
        self._task = self._newest_task = 1
        self._node.hold(self._is_early)
        self._threads: list[Running] = []
        self._started = False
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        in_order = error is None and self._node.accepting
        self.close(deadline_s=5.0 if in_order else 1.0, goodbye=in_order)

    def start(self) -> None:
        """Listen and dial; peers may start in any order. Calling it twice is allowed.

        Raises:
            TransportError: if the transport cannot listen on the address; you may retry.
            RouterStateError: if the router is closed.
        """
        self._check_process()
        if self._started:
            return
        if self._listen_address:
            self._connections.listen(self._listen_address)
        self._started = True
        if self._hold_until == math.inf:
            self._hold_until = self._engine.clock.now() + self._start_timeout_s
        try:
            for work, name in (
                (self._tick_forever, "router-tick"),
                (self._engine.receiver.run, "router-deliver"),
            ):
                self._threads.append(
                    self._engine.clock.spawn(partial(self._guard, work), name=name)
                )
        except BaseException:
            self.close(deadline_s=0.0, goodbye=False)
            raise
        for address in self._dial_addresses:
            self._connections.dial(address)

    def dial(self, address: str) -> None:
        """Dial one more peer, and reconnect whenever it comes back.

        Calling it twice is allowed. Before :meth:`start`, dialing is delayed until then.

        Raises:
            TopologyError: if the address is not valid.
            RouterStateError: if the router is closed.
        """
        check_address(address)
        self._check_process()
        if address in self._dial_addresses:
            return
        self._dial_addresses += (address,)
        if self._started:
            with self._engine.lock:
                if self._node.closing:
                    raise RouterStateError("the router is closed; create a new one")
                self._connections.dial(address)

    def redial(self, old: str, new: str) -> None:
        """Dial a peer at another address from now on, because it was restarted elsewhere.

        Args:
            old: the address that was dialed; nothing happens if none was.
            new: the new address.

        Raises:
            TopologyError: if the new address is not valid.
            RouterStateError: if the router is closed.
        """
        if old == new or old not in self._dial_addresses:
            return
        check_address(new)
        self._check_process()
        self._dial_addresses = tuple(address for address in self._dial_addresses if address != old)
        self._connections.stop_dialing(old)
        self.dial(new)

    def close(self, *, deadline_s: float = 5.0, goodbye: bool = True) -> dict[int, int]:
        """Deliver what was accepted, say goodbye, and end all threads. May be called twice.

        Peers drop what is waiting for a node that says goodbye, and send it nothing more. Without a
        goodbye they keep it for the process that replaces this one. A ``with`` block that raises,
        and one after :meth:`suspend`, close without a goodbye.

        Args:
            deadline_s: how long to wait for peers to accept what is waiting for them.
            goodbye: whether no other process will replace this one.

        Returns:
            The number of accepted reliable events that each peer has not received, including those
            that were dropped because the peer said goodbye or was gone for too long; empty if
            everything was delivered.
        """
        if self._closed or not self._started:
            self._closed = True
            return {}
        self._check_process()
        engine, node = self._engine, self._node
        with engine.lock:
            if goodbye:
                # A peer that has just accepted this node would see a broken connection.
                engine.clock.wait_for(
                    engine.room, lambda: self._connections.is_settled, min(deadline_s, GOODBYE_S)
                )
            node.closing = True
            node.accepting &= goodbye
            node.drain()
        engine.flush()
        with engine.lock:
            engine.clock.wait_for(engine.room, self._is_flushed, deadline_s)
            waiting = {
                int(peer.node_id): peer.outgoing.undelivered.total() for peer in node.peers.values()
            }
            dropped = {int(name): lost.total() for name, lost in node.undelivered.items()}
            if goodbye:
                node.say_goodbye()
        if any(waiting.values()):
            _logger.warning(
                "closed the router with undelivered events (number by node: %s); the peers did not "
                "accept them within %g s, pass a longer deadline_s to close() to wait for them",
                {node_id: count for node_id, count in waiting.items() if count},
                deadline_s,
            )
        if goodbye:
            self._wait_for_goodbyes(min(deadline_s, GOODBYE_S))
        with engine.lock:
            self._closed = True
            engine.end()
        self._connections.close()
        if self._memory is not None:
            self._memory.close()
        for thread in self._threads:
            if not thread.is_current():
                thread.join(5.0)
        undelivered = Counter(waiting) + Counter(dropped)
        return {node_id: undelivered[node_id] for node_id in sorted(undelivered)}

    @property
    def node_id(self) -> int:
        """The number of this process in the run."""
        return self._node_id

    @property
    def incarnation(self) -> int:
        """How this process orders among all that have used its node id.

        The peers agree on it: a new process gets a larger number than any that they know. It may
        grow when another peer connects, which knew of more processes.
        """
        with self._engine.lock:
            return self._node.incarnation

    @property
    def labels(self) -> Collection[str]:
        """The labels of this process."""
        return self._identity.labels

    @property
    def address(self) -> str:
        """Where peers can dial; empty if this node does not listen."""
        address = self._connections.address
        return address and (self._advertise or address)

    def attach(self, accept: Accept) -> None:
        """Set the function that receives each event.

        Args:
            accept: called with the event's name, its arguments, what to call when it was handled
                (with True, or with False if this program will not handle it; in the events' order;
                None unless the sender waits for it) and whether to wait for room. Returns False if
                the queue is full; the event is then passed again, in a thread that may wait.
        """
        with self._engine.lock:
            self._node.accepting = True
        self._engine.receiver.attach(accept)
        self._check_held()

    def suspend(self) -> None:
        """Accept no more events until :meth:`attach` is called; the peers keep them meanwhile.

        For a program that fails and may be restarted: what peers emit from now on waits for the
        process that replaces this one, and :meth:`subscribe` no longer changes what they send.
        Returns when what was accepted before has been delivered, or after a second.
        """
        with self._engine.lock:
            self._node.accepting = False
        self._engine.receiver.deliver_ready()
        with self._engine.lock:
            self._engine.receiver.wait_until_delivered(SUSPEND_S)

    def subscribe(self, name: str, *, active: bool) -> None:
        """Start, or stop, receiving an event from the peers."""
        with self._engine.lock:
            self._note_subscription(name, active)
            if self._node.accepting:
                self._node.subscriptions.subscribe(
                    name for name, is_active in self._subscribed.items() if is_active
                )
        self._check_held()
        self._engine.flush()

    def emit(
        self,
        event: Event,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        to: Collection[int] | None = None,
    ) -> None:
        """Send an event to the peers that subscribe to it, under its delivery contract.

        Returns once the event is accepted; the router delivers it from there. The newest ``latest``
        event of each name is kept and also sent to later subscribers, unless it is for named peers.

        Args:
            event: the event.
            args: positional arguments for the handlers.
            kwargs: keyword arguments for the handlers.
            to: node ids of the only peers that may receive it; None: all peers. Peers that have not
                subscribed to the event do not receive it.

        Raises:
            NoSubscriber: if the event is required, and no peer, or not each of ``to``, has
                subscribed to it; nothing was sent.
            DeliveryTimeout: if a peer had no room for a reliable event until the deadline.
            RouterStateError: if the router is closed.
            RouterError: if this node has failed, for example because a peer refused it.
            EncodeError: if an argument cannot be encoded.
            FrameTooLarge: if the event is larger than peers accept.
        """
        self._check_process()
        self._engine.emit(event, args, kwargs, to)

    def peers(self) -> list[Identity]:
        """Return the identities of the connected peers."""
        with self._engine.lock:
            return self._node.connected_peers()

    def peer_ids(self) -> list[int]:
        """Return the node ids of the connected peers, sorted."""
        return sorted(int(identity.node_id) for identity in self.peers())

    def subscribers(self, name: str, *, timeout_s: float = 0.0) -> list[int]:
        """Return the node ids of the peers that subscribe to an event, sorted.

        Args:
            name: the event.
            timeout_s: how long to wait for connected peers that have announced nothing yet.
        """
        engine, node = self._engine, self._node
        with engine.lock:
            engine.clock.wait_for(engine.members, self._have_peers_announced, timeout_s)
            return sorted(int(node_id) for node_id in node.subscriptions.subscribers(name))

    def wait_for_peers(
        self, count: int, *, timeout_s: float, events: Collection[str] = ()
    ) -> list[Identity]:
        """Wait until at least ``count`` peers are connected and have announced subscriptions.

        Args:
            count: how many peers.
            timeout_s: how long to wait, in seconds.
            events: names of the events that each of them must have subscribed to; peers may
                subscribe after they have connected, and receive nothing that was emitted before.

        Raises:
            WaitTimeout: if they are not in time; the error names the connected peers.
            RouterError: if a peer refused this node.
        """

        def announced() -> set[str]:
            return {
                peer.node_id
                for peer in self._node.peers.values()
                if peer.has_announced and all(map(peer.has_announced_event, events))
            }

        state = f"subscribed to {', '.join(events)}" if events else "became ready"
        return self._wait_for(count, announced, timeout_s, state=state)

    def wait_until_ready(
        self, *, stopped: Callable[[], bool] = lambda: False, task: int = 1
    ) -> bool:
        """Wait until the peers are ready to receive the events of a task.

        Before the first task, these are all expected peers; before a later one, those that are
        connected. Peers that are connected but not ready are waited for without a deadline: they
        may take long to start, or to end the task before.

        Args:
            stopped: called a few times a second; True ends the wait.
            task: the number of the task in this program.

        Returns:
            False if the task is over, because all peers have gone on to a later one.

        Raises:
            WaitTimeout: if expected peers do not connect in time; the error names those that do.
            RouterError: if a peer refused this node.
        """
        self._announce_ready(task)
        self._hold_until = 0.0
        self._check_held()
        self._engine.flush()
        try:
            self._wait_for_task(task, stopped)
        except WaitTimeout:
            with self._engine.lock:
                refusals = list(self._engine.refusals.values())
            if not refusals:
                raise
            self._engine.fail(refusals[0])
            raise refusals[0] from None
        with self._engine.lock:
            peers = [peer for peer in self._connected() if peer.has_announced]
            return not peers or any(peer.ready_for <= task for peer in peers)

    def peer_tasks(self, sign: str) -> dict[int, PeerTask]:
        """Return in which of their tasks the connected peers are, by node id.

        Args:
            sign: the event that a peer subscribes to as long as it takes part in a certain task.
        """
        with self._engine.lock:
            return {
                int(peer.node_id): PeerTask(peer.roles, peer.ready_for, peer.subscribes_to(sign))
                for peer in self._connected()
            }

    def peer_roles(self) -> dict[int, tuple[str, ...]]:
        """Return the roles of the connected peers by node id.

        Those that its program has given to a peer are among them.
        """
        with self._engine.lock:
            return {int(peer.node_id): peer.roles for peer in self._connected()}

    def traffic(self) -> dict[str, EventTraffic]:
        """Return the counters of each event."""
        with self._engine.lock:
            traffic = self._engine.traffic.snapshot()
            for lost in self._node.undelivered.values():
                for event, count in lost.items():
                    traffic[event].undelivered += count
        return traffic

    def peer_traffic(self) -> dict[int, PeerTraffic]:
        """Return the counters of each peer."""
        with self._engine.lock:
            return {
                int(node_id): PeerTraffic.of(peer) for node_id, peer in self._node.peers.items()
            }

    def counters(self) -> dict[str, float]:
        """Return :meth:`traffic` and :meth:`peer_traffic` as a flat dictionary.

        Names are ``event/<name>/<attribute>`` and ``node<id>/<attribute>``.
        """
        counted: list[tuple[str, EventTraffic | PeerTraffic]] = [
            *((f"event/{name}", traffic) for name, traffic in self.traffic().items()),
            *((f"node{number}", traffic) for number, traffic in self.peer_traffic().items()),
        ]
        return {
            f"{prefix}/{name}": float(value)
            for prefix, traffic in counted
            for name, value in asdict(traffic).items()
        }

    def _note_subscription(self, name: str, active: bool) -> None:
        """Note a subscription; a newer task of the program has replaced those of earlier ones."""
        number = task_number(name)
        if number > self._newest_task:
            self._newest_task = number
            self._subscribed = {
                event: is_active
                for event, is_active in self._subscribed.items()
                if base_name(event) == READY_EVENT
            }
        if number < self._newest_task and not active:
            self._subscribed.pop(name, None)
        else:
            self._subscribed[name] = active

    def _connected(self) -> list[Peer]:
        return [self._node.peers[identity.node_id] for identity in self._node.connected_peers()]

    def _have_peers_announced(self) -> bool:
        return all(peer.has_announced for peer in self._connected())

    def _announce_ready(self, task: int) -> None:
        with self._engine.lock:
            self._node.subscriptions.announce_ready()
            self._task = max(self._task, task)
            for name in [name for name in self._subscribed if base_name(name) == READY_EVENT]:
                del self._subscribed[name]
        if task > 1:
            self.subscribe(scoped_name(READY_EVENT, task), active=True)

    def _wait_for_task(self, task: int, stopped: Callable[[], bool]) -> None:
        """Wait until the peers are ready for a task."""
        engine = self._engine

        def done() -> bool:
            return engine.fatal is not None or not (self._n_missing(task) or self._late(task))

        with engine.lock:
            patience = Patience(self._start_timeout_s, engine.clock.now())
            while not stopped():
                left_s = min(CHECK_S, patience.next_look_s(engine.clock.now()))
                if engine.clock.wait_for(engine.members, done, left_s):
                    break
                now = engine.clock.now()
                if patience.is_over(now, hope=not self._n_missing(task)):
                    raise self._not_in_time(
                        self._expected_peers, self._node.subscriptions.ready, self._start_timeout_s
                    )
                if patience.should_say(now):
                    _logger.warning("%s", self._describe_start(task, patience.waited_s(now)))
            if engine.fatal is not None:
                raise engine.fatal

    def _n_missing(self, task: int) -> int:
        """Return how many expected peers have not connected yet."""
        if task > 1:
            return 0
        here = {peer.node_id for peer in self._connected()} | self._node.subscriptions.ready
        return max(0, self._expected_peers - len(here))

    def _late(self, task: int) -> list[Peer]:
        """Return the connected peers that are not ready for a task, as far as they count."""
        ready = self._node.subscriptions.ready
        if task > 1:
            return [peer for peer in self._connected() if peer.ready_for < task]
        if len(ready) >= self._expected_peers:
            return []
        return [peer for peer in self._connected() if peer.node_id not in ready]

    def _describe_start(self, task: int, waited_s: float) -> str:
        late = [
            f"node {peer.node_id} "
            + (f"({'+'.join(peer.roles)}) " if peer.roles else "")
            + (f"is still in task {peer.ready_for}" if peer.ready_for else "is not ready yet")
            for peer in self._late(task)
        ]
        if n_missing := self._n_missing(task):
            late.append(
                f"{n_missing} of {self._expected_peers} peers have not connected yet, for which it "
                f"waits {self._start_timeout_s:g} s (start_timeout_s)"
            )
        return (
            f"node {self._node_id} has waited for {waited_s:.0f} s to begin its task {task}: "
            + "; ".join(late)
        )

    def _check_held(self) -> None:
        """Keep events that arrive before the program has subscribed to them.

        Peers send what was waiting for the predecessor of this process as soon as they connect.
        """
        with self._engine.lock:
            if self._hold_until is not None:
                if self._engine.clock.now() >= self._hold_until:
                    self._hold_until = None
                self._node.hold(self._is_later if self._hold_until is None else self._is_early)
        self._engine.receiver.deliver_ready()

    def _is_early(self, event: EncodedEvent) -> bool:
        name = event.event
        return name != SUBSCRIPTIONS_EVENT and not (
            self._engine.receiver.attached and name in self._subscribed
        )

    def _is_later(self, event: EncodedEvent) -> bool:
        """Return whether an event is for a later task, in which this node's predecessor was."""
        name = event.event
        return name[-1:] == ")" and task_number(name) > self._task and name not in self._subscribed

    def _guard(self, work: Callable[[], None]) -> None:
        """Run the work of a thread without which the router would hang."""
        try:
            work()
        except Exception as error:
            self._engine.fail(
                RouterError(
                    f"the router failed with an internal error: {error!r}; the log has its "
                    "traceback, please report it"
                )
            )
            raise

    def _tick_forever(self) -> None:
        engine = self._engine
        while not engine.closing:
            due_at = self._connections.tick()
            if self._hold_until is not None and engine.clock.now() >= self._hold_until:
                self._check_held()
            engine.tick(min(due_at, self._hold_until or math.inf))

    def _wait_for(
        self,
        count: int,
        matching: Callable[[], set[str]],
        timeout_s: float,
        state: str = "became ready",
    ) -> list[Identity]:
        engine = self._engine

        def done() -> bool:
            return engine.fatal is not None or len(matching()) >= count

        with engine.lock:
            engine.clock.wait_for(engine.members, done, timeout_s)
            if engine.fatal is not None:
                raise engine.fatal
            if done():
                return self._node.connected_peers()
            raise self._not_in_time(count, matching(), timeout_s, state)

    def _not_in_time(
        self, count: int, matching: Collection[str], timeout_s: float, state: str = "became ready"
    ) -> WaitTimeout:
        connected = sorted(int(identity.node_id) for identity in self._node.connected_peers())
        ready = sorted(map(int, matching))
        refusals = [f"; {address}: {error}" for address, error in self._engine.refusals.items()]
        return WaitTimeout(
            f"expected {count} peers within {timeout_s:g} s, but only {len(connected)} connected "
            f"(nodes {connected}) and {len(ready)} {state} (nodes {ready}); check that the others "
            "are running, have the same key, and can reach "
            f"{self.address or ', '.join(self._dial_addresses)}{''.join(refusals)}"
        )

    def _is_flushed(self) -> bool:
        return all(
            peer.outgoing.is_empty or not self._node.is_connected(peer.node_id)
            for peer in self._node.peers.values()
        )

    def _wait_for_goodbyes(self, timeout_s: float) -> None:
        """Wait until the peers have received a goodbye and answered it."""
        self._engine.flush()
        with self._engine.lock:
            self._engine.clock.wait_for(
                self._engine.members,
                lambda: not any(peer.is_connected for peer in self._node.peers.values()),
                timeout_s,
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RouterStateError(
                "this process was forked from one with a router, whose sockets do not survive a "
                "fork; start processes with the 'spawn' method, or create the router after the fork"
            )
        if self._closed:
            raise RouterStateError("the router is closed; create a new one")
