"""Bounds and times of a node."""

from __future__ import annotations

from dataclasses import dataclass

from dmiddleware.router.protocol.membership import HEARTBEAT_S, MISSED_HEARTBEATS

__all__ = ["NodeOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Bounds and times of a node.

    Attributes:
        max_frame_bytes: the largest frame that is accepted.
        outbox_bytes: how much may wait for one peer before emitters wait.
        inbox_bytes: how much of one peer may wait to be handled before the peer waits.
        window: how many frames to one peer may be unacknowledged.
        batch_bytes: small events share frames of up to so many bytes.
        retry_s: an unanswered frame is sent again after so long.
        heartbeat_s: how often a node shows that it is alive.
        missed_heartbeats: after so many missing ones a peer counts as gone.
        forget_after_s: how long what was accepted for a peer that is gone is kept for its return.
        max_lossy: how many lossy events wait for a peer at most.
    """

    max_frame_bytes: int = 256 << 20
    outbox_bytes: int = 8 << 20
    inbox_bytes: int = 64 << 20
    window: int = 8
    batch_bytes: int = 1 << 19
    retry_s: float = 2.0
    heartbeat_s: float = HEARTBEAT_S
    missed_heartbeats: int = MISSED_HEARTBEATS
    forget_after_s: float = 120.0
    max_lossy: int = 1024
