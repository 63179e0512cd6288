"""The router: one node of the network, with its threads, its clock and its transport."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final, Self

from dmiddleware.errors import (
    AuthError,
    DecodeError,
    DeliveryTimeout,
    EventQueueFull,
    FrameError,
    RouterError,
    RouterStateError,
    TopologyError,
    WaitTimeout,
)
from dmiddleware.pipeline import Clock, Event, Running, SystemClock
from dmiddleware.router.codec import Adapter, Codec
from dmiddleware.router.dialer import Dialer
from dmiddleware.router.envelope import EncodedEvent, decode_event, encode_event
from dmiddleware.router.handshake import Identity
from dmiddleware.router.membership import Change
from dmiddleware.router.node import Node, Parked
from dmiddleware.router.options import NodeOptions
from dmiddleware.router.parts import Raw
from dmiddleware.router.topology import check_address, is_loopback
from dmiddleware.router.traffic import EventTraffic, PeerTraffic, Traffic
from dmiddleware.router.transport import Listener, Transport
from dmiddleware.router.transport.nng import NngTransport
from dmiddleware.router.wire import session_of

__all__ = ["Router"]

_logger = logging.getLogger(__name__)

Deliver = Callable[[str, tuple[Any, ...], dict[str, Any]], None]

PARK_S: Final = 1.0
"""How long a poll waits for something to send."""

WARN_EVERY_S: Final = 1.0
"""Connections closed for what came over them are told of so often at most."""

TICK_S: Final = 0.25
LOOK_S: Final = 0.2
"""How often a wait looks whether it is of use still."""

_TAKE: Final = 256
_WORKERS_PER_DIALER: Final = 6


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
        transport: moves the bytes; None: nng.
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
        TopologyError: for an address that is none, or one beyond loopback without a key.
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
        self._options = options if options is not None else NodeOptions()
        self._clock = clock if clock is not None else SystemClock()
        self._transport = transport if transport is not None else NngTransport()
        self._codec = Codec(adapters, pickle=pickle)
        if incarnation is None:
            incarnation = int(self._clock.wall() * 1e9)
        self._identity = Identity(run_id, str(node_id), incarnation, tuple(roles), tuple(labels))
        self._node_id = node_id
        self._expected_peers = expected_peers
        self._start_timeout_s = start_timeout_s
        self._node = Node(
            self._identity,
            key,
            options=self._options,
            nonce=lambda: random_bytes(32),
            session_number=lambda: (int.from_bytes(random_bytes(8), "little") >> 1) + 1,
        )
        self._listen_address = listen
        self._dial_addresses = tuple(dial)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._inbound = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._members = threading.Condition(self._lock)
        self._outbound: dict[str, threading.Condition] = {}
        self._news: deque[tuple[str, tuple[Any, ...], dict[str, Any]]] = deque()
        self._gone: deque[int] = deque()
        self._connections: dict[int, int] = {}
        self._subscribed: dict[str, bool] = {}
        self._traffic = Traffic()
        self._strangers_unsaid = 0
        self._next_warning = -math.inf
        self._fatal: RouterError | None = None
        self._deliver: Deliver | None = None
        self._listener: Listener | None = None
        self._dialers: list[Dialer] = []
        self._threads: list[Running] = []
        self._started = False
        self._n_sessions = 0
        self._closing = False
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
            TransportError: if the address cannot be listened on.
        """
        self._check_process()
        if self._started:
            return
        self._started = True
        if self._listen_address:
            self._listener = self._transport.listen(
                self._listen_address,
                self._serve,
                on_gone=self._gone.append,
                max_frame_bytes=self._options.max_frame_bytes,
            )
        self._spawn(self._tick_forever, "router-tick")
        self._spawn(self._deliver_forever, "router-deliver")
        for address in self._dial_addresses:
            self.dial(address)

    def dial(self, address: str) -> None:
        """Dial one more peer, now and whenever it comes back."""
        check_address(address)
        dialer = Dialer(self, address)
        self._dialers.append(dialer)
        dialer.start()

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
        with self._lock:
            self._node.closing = True
            self._wake_all()
            self._clock.wait_for(self._room, self._is_flushed, deadline_s)
            undelivered = {
                int(link.node_id): count
                for link in self._node.links.values()
                if (count := link.outgoing.outbox.n_messages)
            }
        if undelivered:
            _logger.warning("closing, while peers have not taken all events: %s", undelivered)
        for dialer in self._dialers:
            dialer.close()
        self._await_goodbyes(min(deadline_s, 2 * PARK_S))
        with self._lock:
            self._closing = self._closed = True
            self._wake_all()
        if self._listener is not None:
            self._listener.close()
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
    def address(self) -> str:
        """Where peers can dial; empty if they cannot."""
        return self._listener.address if self._listener is not None else ""

    def attach(self, deliver: Deliver) -> None:
        """Take the function to call, with name and arguments, for each event that arrives."""
        with self._lock:
            self._deliver = deliver
            self._inbound.notify_all()

    def subscribe(self, name: str, *, active: bool) -> None:
        """Begin, or end, to receive an event from the peers."""
        with self._lock:
            self._subscribed[name] = active
            self._node.want(name for name, wanted in self._subscribed.items() if wanted)
            self._wake_all()

    def emit(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send an event to the peers that subscribed to it, as its contract says.

        Returns when it is accepted: what follows is the router's care. The newest ``latest`` event
        of a name is kept, and sent to those who subscribe later, too.

        Raises:
            DeliveryTimeout: if a peer had no room for a reliable event until the deadline.
            EncodeError: if an argument cannot travel.
            FrameTooLarge: if it is larger than peers accept.
        """
        self._check_process()
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            targets = self._node.targets(event.name)
        if not targets and event.delivery != "latest":
            return
        encoded = encode_event(
            event.name, [list(args), kwargs], self._codec, self._transport.lay_down
        )
        with self._lock:
            self._node.check_size(encoded, targets)
            if event.delivery == "reliable":
                self._offer(event, encoded, targets)
            else:
                self._put(event, encoded, targets)

    def peers(self) -> list[Identity]:
        """Return the peers that are here."""
        with self._lock:
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
        with self._lock:
            self._node.get_ready()
            self._wake_all()
        self._wait_for(
            self._expected_peers, lambda: self._node.ready, self._start_timeout_s, stopped
        )

    def _wait_for(
        self,
        count: int,
        found: Callable[[], set[str]],
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Identity]:
        def came() -> bool:
            return self._fatal is not None or len(found()) >= count

        left_s = timeout_s
        with self._lock:
            # A signal's handler may stop the task, and must not have to notify anyone.
            while not self._clock.wait_for(self._members, came, min(left_s, LOOK_S)):
                left_s -= LOOK_S
                if stopped() or left_s <= 0:
                    break
            if self._fatal is not None:
                raise self._fatal
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
        with self._lock:
            return self._traffic.copy()

    def peer_traffic(self) -> dict[int, PeerTraffic]:
        """Return what goes on with each peer."""
        with self._lock:
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

    # Emitting ---------------------------------------------------------------------------------

    def _offer(self, event: Event, encoded: EncodedEvent, targets: Sequence[str]) -> None:
        waiting = self._offer_to(targets, encoded)
        if waiting:
            began = self._clock.now()

            def accepted() -> bool:
                waiting[:] = self._offer_to(waiting, encoded)
                return self._closed or not waiting

            self._clock.wait_for(self._room, accepted, event.timeout_s)
            self._traffic.of(event.name).blocked_s += self._clock.now() - began
        self._count_sent(encoded, len(targets) - len(waiting))
        if waiting:
            full = ", ".join(self._describe(node_id) for node_id in waiting)
            raise DeliveryTimeout(
                f"the event {event.name!r} was not accepted for {event.timeout_s:g} s by {full}; "
                "emit less often, handle it faster there, or declare it latest or lossy"
            )

    def _offer_to(self, targets: Iterable[str], encoded: EncodedEvent) -> list[str]:
        refused = []
        for node_id in targets:
            link = self._node.links.get(node_id)
            # Where others wait already, whoever takes those takes this too, or wakes the next.
            waited = link is not None and link.outgoing.outbox.waits
            if not self._node.offer(node_id, encoded):
                refused.append(node_id)
            elif not waited:
                self._wake(node_id)
        return refused

    def _put(self, event: Event, encoded: EncodedEvent, targets: Sequence[str]) -> None:
        if event.delivery == "latest":
            self._node.put_latest(encoded)
        else:
            for node_id in targets:
                if (link := self._node.links.get(node_id)) is not None:
                    link.outgoing.put_lossy(encoded)
        for node_id in targets:
            self._wake(node_id)
        self._count_sent(encoded, len(targets))

    def _describe(self, node_id: str) -> str:
        link = self._node.links.get(node_id)
        outbox = link.outgoing.outbox if link is not None else None
        state = "here" if self._node.is_here(node_id) else "gone"
        size = f"{outbox.n_messages} events, {outbox.n_bytes} bytes" if outbox else "empty"
        return f"node {node_id} ({state}; its queue holds {size})"

    def _count_sent(self, encoded: EncodedEvent, times: int) -> None:
        traffic = self._traffic.of(encoded.event)
        traffic.sent += times
        traffic.sent_bytes += times * encoded.size

    # Listening --------------------------------------------------------------------------------

    def _serve(self, raw: memoryview, connection: int) -> Raw | None:
        with self._lock:
            if self._closed:
                return None
            now = self._clock.now()
            cover_body = self._transport.covers_body(self._listen_address)
            try:
                answer = self._node.on_request(raw, now, cover_body=cover_body)
                self._connections[connection] = session_of(raw)
            except (FrameError, AuthError) as error:
                self._node.refused += 1
                self._warn_of_stranger(error, now)
                return None
            self.after_input()
            return self._wait_parked(answer) if isinstance(answer, Parked) else answer

    def _warn_of_stranger(self, error: RouterError, now: float) -> None:
        # One may come a thousand times a second, and must not fill the disk with it.
        if now < self._next_warning:
            self._strangers_unsaid += 1
            return
        unsaid = f" (and {self._strangers_unsaid} before it)" if self._strangers_unsaid else ""
        _logger.warning("a connection was closed: %s%s", error, unsaid)
        self._strangers_unsaid, self._next_warning = 0, now + WARN_EVERY_S

    def _wait_parked(self, parked: Parked) -> Raw:
        found: list[Raw] = []
        clock, node = self._clock, self._node
        ends_at = clock.now() + PARK_S
        looks_at = 0.0

        def ready() -> bool:
            answer = node.resume(parked, clock.now())
            if answer is not None:
                found.append(answer)
                return True
            # Something may be due before this wait ends; then it begins anew.
            due_at = node.due_at(parked)
            return self._closed or (due_at is not None and due_at < looks_at)

        while not found and not self._closed and (now := clock.now()) < ends_at:
            due_at = node.due_at(parked)
            looks_at = ends_at if due_at is None else min(ends_at, max(due_at, now + 0.001))
            clock.wait_for(self.outbound(parked.node_id), ready, looks_at - now)
        if not found:
            return node.nothing(parked)
        self.wake_next(parked.node_id)
        return found[0]

    def _lose_connections(self, now: float) -> None:
        """Find peers whose last connection is gone; called with the lock held."""
        lost = set()
        while self._gone:
            lost.add(self._connections.pop(self._gone.popleft(), 0))
        alive = set(self._connections.values())
        for link in list(self._node.links.values()):
            number = link.session.number
            if not link.dialed and number in lost and number not in alive:
                self._node.on_lost(link.node_id, "its connection broke", now)

    # What dialers use -------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The node; to be used with :attr:`lock` held."""
        return self._node

    @property
    def lock(self) -> threading.RLock:
        """Guards the node."""
        return self._lock

    @property
    def clock(self) -> Clock:
        """Times deadlines."""
        return self._clock

    @property
    def transport(self) -> Transport:
        """Moves the bytes."""
        return self._transport

    @property
    def options(self) -> NodeOptions:
        """Bounds and times."""
        return self._options

    def outbound(self, node_id: str) -> threading.Condition:
        """Return what is notified when there may be something to send to a peer."""
        condition = self._outbound.get(node_id)
        if condition is None:
            condition = self._outbound[node_id] = threading.Condition(self._lock)
        return condition

    def wake_next(self, node_id: str) -> None:
        """Let another one send what a frame has left; called with the lock held."""
        link = self._node.links.get(node_id)
        if link is not None and link.outgoing.outbox.waits:
            self._wake(node_id)

    def after_input(self) -> None:
        """Pass on what a frame or the time has changed; called with the lock held."""
        for change in self._node.changes:
            self._news.append(_news(change))
        if self._node.changes:
            self._node.changes.clear()
            if self._listener is not None:
                listening = sum(not link.dialed for link in self._node.links.values())
                self._listener.grow(4 + _WORKERS_PER_DIALER * listening)
            self._members.notify_all()
        if self._node.n_sessions != self._n_sessions:
            self._n_sessions = self._node.n_sessions
            # Polls that are parked in a session that is over end now.
            for condition in self._outbound.values():
                condition.notify_all()
        # Only who has something to do is woken: each thread that looks in vain costs as much as a
        # small event.
        if self._has_mail():
            self._inbound.notify()
        self._room.notify_all()
        for node_id, condition in self._outbound.items():
            link = self._node.links.get(node_id)
            if link is not None and (self._node.closing or not link.outgoing.empty):
                condition.notify_all()

    def fail(self, error: RouterError) -> None:
        """Take note of an error after which this node cannot go on; emitters get it."""
        with self._lock:
            self._fatal = error
            self._wake_all()
        _logger.error("%s", error)

    # Threads ----------------------------------------------------------------------------------

    def _spawn(self, function: Callable[[], None], name: str) -> None:
        self._threads.append(self._clock.spawn(function, name=name))

    def _tick_forever(self) -> None:
        with self._lock:
            while not self._closing:
                now = self._clock.now()
                self._lose_connections(now)
                for node_id, undelivered in self._node.tick(now):
                    self._news.append(("node.forgotten", (int(node_id), undelivered), {}))
                self.after_input()
                self._clock.wait_for(self._members, lambda: self._closing, TICK_S)

    def _deliver_forever(self) -> None:
        while True:
            with self._lock:
                self._clock.wait_for(self._inbound, self._has_mail, None)
                if self._closing:
                    return
                deliver = self._deliver
                news = list(self._news) if deliver is not None else []
                if news:
                    self._news.clear()
                # Taken even with no one attached: peers say in their mail what they want.
                n_told = self._node.n_told
                mail = self._node.take(_TAKE)
                if self._node.n_told != n_told:
                    self._wake_all()
            if deliver is not None:
                for name, args, kwargs in news:
                    self._hand_over(deliver, name, args, kwargs)
                for _, encoded in mail:
                    self._hand_over_encoded(deliver, encoded)

    def _has_mail(self) -> bool:
        return (
            self._closing or (self._deliver is not None and bool(self._news)) or self._node.has_mail
        )

    def _hand_over_encoded(self, deliver: Deliver, encoded: EncodedEvent) -> None:
        traffic = self._traffic.of(encoded.event)
        try:
            args, kwargs = decode_event(encoded, self._codec)
        except (DecodeError, ValueError) as error:
            traffic.undecodable += 1
            _logger.error("the event %r could not be decoded: %s", encoded.event, error)
            return
        except Exception:
            # Adapters and unpickling are foreign code.
            traffic.undecodable += 1
            _logger.exception("the event %r could not be decoded", encoded.event)
            return
        traffic.received += 1
        traffic.received_bytes += encoded.size
        self._hand_over(deliver, encoded.event, tuple(args), kwargs)

    def _hand_over(
        self, deliver: Deliver, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        while not self._closing:
            # A full queue here makes this thread wait, then the inbox fill, then the sender wait.
            with contextlib.suppress(EventQueueFull):
                try:
                    deliver(name, args, kwargs)
                except EventQueueFull:
                    raise
                except Exception:
                    # One event that its taker cannot stand must not end all that come after it.
                    _logger.exception("the event %r was not taken", name)
                return

    # Small things -----------------------------------------------------------------------------

    def _wake(self, node_id: str) -> None:
        condition = self._outbound.get(node_id)
        if condition is not None:
            condition.notify()

    def _wake_all(self) -> None:
        for condition in (self._inbound, self._room, self._members, *self._outbound.values()):
            condition.notify_all()

    def _is_flushed(self) -> bool:
        return all(
            link.outgoing.empty or not self._node.is_here(link.node_id)
            for link in self._node.links.values()
        )

    def _await_goodbyes(self, timeout_s: float) -> None:
        """Wait until the dialers of this node have polled once more and were told goodbye."""
        with self._lock:
            self._wake_all()
            self._clock.wait_for(
                self._members,
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
        if self._closed and self._started:
            raise RouterStateError("the router is closed; make a new one")


def _news(change: Change) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    identity = change.peer.identity
    details: dict[str, Any]
    if change.kind == "joined":
        details = {"roles": identity.roles, "labels": identity.labels}
    elif change.kind == "left":
        details = {"reason": change.reason}
    else:
        details = {"new_incarnation": change.new_incarnation}
    return f"node.{change.kind}", (int(identity.node_id),), details
