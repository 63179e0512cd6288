"""The protocol of one node: handshake, membership, subscriptions and streams, joined.

A :class:`NodeProtocol` replies to requests as a listener, and makes requests and reads the replies
as a dialer. The router passes it frames and the time, and sends what it returns. Data for a dialer
travels in the replies to its polls, so only the listener must be reachable.

Methods must not be called concurrently; the router holds a lock around each call.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import msgspec

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused
from dmiddleware.event_names import base_name
from dmiddleware.router.protocol.fragments import Assembly, Fragment, fragment_contents
from dmiddleware.router.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    Identity,
    ListenerHandshake,
    PeerLimits,
    Refusal,
    Session,
)
from dmiddleware.router.protocol.membership import (
    SAID_GOODBYE,
    Membership,
    MembershipChange,
)
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session import (
    ParkedPoll,
    PeerSession,
    ReplayWindow,
    Request,
    Response,
)
from dmiddleware.router.protocol.streams import EventBatch, Verdict
from dmiddleware.router.protocol.subscriptions import Subscriptions
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.envelope import (
    SUBSCRIPTIONS_EVENT,
    Acknowledgments,
    EncodedEvent,
    frame_contents,
    unpack_events,
)
from dmiddleware.router.wire.frame import (
    HEADER_SIZE,
    MAX_FRAME_BYTES,
    VERSION,
    Frame,
    FrameContents,
    FrameMac,
    FrameType,
    OutgoingFrame,
    decode_frame,
    has_other_version,
    read_metadata,
    session_of,
)

__all__ = ["NodeProtocol"]

_logger = logging.getLogger(__name__)

BUSY_DELAY_S: Final = 0.02
TAKE_BYTES: Final = 1 << 20
_SESSION_OVER: Final = "the session is over; start a new handshake"
_NO_CONTENTS: Final = FrameContents()
_WITH_EVENTS: Final = (FrameType.DATA, FrameType.FRAGMENT)

_acknowledgments_decoder = msgspec.msgpack.Decoder(Acknowledgments)


def _is_announcement(event: EncodedEvent) -> bool:
    return event.event == SUBSCRIPTIONS_EVENT


class NodeProtocol:
    """The protocol state of one node, as a listener and as a dialer.

    Args:
        identity: this node's identity.
        key: the run's key; None without one.
        options: limits and timeouts.
        nonce: returns 32 fresh random bytes.
        session_number: returns a fresh, non-zero number that was never returned before.

    Attributes:
        peers: all known peers by node id, disconnected ones included.
        subscriptions: which peer receives which events.
        changes: membership changes that the router has not processed yet.
        unsent: the peers to check for something to send, as an ordered set; the router clears it.
            Those that an event is offered to are not added.
        n_refused: how many handshakes and frames were refused.
        closing: whether this node admits no more peers, because it is about to close.
        accepting: whether it accepts events; otherwise their senders try again later.
        undelivered: accepted reliable events that were dropped because their peer said goodbye or
            was gone for too long, by node id and event.
        n_sessions: how many sessions have started or ended.
        incarnation: how this process orders among all that have used its node id, as its peers know
            it. It grows when a peer knows more of them.
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
        self.peers: dict[str, PeerSession] = {}
        self.unsent: dict[str, None] = {}
        self.subscriptions = Subscriptions(identity.node_id, self.peers, options, self.unsent)
        self.changes: list[MembershipChange] = []
        self.n_refused = 0
        self.closing = False
        self.accepting = True
        self.undelivered: dict[str, Counter[str]] = {}
        self.n_sessions = 0
        self.incarnation = 1
        self._key = key
        self._nonce = nonce
        self._members = Membership(
            identity,
            heartbeat_s=options.heartbeat_s,
            missed=options.missed_heartbeats,
            max_known=2 * options.max_peers,
        )
        self._handshake = ListenerHandshake(
            identity,
            key,
            limits=PeerLimits(options.max_event_bytes, options.inbox_bytes, options.window),
            nonce=nonce,
            session_number=session_number,
            incarnation=lambda: self.incarnation,
            known=self,
        )
        self._by_session: dict[int, PeerSession] = {}
        self._with_events: dict[str, PeerSession] = {}
        self._gone: dict[str, PeerSession] = {}
        self._orphaned: deque[tuple[str, EncodedEvent]] = deque()
        self._holds: Callable[[EncodedEvent], bool] | None = None
        self._held: dict[str, PeerSession] = {}
        self._held_orphans: deque[tuple[str, EncodedEvent]] = deque()
        self._saying_goodbye = False

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
        outgoing = peer.outgoing
        return (outgoing.outbox_handled if handled else outgoing.outbox).offer(event)

    def hold(self, holds: Callable[[EncodedEvent], bool] | None) -> None:
        """Choose the reliable events that :meth:`take` leaves for later.

        Events of the same peer that arrive after them are also left, to keep the order.

        Args:
            holds: whether an event is left; None: none is. Call this method again when it would
                return something else than before.
        """
        self._holds = holds
        self._with_events |= self._held
        self._held.clear()
        self._orphaned.extendleft(reversed(self._held_orphans))
        self._held_orphans.clear()

    def take(self, n: int) -> list[tuple[str, EncodedEvent]]:
        """Remove and return up to ``n`` events of each peer, as ``(node id, event)``.

        Fewer large events are returned: while they wait for a handler they belong in the inbox,
        where they count against its bound.
        """
        holds = self._holds
        taken: list[tuple[str, EncodedEvent]] = []
        while self._orphaned:
            if holds is not None and (self._held_orphans or holds(self._orphaned[0][1])):
                self._held_orphans.append(self._orphaned.popleft())
            else:
                taken.append(self._orphaned.popleft())
        for peer in list(self._with_events.values()):
            events = peer.incoming.take(n, max_bytes=TAKE_BYTES, holds=holds)
            for event in events:
                if event.event == SUBSCRIPTIONS_EVENT:
                    self._on_announcement(peer, event)
                else:
                    taken.append((peer.node_id, event))
            if not peer.incoming.has_events:
                del self._with_events[peer.node_id]
            elif not events:
                # Held events may wait until the subscriptions behind them are known.
                for event in peer.incoming.inbox.take_out(_is_announcement):
                    self._on_announcement(peer, event)
                self._held[peer.node_id] = self._with_events.pop(peer.node_id)
        return taken

    def take_handled(self, n: int) -> list[tuple[PeerSession, EncodedEvent]]:
        """Remove and return up to ``n`` events of each peer that are acknowledged when handled.

        Call :meth:`on_handled` with the peer for each of them, in this order.
        """
        taken: list[tuple[PeerSession, EncodedEvent]] = []
        for peer in self._with_events.values():
            inbox = peer.incoming.inbox_handled
            if inbox.has_ready:
                events = inbox.take(n, max_bytes=TAKE_BYTES, holds=self._holds)
                taken += [(peer, event) for event in events]
        return taken

    def on_handled(self, peer: PeerSession) -> None:
        """Note that the oldest event that :meth:`take_handled` returned has been handled."""
        if peer.incoming.inbox_handled.on_handled():
            peer.acknowledge_handled()
            peer.owes_acknowledgment = True
            self.unsent[peer.node_id] = None
        if peer.incoming.has_events and self.peers.get(peer.node_id) is peer:
            self._with_events[peer.node_id] = peer

    @property
    def has_events(self) -> bool:
        """Whether :meth:`take` would return something."""
        return bool(self._orphaned or self._with_events)

    def connected_peers(self) -> list[Identity]:
        """Return the identities of the connected peers."""
        return [member.identity for member in self._members]

    def is_connected(self, node_id: str) -> bool:
        """Return whether a peer is connected."""
        return self._members.get(node_id) is not None

    def tick(self, now: float) -> list[tuple[str, int]]:
        """Find peers that went silent, and forget those disconnected for too long.

        Returns:
            ``(node id, number of dropped reliable events)`` of each newly forgotten peer.
        """
        self._record(self._members.tick(now), now)
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

    def say_goodbye(self) -> None:
        """Reply to each poll that this node leaves for good."""
        self._saying_goodbye = True
        self.unsent |= dict.fromkeys(self.peers)

    def on_connection_lost(self, node_id: str, reason: str, now: float) -> None:
        """Note that the connection to a peer broke."""
        self._record(self._members.on_left(node_id, reason), now)

    def on_progress(self, node_id: str, now: float) -> None:
        """Note that bytes have moved over the connection to a peer, without a complete frame.

        It counts as connected, but only for a limited time.
        """
        self._members.on_progress(node_id, now)

    def quiet_peers(self, now: float) -> list[str]:
        """Return the peers that have been silent for a while and count as lost soon."""
        return self._members.quiet(now)

    def on_request(
        self,
        raw: bytes | memoryview,
        now: float,
        *,
        cover_body: bool,
        body_digest: bytes | None = None,
    ) -> Response:
        """Process a dialer's request.

        Args:
            raw: the received frame.
            now: the time in seconds.
            cover_body: whether new sessions sign the buffers of their frames too.
            body_digest: see :func:`~dmiddleware.router.wire.frame.decode_frame`.

        Returns:
            The response. If its content is a :class:`ParkedPoll`, call :meth:`resume` when
            something was emitted.

        Raises:
            FrameError: if it is not a valid frame; close the connection.
            AuthError: if its signature is missing or wrong; close the connection.
        """
        session = session_of(raw)
        if session == 0:
            return self._on_handshake_request(raw, now, cover_body)
        peer = self._by_session.get(session)
        if peer is None:
            return Response(self._session_over(), 0)
        frame = self._read(peer, raw, body_digest)
        if not peer.replay_window.add(frame.sequence):
            raise AuthError(
                f"request {frame.sequence} of node {peer.node_id} is a replay or far too late; it "
                "was ignored"
            )
        self._heard(peer, frame, len(raw), now)
        number = frame.sequence
        if frame.type in _WITH_EVENTS:
            verdict = self._on_data(peer, frame)
            kind = FrameType.BUSY if verdict is Verdict.BUSY else FrameType.ACK
            content = self._frame(kind, session, peer.sign, number, peer.take_acknowledgments())
            return Response(content, session)
        self._on_acknowledgments(peer, frame, now)
        if frame.type is FrameType.POLL:
            parked = ParkedPoll(peer.node_id, session, number)
            return Response(self.resume(parked, now) or parked, session)
        if frame.type is FrameType.BYE:
            self._on_goodbye(peer, now)
        elif frame.type is not FrameType.HEARTBEAT:
            raise FrameError(
                f"got a {frame.type.name} request, which dialers never send; install the same "
                "version of dmiddleware on all hosts"
            )
        acknowledgments = b""
        if frame.type is FrameType.HEARTBEAT:
            # Repeated, because the reply that carried it may have been lost.
            peer.acknowledge_handled()
            acknowledgments = peer.take_acknowledgments()
        content = self._frame(frame.type, session, peer.sign, number, acknowledgments)
        return Response(content, session)

    def resume(self, parked: ParkedPoll, now: float) -> WireBytes | None:
        """Return the reply to a parked poll, or None while there is nothing to send."""
        peer = self.peers.get(parked.node_id)
        if peer is None or peer.session.number != parked.session or peer.dialed:
            return self._session_over()
        if self._saying_goodbye or peer.owes_acknowledgment:
            peer.goodbye_sent = self._saying_goodbye
            return self._frame(
                FrameType.BYE if self._saying_goodbye else FrameType.ACK,
                parked.session,
                peer.sign,
                parked.number,
                peer.take_acknowledgments(),
            )
        batch = peer.outgoing.next_batch(now)
        return None if batch is None else self._data(peer, batch, parked.number)

    def node_of(self, session: int) -> str | None:
        """Return the dialer that a session belongs to, or None if the session is over."""
        peer = self._by_session.get(session)
        return None if peer is None else peer.node_id

    def due_at(self, node_id: str) -> float | None:
        """Return when there is something to send without further input; None: never."""
        peer = self.peers.get(node_id)
        return None if peer is None else peer.outgoing.next_time()

    def hello(self) -> tuple[DialerHandshake, bytes]:
        """Start a handshake; return its state and the first request."""
        handshake = DialerHandshake(
            self.identity,
            self._key,
            incarnation=self.incarnation,
            nonce=self._nonce(),
            max_event_bytes=self.options.max_event_bytes,
            known=self._members,
        )
        return handshake, self._handshake_frame(FrameType.HELLO, handshake.hello())

    def on_challenge(self, handshake: DialerHandshake, raw: bytes | memoryview) -> bytes:
        """Read the reply to HELLO; return the next request.

        Raises:
            HandshakeRefused: if the listener refuses.
            FrameError: if it is not a valid CHALLENGE.
        """
        frame = self._read_handshake(raw, FrameType.CHALLENGE, handshake)
        return self._handshake_frame(FrameType.AUTH, handshake.on_challenge(frame.metadata))

    def on_welcome(
        self, handshake: DialerHandshake, raw: bytes | memoryview, now: float, *, cover_body: bool
    ) -> PeerSession:
        """Read the reply to AUTH and start the session.

        Raises:
            HandshakeRefused: if the listener refuses.
            AuthError: if the listener does not have the key.
            FrameError: if it is not a valid WELCOME.
        """
        frame = self._read_handshake(raw, FrameType.WELCOME, handshake)
        session = handshake.on_welcome(frame.metadata)
        return self._start_session(session, now, dialed=True, cover_body=cover_body)

    def request(self, peer: PeerSession, kind: FrameType) -> Request:
        """Return a HEARTBEAT, BYE or POLL request, with the acknowledgments due to the peer."""
        if kind is FrameType.HEARTBEAT:
            # Repeated, because the frame that carried it may have been lost.
            peer.acknowledge_handled()
        number, acknowledgments = peer.next_number(), peer.take_acknowledgments()
        raw = self._frame(kind, peer.session.number, peer.sign, number, acknowledgments)
        return Request(number, raw, kind)

    def data_request(self, peer: PeerSession, now: float) -> Request | None:
        """Return a request with what is due to a listener, usually events, or None."""
        if peer.owes_acknowledgment:
            return self.request(peer, FrameType.HEARTBEAT)
        batch = peer.outgoing.next_batch(now)
        if batch is None:
            return None
        number = peer.next_number()
        raw = self._data(peer, batch, number)
        return Request(number, raw, _type_of(batch), batch)

    def on_reply(
        self,
        peer: PeerSession,
        request: Request,
        raw: bytes | memoryview,
        now: float,
        *,
        body_digest: bytes | None = None,
    ) -> FrameType:
        """Process a listener's reply.

        Args:
            peer: the listener.
            request: the request that it replies to.
            raw: the received frame.
            now: the time in seconds.
            body_digest: see :func:`~dmiddleware.router.wire.frame.decode_frame`.

        Returns:
            The type of the reply.

        Raises:
            HandshakeRefused: if the session is over; start a new handshake.
            FrameError, AuthError: if it is not a valid reply to this request; replace the
                connection.
        """
        if session_of(raw) == 0:
            raise HandshakeRefused(_SESSION_OVER, code="stale")
        frame = self._read(peer, raw, body_digest)
        if frame.sequence != request.number or request.number not in peer.pending:
            raise AuthError(
                f"got a reply to request {frame.sequence} of node {peer.node_id} for request "
                f"{request.number}; it is a replay and was ignored"
            )
        peer.pending.remove(request.number)
        self._heard(peer, frame, len(raw), now)
        if frame.type in _WITH_EVENTS:
            self._on_data(peer, frame)
        else:
            self._on_acknowledgments(peer, frame, now)
            if request.batch is not None and frame.type not in (FrameType.ACK, FrameType.BUSY):
                peer.outgoing.on_failed(request.batch, now)
                self.unsent[peer.node_id] = None
        if frame.type is FrameType.BYE:
            self._on_goodbye(peer, now)
        return frame.type

    def _on_handshake_request(
        self, raw: bytes | memoryview, now: float, cover_body: bool
    ) -> Response:
        if len(raw) > MAX_HANDSHAKE_BYTES + HEADER_SIZE:
            raise FrameError(
                f"got a frame of {len(raw)} bytes before authentication, at most "
                f"{MAX_HANDSHAKE_BYTES + HEADER_SIZE} are read"
            )
        if has_other_version(raw):
            refusal = HandshakeRefused(
                f"node {self.identity.node_id} has protocol version {VERSION}, and the dialer "
                "another; install the same version of dmiddleware on all hosts",
                code="version",
            )
            return Response(self._refuse(refusal, b""), 0)
        frame = decode_frame(raw)
        try:
            if frame.type is FrameType.HELLO:
                challenge = self._handshake.on_hello(frame.metadata, now)
                return Response(self._handshake_frame(FrameType.CHALLENGE, challenge), 0)
            if frame.type is FrameType.AUTH:
                welcome, session = self._handshake.on_auth(frame.metadata, now)
                self._start_session(session, now, dialed=False, cover_body=cover_body)
                return Response(self._handshake_frame(FrameType.WELCOME, welcome), session.number)
        except (HandshakeRefused, AuthError) as error:
            return Response(self._refuse(error, frame.metadata), 0)
        raise FrameError(f"got {frame.type.name} before the handshake; the frame was ignored")

    def least_incarnation(self, identity: Identity) -> int:
        """Return the least incarnation that a dialer may have."""
        return self._members.least_incarnation(identity)

    def admit(self, identity: Identity, incarnation: int) -> Refusal | None:
        """Return why an authenticated dialer may not join, or None if it may."""
        if self.closing:
            return Refusal("closing", f"node {self.identity.node_id} is closing")
        own, name = self.identity.node_id, identity.node_id
        peer = self.peers.get(name)
        if peer is None and self._is_full():
            return Refusal(
                "full",
                f"node {own} already has {self.options.max_peers} peers, the most that it accepts; "
                "raise max_peers in its NodeOptions",
            )
        if (
            peer is not None
            and peer.dialed
            and peer.session.identity.instance == identity.instance
            and self.is_connected(name)
            and own < name
        ):
            # Otherwise the two connections would keep replacing each other.
            return Refusal("dialed", f"node {own} has already dialed node {name}")
        return self._members.admit(identity, incarnation)

    def _is_full(self) -> bool:
        """Return whether one more peer would be too many; forgotten dialers make room."""
        if len(self.peers) >= self.options.max_peers:
            for peer in list(self.peers.values()):
                if peer.forgotten and not peer.dialed:
                    self._remove(peer)
        return len(self.peers) >= self.options.max_peers

    def _start_session(
        self, session: Session, now: float, *, dialed: bool, cover_body: bool
    ) -> PeerSession:
        self.n_sessions += 1
        self.incarnation = max(self.incarnation, session.own_incarnation)
        node_id = session.identity.node_id
        known = self.peers.get(node_id)
        if known is not None:
            self._by_session.pop(known.session.number, None)
        if known is not None and known.session.identity.instance == session.identity.instance:
            peer = known
            peer.outgoing.on_reconnect(now)
        else:
            if known is not None:
                self._keep_received(known)
            peer = PeerSession.start(session, known, self.options, dialed=dialed)
        peer.session, peer.dialed = session, dialed
        peer.replay_window, peer.n_requests, peer.pending = ReplayWindow(), 0, set()
        peer.use_keys(session, dialed=dialed, cover_body=cover_body)
        self.peers[node_id] = peer
        self.unsent[node_id] = None
        self.subscriptions.on_peers_changed()
        if not dialed:
            self._by_session[session.number] = peer
        self._record(self._members.on_session(session, now), now)
        peer.gone_since = None
        self._gone.pop(node_id, None)
        if peer is not known:
            self.subscriptions.announce_to(peer)
        return peer

    def _on_goodbye(self, peer: PeerSession, now: float) -> None:
        """Note that a peer leaves for good, or that this node has left it."""
        reason = SAID_GOODBYE
        if self.peers.get(peer.node_id) is peer and (n_dropped := self._drop_outgoing(peer)):
            reason += f"; {n_dropped} events that it had not accepted were dropped"
        self._record(self._members.on_left(peer.node_id, reason, for_good=True), now)
        self.n_sessions += 1
        self.unsent[peer.node_id] = None
        self._remove(peer)

    def _remove(self, peer: PeerSession) -> None:
        if self.peers.get(peer.node_id) is peer:
            self._keep_received(peer)
            del self.peers[peer.node_id]
            self._gone.pop(peer.node_id, None)
            self.subscriptions.on_peers_changed()
        if not peer.dialed:
            self._by_session.pop(peer.session.number, None)

    def _drop_outgoing(self, peer: PeerSession) -> int:
        """Drop and count what is waiting for a peer; return the number of reliable events."""
        lost = peer.outgoing.give_up()
        if lost:
            self.undelivered.setdefault(peer.node_id, Counter()).update(lost)
        return lost.total()

    def _keep_received(self, peer: PeerSession) -> None:
        """Keep the acknowledged events of a process that has ended until they are taken."""
        incoming = peer.incoming
        for event in (*incoming.take(sys.maxsize), *incoming.inbox_handled.take()):
            if event.event == SUBSCRIPTIONS_EVENT:
                self._on_announcement(peer, event)
            else:
                self._orphaned.append((peer.node_id, event))
        self._with_events.pop(peer.node_id, None)
        self._held.pop(peer.node_id, None)

    def _on_announcement(self, peer: PeerSession, event: EncodedEvent) -> None:
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

    def _heard(self, peer: PeerSession, frame: Frame, n_bytes: int, now: float) -> None:
        peer.counters.received_frames += 1
        peer.counters.received_bytes += n_bytes
        changes = self._members.on_heard(peer.node_id, frame.session, frame.incarnation, now)
        self._record(changes, now)

    def _read(self, peer: PeerSession, raw: bytes | memoryview, body_digest: bytes | None) -> Frame:
        frame = decode_frame(raw, peer.check, body_digest=body_digest)
        if frame.session != peer.session.number:
            raise AuthError(
                f"got a frame of session {frame.session} in session {peer.session.number} with "
                f"node {peer.node_id}; it was ignored"
            )
        return frame

    def _on_data(self, peer: PeerSession, frame: Frame) -> Verdict:
        stream, sequence = frame.stream, frame.data_sequence
        if frame.type is FrameType.FRAGMENT:
            events = self._on_fragment(peer, frame)
        else:
            events = unpack_events(frame)
        if events is None:
            # Not in full; the peer knows what to send next.
            return Verdict.ACCEPTED
        self._check_names(peer, events)
        if self.accepting:
            verdict = peer.incoming.on_events(stream, sequence, events)
        else:
            verdict = Verdict.BUSY
        if verdict is Verdict.BUSY:
            peer.counters.refused_frames += 1
            peer.busy.append((stream, sequence, BUSY_DELAY_S))
        else:
            inbox = peer.incoming.inbox_of(stream)
            if inbox is None:
                peer.acks.append((stream, sequence, peer.incoming.inbox.credit))
            elif sequence <= inbox.acknowledged:
                peer.acks.append((stream, inbox.acknowledged, inbox.credit))
            else:
                peer.kept.append((stream, sequence))
            if peer.incoming.has_events:
                self._with_events[peer.node_id] = peer
        return verdict

    def _on_fragment(self, peer: PeerSession, frame: Frame) -> list[EncodedEvent] | None:
        """Add a fragment to its frame.

        Returns:
            The frame's event if it has arrived in full; None if it has not, and no event if there
            is nothing to read because the frame is a duplicate or this node accepts none.
        """
        stream, sequence, incoming = frame.stream, frame.data_sequence, peer.incoming
        fragment = Fragment.of(frame)
        if not self.accepting or incoming.has(stream, sequence):
            return []
        assembly = incoming.assembly(stream, sequence)
        if assembly is None:
            assembly = self._grant(peer, stream, sequence, fragment.total)
        if assembly is None:
            peer.counters.refused_frames += 1
            peer.busy.append((stream, sequence, BUSY_DELAY_S))
            return None
        assembly.add(fragment, frame)
        if assembly.complete:
            return [assembly.event()]
        peer.progress.append((stream, sequence, assembly.offset))
        return None

    def _grant(self, peer: PeerSession, stream: int, sequence: int, total: int) -> Assembly | None:
        """Grant memory for a frame in fragments; None: there is none at the moment."""
        most = self.options.max_event_bytes
        if total > most:
            raise FrameError(
                f"node {peer.node_id} wants to send a frame of {total} bytes, but this node has "
                f"announced that it accepts at most {most}"
            )
        held = sum(one.incoming.large_bytes for one in self.peers.values())
        if held + total > most:
            for gone in self._gone.values():
                gone.incoming.drop_unfinished()
            held = sum(one.incoming.large_bytes for one in self.peers.values())
        if held + total > most:
            return None
        try:
            assembly = Assembly(stream, sequence, total)
        except MemoryError:
            _logger.warning(
                "the system refused %d bytes for an event of node %s, which is kept waiting; "
                "free some memory, or lower max_event_bytes",
                total,
                peer.node_id,
            )
            return None
        peer.incoming.grant(assembly)
        return assembly

    def _check_names(self, peer: PeerSession, events: list[EncodedEvent]) -> None:
        names = {base_name(name) for name in {event.event for event in events}}
        if names <= peer.event_names:
            return
        most = self.options.max_event_names
        if len(names | peer.event_names) > most:
            raise FrameError(
                f"node {peer.node_id} has used more than {most} event names; use fewer, or raise "
                "max_event_names in the NodeOptions of all nodes"
            )
        peer.event_names |= names

    def _on_acknowledgments(self, peer: PeerSession, frame: Frame, now: float) -> None:
        if not len(frame.metadata):
            return
        received = read_metadata(
            _acknowledgments_decoder, frame.metadata, "list of acknowledgments"
        )
        for stream, sequence, credit in received.acks:
            peer.outgoing.on_ack(stream, sequence, credit)
        for stream, sequence in received.kept:
            peer.outgoing.on_kept(stream, sequence)
        for stream, sequence, delay_s in received.busy:
            peer.outgoing.on_busy(stream, sequence, min(delay_s, 1.0), now)
        for stream, sequence, offset in received.progress:
            peer.outgoing.on_progress(stream, sequence, offset)
        self.unsent[peer.node_id] = None

    def _data(self, peer: PeerSession, batch: EventBatch, number: int) -> WireBytes:
        raw = OutgoingFrame(
            _type_of(batch),
            frame_contents(batch.events)
            if batch.fragment is None
            else fragment_contents(batch.events[0], batch.fragment),
            peer.sign,
            max_size=MAX_FRAME_BYTES,
            session=peer.session.number,
            incarnation=self.incarnation,
            stream=batch.stream,
            sequence=number,
            data_sequence=batch.sequence,
        )
        peer.counters.sent_frames += 1
        peer.counters.sent_bytes += len(raw)
        peer.counters.retried_frames += batch.is_retry
        return raw

    def _frame(
        self,
        kind: FrameType,
        session: int,
        sign: FrameMac | None,
        sequence: int = 0,
        metadata: bytes = b"",
    ) -> bytes:
        frame = OutgoingFrame(
            kind,
            FrameContents(metadata) if metadata else _NO_CONTENTS,
            sign,
            max_size=MAX_FRAME_BYTES,
            session=session,
            incarnation=self.incarnation,
            sequence=sequence,
        )
        return bytes(frame)

    def _handshake_frame(self, kind: FrameType, content: bytes) -> bytes:
        return self._frame(kind, 0, None, 0, content)

    def _refuse(self, error: HandshakeRefused | AuthError, request: bytes | memoryview) -> bytes:
        self.n_refused += 1
        refusal = self._handshake.refusal(error, request)
        return self._handshake_frame(FrameType.REFUSED, refusal)

    def _session_over(self) -> bytes:
        # The key of the session is gone, so the dialer cannot verify this and just dials again.
        return self._refuse(HandshakeRefused(_SESSION_OVER, code="stale"), b"")

    @staticmethod
    def _read_handshake(
        raw: bytes | memoryview, expected: FrameType, handshake: DialerHandshake
    ) -> Frame:
        frame = decode_frame(raw)
        if frame.type is FrameType.REFUSED:
            raise handshake.on_refused(frame.metadata)
        if frame.type is not expected:
            raise FrameError(
                f"expected {expected.name}, got {frame.type.name}; check the address, and install "
                "the same version of dmiddleware on all hosts"
            )
        return frame


def _type_of(batch: EventBatch) -> FrameType:
    return FrameType.DATA if batch.fragment is None else FrameType.FRAGMENT
