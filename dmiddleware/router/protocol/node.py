"""What one node of the network does, without a socket, a thread or a clock.

A :class:`Node` joins handshake, membership and delivery. It answers requests when it listens, and
makes requests and reads their answers when it dials; the router gives it frames and the time, and
moves what it gives back. Data for a dialer rides on the answers to its polls, so that only the
listener must be reachable.

Every method may be called from one thread at a time; the router holds a lock around it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused
from dmiddleware.router.protocol.delivery import Verdict
from dmiddleware.router.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    Identity,
    Limits,
    ListenerHandshake,
    Refusal,
    Session,
)
from dmiddleware.router.protocol.limits import NodeOptions
from dmiddleware.router.protocol.membership import Change, Membership
from dmiddleware.router.protocol.outgoing import Sending
from dmiddleware.router.protocol.session import Link, Parked, Seen
from dmiddleware.router.protocol.subscriptions import Audience
from dmiddleware.router.wire.byte_pieces import Raw
from dmiddleware.router.wire.envelope import (
    WANTS_EVENT,
    Answer,
    EncodedEvent,
    pack_events,
    unpack_events,
)
from dmiddleware.router.wire.frame import (
    HEADER_SIZE,
    Frame,
    FrameMac,
    FrameType,
    decode_frame,
    encode_frame,
    frame_parts,
    read_metadata,
    session_of,
)

__all__ = ["Node"]

BUSY_DELAY_S: Final = 0.02
TAKE_BYTES: Final = 1 << 20
_LARGE: Final = 64 * 1024

_encode = msgspec.msgpack.Encoder().encode
_answers = msgspec.msgpack.Decoder(Answer)


class Node:
    """One node: it answers requests as a listener, makes them as a dialer.

    Args:
        identity: who it is.
        key: the run's key; None without one.
        options: bounds and times.
        nonce: returns 32 fresh random bytes.
        session_number: returns a fresh number, not 0, never given before.
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
        self.links: dict[str, Link] = {}
        self.audience = Audience(identity.node_id, self.links, options)
        self.changes: list[Change] = []
        self.refused = 0
        self.closing = False
        self._key = key
        self._nonce = nonce
        self._members = Membership(
            identity, heartbeat_s=options.heartbeat_s, missed=options.missed_heartbeats
        )
        self._handshake = ListenerHandshake(
            identity,
            key,
            limits=Limits(options.max_frame_bytes, options.inbox_bytes, options.window),
            nonce=nonce,
            session_number=session_number,
            admit=self._admit,
        )
        self._by_session: dict[int, Link] = {}
        self._left_behind: deque[tuple[str, EncodedEvent]] = deque()
        # How often a session has begun or ended.
        self.n_sessions = 0

    # Events -----------------------------------------------------------------------------------

    def offer(self, node_id: str, event: EncodedEvent) -> bool:
        """Accept a reliable event for a peer, unless what waits for it is full.

        A peer that has been forgotten takes nothing: the answer is True.
        """
        link = self.links.get(node_id)
        return link is None or link.forgotten or link.outgoing.offer(event)

    def take(self, n: int) -> list[tuple[str, EncodedEvent]]:
        """Remove and return up to ``n`` events of each peer, as ``(node id, event)``.

        Of large events fewer are taken: those that wait for their handler belong in the inbox,
        where they count against its bound.
        """
        taken = list(self._left_behind)
        self._left_behind.clear()
        for link in self.links.values():
            if link.incoming.waiting:
                for event in link.incoming.take(n, max_bytes=TAKE_BYTES):
                    if event.event == WANTS_EVENT:
                        self._hear(link, event)
                    else:
                        taken.append((link.node_id, event))
        return taken

    @property
    def has_mail(self) -> bool:
        """Whether :meth:`take` would return something."""
        return bool(self._left_behind) or any(x.incoming.waiting for x in self.links.values())

    # Membership -------------------------------------------------------------------------------

    def peers(self) -> list[Identity]:
        """Return who is here."""
        return [peer.identity for peer in self._members]

    def is_here(self, node_id: str) -> bool:
        """Tell whether a peer counts as present."""
        return self._members.get(node_id) is not None

    def tick(self, now: float) -> list[tuple[str, int]]:
        """Find peers that went silent, and forget those that are gone for too long.

        Returns:
            ``(node id, undelivered events)`` of those that were forgotten.
        """
        self._note(self._members.tick(now), now)
        forgotten = [
            link
            for link in self.links.values()
            if link.gone_since is not None
            and not link.forgotten
            and now - link.gone_since > self.options.forget_after_s
        ]
        for link in forgotten:
            link.forgotten = True
            self.audience.on_links_changed()
        return [(link.node_id, link.outgoing.give_up()) for link in forgotten]

    def on_lost(self, node_id: str, reason: str, now: float) -> None:
        """Take note that the connection to a peer broke."""
        self._note(self._members.on_left(node_id, reason), now)

    # Listening --------------------------------------------------------------------------------

    def on_request(self, raw: bytes | memoryview, now: float, *, cover_body: bool) -> Raw | Parked:
        """Answer a dialer's request.

        Args:
            raw: the frame that came.
            now: the time in seconds.
            cover_body: whether new sessions sign their frames' buffers too.

        Returns:
            The frame to answer with; or :class:`Parked`: ask :meth:`resume` when something was
            emitted, and :meth:`nothing` when the dialer has waited long enough.

        Raises:
            FrameError: if it is no frame of this protocol: close the connection.
            AuthError: if it is not signed as it must be: close the connection.
        """
        session = session_of(raw)
        if session == 0:
            return self._on_stranger(raw, now, cover_body)
        link = self._by_session.get(session)
        if link is None:
            return self._refused(
                HandshakeRefused("the session is over; shake hands anew", code="stale")
            )
        frame = self._read(link, raw)
        if not link.seen.add(frame.sequence):
            raise AuthError(f"request {frame.sequence} came twice; it is not answered again")
        self._heard(link, len(raw), now)
        if frame.type is FrameType.DATA:
            return self._on_data(link, frame)
        self._take_answer(link, frame, now)
        if frame.type is FrameType.POLL:
            parked = Parked(link.node_id, link.session.number)
            return self.resume(parked, now) or parked
        if frame.type is FrameType.BYE:
            self.on_goodbye(link, now)
        elif frame.type is not FrameType.HEARTBEAT:
            raise FrameError(f"a dialer does not send {frame.type.name}")
        return self._frame(frame.type, link.session.number, link.sign)

    def resume(self, parked: Parked, now: float) -> Raw | None:
        """Return the answer to a parked poll, or None while there is nothing to send."""
        link = self.links.get(parked.node_id)
        if link is None or link.session.number != parked.session or link.dialed:
            return self._refused(HandshakeRefused("the session is over", code="stale"))
        sending = link.outgoing.next_sending(now)
        if sending is not None:
            return self._data(link, sending)
        if self.closing and link.outgoing.empty:
            link.told_goodbye = True
            return self._frame(FrameType.BYE, parked.session, link.sign)
        return None

    def node_of(self, session: int) -> str | None:
        """Return which dialer a session is of; None: of nobody now."""
        link = self._by_session.get(session)
        return None if link is None else link.node_id

    def due_at(self, node_id: str) -> float | None:
        """Return when there may be something to send without further input; None: never."""
        link = self.links.get(node_id)
        return None if link is None else link.outgoing.next_time()

    def nothing(self, parked: Parked) -> bytes:
        """Return the answer that there was nothing to send."""
        link = self.links.get(parked.node_id)
        sign = link.sign if link is not None and link.session.number == parked.session else None
        return self._frame(FrameType.NOTHING, parked.session, sign)

    # Dialing ----------------------------------------------------------------------------------

    def hello(self) -> tuple[DialerHandshake, bytes]:
        """Begin a handshake; returns its state and the request to make."""
        handshake = DialerHandshake(
            self.identity,
            self._key,
            nonce=self._nonce(),
            max_frame_bytes=self.options.max_frame_bytes,
        )
        return handshake, self._stranger_frame(FrameType.HELLO, handshake.hello())

    def on_challenge(self, handshake: DialerHandshake, raw: bytes | memoryview) -> bytes:
        """Read the answer to HELLO; returns the next request.

        Raises:
            HandshakeRefused: if the listener refuses.
            FrameError: if it is no such answer.
        """
        frame = self._read_stranger(raw, FrameType.CHALLENGE)
        return self._stranger_frame(FrameType.AUTH, handshake.on_challenge(frame.metadata))

    def on_welcome(
        self, handshake: DialerHandshake, raw: bytes | memoryview, now: float, *, cover_body: bool
    ) -> Link:
        """Read the answer to AUTH; the session begins.

        Raises:
            HandshakeRefused: if the listener refuses.
            AuthError: if the listener does not have the key.
            FrameError: if it is no such answer.
        """
        frame = self._read_stranger(raw, FrameType.WELCOME)
        session = handshake.on_welcome(frame.metadata)
        return self._begin(session, now, dialed=True, cover_body=cover_body)

    def request(self, link: Link, kind: FrameType) -> bytes:
        """Make a HEARTBEAT, BYE or POLL, which tells what became of the data that came before."""
        return self._frame(
            kind, link.session.number, link.sign, link.next_number(), link.take_answers()
        )

    def data_request(self, link: Link, now: float) -> tuple[Sending, Raw] | None:
        """Make a request that carries the next events for a listener, or None."""
        sending = link.outgoing.next_sending(now)
        return None if sending is None else (sending, self._data(link, sending))

    def on_answer(
        self, link: Link, raw: bytes | memoryview, now: float, *, sent: Sending | None = None
    ) -> FrameType:
        """Read a listener's answer.

        Args:
            link: whose.
            raw: the frame that came.
            now: the time in seconds.
            sent: what the request carried.

        Returns:
            The answer's type.

        Raises:
            HandshakeRefused: if the session is over; shake hands anew.
            FrameError, AuthError: if it is no answer of this session: replace the connection.
        """
        if session_of(raw) == 0:
            self._read_stranger(raw, FrameType.REFUSED)
        frame = self._read(link, raw)
        self._heard(link, len(raw), now)
        if frame.type is FrameType.DATA:
            self._take_data(link, frame)
        elif frame.type in (FrameType.ACK, FrameType.BUSY):
            self._take_answer(link, frame, now)
        elif sent is not None:
            link.outgoing.on_failed(sent, now)
        if frame.type is FrameType.BYE:
            self.on_goodbye(link, now)
        return frame.type

    # Within -----------------------------------------------------------------------------------

    def _on_stranger(self, raw: bytes | memoryview, now: float, cover_body: bool) -> bytes:
        if len(raw) > MAX_HANDSHAKE_BYTES + HEADER_SIZE:
            raise FrameError(f"a stranger's frame has {len(raw)} bytes, which is not read")
        frame = decode_frame(raw)
        try:
            if frame.type is FrameType.HELLO:
                challenge = self._handshake.on_hello(frame.metadata, now)
                return self._stranger_frame(FrameType.CHALLENGE, challenge)
            if frame.type is FrameType.AUTH:
                welcome, session = self._handshake.on_auth(frame.metadata, now)
                self._begin(session, now, dialed=False, cover_body=cover_body)
                return self._stranger_frame(FrameType.WELCOME, welcome)
        except (HandshakeRefused, AuthError) as error:
            return self._refused(error)
        raise FrameError(f"a stranger does not send {frame.type.name}")

    def _on_data(self, link: Link, frame: Frame) -> bytes:
        verdict = self._take_data(link, frame)
        kind = FrameType.BUSY if verdict is Verdict.BUSY else FrameType.ACK
        return self._frame(kind, link.session.number, link.sign, 0, link.take_answers())

    def on_goodbye(self, link: Link, now: float) -> None:
        """Take note that a peer leaves for good, or that this node left it."""
        left = self._members.on_left(link.node_id, "said goodbye", for_good=True)
        self._note(left, now)
        self.n_sessions += 1
        if self.links.get(link.node_id) is link:
            self._empty(link)
            del self.links[link.node_id]
            self.audience.on_links_changed()
        if not link.dialed:
            self._by_session.pop(link.session.number, None)

    def _admit(self, identity: Identity) -> Refusal | None:
        if self.closing:
            return Refusal("closing", f"node {self.identity.node_id} is closing")
        own, name = self.identity.node_id, identity.node_id
        link = self.links.get(name)
        if (
            link is not None
            and link.dialed
            and link.session.peer.incarnation == identity.incarnation
            and self.is_here(name)
            and own < name
        ):
            # Each one's connection would take the place of the other's, for ever.
            return Refusal("dialed", f"node {own} has dialed node {name} already")
        return self._members.admit(identity)

    def _begin(self, session: Session, now: float, *, dialed: bool, cover_body: bool) -> Link:
        self.n_sessions += 1
        node_id = session.peer.node_id
        known = self.links.get(node_id)
        if known is not None and known.session.peer.incarnation == session.peer.incarnation:
            link = known
            self._by_session.pop(link.session.number, None)
            link.outgoing.on_reconnect(now)
        else:
            if known is not None:
                self._empty(known)
                self._by_session.pop(known.session.number, None)
            link = Link.begin(session, known, self.options, dialed=dialed)
        link.session, link.dialed = session, dialed
        link.seen, link.requests = Seen(), 0
        link.use_keys(session, dialed=dialed, cover_body=cover_body)
        self.links[node_id] = link
        self.audience.on_links_changed()
        if not dialed:
            self._by_session[session.number] = link
        self._note(self._members.on_session(session.peer, session.number, now), now)
        link.gone_since = None
        if link is not known:
            self.audience.tell(link)
        return link

    def _empty(self, link: Link) -> None:
        """Keep what a peer that is no more has sent, and was acknowledged, until it is taken."""
        for event in link.incoming.take(sys.maxsize):
            if event.event == WANTS_EVENT:
                self._hear(link, event)
            else:
                self._left_behind.append((link.node_id, event))

    def _hear(self, link: Link, event: EncodedEvent) -> None:
        try:
            self.audience.hear(link, event)
        except FrameError:
            # It was accepted, and what came with it is good; the peer gets what it wanted before.
            self.refused += 1

    def _note(self, changes: list[Change], now: float) -> None:
        for change in changes:
            link = self.links.get(change.peer.node_id)
            if link is not None:
                link.gone_since = now if change.kind == "left" else None
                if link.forgotten and change.kind != "left":
                    self.audience.remember(link)
        self.changes += changes

    def _heard(self, link: Link, n_bytes: int, now: float) -> None:
        link.counters.received_frames += 1
        link.counters.received_bytes += n_bytes
        self._note(self._members.on_heard(link.node_id, link.session.number, now), now)

    def _read(self, link: Link, raw: bytes | memoryview) -> Frame:
        frame = decode_frame(raw, link.check)
        if frame.session != link.session.number:
            raise AuthError(f"a frame of session {frame.session} came in {link.session.number}")
        return frame

    def _take_data(self, link: Link, frame: Frame) -> Verdict:
        stream, sequence = frame.stream, frame.data_sequence
        verdict = link.incoming.on_events(stream, sequence, unpack_events(frame))
        if verdict is Verdict.BUSY:
            link.counters.refused_frames += 1
            link.busy.append((stream, sequence, BUSY_DELAY_S))
        else:
            link.acks.append((stream, sequence, link.incoming.credit))
        return verdict

    def _take_answer(self, link: Link, frame: Frame, now: float) -> None:
        answer = read_metadata(_answers, frame.metadata, "answer")
        for stream, sequence, credit in answer.acks:
            link.outgoing.on_ack(stream, sequence, credit)
        for stream, sequence, delay_s in answer.busy:
            link.outgoing.on_busy(stream, sequence, min(delay_s, 1.0), now)

    def _data(self, link: Link, sending: Sending) -> Raw:
        metadata, buffers, flags = pack_events(sending.events)
        raw = frame_parts(
            Frame(
                FrameType.DATA,
                session=link.session.number,
                incarnation=self.identity.incarnation,
                stream=sending.stream,
                sequence=link.next_number() if link.dialed else 0,
                data_sequence=sending.sequence,
                metadata=metadata,
                buffers=buffers,
                flags=flags,
            ),
            link.sign,
            max_size=link.session.limits.max_frame_bytes,
        )
        link.counters.sent_frames += 1
        link.counters.sent_bytes += len(raw)
        link.counters.retried_frames += sending.again
        return raw if len(raw) >= _LARGE else bytes(raw)

    def _frame(
        self,
        kind: FrameType,
        session: int,
        sign: FrameMac | None,
        sequence: int = 0,
        metadata: bytes = b"",
    ) -> bytes:
        frame = Frame(
            kind,
            session=session,
            incarnation=self.identity.incarnation,
            sequence=sequence,
            metadata=metadata,
        )
        return encode_frame(frame, sign, max_size=self.options.max_frame_bytes)

    def _stranger_frame(self, kind: FrameType, content: bytes) -> bytes:
        return self._frame(kind, 0, None, 0, content)

    def _refused(self, error: HandshakeRefused | AuthError) -> bytes:
        self.refused += 1
        return self._stranger_frame(FrameType.REFUSED, ListenerHandshake.refusal(error))

    @staticmethod
    def _read_stranger(raw: bytes | memoryview, wanted: FrameType) -> Frame:
        frame = decode_frame(raw)
        if frame.type is FrameType.REFUSED:
            raise DialerHandshake.on_refused(frame.metadata)
        if frame.type is not wanted:
            raise FrameError(f"{frame.type.name} came where {wanted.name} belongs")
        return frame
