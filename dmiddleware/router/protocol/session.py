"""One peer of a node: its session, and all that is under way in both directions."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Final

import msgspec

from dmiddleware.router.protocol.handshake import Session, hkdf
from dmiddleware.router.protocol.incoming import Incoming
from dmiddleware.router.protocol.limits import NodeOptions
from dmiddleware.router.protocol.outgoing import Outgoing
from dmiddleware.router.wire.envelope import FRAME_OVERHEAD, MAX_BATCH_BYTES, Answer
from dmiddleware.router.wire.frame import FrameMac

__all__ = ["Counters", "Link", "Parked", "Seen"]

HOLD_BYTES: Final = 1 << 14
"""While a frame is under way, fewer bytes of events wait for its answer."""

_BEHIND: Final = 4096
"""Requests that come later than so many that were made after them are not taken."""

_BEHIND_MASK: Final = (1 << _BEHIND) - 1

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Counters:
    """What went to and came from one peer."""

    sent_frames: int = 0
    sent_bytes: int = 0
    received_frames: int = 0
    received_bytes: int = 0
    retried_frames: int = 0
    refused_frames: int = 0


class Seen:
    """Numbers of requests that came, so that none is taken twice.

    Requests of one session come over two connections, and of one that is busy thousands may come
    while the thread that has a heartbeat to send over the other waits for its turn.
    """

    __slots__ = ("_bits", "_highest")

    def __init__(self) -> None:
        self._highest = 0
        self._bits = 0

    def add(self, number: int) -> bool:
        """Note a number; tell whether it is new (numbers far behind count as old)."""
        if number > self._highest:
            self._bits = (self._bits << min(number - self._highest, _BEHIND) | 1) & _BEHIND_MASK
            self._highest = number
            return True
        behind = self._highest - number
        if behind >= _BEHIND or self._bits >> behind & 1:
            return False
        self._bits |= 1 << behind
        return True


@dataclass(frozen=True, slots=True)
class Parked:
    """A poll that waits for something to send.

    Attributes:
        node_id: the dialer that polls.
        session: in which it polls; a newer session ends the wait.
    """

    node_id: str
    session: int


@dataclass(slots=True)
class Link:
    """One peer: its session and all that is under way in both directions.

    The session changes with each connection; what is under way outlives it.
    """

    node_id: str
    session: Session
    dialed: bool
    outgoing: Outgoing
    incoming: Incoming
    sign: FrameMac | None = None
    check: FrameMac | None = None
    wants: tuple[str, ...] = ()
    matches: dict[str, bool] = field(default_factory=dict)
    acks: list[tuple[int, int, int]] = field(default_factory=list)
    busy: list[tuple[int, int, float]] = field(default_factory=list)
    gone_since: float | None = None
    forgotten: bool = False
    told_wants: bool = False
    told_goodbye: bool = False
    requests: int = 0
    seen: Seen = field(default_factory=Seen)
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def begin(
        cls, session: Session, old: Link | None, options: NodeOptions, *, dialed: bool
    ) -> Link:
        """Begin with a process that was not there before.

        Args:
            session: the first one with it.
            old: its predecessor under the same node id; what waited for that is for this.
            options: bounds and times of this node.
            dialed: whether this node dialed.
        """
        incoming = Incoming(
            max_bytes=options.inbox_bytes, window=options.window, max_lossy=options.max_lossy
        )
        if old is not None:
            old.outgoing.on_new_peer()
            link = cls(session.peer.node_id, session, dialed, old.outgoing, incoming)
            # Until it says what it wants, so that nothing emitted meanwhile misses it.
            link.wants = old.wants
            return link
        batch_bytes = min(
            options.batch_bytes, session.limits.max_frame_bytes - FRAME_OVERHEAD, MAX_BATCH_BYTES
        )
        outgoing = Outgoing(
            max_bytes=options.outbox_bytes,
            window=min(options.window, session.limits.window),
            batch_bytes=batch_bytes,
            hold_bytes=min(batch_bytes, HOLD_BYTES),
            retry_s=options.retry_s,
            max_lossy=options.max_lossy,
        )
        return cls(session.peer.node_id, session, dialed, outgoing, incoming)

    def is_wanted(self, event: str) -> bool:
        """Whether the peer subscribed to an event."""
        wanted = self.matches.get(event)
        if wanted is None:
            wanted = any(fnmatch.fnmatchcase(event, pattern) for pattern in self.wants)
            self.matches[event] = wanted
        return wanted

    def next_number(self) -> int:
        """Return the number of the next request in this session."""
        self.requests += 1
        return self.requests

    def take_answers(self) -> bytes:
        """Return, encoded, what became of the data that came since last asked."""
        answer = _encode(Answer(tuple(self.acks), tuple(self.busy)))
        self.acks.clear()
        self.busy.clear()
        return answer

    def use_keys(self, session: Session, *, dialed: bool, cover_body: bool) -> None:
        """Sign and check with a session's keys: one a direction, so that no frame can go back."""
        self.sign = self.check = None
        if session.key is None:
            return
        salt = session.number.to_bytes(8, "little")
        to_listener, to_dialer = (
            FrameMac(hkdf(session.key, salt=salt, info=direction), cover_body=cover_body)
            for direction in (b"dmw to listener", b"dmw to dialer")
        )
        self.sign, self.check = (to_listener, to_dialer) if dialed else (to_dialer, to_listener)
