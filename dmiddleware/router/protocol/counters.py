"""Counters of a router, by event and by peer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from dmiddleware.router.protocol.peer import Peer

__all__ = ["EventTraffic", "PeerTraffic", "TrafficCounters"]


@dataclass(slots=True)
class EventTraffic:
    """Counters of one event at this node.

    Attributes:
        sent: emissions accepted for peers, counted once for each peer; a ``latest`` one that is
            kept counts for each later subscriber too.
        sent_bytes: their bytes.
        received: emissions received from peers.
        received_bytes: their bytes.
        blocked_s: seconds that emitters spent waiting for room.
        undecodable: received emissions that could not be decoded.
        unsubscribed: emissions that no peer had subscribed to, and peers named in ``emit(to=…)``
            that had not.
        undelivered: accepted reliable emissions that were dropped, because their peer said goodbye
            or was gone for too long.
    """

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    blocked_s: float = 0.0
    undecodable: int = 0
    unsubscribed: int = 0
    undelivered: int = 0


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Counters of one peer.

    Attributes:
        connected: whether it is connected.
        waiting: accepted reliable events that it has not acknowledged.
        waiting_bytes: their bytes.
        sent_frames: frames sent, also those sent again.
        resent_frames: frames with reliable events that were sent again.
        received_frames: frames received.
        sent_bytes: bytes sent.
        received_bytes: bytes received.
        dropped: lossy events dropped in either direction.
    """

    connected: bool
    waiting: int
    waiting_bytes: int
    sent_frames: int
    resent_frames: int
    received_frames: int
    sent_bytes: int
    received_bytes: int
    dropped: int

    @classmethod
    def of(cls, peer: Peer) -> Self:
        """Collect the counters of a peer."""
        counters, outgoing = peer.counters, peer.outgoing
        return cls(
            connected=peer.is_connected,
            waiting=outgoing.n_messages,
            waiting_bytes=outgoing.n_bytes,
            sent_frames=counters.sent_frames,
            resent_frames=outgoing.n_resent,
            received_frames=counters.received_frames,
            sent_bytes=counters.sent_bytes,
            received_bytes=counters.received_bytes,
            dropped=outgoing.counters.dropped + peer.incoming.counters.dropped,
        )


class TrafficCounters(dict[str, EventTraffic]):
    """The counters of every event, whichever task exchanges it; any thread may look one up."""

    def __missing__(self, event: str) -> EventTraffic:
        return self.setdefault(event, EventTraffic())

    def snapshot(self) -> dict[str, EventTraffic]:
        """Return a copy of all counters."""
        return {event: replace(traffic) for event, traffic in list(self.items())}
