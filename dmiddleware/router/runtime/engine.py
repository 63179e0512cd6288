"""The engine: a node's protocol behind a lock, with the transport and the clock that drive it.

A thread that has passed a frame to the node calls :meth:`Engine.update` with the lock held and then
:meth:`Engine.deliver_and_send` without it. Frames are made under the lock and sent outside it.
Nothing here waits for a peer, except emitters that have no room.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, Final

from dmiddleware.errors import DeliveryTimeout, NoSubscriber, RouterError, TransportError
from dmiddleware.event_names import base_name
from dmiddleware.pipeline import Clock, Event
from dmiddleware.router.protocol.membership import MembershipChange
from dmiddleware.router.protocol.node import NodeProtocol
from dmiddleware.router.protocol.peer import Peer, PeerConnection
from dmiddleware.router.runtime.receiver import DecodedEvent, Receiver
from dmiddleware.router.transport.shared_memory import SharedMemory
from dmiddleware.router.wire.codec import Codec
from dmiddleware.router.wire.envelope import EncodedEvent, encode_event

__all__ = ["Engine"]

_logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""The time between two ticks of a node that watches strangers or silent peers."""

_IDLE_TICK_S: Final = 60.0
"""The longest time between two ticks."""

_N_MOMENTS: Final = 8
"""At how many moments between two heartbeats the nodes of a host send theirs. Those that arrive
together cost a peer much less than those that each wake it."""


