"""Membership: which nodes are connected, which have left and why, and which have returned.

A node is connected from its handshake until it says goodbye, misses its heartbeats, loses its
connection, or is replaced by a newer process with its node id.

Processes with one node id are distinguished by their instances, and ordered by their incarnations.
While one is connected, another is refused until the first has left, unless peers elsewhere have
agreed that the other one is newer. A process that has been replaced is refused for good.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from dmiddleware.router.protocol.handshake import Identity, Refusal, Session

__all__ = [
    "Member",
    "MembershipChange",
    "Membership",
    "HEARTBEAT_S",
    "MISSED_HEARTBEATS",
    "MISSED_WHILE_BUSY",
    "SAID_GOODBYE",
]

HEARTBEAT_S: Final = 1.0
"""Seconds between two heartbeats."""

MISSED_HEARTBEATS: Final = 3
"""How many heartbeats a node may miss before it counts as disconnected."""

MISSED_WHILE_BUSY: Final = 10
"""How many it may miss while bytes move over its connection. They are not authenticated before
their frame is complete, so they do not count for longer."""

SAID_GOODBYE: Final = "said goodbye"
"""The first words of the reason of a node that left at the ordered end of its run."""

_MAX_REPLACED: Final = 64
"""How many replaced processes of a node id are remembered."""

ChangeKind = Literal["joined", "left", "rejoined"]


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the run, as this node knows it.

    Attributes:
        identity: the node's identity.
        incarnation: the newest incarnation that it has used.
        connected: whether it is connected.
    """

    identity: Identity
    incarnation: int
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
            same or a newer process.
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
        max_known: how many nodes are remembered, disconnected ones included.
    """

    def __init__(
        self,
        own: Identity,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        missed: int = MISSED_HEARTBEATS,
        max_known: int = 8192,
    ) -> None:
        self._own = own
        self._max_known = max_known
        self._silence_s = heartbeat_s * missed
        self._busy_silence_s = heartbeat_s * max(missed, MISSED_WHILE_BUSY)
        self._members: dict[str, Member] = {}
        # The connected nodes, the one that was heard longest ago first.
        self._heard_at: dict[str, float] = {}
        # When those were heard for which unauthenticated bytes count at the moment.
        self._busy_since: dict[str, float] = {}
        self._replaced: dict[str, deque[bytes]] = {}

    def __iter__(self) -> Iterator[Member]:
        return (member for member in self._members.values() if member.connected)

    def __len__(self) -> int:
        return len(self._heard_at)

    def get(self, node_id: str) -> Member | None:
        """Return a connected node, or None."""
        member = self._members.get(node_id)
        return member if member is not None and member.connected else None

    def least_incarnation(self, identity: Identity) -> int:
        """Return the least incarnation that a process may have."""
        member = self._members.get(identity.node_id)
        if member is None:
            return 1
        return member.incarnation + (member.identity.instance != identity.instance)

    def admit(self, identity: Identity, incarnation: int) -> Refusal | None:
        """Return why an authenticated process may not join, or None if it may.

        Args:
            identity: identity of the process.
            incarnation: its incarnation before this handshake.
        """
        name = identity.node_id
        if name == self._own.node_id:
            return Refusal(
                "node_id_taken",
                f"both nodes have node id {name}; give each node a unique id",
            )
        if identity.instance in self._replaced.get(name, ()):
            return Refusal(
                "replaced",
                f"a newer process has joined as node {name} and replaced this one; give each node "
                "a unique id, unless you restarted it on purpose",
            )
        member = self.get(name)
        if (
            member is None
            or member.identity.instance == identity.instance
            or incarnation > member.incarnation
        ):
            return None
        return Refusal(
            "duplicate",
            f"another process is connected as node {name}; give each node a unique id, or stop the "
            "other process",
        )

    def on_session(self, session: Session, now: float) -> list[MembershipChange]:
        """Note a completed handshake."""
        identity = session.identity
        before = self._members.get(identity.node_id)
        member = Member(identity, session.incarnation)
        self._members[identity.node_id] = member
        self.on_heard(identity.node_id, session.incarnation, now)
        if before is None:
            self._forget_oldest()
            return [MembershipChange("joined", member)]
        newer = identity.instance != before.identity.instance
        if newer:
            replaced = self._replaced.setdefault(identity.node_id, deque(maxlen=_MAX_REPLACED))
            replaced.append(before.identity.instance)
        if before.connected and not newer:
            return []  # The same process over a new connection: it has not been away.
        changes = [MembershipChange("rejoined", member, new_incarnation=newer)]
        if before.connected:
            gone = replace(before, connected=False)
            changes.insert(0, MembershipChange("left", gone, "replaced by a new process"))
        return changes

    def on_heard(self, node_id: str, incarnation: int, now: float) -> None:
        """Note that an authenticated frame of a connected node has arrived."""
        # The node that was heard last comes last.
        self._heard_at.pop(node_id, None)
        self._heard_at[node_id] = now
        if self._busy_since:
            self._busy_since.pop(node_id, None)
        member = self._members[node_id]
        if member.incarnation < incarnation:
            self._members[node_id] = replace(member, incarnation=incarnation)

    def on_progress(self, node_id: str, now: float) -> None:
        """Note that bytes have moved over the connection of a node, without a complete frame."""
        heard_at = self._heard_at.get(node_id)
        if heard_at is None:
            return
        since = self._busy_since.get(node_id, heard_at)
        if now - since <= self._busy_silence_s:
            self.on_heard(node_id, 0, now)
            self._busy_since[node_id] = since

    def quiet(self, now: float) -> list[str]:
        """Return the nodes that count as disconnected soon if they are not heard."""
        node_ids = []
        for node_id, heard_at in self._heard_at.items():
            if now - heard_at <= self._silence_s / 2:
                break
            node_ids.append(node_id)
        return node_ids

    def on_left(self, node_id: str, reason: str) -> list[MembershipChange]:
        """Note that a node said goodbye, or that its connection has ended."""
        member = self.get(node_id)
        if member is None:
            return []
        gone = replace(member, connected=False)
        # The nodes that left first come first.
        del self._members[node_id]
        self._members[node_id] = gone
        del self._heard_at[node_id]
        self._busy_since.pop(node_id, None)
        return [MembershipChange("left", gone, reason)]

    @property
    def silent_at(self) -> float:
        """When the next node counts as disconnected if it is not heard; infinity: never."""
        heard_at = next(iter(self._heard_at.values()), math.inf)
        return heard_at + self._silence_s

    def tick(self, now: float) -> list[MembershipChange]:
        """Find the nodes that have been silent for too long."""
        changes: list[MembershipChange] = []
        while self._heard_at:
            node_id, heard_at = next(iter(self._heard_at.items()))
            if now - heard_at <= self._silence_s:
                break
            changes += self.on_left(node_id, f"no heartbeat for {now - heard_at:.1f} s")
        return changes

    def _forget_oldest(self) -> None:
        if len(self._members) > self._max_known:
            gone = (member.node_id for member in self._members.values() if not member.connected)
            oldest = next(gone, None)
            if oldest is not None:
                del self._members[oldest]
                self._replaced.pop(oldest, None)
