"""A node that has only the layers over byte streams: enough to exchange messages reliably."""

from __future__ import annotations

import itertools
import threading
from typing import Final

from dmiddleware.errors import AuthError, FrameError, HandshakeRefused, RouterError
from dmiddleware.router.protocol.delivery import Inbox, Outbox
from dmiddleware.router.protocol.handshake import (
    MAX_HANDSHAKE_BYTES,
    DialerHandshake,
    Identity,
    ListenerHandshake,
    PeerLimits,
    Refusal,
    Session,
)
from dmiddleware.router.protocol.session_frames import SessionFrames, States, is_urgent
from dmiddleware.router.transport.framed_connection import FramedConnection
from dmiddleware.router.transport.stream import Stream
from dmiddleware.router.wire.envelope import (
    EncodedEvent,
    frame_contents,
    pack_events,
    unpack_events,
)
from dmiddleware.router.wire.frame import (
    HEADER_SIZE,
    MAX_FRAME_BYTES,
    Frame,
    FrameContents,
    FrameType,
    OutgoingFrame,
    decode_frame,
    encode_frame,
)

__all__ = ["StreamNode"]

RELIABLE: Final = 0
CAPACITY: Final = 20_000
LIMITS: Final = PeerLimits(max_event_bytes=1 << 20, credit_bytes=CAPACITY, window=1)


class Known:
    """Admits all processes."""

    def least_incarnation(self, identity: Identity) -> int:
        return 1

    def admit(self, identity: Identity, incarnation: int) -> Refusal | None:
        return None


def encoded(skeleton: bytes) -> EncodedEvent:
    """Return an event as its receiver decodes it: both sides must count the same bytes."""
    contents = FrameContents(*pack_events([EncodedEvent("n", skeleton, (), 0)]))
    raw = OutgoingFrame(FrameType.DATA, contents, None, max_size=MAX_FRAME_BYTES)
    (event,) = unpack_events(decode_frame(bytes(raw)))
    return event


class StreamNode:
    """One of two nodes, which outlives its connections.

    Args:
        name: its node id.
        key: the run's key.
    """

    def __init__(self, name: int, key: bytes = bytes(32)) -> None:
        self.lock = threading.RLock()
        self.identity = Identity("run", str(name), bytes([name]) * 16)
        self.key = key
        self.outbox: Outbox[EncodedEvent] = Outbox(max_bytes=50_000, batch_bytes=4_000)
        self.inbox: Inbox[EncodedEvent] = Inbox(CAPACITY, peer_bytes=50_000)
        self.received: list[int] = []
        self.errors: list[RouterError] = []
        self.n_sessions = 0
        self.link: Link | None = None
        self._nonces = itertools.count(1000 * name + 1)
        self.listens = ListenerHandshake(
            self.identity,
            key,
            limits=LIMITS,
            nonce=self.nonce,
            session_number=itertools.count(1).__next__,
            incarnation=lambda: 1,
            known=Known(),
        )

    def nonce(self) -> bytes:
        return next(self._nonces).to_bytes(32, "big")

    def offer(self, number: int, n_bytes: int) -> bool:
        """Offer a message to the peer."""
        skeleton = b"%d " % number + bytes(n_bytes)
        with self.lock:
            accepted = self.outbox.offer(encoded(skeleton))
            self.pump()
        return accepted

    def heartbeat(self) -> None:
        with self.lock:
            if self.link is not None and self.link.session is not None:
                self.link.send_state(FrameType.HEARTBEAT)

    def take(self, n: int) -> None:
        with self.lock:
            for event in self.inbox.take(n):
                self.received.append(int(bytes(event.skeleton).split()[0]))
            self.pump()

    def pump(self) -> None:
        """Send what can be sent; called with the lock held."""
        link = self.link
        if link is None or link.session is None:
            return
        while (batch := self.outbox.next_frame()) is not None:
            link.send(FrameType.DATA, frame_contents(batch.messages), batch.sequence)
        if self.outbox.take_ask():
            link.send(FrameType.ASK, FrameContents())
        if self.inbox.is_due:
            link.send_state(FrameType.STATE)


class Link:
    """One connection of a node, from the handshake on.

    Args:
        node: the node.
        stream: the connection.
        dials: whether the node has dialed.
    """

    def __init__(self, node: StreamNode, stream: Stream, *, dials: bool) -> None:
        self.session: SessionFrames | None = None
        self._node = node
        self._dials = dials
        self.has_ended = False
        self.framed = FramedConnection(
            stream,
            on_frame=self._on_frame,
            on_end=self._on_end,
            max_frame_bytes=MAX_HANDSHAKE_BYTES + HEADER_SIZE,
        )
        if dials:
            self._handshake = DialerHandshake(
                node.identity,
                node.key,
                incarnation=1,
                nonce=node.nonce(),
                max_event_bytes=1 << 20,
                known=Known(),
            )
            self._greet(FrameType.HELLO, self._handshake.hello())
        self.framed.start()

    def send(self, kind: FrameType, contents: FrameContents, data_sequence: int = 0) -> None:
        assert self.session is not None
        frame = self.session.make(
            kind, contents, incarnation=1, stream=RELIABLE, data_sequence=data_sequence
        )
        self.framed.send(frame, urgent=is_urgent(kind))

    def send_state(self, kind: FrameType) -> None:
        states = States(((RELIABLE, *self._node.inbox.take_state()),))
        self.send(kind, states.contents())

    def _on_frame(self, raw: memoryview) -> None:
        node = self._node
        with node.lock:
            try:
                if self.session is None:
                    self._continue_handshake(decode_frame(raw))
                else:
                    self._process(self.session.read(raw))
            except (FrameError, AuthError, HandshakeRefused) as error:
                node.errors.append(error)
                self.framed.close(error)
            node.pump()

    def _process(self, frame: Frame) -> None:
        node = self._node
        if frame.type is FrameType.DATA:
            node.inbox.on_frame(frame.data_sequence, unpack_events(frame))
        elif frame.type is FrameType.ASK:
            node.inbox.on_ask()
        else:
            state = States.read(frame).of(RELIABLE)
            assert state is not None
            node.outbox.on_state(state)

    def _continue_handshake(self, frame: Frame) -> None:
        if frame.type is FrameType.CHALLENGE:
            self._greet(FrameType.AUTH, self._handshake.on_challenge(frame.metadata))
        elif frame.type is FrameType.WELCOME:
            self._start(self._handshake.on_welcome(frame.metadata))
        elif frame.type is FrameType.HELLO:
            self._greet(FrameType.CHALLENGE, self._node.listens.on_hello(frame.metadata, 0.0))
        else:
            welcome, session = self._node.listens.on_auth(frame.metadata, 0.0)
            self._greet(FrameType.WELCOME, welcome)
            self._start(session)

    def _start(self, session: Session) -> None:
        node = self._node
        self.session = SessionFrames(session, dialed=self._dials, cover_body=True)
        self.framed.allow(MAX_FRAME_BYTES)
        if node.link is not None:
            node.link.framed.close()
        node.link = self
        node.n_sessions += 1
        node.outbox.on_connect(CAPACITY)
        self.send_state(FrameType.STATE)

    def _greet(self, kind: FrameType, message: bytes) -> None:
        frame = Frame(kind, metadata=message)
        self.framed.send(encode_frame(frame, max_size=MAX_HANDSHAKE_BYTES + HEADER_SIZE))

    def _on_end(self, error: RouterError) -> None:
        with self._node.lock:
            self.has_ended = True
            if self._node.link is self:
                self._node.link = None
