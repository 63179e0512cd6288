"""Membership: which nodes are connected, which have left and why, and which have returned.

A node is connected from its handshake until it says goodbye, misses its heartbeats, loses its
connection, or is replaced by a newer incarnation of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from dmiddleware.router.protocol.handshake import Identity, Refusal

__all__ = [
    "Member",
    "MembershipChange",
    "Membership",
    "HEARTBEAT_S",
    "MISSED_HEARTBEATS",
    "SAID_GOODBYE",
]

HEARTBEAT_S: Final = 1.0
"""Seconds between two heartbeats."""

MISSED_HEARTBEATS: Final = 3
"""How many heartbeats a node may miss before it counts as disconnected."""

SAID_GOODBYE: Final = "said goodbye"
"""The first words of the reason of a node that left at the ordered end of its run."""

ChangeKind = Literal["joined", "left", "rejoined"]


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the run, as this node knows it.

    Attributes:
        identity: the node's identity.
        session: the session that its frames carry.
        connected: whether it is connected.
    """

    identity: Identity
    session: int
    connected: bool = True

    @property
    def node_id(self) -> str:
        """The node's id."""
        return self.identity.node_id


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A node has joined, left or rejoined.

    Attributes:
        kind: ``joined``: seen for the first time; ``left``; ``rejoined``: connected again, as the
            same or a newer incarnation.
        member: the node.
        reason: why it left; empty otherwise.
        new_incarnation: whether it rejoined as a new process, which has none of the old state.
    """

    kind: ChangeKind
    member: Member
    reason: str = ""
    new_incarnation: bool = False


class Membership:
    """All nodes that this node has met.

    Args:
        own: this node's identity; no other node may use its id.
        heartbeat_s: seconds between two heartbeats of a peer.
        missed: how many heartbeats a peer may miss before it counts as disconnected.
    """

    def __init__(
        self, own: Identity, *, heartbeat_s: float = HEARTBEAT_S, missed: int = MISSED_HEARTBEATS
    ) -> None:
        self._own = own
        self._silence_s = heartbeat_s * missed
        self._members: dict[str, Member] = {}
        # The connected nodes, the one that was heard longest ago first.
        self._heard_at: dict[str, float] = {}

    def __iter__(self) -> Iterator[Member]:
        return (member for member in self._members.values() if member.connected)

    def __len__(self) -> int:
        return len(self._heard_at)

    def get(self, node_id: str) -> Member | None:
        """Return a connected node, or None."""
        member = self._members.get(node_id)
        return member if member is not None and member.connected else None

    def admit(self, identity: Identity) -> Refusal | None:
        """Return why an authenticated node may not join, or None if it may."""
        name = identity.node_id
        if name == self._own.node_id:
            return Refusal(
                "node_id_taken",
                f"the listening node already has node id {name!r}; give each node a unique id",
            )
        known = self._members.get(name)
        if known is None or identity.incarnation >= known.identity.incarnation:
            return None
        return Refusal(
            "replaced",
            f"a newer process has joined as node {name!r} and replaced this one; give each node a "
            "unique id, unless you restarted it on purpose",
        )

    def on_session(self, identity: Identity, session: int, now: float) -> list[MembershipChange]:
        """Note a completed handshake."""
        known = self._members.get(identity.node_id)
        member = Member(identity, session)
        self._members[identity.node_id] = member
        self._note_heard(identity.node_id, now)
        if known is None:
            return [MembershipChange("joined", member)]
        newer = identity.incarnation > known.identity.incarnation
        if known.connected and not newer:
            return []  # The same process over a new connection: it has not been away.
        changes = [MembershipChange("rejoined", member, new_incarnation=newer)]
        if known.connected:
            gone = replace(known, connected=False)
            changes.insert(0, MembershipChange("left", gone, "replaced by a new process"))
        return changes

    def on_heard(self, node_id: str, session: int, now: float) -> list[MembershipChange]:
        """Note that an authenticated frame arrived; a disconnected node rejoins.

        Frames of a session that has been replaced are ignored.
        """
        known = self._members.get(node_id)
        if known is None or known.session != session:
            return []
        self._note_heard(node_id, now)
        if known.connected:
            return []
        member = self._members[node_id] = replace(known, connected=True)
        return [MembershipChange("rejoined", member)]

    def on_left(
        self, node_id: str, reason: str, *, for_good: bool = False
    ) -> list[MembershipChange]:
        """Note that a node said goodbye or is known to be dead.

        Args:
            node_id: the node.
            reason: why it left.
            for_good: whether its session is over, so that late frames do not bring it back.
        """
        known = self.get(node_id)
        if known is None:
            return []
        gone = replace(known, connected=False, session=0 if for_good else known.session)
        self._members[node_id] = gone
        del self._heard_at[node_id]
        return [MembershipChange("left", gone, reason)]

    def tick(self, now: float) -> list[MembershipChange]:
        """Find the nodes that have been silent for too long."""
        changes: list[MembershipChange] = []
        while self._heard_at:
            node_id, heard_at = next(iter(self._heard_at.items()))
            if now - heard_at <= self._silence_s:
                break
            changes += self.on_left(node_id, f"no heartbeat for {now - heard_at:.1f} s")
        return changes

    def _note_heard(self, node_id: str, now: float) -> None:
        self._heard_at.pop(node_id, None)
        self._heard_at[node_id] = now
