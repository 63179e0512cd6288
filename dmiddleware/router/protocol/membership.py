"""Who is there: heartbeats, incarnations, and why someone left.

A node is *here* from its handshake until it says goodbye, misses its heartbeats, or is replaced by
a newer incarnation of itself. What this module says is pure: it takes a time and gives back what
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from dmiddleware.router.protocol.handshake import Identity, Refusal

__all__ = ["Peer", "Change", "Membership", "HEARTBEAT_S", "MISSED_HEARTBEATS"]

HEARTBEAT_S: Final = 1.0
"""How often a node shows that it is alive."""

MISSED_HEARTBEATS: Final = 3
"""After so many missing heartbeats a node counts as gone."""

ChangeKind = Literal["joined", "left", "rejoined"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A node of the run, as this node knows it.

    Attributes:
        identity: who it is.
        session: the session that its frames carry.
        here: whether it counts as present.
    """

    identity: Identity
    session: int
    here: bool = True

    @property
    def node_id(self) -> str:
        """The peer's node id."""
        return self.identity.node_id


@dataclass(frozen=True, slots=True)
class Change:
    """Someone came, went, or came back.

    Attributes:
        kind: ``joined``: first seen; ``left``; ``rejoined``: seen again, as the same or a newer
            incarnation.
        peer: who.
        reason: why it left; empty otherwise.
        new_incarnation: whether it came back as another process, which knows nothing of before.
    """

    kind: ChangeKind
    peer: Peer
    reason: str = ""
    new_incarnation: bool = False


class Membership:
    """All nodes that this node has met.

    Args:
        own: this node; no other may use its id.
        heartbeat_s: how often peers are expected to be heard of.
        missed: after how many missing heartbeats a peer counts as gone.
    """

    def __init__(
        self, own: Identity, *, heartbeat_s: float = HEARTBEAT_S, missed: int = MISSED_HEARTBEATS
    ) -> None:
        self._own = own
        self._silence_s = heartbeat_s * missed
        self._peers: dict[str, Peer] = {}
        self._heard_at: dict[str, float] = {}

    def __iter__(self) -> Iterator[Peer]:
        return (peer for peer in self._peers.values() if peer.here)

    def __len__(self) -> int:
        return sum(peer.here for peer in self._peers.values())

    def get(self, node_id: str) -> Peer | None:
        """Return a peer that is here, or None."""
        peer = self._peers.get(node_id)
        return peer if peer is not None and peer.here else None

    def admit(self, identity: Identity) -> Refusal | None:
        """Decide whether a node that has the key may join; None: it may."""
        name = identity.node_id
        if name == self._own.node_id:
            return Refusal(
                "node_id_taken", f"node id {name!r} is this node's own; give each node another id"
            )
        known = self._peers.get(name)
        if known is None or identity.incarnation > known.identity.incarnation:
            return None
        if identity.incarnation < known.identity.incarnation:
            return Refusal(
                "replaced",
                f"a newer start of node {name!r} has joined, and replaced this one; give each node "
                "an id of its own, unless it was started anew on purpose",
            )
        return None

    def on_session(self, identity: Identity, session: int, now: float) -> list[Change]:
        """Take note of a completed handshake."""
        known = self._peers.get(identity.node_id)
        peer = Peer(identity, session)
        self._peers[identity.node_id] = peer
        self._heard_at[identity.node_id] = now
        if known is None:
            return [Change("joined", peer)]
        newer = identity.incarnation > known.identity.incarnation
        if known.here and not newer:
            return []  # The same process over a new connection: it never was away.
        changes = [Change("rejoined", peer, new_incarnation=newer)]
        if known.here:
            changes.insert(0, Change("left", replace(known, here=False), "replaced by a new start"))
        return changes

    def on_heard(self, node_id: str, session: int, now: float) -> list[Change]:
        """Take note that a signed frame came; it brings back a peer that was thought gone.

        Frames of a session that has been replaced count for nothing.
        """
        known = self._peers.get(node_id)
        if known is None or known.session != session:
            return []
        self._heard_at[node_id] = now
        if known.here:
            return []
        peer = self._peers[node_id] = replace(known, here=True)
        return [Change("rejoined", peer)]

    def on_left(self, node_id: str, reason: str, *, for_good: bool = False) -> list[Change]:
        """Take note that a peer said goodbye or is known to be dead.

        Args:
            node_id: which.
            reason: why.
            for_good: whether its session is over, so that frames still under way count for nothing.
        """
        known = self.get(node_id)
        if known is None:
            return []
        gone = replace(known, here=False, session=0 if for_good else known.session)
        self._peers[node_id] = gone
        return [Change("left", gone, reason)]

    def tick(self, now: float) -> list[Change]:
        """Find who has been silent for too long."""
        changes = []
        for peer in list(self):
            silent = now - self._heard_at[peer.node_id]
            if silent > self._silence_s:
                changes += self.on_left(peer.node_id, f"nothing heard for {silent:.1f} s")
        return changes
