"""A peer of a node: its current connection, and its streams in both directions."""

from __future__ import annotations

import fnmatch
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Protocol

from dmiddleware.errors import RouterError
from dmiddleware.event_names import ROLE_EVENTS, base_name, is_glob, task_number
from dmiddleware.router.protocol.handshake import (
    DialerHandshake,
    Identity,
    ListenerHandshake,
    Session,
)
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session_frames import SessionFrames
from dmiddleware.router.protocol.streams import IncomingStreams, OutgoingStreams
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.envelope import MAX_BATCH_BYTES
from dmiddleware.router.wire.frame import FrameType

__all__ = ["READY_EVENT", "Peer", "PeerConnection", "PeerCounters", "Route", "Sharing"]

READY_EVENT: Final = "task.ready"
"""Never emitted. A peer that subscribes to it under the name of a task is ready for that task."""


@dataclass(slots=True)
class PeerCounters:
    """Frames and bytes exchanged with one peer."""

    sent_frames: int = 0
    sent_bytes: int = 0
    received_frames: int = 0
    received_bytes: int = 0


class Route(Protocol):
    """What carries the frames of a connection."""

    @property
    def has_room(self) -> bool:
        """Whether one more frame with events should be added."""
        ...

    @property
    def n_moved(self) -> int:
        """A number that grows while bytes move, in either direction."""
        ...

    def allow(self, max_frame_bytes: int) -> None:
        """Accept longer frames from now on."""
        ...

    def put(self, frame: WireBytes, *, urgent: bool = False) -> None:
        """Add a frame, without sending it yet."""
        ...

    def flush(self) -> bool:
        """Send what can be sent; return whether that is everything."""
        ...

    def close(self, error: RouterError | None = None) -> None:
        """End the connection, without waiting."""
        ...


class Sharing(Protocol):
    """Memory that the two nodes of a connection may share."""

    @property
    def is_agreed(self) -> bool:
        """Whether both nodes share memory."""
        ...

    @property
    def has_worked(self) -> bool:
        """Whether a frame of the peer has been read from memory."""
        ...

    def proof(self) -> bytes:
        """Return what to show the authenticated peer; empty: nothing."""
        ...

    def agree(self, proof: bytes) -> None:
        """Share memory from now on, if the proof of the peer is right."""
        ...

    def take(self, raw: memoryview) -> memoryview:
        """Return a frame that has arrived, from memory if necessary."""
        ...

    def close(self) -> None:
        """Stop sharing."""
        ...


@dataclass(eq=False, slots=True)
class PeerConnection:
    """One connection of a node, from the handshake on.

    Attributes:
        route: carries its frames.
        dialed: whether this node dialed.
        covers_body: whether the arrays of frames are signed too.
        sharing: memory that may be shared with the peer; None: none.
        handshake: this side of the handshake; None before the first frame.
        identity: the process at the other end, as far as it is known.
        session: its frames, after the handshake.
        peer: the peer, after the handshake.
        is_stalled: whether more frames can be made when the route has room.
        is_over: whether everything that still arrives is ignored.
        owed: how many frames of each type are due, apart from those with events: heartbeats and
            the states of the inboxes (once at most), answers to repetitions, the proof of shared
            memory, and the goodbye, which is said when nothing else is left to send.
        owes_resend: whether to let the peer send again what was dropped.
        n_resends: how many repetitions the peer has not begun yet; until then, events are dropped.
        said_goodbye: whether this node has said it.
    """

    route: Route
    dialed: bool
    covers_body: bool
    sharing: Sharing | None = None
    handshake: DialerHandshake | ListenerHandshake | None = None
    identity: Identity | None = None
    session: SessionFrames | None = None
    peer: Peer | None = None
    is_stalled: bool = False
    is_over: bool = False
    owed: Counter[FrameType] = field(default_factory=Counter)
    owes_resend: bool = False
    n_resends: int = 0
    said_goodbye: bool = False


