"""The protocol of one node: handshake, membership, subscriptions and streams, joined.

A :class:`NodeProtocol` reads the frames that arrive over the connections with its peers, and makes
those to send. Both sides of a connection do the same after the handshake. The router passes it
frames and the time, and sends what it returns.

Methods must not be called concurrently; the router holds a lock around each call.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused
from dmiddleware.event_names import base_name
from dmiddleware.router.protocol.fragments import Assembly, Fragment, fragment_contents
from dmiddleware.router.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    Identity,
    ListenerHandshake,
    Refusal,
    Session,
    check_incarnation,
)
from dmiddleware.router.protocol.membership import (
    SAID_GOODBYE,
    Membership,
    MembershipChange,
)
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session import Link, PeerSession
from dmiddleware.router.protocol.session_frames import SessionFrames, States, is_urgent
from dmiddleware.router.protocol.streams import EventBatch
from dmiddleware.router.protocol.subscriptions import OWN_EVENTS, Subscriptions
from dmiddleware.router.wire.envelope import (
    SUBSCRIPTIONS_EVENT,
    EncodedEvent,
    frame_contents,
    unpack_events,
)
from dmiddleware.router.wire.frame import (
    HEADER_SIZE,
    VERSION,
    Frame,
    FrameContents,
    FrameType,
    asks,
    decode_frame,
    encode_frame,
    version_of,
)

__all__ = ["MAX_STRANGER_BYTES", "NodeProtocol"]

_logger = logging.getLogger(__name__)

MAX_STRANGER_BYTES: Final = MAX_HANDSHAKE_BYTES + HEADER_SIZE
"""The longest frame before authentication."""

TAKE_BYTES: Final = 1 << 20
_NO_CONTENTS: Final = FrameContents()
_WITH_EVENTS: Final = (FrameType.DATA, FrameType.FRAGMENT)


class _Wanted(NamedTuple):
    """A large frame that a peer asks memory for."""

    peer: PeerSession
    stream: int
    sequence: int
    total: int


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
        subscriptions: which peer receives which events.
        changes: membership changes that the router has not processed yet.
        unsent: the links to check for something to send, as an ordered set; the router clears it.
            Those of peers that an event is offered to are not added.
        ended: the links to close, with the reasons; the router clears it.
        n_refused: how many handshakes and frames were refused.
        closing: whether this node admits no more peers, because it is about to close.
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
        self.unsent: dict[Link, None] = {}
        self.ended: list[tuple[Link, str]] = []
        self.subscriptions = Subscriptions(identity.node_id, self.peers, options, self.unsent)
        self.changes: list[MembershipChange] = []
        self.n_refused = 0
        self.closing = False
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
            limits=options.limits,
            nonce=nonce,
            session_number=session_number,
            incarnation=lambda: self.incarnation,
            known=self,
        )
        self._with_events: dict[str, PeerSession] = {}
        self._gone: dict[str, PeerSession] = {}
        self._orphaned: deque[tuple[str, EncodedEvent]] = deque()
        self._holds: Callable[[EncodedEvent], bool] | None = None
        self._held: dict[str, PeerSession] = {}
        self._held_orphans: deque[tuple[str, EncodedEvent]] = deque()
        self._wanted: deque[_Wanted] = deque()
        self._accepts = True

    @property
    def accepting(self) -> bool:
        """Whether this node accepts events; otherwise their senders keep them."""
        return self._accepts

    @accepting.setter
    def accepting(self, accepting: bool) -> None:
        if accepting != self._accepts:
            self._accepts = accepting
            for peer in self.peers.values():
                self._owe_states(peer)

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
            self._note_taken(peer)
        self._grant_wanted()
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
                self._note_taken(peer)
        self._grant_wanted()
        return taken

    def on_handled(self, peer: PeerSession) -> None:
        """Note that the oldest event that :meth:`take_handled` returned has been handled."""
        peer.incoming.inbox_handled.on_handled()
        self._note_taken(peer)
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
            if peer is not None and peer.link is not None:
                self._close(peer.link, change.reason)
        self._record(silent, now)
        self._grant_wanted()
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
            if peer.link is not None:
                peer.link.owes_heartbeat = True
                peer.link.owes_states |= peer.incoming.has_news
                self.unsent[peer.link] = None

    def drain(self) -> None:
        """Have everything acknowledged soon, because nothing may follow."""
        for peer in self.peers.values():
            peer.outgoing.drain()
            if peer.link is not None:
                self.unsent[peer.link] = None

    def say_goodbye(self) -> None:
        """Tell each peer that this node leaves for good."""
        for peer in self.peers.values():
            if peer.link is not None:
                peer.link.owes_goodbye = True
                self.unsent[peer.link] = None

    def on_end(self, link: Link, reason: str, now: float) -> None:
        """Note that a connection has ended."""
        peer = link.peer
        if self._detach(link) and peer is not None and self.peers.get(peer.node_id) is peer:
            self._record(self._members.on_left(peer.node_id, reason), now)

    def on_progress(self, node_id: str, now: float) -> None:
        """Note that bytes have moved over the connection to a peer, without a complete frame.

        It counts as connected, but only for a limited time.
        """
        self._members.on_progress(node_id, now)

    def quiet_peers(self, now: float) -> list[str]:
        """Return the peers that have been silent for a while and count as lost soon."""
        return self._members.quiet(now)

    def dial(self, link: Link) -> None:
        """Start a handshake over a connection that this node has dialed."""
        link.handshake = DialerHandshake(
            self.identity,
            self._key,
            incarnation=self.incarnation,
            nonce=self._nonce(),
            limits=self.options.limits,
            known=self,
        )
        self._answer(link, FrameType.HELLO, link.handshake.hello())

    def on_frame(
        self, link: Link, raw: memoryview, now: float, *, body_digest: bytes | None = None
    ) -> FrameType:
        """Process a frame.

        Args:
            link: the connection over which it has arrived.
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
        if link.is_over:
            return FrameType.BYE
        session, peer = link.session, link.peer
        if session is None or peer is None:
            if link.handshake is None:
                return self._on_dialer(link, raw, now)
            return self._on_listener(link, link.handshake, raw, now)
        frame = session.read(raw, body_digest=body_digest)
        self._heard(peer, frame, len(raw), now)
        self._on_session_frame(link, peer, frame, now)
        if peer.incoming.is_due:
            self.unsent[link] = None
        return frame.type

    def fill(self, link: Link) -> None:
        """Make the frames that can be sent over a connection now."""
        route, peer = link.route, link.peer
        link.is_stalled = False
        if link.is_over or peer is None:
            return
        if link.owes_states or peer.incoming.is_due:
            states = peer.incoming.take_states(accepting=self._accepts)
            self._put(link, FrameType.STATE, states.contents())
        elif link.owes_heartbeat:
            self._put(link, FrameType.HEARTBEAT, _NO_CONTENTS)
        link.owes_states = link.owes_heartbeat = False
        if link.owes_proof:
            link.owes_proof = False
            if link.sharing is not None and (proof := link.sharing.proof()):
                self._put(link, FrameType.SHARE, FrameContents(proof))
        while route.has_room:
            batch = peer.outgoing.next_batch()
            if batch is None:
                break
            self._put_batch(link, batch)
        else:
            link.is_stalled = True
            return
        while (stream := peer.outgoing.take_ask()) is not None:
            self._put(link, FrameType.ASK, _NO_CONTENTS, stream=stream)
        if link.owes_goodbye:
            link.owes_goodbye, link.said_goodbye = False, True
            self._put(link, FrameType.BYE, _NO_CONTENTS)

    def _on_session_frame(self, link: Link, peer: PeerSession, frame: Frame, now: float) -> None:
        if frame.type in _WITH_EVENTS:
            self._on_data(peer, frame)
        elif frame.type is FrameType.STATE:
            peer.outgoing.on_states(States.read(frame))
            self.unsent[link] = None
        elif frame.type is FrameType.ASK:
            peer.incoming.on_ask(frame.stream)
        elif frame.type is FrameType.SHARE:
            if link.sharing is not None:
                link.sharing.agree(bytes(frame.metadata))
        elif frame.type is FrameType.BYE:
            self._on_goodbye(link, peer, now)
        elif frame.type is not FrameType.HEARTBEAT:
            raise FrameError(
                f"got a {frame.type.name} frame in a session; install the same version of "
                "dmiddleware on all hosts"
            )

    def _on_dialer(self, link: Link, raw: memoryview, now: float) -> FrameType:
        """Process a frame of a dialer before its session."""
        frame = Frame(FrameType.HELLO)
        try:
            frame = _read_handshake(raw)
            if frame.type is FrameType.HELLO:
                challenge = self._handshake.on_hello(frame.metadata, now)
                self._answer(link, FrameType.CHALLENGE, challenge)
            elif frame.type is FrameType.AUTH:
                welcome, session = self._handshake.on_auth(frame.metadata, now)
                self._answer(link, FrameType.WELCOME, welcome)
                self._start_session(link, session, now)
            else:
                raise FrameError(f"got {frame.type.name} before the handshake")
        except (HandshakeRefused, AuthError) as error:
            self.n_refused += 1
            refusal = self._handshake.refusal(error, frame.metadata)
            self._answer(link, FrameType.REFUSED, refusal)
            link.is_over = True
            return FrameType.REFUSED
        return frame.type

    def _on_listener(
        self, link: Link, handshake: DialerHandshake, raw: memoryview, now: float
    ) -> FrameType:
        """Process a frame of a listener before its session."""
        frame = _read_handshake(raw)
        if frame.type is FrameType.REFUSED:
            raise handshake.on_refused(frame.metadata)
        if frame.type is FrameType.CHALLENGE:
            self._answer(link, FrameType.AUTH, handshake.on_challenge(frame.metadata))
        elif frame.type is FrameType.WELCOME:
            self._start_session(link, handshake.on_welcome(frame.metadata), now)
        else:
            raise FrameError(
                f"got {frame.type.name} in the handshake; check the address, and install the same "
                "version of dmiddleware on all hosts"
            )
        return frame.type

    def least_incarnation(self, identity: Identity) -> int:
        """Return the least incarnation that a process may have."""
        return self._members.least_incarnation(identity)

    def admit(self, identity: Identity, incarnation: int, *, dialed: bool) -> Refusal | None:
        """Return why a process may not join, or None if it may.

        Args:
            identity: identity of the process.
            incarnation: its incarnation before this handshake.
            dialed: whether this node has dialed it.
        """
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
            and peer.link is not None
            and peer.session.identity.instance == identity.instance
            and ((dialed and peer.link.dialed) or self._stays(peer.link, dialed))
        ):
            # Otherwise the two connections would keep replacing each other.
            return Refusal("connected", f"nodes {own} and {name} are already connected")
        return self._members.admit(identity, incarnation)

    def _stays(self, link: Link, dialed: bool) -> bool:
        """Return whether a connection stays if there is another one with the same process.

        If each of the two nodes has dialed the other, both keep the one that the same node dialed.
        """
        assert link.peer is not None
        is_first = self.identity.node_id < link.peer.node_id
        return link.dialed != dialed and link.dialed == is_first

    def _is_full(self) -> bool:
        """Return whether one more peer would be too many; forgotten dialers make room."""
        if len(self.peers) >= self.options.max_peers:
            for peer in list(self.peers.values()):
                if peer.forgotten:
                    self._remove(peer)
        return len(self.peers) >= self.options.max_peers

    def _start_session(self, link: Link, session: Session, now: float) -> None:
        self.n_sessions += 1
        self.incarnation = max(self.incarnation, session.own_incarnation)
        node_id = session.identity.node_id
        known = self.peers.get(node_id)
        old = None if known is None else known.link
        if known is not None and known.session.identity.instance == session.identity.instance:
            if old is not None and self._stays(old, link.dialed):
                self._close(link, "there is another connection with this node")
                return
            peer = known
        else:
            if known is not None:
                self._keep_received(known)
            peer = PeerSession.start(session, known, self.options)
        if old is not None:
            self._close(old, "a newer connection has replaced this one")
        peer.session, peer.link, link.peer = session, link, peer
        link.session = SessionFrames(session, dialed=link.dialed, cover_body=link.covers_body)
        if peer.avoids_sharing:
            link.sharing, peer.avoids_sharing = None, False
        link.owes_states = link.owes_proof = True
        peer.outgoing.on_connect(session.limits.inbox_bytes)
        self.peers[node_id] = peer
        self.unsent[link] = None
        self.subscriptions.on_peers_changed()
        self._record(self._members.on_session(session, now), now)
        peer.gone_since = None
        self._gone.pop(node_id, None)
        if peer is not known:
            self.subscriptions.announce_to(peer)

    def _on_goodbye(self, link: Link, peer: PeerSession, now: float) -> None:
        """Note that a peer leaves for good, or that this node has left it."""
        if link.said_goodbye:
            self._close(link, SAID_GOODBYE)
        else:
            # The peer closes the connection when it has the answer.
            self._detach(link)
            self._put(link, FrameType.BYE, _NO_CONTENTS)
            self.unsent[link] = None
        reason = SAID_GOODBYE
        if self.peers.get(peer.node_id) is peer and (n_dropped := self._drop_outgoing(peer)):
            reason += f"; {n_dropped} events that it had not accepted were dropped"
        self._record(self._members.on_left(peer.node_id, reason, for_good=True), now)
        self.n_sessions += 1
        self._remove(peer)

    def _close(self, link: Link, reason: str) -> None:
        """End a connection, without noting that the peer has left."""
        self._detach(link)
        self.ended.append((link, reason))

    def _detach(self, link: Link) -> bool:
        """Stop using a connection; return whether it was the one with its peer."""
        link.is_over = True
        self.unsent.pop(link, None)
        peer = link.peer
        if peer is None or peer.link is not link:
            return False
        peer.link = None
        peer.incoming.on_disconnect()
        self._wanted = deque(one for one in self._wanted if one.peer is not peer)
        return True

    def _remove(self, peer: PeerSession) -> None:
        if self.peers.get(peer.node_id) is peer:
            self._keep_received(peer)
            del self.peers[peer.node_id]
            self._gone.pop(peer.node_id, None)
            self.subscriptions.on_peers_changed()

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
        check_incarnation(frame.incarnation, peer.session.incarnation)
        changes = self._members.on_heard(peer.node_id, frame.session, frame.incarnation, now)
        self._record(changes, now)

    def _owe_states(self, peer: PeerSession) -> None:
        if peer.link is not None:
            peer.link.owes_states = True
            self.unsent[peer.link] = None

    def _note_taken(self, peer: PeerSession) -> None:
        """Send the peer the states of its inboxes, if they have changed enough."""
        if peer.link is not None and peer.incoming.is_due:
            self.unsent[peer.link] = None

    def _on_data(self, peer: PeerSession, frame: Frame) -> None:
        stream, incoming = frame.stream, peer.incoming
        if frame.type is FrameType.FRAGMENT:
            events = self._on_fragment(peer, frame)
        else:
            events = unpack_events(frame)
        if events is None:
            return
        if not self._accepts:
            incoming.drop_frame(stream, len(events))
            return
        self._check_names(peer, events)
        incoming.on_events(stream, frame.data_sequence, events)
        if asks(frame):
            incoming.on_ask(stream, until_empty=False)
        if incoming.has_events:
            self._with_events[peer.node_id] = peer

    def _on_fragment(self, peer: PeerSession, frame: Frame) -> list[EncodedEvent] | None:
        """Process a fragment; return the frame's event if it has arrived in full."""
        stream, sequence = frame.stream, frame.data_sequence
        fragment = Fragment.of(frame)
        if not self._accepts:
            peer.incoming.drop_frame(stream, int(not fragment.length))
        elif not fragment.length:
            self._want(_Wanted(peer, stream, sequence, fragment.total))
        else:
            # Fragments without memory are on their way when frames before them are dropped.
            assembly = peer.incoming.assembly(stream, sequence)
            if assembly is not None:
                assembly.add(fragment, frame)
                return [assembly.event()] if assembly.is_complete else None
        return None

    def _want(self, wanted: _Wanted) -> None:
        most = self.options.max_event_bytes
        if wanted.total > most:
            raise FrameError(
                f"node {wanted.peer.node_id} wants to send a frame of {wanted.total} bytes, but "
                f"this node has announced that it accepts at most {most}"
            )
        if any(one[:2] == wanted[:2] for one in self._wanted):
            raise FrameError(
                f"node {wanted.peer.node_id} asks twice for the memory of a large frame"
            )
        self._wanted.append(wanted)
        self._grant_wanted()

    def _grant_wanted(self) -> None:
        """Grant memory for large frames, in the order in which it was asked for."""
        while self._wanted:
            wanted = self._wanted[0]
            assembly = self._memory_for(wanted)
            if assembly is None:
                return
            self._wanted.popleft()
            wanted.peer.incoming.grant(assembly)
            self._note_taken(wanted.peer)

    def _memory_for(self, wanted: _Wanted) -> Assembly | None:
        """Return memory for a large frame; None: there is none at the moment."""
        known = wanted.peer.incoming.assembly(wanted.stream, wanted.sequence)
        if known is not None and known.total == wanted.total:
            return known
        most = self.options.max_event_bytes
        held = sum(one.incoming.large_bytes for one in self.peers.values())
        if held + wanted.total > most:
            for gone in self._gone.values():
                gone.incoming.drop_unfinished()
            held = sum(one.incoming.large_bytes for one in self.peers.values())
        if held + wanted.total > most:
            return None
        try:
            return Assembly(wanted.stream, wanted.sequence, wanted.total)
        except MemoryError:
            _logger.warning(
                "the system refused %d bytes for an event of node %s, which is kept waiting; "
                "free some memory, or lower max_event_bytes",
                wanted.total,
                wanted.peer.node_id,
            )
            return None

    def _check_names(self, peer: PeerSession, events: list[EncodedEvent]) -> None:
        names = {base_name(name) for name in {event.event for event in events}}
        if names <= peer.event_names:
            return
        if not names.isdisjoint(OWN_EVENTS):
            raise FrameError(
                f"node {peer.node_id} sends an event that each router emits itself: "
                + ", ".join(sorted(names & OWN_EVENTS))
            )
        peer.event_names |= names - {SUBSCRIPTIONS_EVENT}
        most = self.options.max_event_names
        if len(peer.event_names) > most:
            raise FrameError(
                f"node {peer.node_id} has used more than {most} event names; use fewer, or raise "
                "max_event_names in the NodeOptions of all nodes"
            )

    def _put_batch(self, link: Link, batch: EventBatch) -> None:
        if batch.fragment is None:
            kind, contents = FrameType.DATA, frame_contents(batch.events)
        else:
            kind = FrameType.FRAGMENT
            contents = fragment_contents(batch.events[0], batch.fragment)
        self._put(
            link,
            kind,
            contents,
            stream=batch.stream,
            data_sequence=batch.sequence,
            asks=batch.asks,
        )

    def _put(
        self,
        link: Link,
        kind: FrameType,
        contents: FrameContents,
        *,
        stream: int = 0,
        data_sequence: int = 0,
        asks: bool = False,
    ) -> None:
        """Add a frame to a connection with a session."""
        session, peer = link.session, link.peer
        assert session is not None and peer is not None
        frame = session.make(
            kind,
            contents,
            incarnation=self.incarnation,
            stream=stream,
            data_sequence=data_sequence,
            asks=asks,
        )
        peer.counters.sent_frames += 1
        peer.counters.sent_bytes += len(frame)
        link.route.put(frame, urgent=is_urgent(kind))

    def _answer(self, link: Link, kind: FrameType, content: bytes) -> None:
        """Add a frame of the handshake to a connection."""
        frame = Frame(kind, incarnation=self.incarnation, metadata=content)
        # The first states, which are urgent, must not overtake it.
        link.route.put(encode_frame(frame, max_size=MAX_STRANGER_BYTES), urgent=True)
        self.unsent[link] = None


def _read_handshake(raw: memoryview) -> Frame:
    version = version_of(raw)
    if version not in (None, VERSION):
        raise HandshakeRefused(
            f"the two sides have protocol versions {version} and {VERSION}; install the same "
            "version of dmiddleware on all hosts",
            code="version",
        )
    return decode_frame(raw)
