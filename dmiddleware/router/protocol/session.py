"""One peer of a node: its session, its keys, and its streams in both directions."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from dmiddleware.event_names import base_name, task_number
from dmiddleware.router.protocol.handshake import Session
from dmiddleware.router.protocol.options import NodeOptions
from dmiddleware.router.protocol.session_frames import frame_macs
from dmiddleware.router.protocol.streams import (
    HANDLED,
    EventBatch,
    IncomingStreams,
    OutgoingStreams,
)
from dmiddleware.router.wire.byte_pieces import WireBytes
from dmiddleware.router.wire.envelope import MAX_BATCH_BYTES, Acknowledgments
from dmiddleware.router.wire.frame import FrameMac, FrameType

__all__ = [
    "READY_EVENT",
    "ParkedPoll",
    "PeerCounters",
    "PeerSession",
    "ReplayWindow",
    "Request",
    "Response",
]

READY_EVENT: Final = "task.ready"
"""Never emitted. A peer that subscribes to it under the name of a task is ready for that task."""

HOLD_BYTES: Final = 1 << 14
"""While a frame is unacknowledged, fewer bytes of events than this are held back."""

_REPLAY_WINDOW: Final = 4096
"""Requests that are this far behind the newest one are rejected."""

_REPLAY_MASK: Final = (1 << _REPLAY_WINDOW) - 1

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class PeerCounters:
    """Frames and bytes exchanged with one peer."""

    sent_frames: int = 0
    sent_bytes: int = 0
    received_frames: int = 0
    received_bytes: int = 0
    retried_frames: int = 0
    refused_frames: int = 0


class ReplayWindow:
    """The request numbers of a session that have been seen, so that none is accepted twice.

    The requests of one session arrive over two connections, and thousands may arrive over a busy
    one while the thread that sends a heartbeat over the other waits for its turn.
    """

    __slots__ = ("_bits", "_highest")

    def __init__(self) -> None:
        self._highest = 0
        self._bits = 0

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new. Numbers below the window count as seen."""
        if number > self._highest:
            shift = min(number - self._highest, _REPLAY_WINDOW)
            self._bits = (self._bits << shift | 1) & _REPLAY_MASK
            self._highest = number
            return True
        behind = self._highest - number
        if behind >= _REPLAY_WINDOW or self._bits >> behind & 1:
            return False
        self._bits |= 1 << behind
        return True


class ParkedPoll(msgspec.Struct, frozen=True):
    """A poll that waits until there is something to send.

    Attributes:
        node_id: the dialer that polls.
        session: the session of the poll; a newer session ends the wait.
        number: number of the poll, which its reply repeats.
    """

    node_id: str
    session: int
    number: int


class Request(msgspec.Struct, frozen=True):
    """A request of a dialer.

    Attributes:
        number: its number in the session, which the reply must repeat.
        raw: the frame.
        kind: the type of the frame.
        batch: the events in it; None for other requests.
    """

    number: int
    raw: WireBytes
    kind: FrameType
    batch: EventBatch | None = None


class Response(NamedTuple):
    """A listener's response to a request.

    Attributes:
        content: the frame to reply with, or a poll to reply to later.
        session: number of the authenticated session that the request belongs to or has started;
            0 without one.
    """

    content: WireBytes | ParkedPoll
    session: int


