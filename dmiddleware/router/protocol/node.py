"""The protocol of one node: handshake, membership, subscriptions and streams, joined.

A :class:`NodeProtocol` reads the frames that arrive over the connections with its peers, and makes
those to send. Both sides of a connection do the same after the handshake. The router passes it
frames and the time, and sends what it returns.

Methods must not be called concurrently; the router holds a lock around each call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from dmiddleware.errors import FrameError
from dmiddleware.router.protocol.counters import TrafficCounters
from dmiddleware.router.protocol.fragments import Fragment, fragment_contents
from dmiddleware.router.protocol.greetings import Greetings
from dmiddleware.router.protocol.handshake import Identity, Session, check_incarnation
from dmiddleware.router.protocol.membership import SAID_GOODBYE, Membership, MembershipChange
from dmiddleware.router.protocol.memory_grants import MemoryGrants
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.peer import Peer, PeerConnection
from dmiddleware.router.protocol.session_frames import URGENT, SessionFrames, States
from dmiddleware.router.protocol.streams import EventBatch
from dmiddleware.router.protocol.subscriptions import Subscriptions
from dmiddleware.router.wire.envelope import (
    SUBSCRIPTIONS_EVENT,
    EncodedEvent,
    frame_contents,
    unpack_events,
)
from dmiddleware.router.wire.frame import Frame, FrameContents, FrameType

__all__ = ["NodeProtocol", "TakenEvent"]

_logger = logging.getLogger(__name__)

TAKE_BYTES: Final = 1 << 20
_NO_CONTENTS: Final = FrameContents()
_NO_EVENTS: Final = EventBatch(0, 0, ())


class TakenEvent(NamedTuple):
    """An event that has arrived.

    Attributes:
        event: the event.
        peer: its sender.
        acknowledges: whether to call :meth:`NodeProtocol.on_handled` when it was handled, in the
            order of such events.
    """

    event: EncodedEvent
    peer: Peer
    acknowledges: bool = False


def _is_announcement(event: EncodedEvent) -> bool:
    return event.event == SUBSCRIPTIONS_EVENT


class NodeProtocol:
    """The protocol state of one node.

    Args:
        identity: this node's identity.
        key: the run's key; None without one.
        options: limits and timeouts.
        nonce: returns 32 fresh random bytes.
        session_number: returns a fresh, non-zero number that was never returned before.

    Attributes:
        peers: all known peers by node id, disconnected ones included.
        with_events: the processes of which :meth:`take` may return events, as an ordered set; some
            have ended.
        subscriptions: which peer receives which events.
        changes: membership changes that the router has not processed yet.
        unsent: the connections to check for something to send, as an ordered set; the router clears
            it. The connections of peers that an event is offered to are not
            added.
        traffic: counts events.
        ended: the connections to close, with the reasons; the router clears it.
        n_refused: how many handshakes and frames were refused.
        undelivered: accepted reliable events that were dropped because their peer said goodbye or
            was gone for too long, by node id and event.
        n_sessions: how many sessions have started or ended.
        closing: whether this node admits no more peers, because it is about to close.
    """

    def __init__(
        self,
        identity: Identity,
        key: bytes | None,
        *,
        options: NodeOptions,
        nonce: Callable[[], bytes],
        session_number: Callable[[], int],
    ) -> None:
        self.identity = identity
        self.options = options
        self.peers: dict[str, Peer] = {}
        self.with_events: dict[Peer, None] = {}
        self.unsent: dict[PeerConnection, None] = {}
        self.traffic = TrafficCounters()
        self.ended: list[tuple[PeerConnection, str]] = []
        self.subscriptions = Subscriptions(
            identity.node_id, self.peers, options, self.unsent, self.traffic
        )
        self.changes: list[MembershipChange] = []
        self.n_refused = 0
        self.undelivered: dict[str, Counter[str]] = {}
        self.n_sessions = 0
        self.closing = False
        self._members = Membership(
            identity,
            heartbeat_s=options.heartbeat_s,
            missed=options.missed_heartbeats,
            max_known=2 * options.max_peers,
        )
        self._greetings = Greetings(
            identity,
            key,
            options=options,
            nonce=nonce,
            session_number=session_number,
            peers=self.peers,
            members=self._members,
            make_room=self._remove_forgotten,
            is_closing=lambda: self.closing,
        )
        self._gone: dict[str, Peer] = {}
        self._holds: Callable[[EncodedEvent], bool] | None = None
        self._held: dict[Peer, None] = {}
        self._memory = MemoryGrants(options.max_event_bytes, peers=self.peers, gone=self._gone)
        self._accepts = True

    @property
    def incarnation(self) -> int:
        """How this process orders among all that have used its node id, as its peers know it.

        It grows when a peer knows more of them.
        """
        return self._greetings.incarnation

    @property
    def accepting(self) -> bool:
        """Whether this node accepts events; otherwise their senders keep them."""
        return self._accepts

    @accepting.setter
    def accepting(self, accepting: bool) -> None:
        if accepting != self._accepts:
            self._accepts = accepting
            for peer in self.peers.values():
                if peer.connection is not None:
                    peer.connection.owes_resend = accepting
                    self._owe_states(peer)
                    self._memory.drop(peer)

    def offer(self, node_id: str, event: EncodedEvent, *, handled: bool = False) -> bool | None:
        """Accept a reliable event for a peer.

        Args:
            node_id: the peer.
            event: the event.
            handled: whether the peer acknowledges it when it was handled, and not when accepted.

        Returns:
            False if its outbox is full, None if it has left and receives nothing any more.
        """
        peer = self.peers.get(node_id)
        if peer is None or peer.forgotten:
            return None
        outbox = peer.outgoing.outbox_handled if handled else peer.outgoing.outbox
        is_accepted = outbox.offer(event)
        if peer.connection is not None and not outbox.is_holding:
            self.unsent[peer.connection] = None
        return is_accepted

    def hold(self, holds: Callable[[EncodedEvent], bool] | None) -> None:
        """Choose the reliable events that :meth:`take` leaves for later.

        Events of the same peer that arrive after them are also left, to keep the order.

        Args:
            holds: whether an event is left; None: none is. Call this method again when it would
                return something else than before.
        """
        self._holds = holds
        self.with_events, self._held = self._held | self.with_events, {}

    def take(self, n: int) -> list[TakenEvent]:
        """Remove and return up to ``n`` events of each peer, and as many to be acknowledged.

        Fewer large events are returned: while they wait for a handler they belong in the inbox,
        where they count against its bound.
        """
        events: list[TakenEvent] = []
        for peer in list(self.with_events):
            incoming = peer.incoming
            handled, others = incoming.take(n, max_bytes=TAKE_BYTES, holds=self._holds)
            events += [TakenEvent(event, peer, acknowledges=True) for event in handled]
            for event in others:
                if event.event == SUBSCRIPTIONS_EVENT:
                    self._on_announcement(peer, event)
                else:
                    events.append(TakenEvent(event, peer))
            is_empty = not incoming.inbox.n_bytes and not incoming.inbox_handled.n_bytes
            if is_empty and len(others) < n:
                del self.with_events[peer]
            elif not handled and not others:
                # Held events may wait until the subscriptions behind them are known. Those behind
                # unhandled ones come back in on_handled.
                self._take_announcements(peer)
                if incoming.has_events:
                    self._held[peer] = None
                del self.with_events[peer]
            self._note_due(peer)
        if self._memory.wanted:
            self._grant_memory()
        return events

    def on_handled(self, peer: Peer) -> None:
        """Note that a peer's oldest event with ``acknowledges`` has been handled."""
        peer.incoming.inbox_handled.on_handled()
        self._note_due(peer)
        if peer.incoming.has_events:
            self.with_events[peer] = None

    def connected_peers(self) -> list[Identity]:
        """Return the identities of the connected peers."""
        return [member.identity for member in self._members]

    def is_connected(self, node_id: str) -> bool:
        """Return whether a peer is connected."""
        peer = self.peers.get(node_id)
        return peer is not None and peer.is_connected

    def tick(self, now: float) -> list[tuple[str, int]]:
        """Find peers that went silent, and forget those disconnected for too long.

        Returns:
            ``(node id, number of dropped reliable events)`` of each newly forgotten peer.
        """
        silent = self._members.tick(now)
        for change in silent:
            peer = self.peers.get(change.member.node_id)
            if peer is not None and peer.connection is not None:
                self._close(peer.connection, change.reason)
        self._record(silent, now)
        self._grant_memory()
        forgotten = [
            peer
            for peer in self._gone.values()
            if peer.gone_since is not None and now - peer.gone_since > self.options.forget_after_s
        ]
        for peer in forgotten:
            peer.forgotten = True
            peer.incoming.drop_unfinished()
            del self._gone[peer.node_id]
            self.subscriptions.on_peers_changed()
        return [(peer.node_id, self._drop_outgoing(peer)) for peer in forgotten]

    @property
    def tick_at(self) -> float:
        """When :meth:`tick` may find something if nothing happens before; infinity: never."""
        gone = next(iter(self._gone.values()), None)
        if gone is None or gone.gone_since is None:
            return self._members.silent_at
        return min(self._members.silent_at, gone.gone_since + self.options.forget_after_s)

    def beat(self) -> None:
        """Let all peers know that this node is alive."""
        for peer in self.peers.values():
            if peer.connection is not None:
                kind = FrameType.STATE if peer.incoming.has_news else FrameType.HEARTBEAT
                peer.connection.owed[kind] = 1
                self.unsent[peer.connection] = None

    def drain(self) -> None:
        """Have everything acknowledged soon, because nothing may follow."""
        for peer in self.peers.values():
            peer.outgoing.drain()
            if peer.connection is not None:
                self.unsent[peer.connection] = None

    def say_goodbye(self) -> None:
        """Tell each peer that this node leaves for good."""
        for peer in self.peers.values():
            if peer.connection is not None:
                # The peer counts as lost what it does not know to have arrived.
                if peer.incoming.has_news:
                    peer.connection.owed[FrameType.STATE] = 1
                peer.connection.owed[FrameType.BYE] = 1
                self.unsent[peer.connection] = None

    def on_end(self, connection: PeerConnection, reason: str, now: float) -> None:
        """Note that a connection has ended."""
        self._detach(connection)
        self._greetings.on_end(connection)
        identity = connection.identity
        if identity is None:
            return
        peer = self.peers.get(identity.node_id)
        # While the peer may have replaced the connection by another one, it has not left.
        if (
            peer is not None
            and peer.connection is None
            and peer.session.identity.instance == identity.instance
            and not self._greetings.is_under_way(identity)
        ):
            self._record(self._members.on_left(peer.node_id, reason), now)
            if connection.said_goodbye:
                self._remove(peer)

    def on_progress(self, node_id: str, now: float) -> None:
        """Note that bytes have moved over the connection to a peer, without a complete frame.

        It counts as connected, but only for a limited time.
        """
        self._members.on_progress(node_id, now)

    def quiet_peers(self, now: float) -> list[str]:
        """Return the peers that have been silent for a while and count as lost soon."""
        return self._members.quiet(now)

    def dial(self, connection: PeerConnection) -> None:
        """Start a handshake over a connection that this node has dialed."""
        self._greetings.dial(connection)
        self.unsent[connection] = None

    def on_frame(
        self,
        connection: PeerConnection,
        raw: memoryview,
        now: float,
        *,
        body_digest: bytes | None = None,
    ) -> FrameType:
        """Process a frame.

        Args:
            connection: the connection over which it has arrived.
            raw: the received frame.
            now: the time in seconds.
            body_digest: see :func:`~dmiddleware.router.wire.frame.decode_frame`.

        Returns:
            The type of the frame.

        Raises:
            FrameError: if it is not a valid frame; close the connection.
            AuthError: if its signature is missing or wrong; close the connection.
            HandshakeRefused: if the peer refuses this node, or the other way round; close the
                connection.
        """
        if connection.is_over:
            if connection.session is None:
                raise FrameError("got a frame after a refusal")
            return FrameType.BYE
        session, peer = connection.session, connection.peer
        if session is None or peer is None:
            kind, started = self._greetings.on_frame(connection, raw)
            self.unsent[connection] = None
            self.n_refused += kind is FrameType.REFUSED
            if started is not None:
                self._start_session(connection, started, now)
            return kind
        frame = session.read(raw, body_digest=body_digest)
        peer.counters.received_frames += 1
        peer.counters.received_bytes += len(raw)
        if frame.incarnation != peer.session.incarnation:
            check_incarnation(frame.incarnation, peer.session.incarnation)
        self._members.on_heard(peer.node_id, frame.incarnation, now)
        if frame.type is FrameType.HEARTBEAT:
            return frame.type
        if frame.type is not FrameType.DATA and frame.type is not FrameType.FRAGMENT:
            self._on_control(connection, peer, frame, now)
        elif self._accepts and not connection.owes_resend and not connection.n_resends:
            self._on_data(peer, frame)
        self._note_due(peer)
        return frame.type

    def fill(self, connection: PeerConnection) -> None:
        """Make the frames that can be sent over a connection now."""
        route, peer = connection.route, connection.peer
        connection.is_stalled = False
        if connection.is_over or peer is None:
            return
        if connection.owed:
            self._put_owed(connection, peer)
        while route.has_room:
            batch = peer.outgoing.next_batch()
            if batch is None:
                break
            if batch.fragment is not None:
                contents = fragment_contents(batch.events[0], batch.fragment)
                self._put(connection, FrameType.FRAGMENT, contents, batch)
            elif batch.sequence:
                self._put(connection, FrameType.DATA, frame_contents(batch.events), batch)
            else:
                self._put(connection, FrameType.ASK, _NO_CONTENTS, batch)
        else:
            connection.is_stalled = True
            return
        if connection.owed.pop(FrameType.BYE, 0):
            connection.said_goodbye = True
            self._put(connection, FrameType.BYE, _NO_CONTENTS)

    def _put_owed(self, connection: PeerConnection, peer: Peer) -> None:
        """Put what is sent before events, and however full the connection is."""
        owed = connection.owed
        is_heartbeat_due = owed.pop(FrameType.HEARTBEAT, 0)
        if owed.pop(FrameType.STATE, 0):
            states = peer.incoming.take_states(
                since=peer.since, accepts=self._accepts, resend=connection.owes_resend
            )
            connection.n_resends += connection.owes_resend
            connection.owes_resend = False
            self._put(connection, FrameType.STATE, states.contents())
        elif is_heartbeat_due:
            self._put(connection, FrameType.HEARTBEAT, _NO_CONTENTS)
        for _ in range(owed.pop(FrameType.AGAIN, 0)):
            self._put(connection, FrameType.AGAIN, _NO_CONTENTS)
        is_proof_due = owed.pop(FrameType.SHARE, 0)
        if (
            is_proof_due
            and connection.sharing is not None
            and (proof := connection.sharing.proof())
        ):
            self._put(connection, FrameType.SHARE, FrameContents(proof))

    def _on_control(self, connection: PeerConnection, peer: Peer, frame: Frame, now: float) -> None:
        if frame.type is FrameType.STATE:
            self._on_states(connection, peer, States.read(frame))
        elif frame.type is FrameType.AGAIN and connection.n_resends:
            connection.n_resends -= 1
        elif frame.type is FrameType.ASK:
            peer.incoming.on_ask(frame.stream)
        elif frame.type is FrameType.SHARE:
            if connection.sharing is not None:
                connection.sharing.agree(bytes(frame.metadata))
        elif frame.type is FrameType.BYE:
            self._on_goodbye(connection, peer, now)
        else:
            raise FrameError(
                f"got a {frame.type.name} frame in a session; install the same version of "
                "dmiddleware on all hosts"
            )

    def _start_session(self, connection: PeerConnection, session: Session, now: float) -> None:
        self.n_sessions += 1
        self._greetings.incarnation = max(self.incarnation, session.own_incarnation)
        connection.identity = session.identity
        peer = self.peers.get(session.identity.node_id)
        if peer is not None and peer.connection is not None:
            self._close(peer.connection, "a newer connection has replaced this one")
        connection.session = SessionFrames(
            session, dialed=connection.dialed, cover_body=connection.covers_body
        )
        connection.owed[FrameType.SHARE] = 1
        if peer is None or peer.session.identity.instance != session.identity.instance:
            self._start_over(connection, session, peer)
        else:
            peer.session, peer.connection, connection.peer = session, connection, peer
            if peer.avoids_sharing:
                connection.sharing, peer.avoids_sharing = None, False
            self._owe_states(peer)
            peer.outgoing.on_connect(session.limits.inbox_bytes)
            self.subscriptions.on_peers_changed()
        self._record(self._members.on_session(session, now), now)

    def _start_over(self, connection: PeerConnection, session: Session, old: Peer | None) -> Peer:
        """Start with a process that is new, or that has been forgotten, or has forgotten this one.

        Args:
            connection: the connection with it.
            session: the session.
            old: what this node has for the peer or its predecessor.
        """
        if old is not None:
            self._note_ended(old)
            old.connection = None
        peer = Peer.start(session, old, self.options)
        peer.connection, connection.peer = connection, peer
        self.peers[peer.node_id] = peer
        peer.outgoing.on_connect(session.limits.inbox_bytes)
        self._owe_states(peer)
        self.subscriptions.on_peers_changed()
        self.subscriptions.announce_to(peer)
        return peer

    def _on_goodbye(self, connection: PeerConnection, peer: Peer, now: float) -> None:
        """Note that a peer leaves for good, or that this node has left it."""
        if connection.said_goodbye:
            self._close(connection, SAID_GOODBYE)
        else:
            # The peer closes the connection when it has the answer.
            self._detach(connection)
            self._put(connection, FrameType.BYE, _NO_CONTENTS)
            self.unsent[connection] = None
        reason = SAID_GOODBYE
        if self.peers.get(peer.node_id) is peer and (n_dropped := self._drop_outgoing(peer)):
            reason += f"; {n_dropped} events that it had not accepted were dropped"
        self._record(self._members.on_left(peer.node_id, reason), now)
        self.n_sessions += 1
        self._remove(peer)

    def _close(self, connection: PeerConnection, reason: str) -> None:
        """End a connection, without noting that the peer has left."""
        self._detach(connection)
        self.ended.append((connection, reason))

    def _detach(self, connection: PeerConnection) -> None:
        """Stop using a connection."""
        connection.is_over = True
        self.unsent.pop(connection, None)
        peer = connection.peer
        if peer is not None and peer.connection is connection:
            peer.connection = None
            self._memory.drop(peer)

    def _remove(self, peer: Peer) -> None:
        if self.peers.get(peer.node_id) is peer:
            self._note_ended(peer)
            del self.peers[peer.node_id]
            self.subscriptions.on_peers_changed()

    def _remove_forgotten(self) -> None:
        for peer in [peer for peer in self.peers.values() if peer.forgotten]:
            self._remove(peer)

    def _drop_outgoing(self, peer: Peer) -> int:
        """Drop and count what is waiting for a peer; return the number of reliable events."""
        lost = peer.outgoing.give_up()
        if lost:
            self.undelivered.setdefault(peer.node_id, Counter()).update(lost)
        return lost.total()

    def _note_ended(self, peer: Peer) -> None:
        """Note that a process has ended, or is removed; its events can still be taken."""
        self._take_announcements(peer)
        peer.incoming.drop_unfinished()
        self._gone.pop(peer.node_id, None)

    def _take_announcements(self, peer: Peer) -> None:
        """Process the subscriptions that a peer has announced, ahead of the events before them."""
        for event in peer.incoming.inbox.take_out(_is_announcement):
            self._on_announcement(peer, event)

    def _on_announcement(self, peer: Peer, event: EncodedEvent) -> None:
        try:
            self.subscriptions.on_announcement(peer, event)
        except FrameError as error:
            # The events around it are valid, and the peer keeps its earlier subscriptions.
            self.n_refused += 1
            _logger.warning("ignored the subscriptions of node %s: %s", peer.node_id, error)

    def _record(self, changes: list[MembershipChange], now: float) -> None:
        for change in changes:
            peer = self.peers.get(change.member.node_id)
            if peer is not None:
                if change.kind == "left":
                    peer.gone_since = now
                    self._gone[peer.node_id] = peer
                else:
                    peer.gone_since = None
                    self._gone.pop(peer.node_id, None)
                if peer.forgotten and change.kind != "left":
                    self.subscriptions.readmit(peer)
        self.changes += changes

    def _owe_states(self, peer: Peer) -> None:
        if peer.connection is not None:
            peer.connection.owed[FrameType.STATE] = 1
            self.unsent[peer.connection] = None

    def _note_due(self, peer: Peer) -> None:
        """Send the peer the states of its inboxes, if they have changed enough."""
        if peer.incoming.is_due:
            self._owe_states(peer)

    def _on_data(self, peer: Peer, frame: Frame) -> None:
        stream, sequence, incoming = frame.stream, frame.data_sequence, peer.incoming
        if frame.type is FrameType.FRAGMENT:
            fragment = Fragment.of(frame)
            if not fragment.length:
                self._memory.ask(peer, stream, sequence, fragment.total)
                self._grant_memory()
                return
            assembly = incoming.assembly(stream, sequence)
            if assembly is None:
                raise FrameError(f"node {peer.node_id} was granted no memory for a large frame")
            assembly.add(fragment, frame)
            if not assembly.is_complete:
                return
            events = [assembly.event()]
        else:
            events = unpack_events(frame)
        self.subscriptions.check_received_names(peer, events)
        incoming.on_events(stream, sequence, events)
        if frame.asks:
            incoming.on_ask(stream, until_empty=False)
        self.with_events[peer] = None

    def _on_states(self, connection: PeerConnection, peer: Peer, states: States) -> None:
        """Process what a peer says about the streams to it."""
        self.unsent[connection] = None
        if states.resend:
            peer.outgoing.on_connect(peer.session.limits.inbox_bytes)
            connection.owed[FrameType.AGAIN] += 1
        if states.since != peer.since and peer.since != peer.session.number:
            # One of the two does not remember the other, or only from another session.
            peer = self._start_over(connection, peer.session, peer)
        # Otherwise the peer starts over when it gets the states of this node.
        if states.since == peer.since:
            peer.outgoing.on_states(states)

    def _grant_memory(self) -> None:
        for peer in self._memory.grant():
            self._note_due(peer)

    def _put(
        self,
        connection: PeerConnection,
        kind: FrameType,
        contents: FrameContents,
        batch: EventBatch = _NO_EVENTS,
    ) -> None:
        """Add a frame to a connection with a session."""
        session, peer = connection.session, connection.peer
        assert session is not None and peer is not None
        frame = session.make(
            kind,
            contents,
            incarnation=self._greetings.incarnation,
            stream=batch.stream,
            data_sequence=batch.sequence,
            asks=batch.asks,
        )
        peer.counters.sent_frames += 1
        peer.counters.sent_bytes += frame.size
        connection.route.put(frame, urgent=kind in URGENT)
