"""What went through a router: by event, and by peer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from dmiddleware.router.protocol.session import Link

__all__ = ["EventTraffic", "PeerTraffic", "Traffic"]


@dataclass(slots=True)
class EventTraffic:
    """What became of one event here.

    Attributes:
        sent: emissions that were accepted for peers, one count a peer.
        sent_bytes: their bytes.
        received: emissions that came from peers.
        received_bytes: their bytes.
        blocked_s: seconds that emitters waited for room.
        undecodable: emissions that came and could not be decoded.
    """

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    blocked_s: float = 0.0
    undecodable: int = 0


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """What goes on with one peer.

    Attributes:
        here: whether it counts as present.
        waiting: accepted reliable events that it has not acknowledged.
        waiting_bytes: their bytes.
        sent_frames: frames sent, repeated ones included.
        retried_frames: frames sent again.
        refused_frames: frames that this side or the peer was too full to take.
        received_frames: frames received.
        sent_bytes: bytes sent.
        received_bytes: bytes received.
        dropped: lossy events dropped on the way out or in.
        duplicates: frames received more than once, and taken once.
    """

    here: bool
    waiting: int
    waiting_bytes: int
    sent_frames: int
    retried_frames: int
    refused_frames: int
    received_frames: int
    sent_bytes: int
    received_bytes: int
    dropped: int
    duplicates: int

    @classmethod
    def of(cls, link: Link, *, here: bool) -> Self:
        """Count what goes on with the peer of a link."""
        counters, outbox = link.counters, link.outgoing.outbox
        outgoing, incoming = link.outgoing.counters, link.incoming.counters
        return cls(
            here=here,
            waiting=outbox.n_messages,
            waiting_bytes=outbox.n_bytes,
            sent_frames=counters.sent_frames,
            retried_frames=counters.retried_frames,
            refused_frames=counters.refused_frames + outbox.counters.refused_frames,
            received_frames=counters.received_frames,
            sent_bytes=counters.sent_bytes,
            received_bytes=counters.received_bytes,
            dropped=outgoing.dropped + incoming.dropped,
            duplicates=link.incoming.inbox.counters.duplicates + incoming.duplicates,
        )


class Traffic:
    """Counts by event; any thread may ask for a count, which is its own to add to."""

    def __init__(self) -> None:
        self._by_event: dict[str, EventTraffic] = {}

    def of(self, event: str) -> EventTraffic:
        """Return the counts of an event, to be added to."""
        traffic = self._by_event.get(event)
        if traffic is None:
            traffic = self._by_event.setdefault(event, EventTraffic())
        return traffic

    def copy(self) -> dict[str, EventTraffic]:
        """Return all counts as they are now."""
        return {event: replace(traffic) for event, traffic in list(self._by_event.items())}