@dataclass(eq=False, slots=True)
class Peer:
    """One peer: its current session, and the streams to and from it.

    The session changes with each connection; the streams outlive it.

    Attributes:
        node_id: the peer.
        session: result of the latest handshake.
        since: the number of the session in which the numbers of the frames began.
        outgoing: the streams to the peer.
        incoming: the streams from the peer.
        connection: the connection with it; None while there is none.
        patterns: events that the peer subscribes to, as globs.
        inherited: events that the peer's predecessor subscribed to; it receives them too until it
            is ready for the task that they belong to.
        ready_for: number of the newest task that the peer is ready for; 0: of none yet.
        event_names: names of the events that the peer has sent.
        sent_names: names of the events that were sent to the peer.
        has_announced: whether the peer has announced its subscriptions in this incarnation.
        gone_since: when the peer disconnected; None while it is connected.
        forgotten: whether its waiting events were dropped.
        avoids_sharing: whether the next connection shares no memory, because the last one failed.
        counters: frames and bytes.
    """

    node_id: str
    session: Session
    since: int
    outgoing: OutgoingStreams
    incoming: IncomingStreams
    connection: PeerConnection | None = None
    patterns: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()
    ready_for: int = 0
    event_names: set[str] = field(default_factory=set)
    sent_names: set[str] = field(default_factory=set)
    has_announced: bool = False
    gone_since: float | None = None
    forgotten: bool = False
    avoids_sharing: bool = False
    counters: PeerCounters = field(default_factory=PeerCounters)
    _announced: Patterns | None = None
    _inherited: Patterns | None = None
    _roles: tuple[str, ...] | None = None

    @classmethod
    def start(cls, session: Session, old: Peer | None, options: NodeOptions) -> Peer:
        """Start with a process that has not been seen before, or has been forgotten.

        Args:
            session: the first session with it.
            old: its predecessor under the same node id, whose waiting events it receives.
            options: limits and timeouts of this node.
        """
        incoming = IncomingStreams(
            max_bytes=options.inbox_bytes,
            peer_bytes=session.limits.outbox_bytes,
            max_lossy=options.max_lossy,
        )
        if old is not None:
            old.outgoing.on_new_peer()
            peer = cls(session.identity.node_id, session, session.number, old.outgoing, incoming)
            peer.inherited = tuple(dict.fromkeys((*old.patterns, *old.inherited)))
            peer.sent_names = old.sent_names
            return peer
        outgoing = OutgoingStreams(
            max_bytes=options.outbox_bytes,
            batch_bytes=min(options.batch_bytes, MAX_BATCH_BYTES),
            max_lossy=options.max_lossy,
            fragment_bytes=options.fragment_bytes,
            largest_whole_bytes=options.largest_whole_bytes,
        )
        return cls(session.identity.node_id, session, session.number, outgoing, incoming)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection with it."""
        return self.connection is not None

    @property
    def roles(self) -> tuple[str, ...]:
        """Its roles: those of its handshake, and those that its program has given to its task."""
        if self._roles is None:
            names = [n for n in (*self.patterns, *self.inherited) if n.startswith(ROLE_EVENTS)]
            newest = max(map(task_number, names), default=0)
            announced = [
                base_name(name).removeprefix(ROLE_EVENTS)
                for name in names
                if task_number(name) == newest
            ]
            self._roles = tuple(dict.fromkeys((*self.session.identity.roles, *announced)))
        return self._roles

    def subscribes_to(self, event: str) -> bool:
        """Return whether the peer subscribes to an event."""
        if self.has_announced_event(event):
            return True
        if self._inherited is None:
            self._inherited = Patterns(self.inherited)
        return self._inherited.match(event)

    def has_announced_event(self, event: str) -> bool:
        """Return whether the peer itself, and not its predecessor, has subscribed to an event."""
        if self._announced is None:
            self._announced = Patterns(self.patterns)
        return self._announced.match(event)

    def set_patterns(self, patterns: tuple[str, ...], *, ready: bool) -> None:
        """Store the subscriptions that the peer has announced.

        Args:
            patterns: the subscriptions.
            ready: whether they include all initial ones.
        """
        self.patterns, self.has_announced = patterns, True
        later = (task_number(name) for name in patterns if base_name(name) == READY_EVENT)
        self.ready_for = max(later, default=int(ready))
        if ready:
            self.inherited = tuple(n for n in self.inherited if task_number(n) > self.ready_for)
        self._announced = self._inherited = self._roles = None


class Patterns:
    """Names of events, globs allowed.

    Args:
        patterns: the names and globs.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._globs = [pattern for pattern in patterns if is_glob(pattern)]
        self._names = frozenset(patterns).difference(self._globs)

    def match(self, name: str) -> bool:
        """Return whether a name is among them."""
        return name in self._names or any(fnmatch.fnmatchcase(name, glob) for glob in self._globs)