class Engine:
    """Drives a node: encodes and queues emitted events, sends frames, delivers what arrives.

    Args:
        node: used with :attr:`lock` held.
        codec: encodes and decodes events.
        clock: times deadlines.
        memory: shared with peers of the same host; None: none is.

    Attributes:
        lock: guards the node and all attributes of the engine.
        room: notified when emitters may find room, or would wait in vain.
        members: notified when peers have joined, left or announced something.
        receiver: delivers what they have sent.
        traffic: counts events.
        fatal: the error that stopped this node; emitters raise it.
        refusals: why peers currently refuse this node, by address.
        closing: whether the threads are to end.
    """

    def __init__(
        self,
        node: NodeProtocol,
        *,
        codec: Codec,
        clock: Clock,
        memory: SharedMemory | None = None,
    ) -> None:
        self.node = node
        self.clock = clock
        self.lock = threading.RLock()
        self.room = threading.Condition(self.lock)
        self.members = threading.Condition(self.lock)
        self.traffic = node.traffic
        self.receiver = Receiver(
            node,
            self.lock,
            codec=codec,
            traffic=self.traffic,
            clock=clock,
            on_subscriptions_changed=self.flush,
            on_taken=self._send_unsent,
            on_handled=self._on_handled,
        )
        self.fatal: RouterError | None = None
        self.refusals: dict[str, RouterError] = {}
        self.closing = False
        self._codec = codec
        self._memory = memory
        self._ticking = threading.Condition(self.lock)
        self._n_sessions = 0
        self._next_tick = 0.0
        self._next_beat = 0.0

    def emit(
        self,
        event: Event,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        to: Collection[int] | None = None,
    ) -> None:
        """Send an event to its subscribers; see :meth:`dmiddleware.router.Router.emit`."""
        with self.lock:
            if self.fatal is not None:
                raise self.fatal
            targets = self.node.subscriptions.subscribers(event.name)
            if to is not None:
                targets = self._named(event, targets, to)
            elif not targets and event.delivery != "latest":
                self._note_unsubscribed(event)
        if not targets and (event.delivery != "latest" or to is not None):
            return
        stage = None if self._memory is None else partial(self._stage_arrays, event, targets)
        encoded = encode_event(event.name, [list(args), kwargs], self._codec, stage)
        waiting: list[str] = []
        with self.lock:
            self.node.subscriptions.check(encoded, targets)
            if event.delivery == "reliable":
                waiting = self._offer(event, encoded, targets)
            else:
                self._put(event, encoded, targets, named=to is not None)
            connections = self._fill_unsent()
        self.send(connections)
        if waiting:
            self._wait_for_room(event, encoded, waiting, targets)

    def _stage_arrays(
        self, event: Event, targets: Sequence[str], arrays: Sequence[memoryview]
    ) -> list[memoryview] | None:
        """Copy the arrays of an event to memory that its only reader shares."""
        memory, n_bytes = self._memory, sum(map(len, arrays))
        # Events that are sent in fragments are copied anyway. Another reader would see what the
        # first one changes in place.
        if (
            memory is None
            or not memory.min_bytes <= n_bytes <= self.node.options.largest_whole_bytes
            or len(targets) != 1
            or event.delivery == "latest"
        ):
            return None
        with self.lock:
            peer = self.node.peers.get(targets[0])
            sharing = None if peer is None or peer.connection is None else peer.connection.sharing
            if sharing is None or not sharing.is_agreed:
                return None
        return memory.stage_arrays(arrays)

    def _named(
        self, event: Event, subscribers: tuple[str, ...], to: Collection[int]
    ) -> tuple[str, ...]:
        """Return the subscribers among the named peers, and note the other named ones."""
        node_ids = dict.fromkeys(map(str, to))
        subscribed = tuple(node_id for node_id in node_ids if node_id in subscribers)
        if len(subscribed) < len(node_ids):
            self._note_unsubscribed(
                event, [node_id for node_id in node_ids if node_id not in subscribed]
            )
        return subscribed

    def _note_unsubscribed(self, event: Event, named: Sequence[str] = ()) -> None:
        """Count an emission that peers do not receive; it is an error if they must."""
        self.traffic[base_name(event.name)].unsubscribed += len(named) or 1
        if event.required:
            peers = "no peer" if not named else f"not node {', '.join(named)}"
            raise NoSubscriber(
                f"the event {event.name!r} is required, but {peers} has subscribed to it; emit it "
                "when the peers are ready, or declare it with required=False"
            )

    def _offer(self, event: Event, encoded: EncodedEvent, targets: Iterable[str]) -> list[str]:
        """Offer an event to peers; return those whose outbox is full."""
        refused, n_accepted = [], 0
        handled, traffic = event.acknowledged == "handled", self.traffic[base_name(event.name)]
        for node_id in targets:
            accepted = self.node.offer(node_id, encoded, handled=handled)
            if accepted:
                n_accepted += 1
            elif accepted is None:
                traffic.unsubscribed += 1
            else:
                refused.append(node_id)
        traffic.sent += n_accepted
        traffic.sent_bytes += n_accepted * encoded.size
        return refused

    def _put(
        self, event: Event, encoded: EncodedEvent, targets: Collection[str], *, named: bool
    ) -> None:
        """Queue a latest or lossy event for peers."""
        if event.delivery == "latest":
            self.node.subscriptions.put_latest(encoded, targets if named else None)
            return
        self.node.subscriptions.put_lossy(encoded, targets)
        if targets:
            traffic = self.traffic[base_name(event.name)]
            traffic.sent += len(targets)
            traffic.sent_bytes += len(targets) * encoded.size

    def _wait_for_room(
        self, event: Event, encoded: EncodedEvent, waiting: list[str], targets: Collection[str]
    ) -> None:
        started = self.clock.now()

        def accepted() -> bool:
            waiting[:] = self._offer(event, encoded, waiting)
            # Sent with the lock held: this wait may last long, on account of other peers.
            self.send(self._fill_unsent())
            return self.closing or self.fatal is not None or not waiting

        with self.lock:
            self.clock.wait_for(self.room, accepted, event.timeout_s)
            self.traffic[base_name(event.name)].blocked_s += self.clock.now() - started
            full = ", ".join(self._describe(node_id) for node_id in waiting)
        if not waiting:
            return
        if self.fatal is not None:
            raise self.fatal
        accepted_by = sorted(int(node_id) for node_id in targets if node_id not in waiting)
        others = ", ".join(map(str, accepted_by)) or "none"
        raise DeliveryTimeout(
            f"could not emit {event.name!r} to all subscribers: the outbox was full for "
            f"{event.timeout_s:g} s at {full}; the nodes that receive it: {others}. Emit less "
            'often, speed up the handler there, or declare the event with delivery="latest" or '
            '"lossy"',
            accepted=accepted_by,
            refused=sorted(map(int, waiting)),
        )

    def _describe(self, node_id: str) -> str:
        peer = self.node.peers.get(node_id)
        state, contents = "disconnected", "no events"
        if peer is not None:
            state = "connected" if peer.is_connected else state
            contents = f"{peer.outgoing.n_messages} events, {peer.outgoing.n_bytes} bytes"
        return f"node {node_id} ({state}; its outbox holds {contents})"

    def update(self) -> list[PeerConnection]:
        """Process what a frame or the time has changed; called with the lock held.

        Returns:
            The connections with something to send; pass them to :meth:`deliver_and_send`, without
            the lock.
        """
        now, node = self.clock.now(), self.node
        if node.changes:
            changes, node.changes = node.changes, []
            for change in changes:
                self.receiver.add(_membership_event(change))
            self.members.notify_all()
            self.tick_by(now + TICK_S)
        connections = self._fill_unsent()
        if node.ended:
            ended, node.ended = node.ended, []
            for connection, reason in ended:
                connection.route.close(TransportError(reason))
        self.room.notify_all()
        if node.closing or node.n_sessions != self._n_sessions:
            self._n_sessions = node.n_sessions
            self.members.notify_all()
        return connections

    def send(self, connections: Iterable[PeerConnection]) -> None:
        """Send what waits on connections, and what can be made when there is room again."""
        for connection in connections:
            while connection.route.flush() and connection.is_stalled:
                with self.lock:
                    self.node.fill(connection)

    def on_room(self, connection: PeerConnection) -> None:
        """Continue with a connection that has room again."""
        with self.lock:
            self.node.fill(connection)
        self.send((connection,))

    def _fill_unsent(self) -> list[PeerConnection]:
        """Make the frames that can be sent now; called with the lock held.

        Returns:
            Their connections.
        """
        connections = list(self.node.unsent)
        self.node.unsent.clear()
        for connection in connections:
            self.node.fill(connection)
        return connections

    def _send_unsent(self) -> None:
        """Send what has become due because events were taken."""
        with self.lock:
            connections = self.update()
        self.send(connections)

    def _on_handled(self, peer: Peer) -> None:
        """Acknowledge events that have been handled, and make room for more."""
        with self.lock:
            self.node.on_handled(peer)
            self.receiver.wake()
        if not self.closing and self.node.unsent:
            self._send_unsent()

    def deliver_and_send(self, connections: Iterable[PeerConnection]) -> None:
        """Deliver what has arrived and send what is due; called without the lock."""
        # Others may be waiting for an event that arrived, and the peer for its answer. So one batch
        # is delivered first, and the rest after sending.
        self.receiver.deliver_ready(once=True)
        self.send(connections)
        self.receiver.deliver_ready()

    def flush(self) -> None:
        """Send whatever can be sent to any peer, and re-check all waits."""
        with self.lock:
            connections = self.update()
            self.members.notify_all()
        self.deliver_and_send(connections)

    def fail(self, error: RouterError) -> None:
        """Stop this node with an error, which emitters and waits raise."""
        with self.lock:
            self.fatal = error
            self._wake_all()
        _logger.error("%s", error)

    def end(self) -> None:
        """End all waits and threads; called with the lock held."""
        self.closing = True
        self.receiver.close()
        self._wake_all()

    def tick(self, due_at: float) -> None:
        """Do what is due, then wait until more may be.

        Args:
            due_at: when something else is due.
        """
        with self.lock:
            now = self.clock.now()
            for node_id, undelivered in self.node.tick(now):
                forgotten = DecodedEvent("node.forgotten", (int(node_id), undelivered), {})
                self.receiver.add(forgotten)
            if now >= self._next_beat:
                self.node.beat()
                self._next_beat = now + self._until_next_beat(now)
            connections = self.update()
            # A little late, so that the time has really come.
            self._next_tick = min(
                due_at, self._next_beat, self.node.tick_at + TICK_S, now + _IDLE_TICK_S
            )
        self.deliver_and_send(connections)
        with self.lock:
            while not self.closing and (left_s := self._next_tick - self.clock.now()) > 0:
                planned = self._next_tick
                self.clock.wait_for(self._ticking, partial(self._is_tick_before, planned), left_s)

    def tick_by(self, due_at: float) -> None:
        """Tick at a certain time at the latest; called with the lock held."""
        if due_at < self._next_tick:
            self._next_tick = due_at
            self._ticking.notify_all()

    def _until_next_beat(self, now: float) -> float:
        """Return the seconds to the next moment at which nodes of this host send a heartbeat."""
        heartbeat_s = self.node.options.heartbeat_s
        moment = zlib.crc32(self.node.identity.node_id.encode()) % _N_MOMENTS / _N_MOMENTS
        left_s = heartbeat_s - (now - moment * heartbeat_s) % heartbeat_s
        # Not twice at the same moment, for example because of rounding.
        return left_s if left_s > heartbeat_s / 100 else left_s + heartbeat_s

    def _wake_all(self) -> None:
        self.room.notify_all()
        self.members.notify_all()
        self._ticking.notify_all()

    def _is_tick_before(self, planned: float) -> bool:
        return self.closing or self._next_tick < planned


def _membership_event(change: MembershipChange) -> DecodedEvent:
    identity = change.member.identity
    details: dict[str, Any]
    if change.kind == "joined":
        details = {"roles": identity.roles, "labels": identity.labels}
    elif change.kind == "left":
        details = {"reason": change.reason}
    else:
        details = {"new_incarnation": change.new_incarnation}
    return DecodedEvent(f"node.{change.kind}", (int(identity.node_id),), details)