@dataclass(slots=True)
class PeerSession:
    """One peer: its current session, and the streams to and from it.

    The session changes with each connection; the streams outlive it.

    Attributes:
        node_id: the peer.
        session: result of the latest handshake.
        dialed: whether this node dialed.
        outgoing: the streams to the peer.
        incoming: the streams from the peer.
        sign: signs frames to the peer; None without a key.
        check: checks frames from the peer; None without a key.
        patterns: events that the peer subscribes to, as globs.
        inherited: events that the peer's predecessor subscribed to; it receives them too until it
            is ready for the task that they belong to.
        ready_for: number of the newest task that the peer is ready for; 0: of none yet.
        event_names: names of the events that the peer has sent.
        has_announced: whether the peer has announced its subscriptions in this incarnation.
        acks: ``(stream, sequence, credit)`` to send with the next frame.
        busy: ``(stream, sequence, delay_s)`` to send with the next frame.
        kept: ``(stream, sequence)`` to send with the next frame.
        progress: ``(stream, sequence, offset)`` to send with the next frame.
        owes_acknowledgment: whether a frame must be sent for them.
        gone_since: when the peer disconnected; None while it is connected.
        forgotten: whether its waiting events were dropped.
        goodbye_sent: whether this node has said goodbye.
        n_requests: number of the latest request to the peer.
        pending: numbers of the requests to the peer that have no reply yet.
        replay_window: numbers of the requests from the peer.
        counters: frames and bytes.
    """

    node_id: str
    session: Session
    dialed: bool
    outgoing: OutgoingStreams
    incoming: IncomingStreams
    sign: FrameMac | None = None
    check: FrameMac | None = None
    patterns: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()
    ready_for: int = 0
    event_names: set[str] = field(default_factory=set)
    has_announced: bool = False
    acks: list[tuple[int, int, int]] = field(default_factory=list)
    busy: list[tuple[int, int, float]] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    progress: list[tuple[int, int, int]] = field(default_factory=list)
    owes_acknowledgment: bool = False
    gone_since: float | None = None
    forgotten: bool = False
    goodbye_sent: bool = False
    n_requests: int = 0
    pending: set[int] = field(default_factory=set)
    replay_window: ReplayWindow = field(default_factory=ReplayWindow)
    counters: PeerCounters = field(default_factory=PeerCounters)
    _matches: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def start(
        cls, session: Session, old: PeerSession | None, options: NodeOptions, *, dialed: bool
    ) -> PeerSession:
        """Start with a process that has not been seen before.

        Args:
            session: the first session with it.
            old: its predecessor under the same node id, whose waiting events it receives.
            options: limits and timeouts of this node.
            dialed: whether this node dialed.
        """
        incoming = IncomingStreams(
            max_bytes=options.inbox_bytes, window=options.window, max_lossy=options.max_lossy
        )
        if old is not None:
            old.outgoing.on_new_peer()
            peer = cls(session.identity.node_id, session, dialed, old.outgoing, incoming)
            peer.inherited = tuple(dict.fromkeys((*old.patterns, *old.inherited)))
            return peer
        batch_bytes = min(options.batch_bytes, MAX_BATCH_BYTES)
        outgoing = OutgoingStreams(
            max_bytes=options.outbox_bytes,
            window=min(options.window, session.limits.window),
            batch_bytes=batch_bytes,
            hold_bytes=min(batch_bytes, HOLD_BYTES),
            retry_s=options.retry_s,
            max_lossy=options.max_lossy,
            fragment_bytes=options.fragment_bytes,
            largest_whole_bytes=options.largest_whole_bytes,
        )
        return cls(session.identity.node_id, session, dialed, outgoing, incoming)

    def subscribes_to(self, event: str) -> bool:
        """Return whether the peer subscribes to an event."""
        matches = self._matches.get(event)
        if matches is None:
            matches = self.has_announced_event(event) or _matches_any(event, self.inherited)
            self._matches[event] = matches
        return matches

    def has_announced_event(self, event: str) -> bool:
        """Return whether the peer itself, and not its predecessor, has subscribed to an event."""
        return _matches_any(event, self.patterns)

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
        self._matches.clear()

    def next_number(self) -> int:
        """Return the number of the next request in this session."""
        self.n_requests += 1
        self.pending.add(self.n_requests)
        return self.n_requests

    def take_acknowledgments(self) -> bytes:
        """Return, encoded, the acknowledgments collected since the last call; empty for none."""
        if not (self.acks or self.busy or self.kept or self.progress):
            return b""
        acknowledgments = _encode(
            Acknowledgments(
                tuple(self.acks), tuple(self.busy), tuple(self.kept), tuple(self.progress)
            )
        )
        self.acks.clear()
        self.busy.clear()
        self.kept.clear()
        self.progress.clear()
        self.owes_acknowledgment = False
        return acknowledgments

    def acknowledge_handled(self) -> None:
        """Add the newest acknowledgment of events that were handled, if there is one."""
        inbox = self.incoming.inbox_handled
        if inbox.acknowledged:
            self.acks = [ack for ack in self.acks if ack[0] != HANDLED]
            self.acks.append((HANDLED, inbox.acknowledged, inbox.credit))

    def use_keys(self, session: Session, *, dialed: bool, cover_body: bool) -> None:
        """Use the keys of a session."""
        self.sign, self.check = frame_macs(session, dialed=dialed, cover_body=cover_body)


def _matches_any(event: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(event, pattern) for pattern in patterns)
