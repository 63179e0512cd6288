"""The router: one node of the network, with its threads, its clock and its transport."""

from __future__ import annotations

import logging
import os
import secrets
import threading
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
from dmiddleware.pipeline import Clock, Event, Running, SystemClock
from dmiddleware.router.core import Core
from dmiddleware.router.emitter import Emitter
from dmiddleware.router.protocol.counters import EventTraffic, PeerTraffic
from dmiddleware.router.protocol.handshake import MAX_IDENTITY_BYTES, Identity
from dmiddleware.router.protocol.limits import NodeOptions
from dmiddleware.router.protocol.node import Node
from dmiddleware.router.protocol.topology import check_address, is_loopback
from dmiddleware.router.runtime.dialer import Dialer
from dmiddleware.router.runtime.listener import Listening
from dmiddleware.router.runtime.receiver import Deliver, Offer
from dmiddleware.router.runtime.sender import PARK_S
from dmiddleware.router.transport import Transport
from dmiddleware.router.transport.default import SocketTransport
from dmiddleware.router.wire.codec import Adapter, Codec

__all__ = ["Router"]

_logger = logging.getLogger(__name__)

LOOK_S: Final = 0.2
"""How often a wait looks whether it is of use still."""


class Router:
    """Carries events between this process and its peers.

    Use it as a context manager, and give it to a task: ``Task(ctx, router=router)``. Besides what
    peers emit, handlers get ``node.joined(node_id, roles)``, ``node.left(node_id, reason)``,
    ``node.rejoined(node_id, new_incarnation)`` and ``node.forgotten(node_id, undelivered)``.

    Args:
        node_id: this process's number, unique in the run.
        run_id: nodes of different runs refuse each other.
        roles: what this process does, told to peers.
        labels: free words, told to peers.
        listen: the address to listen on; empty: peers cannot dial this node.
        dial: addresses of peers to dial; they need not be there yet.
        key: the run's secret; without one only loopback addresses are allowed.
        transport: moves the bytes; None: sockets, plain ones on this host and nng between hosts.
        options: bounds and times.
        clock: times deadlines, and starts the threads.
        incarnation: tells this node from those of the same number that were before it, and is
            larger than theirs; None: the nanoseconds since 1970.
        random_bytes: returns so many bytes that no one can guess; only a test gives others.
        adapters: for types that peers exchange beyond the built-in ones.
        pickle: ``(dumps, loads)`` to exchange what nothing else can carry; both ends must opt in.
        expected_peers: how many must be ready before the task's first step.
        start_timeout_s: how long the first step waits for them.

    Raises:
        TopologyError: for an address that is none, or one beyond loopback without a key; or if
            run id, roles and labels are longer than peers read.
    """

    def __init__(
        self,
        *,
        node_id: int = 0,
        run_id: str = "run",
        roles: Iterable[str] = (),
        labels: Iterable[str] = (),
        listen: str = "",
        dial: Sequence[str] = (),
        key: bytes | None = None,
        transport: Transport | None = None,
        options: NodeOptions | None = None,
        clock: Clock | None = None,
        incarnation: int | None = None,
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
        if listen and not is_loopback(listen) and key is None:
            raise TopologyError(
                f"{listen} can be reached from other hosts, and there is no key; give all nodes of "
                "the run one key, in a file or in the environment"
            )
        if clock is None:
            clock = SystemClock()
        if incarnation is None:
            incarnation = int(clock.wall() * 1e9)
        self._identity = Identity(run_id, str(node_id), incarnation, tuple(roles), tuple(labels))
        if self._identity.size > MAX_IDENTITY_BYTES:
            raise TopologyError(
                f"the run id, roles and labels of node {node_id} take {self._identity.size} bytes, "
                f"and peers read at most {MAX_IDENTITY_BYTES}; use shorter ones"
            )
        self._node_id = node_id
        self._expected_peers = expected_peers
        self._start_timeout_s = start_timeout_s
        self._node = Node(
            self._identity,
            key,
            options=options if options is not None else NodeOptions(),
            nonce=lambda: random_bytes(32),
            session_number=lambda: (int.from_bytes(random_bytes(8), "little") >> 1) + 1,
        )
        self._core = Core(
            self._node,
            transport=transport if transport is not None else SocketTransport(),
            codec=Codec(adapters, pickle=pickle),
            clock=clock,
        )
        self._emitter = Emitter(self._core)
        self._listen_address = listen
        self._dial_addresses = tuple(dict.fromkeys(dial))
        self._pid = os.getpid()
        self._subscribed: dict[str, bool] = {}
        self._listening: Listening | None = None
        self._dialers: list[Dialer] = []
        self._threads: list[Running] = []
        self._started = False
        self._closed = False

    # Life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(deadline_s=5.0 if error is None else 1.0)

    def start(self) -> None:
        """Listen and dial; peers may come in any order. Twice is fine.

        Raises:
            TransportError: if the address cannot be listened on; it may be tried again.
            RouterStateError: if the router is closed.
        """
        self._check_process()
        if self._started:
            return
        if self._listen_address:
            self._listening = Listening(self._core, self._listen_address)
        self._started = True
        for work, name in (
            (self._tick_forever, "router-tick"),
            (self._core.dispatcher.run, "router-deliver"),
        ):
            self._threads.append(self._core.clock.spawn(partial(self._do, work), name=name))
        for address in self._dial_addresses:
            self._keep_dialed(address)

    def dial(self, address: str) -> None:
        """Dial one more peer, from the start on, and whenever it comes back. Twice is fine.

        Raises:
            TopologyError: for an address that is none.
            RouterStateError: if the router is closed.
        """
        check_address(address)
        self._check_process()
        if address in self._dial_addresses:
            # Two connections to one peer would take each other's place for ever.
            return
        self._dial_addresses += (address,)
        if self._started:
            self._keep_dialed(address)

    def close(self, *, deadline_s: float = 5.0) -> dict[int, int]:
        """Deliver what was accepted, say goodbye, and end all threads. Twice is fine.

        Args:
            deadline_s: how long to wait for peers to take what was accepted.

        Returns:
            How many accepted events each peer did not take; empty if all arrived.
        """
        if self._closed or not self._started:
            self._closed = True
            return {}
        self._check_process()
        core, node = self._core, self._node
        with core.lock:
            node.closing = True
        core.flush()
        with core.lock:
            core.clock.wait_for(core.room, self._is_flushed, deadline_s)
            undelivered = {
                int(link.node_id): count
                for link in node.links.values()
                if (count := link.outgoing.undelivered)
            }
        if undelivered:
            _logger.warning("closing, while peers have not taken all events: %s", undelivered)
        # All of them first: each may have to wait for a peer that does not answer.
        for dialer in self._dialers:
            dialer.stop()
        for dialer in self._dialers:
            dialer.close()
        self._await_goodbyes(min(deadline_s, 2 * PARK_S))
        with core.lock:
            self._closed = True
            core.end()
        if self._listening is not None:
            self._listening.close()
        for thread in self._threads:
            if not thread.is_current():
                thread.join(5.0)
        return undelivered

    # What a task uses -------------------------------------------------------------------------

    @property
    def node_id(self) -> int:
        """The number of this process in the run."""
        return self._node_id

    @property
    def labels(self) -> Collection[str]:
        """The labels of this process."""
        return self._identity.labels

    @property
    def node(self) -> Node:
        """What this router does without a thread; to be looked at with :attr:`lock` held."""
        return self._node

    @property
    def lock(self) -> threading.RLock:
        """Guards the node."""
        return self._core.lock

    @property
    def address(self) -> str:
        """Where peers can dial; empty if they cannot."""
        return self._listening.address if self._listening is not None else ""

    def attach(self, deliver: Deliver, offer: Offer | None = None) -> None:
        """Take the functions to call, with name and arguments, for each event that arrives.

        Args:
            deliver: takes an event; it may wait, on a thread of its own.
            offer: takes an event if it can at once, and tells whether it did; spares that thread.
        """
        self._core.dispatcher.attach(deliver, offer)

    def subscribe(self, name: str, *, active: bool) -> None:
        """Begin, or end, to receive an event from the peers."""
        with self._core.lock:
            self._subscribed[name] = active
            self._node.audience.want(name for name, wanted in self._subscribed.items() if wanted)
        self._core.flush()

    def emit(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send an event to the peers that subscribed to it, as its contract says.

        Returns when it is accepted: what follows is the router's care. The newest ``latest`` event
        of a name is kept, and sent to those who subscribe later, too.

        Raises:
            DeliveryTimeout: if a peer had no room for a reliable event until the deadline.
            RouterStateError: if the router is closed.
            RouterError: if this node cannot go on, since a peer refused it say.
            EncodeError: if an argument cannot travel.
            FrameTooLarge: if it is larger than peers accept.
        """
        self._check_process()
        self._emitter.emit(event, args, kwargs)

    def peers(self) -> list[Identity]:
        """Return the peers that are here."""
        with self._core.lock:
            return self._node.peers()

    def peer_ids(self) -> list[int]:
        """Return the numbers of the peers that are here."""
        return sorted(int(identity.node_id) for identity in self.peers())

    def wait_for_peers(self, count: int, *, timeout_s: float) -> list[Identity]:
        """Wait until at least ``count`` peers are here and have said what they subscribe to.

        Raises:
            WaitTimeout: if they are not in time; it names those that are.
            RouterError: if a peer refused this node.
        """
        return self._wait_for(
            count, lambda: {x.node_id for x in self._node.links.values() if x.told_wants}, timeout_s
        )

    def begin(self, *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until every expected peer is ready too, so that nothing emitted misses anyone.

        Args:
            stopped: looked at a few times a second; True ends the wait.

        Raises:
            WaitTimeout: if they are not in time; it names those that are here.
            RouterError: if a peer refused this node.
        """
        with self._core.lock:
            self._node.audience.get_ready()
        self._core.flush()
        self._wait_for(
            self._expected_peers, lambda: self._node.audience.ready, self._start_timeout_s, stopped
        )

    def _wait_for(
        self,
        count: int,
        found: Callable[[], set[str]],
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Identity]:
        def came() -> bool:
            return self._core.fatal is not None or len(found()) >= count

        left_s = timeout_s
        with self._core.lock:
            # A signal's handler may stop the task, and must not have to notify anyone.
            while not self._core.clock.wait_for(self._core.members, came, min(left_s, LOOK_S)):
                left_s -= LOOK_S
                if stopped() or left_s <= 0:
                    break
            if self._core.fatal is not None:
                raise self._core.fatal
            if stopped() or came():
                return self._node.peers()
            here = sorted(int(identity.node_id) for identity in self._node.peers())
            ready = sorted(map(int, found()))
        raise WaitTimeout(
            f"{count} peers were awaited, and within {timeout_s:g} s {len(here)} came (nodes "
            f"{here}) and {len(ready)} got ready ({ready}); are the others started, with "
            f"the same key, and can they reach {self.address or ', '.join(self._dial_addresses)}?"
        )

    def traffic(self) -> dict[str, EventTraffic]:
        """Return what became of each event here."""
        with self._core.lock:
            return self._core.traffic.copy()

    def peer_traffic(self) -> dict[int, PeerTraffic]:
        """Return what goes on with each peer."""
        with self._core.lock:
            return {
                int(link.node_id): PeerTraffic.of(link, here=self._node.is_here(link.node_id))
                for link in self._node.links.values()
            }

    def counters(self) -> dict[str, float]:
        """Return :meth:`traffic` and :meth:`peer_traffic` as numbers with flat names.

        Those of events are ``event/<name>/<attribute>``, those of peers ``node<id>/<attribute>``.
        """
        counted: list[tuple[str, EventTraffic | PeerTraffic]] = [
            *((f"event/{name}", one) for name, one in self.traffic().items()),
            *((f"node{number}", one) for number, one in self.peer_traffic().items()),
        ]
        return {
            f"{prefix}/{name}": float(value)
            for prefix, one in counted
            for name, value in asdict(one).items()
        }

    # Within -----------------------------------------------------------------------------------

    def _keep_dialed(self, address: str) -> None:
        with self._core.lock:
            if self._node.closing:
                raise RouterStateError("the router is closed; make a new one")
            dialer = Dialer(self._core, address)
            self._dialers.append(dialer)
        dialer.start()

    def _do(self, work: Callable[[], None]) -> None:
        """Do the work of a thread; without it nothing would go on."""
        try:
            work()
        except Exception as error:
            self._core.fail(RouterError(f"the router failed within: {error!r}"))
            raise

    def _tick_forever(self) -> None:
        core = self._core
        while not core.closing:
            if self._listening is not None:
                with core.lock:
                    self._listening.lose_connections(core.clock.now())
            core.tick()

    def _is_flushed(self) -> bool:
        return all(
            link.outgoing.empty or not self._node.is_here(link.node_id)
            for link in self._node.links.values()
        )

    def _await_goodbyes(self, timeout_s: float) -> None:
        """Wait until the dialers of this node have polled once more and were told goodbye."""
        self._core.flush()
        with self._core.lock:
            self._core.clock.wait_for(
                self._core.members,
                lambda: all(
                    link.dialed or link.told_goodbye or not self._node.is_here(link.node_id)
                    for link in self._node.links.values()
                ),
                timeout_s,
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RouterStateError(
                "this process was forked from one with a router, whose sockets do not survive a "
                "fork; start processes with the 'spawn' method, or make the router after the fork"
            )
        if self._closed:
            raise RouterStateError("the router is closed; make a new one")
