"""The options of a node."""

from __future__ import annotations

from dataclasses import dataclass

from dmiddleware.router.protocol.handshake import MIN_FRAME_BYTES
from dmiddleware.router.protocol.membership import HEARTBEAT_S, MISSED_HEARTBEATS

__all__ = ["NodeOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Limits and timeouts of a node.

    Attributes:
        max_frame_bytes: the largest frame that this node accepts.
        outbox_bytes: how many bytes may wait for one peer before emitters block; counted apart for
            events that are acknowledged when accepted, and when handled.
        inbox_bytes: how many bytes from one peer may wait for their handlers before the peer has
            to wait.
        window: how many frames to one peer may be unacknowledged.
        batch_bytes: small events share frames of up to this size.
        retry_s: seconds after which an unacknowledged frame is sent again.
        heartbeat_s: seconds between two heartbeats.
        missed_heartbeats: how many heartbeats a peer may miss before it counts as disconnected.
        forget_after_s: how many seconds accepted events are kept for a disconnected peer.
        max_lossy: how many lossy events may wait for one peer.
        max_peers: how many peers this node accepts.
        max_event_names: how many event names one peer may use, and how many it may subscribe to.

    Raises:
        ValueError: if ``max_frame_bytes`` or another limit is too small.
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
    max_peers: int = 4096
    max_event_names: int = 1024

    def __post_init__(self) -> None:
        if self.max_frame_bytes < MIN_FRAME_BYTES:
            raise ValueError(
                f"max_frame_bytes must be at least {MIN_FRAME_BYTES}, got {self.max_frame_bytes}"
            )
        for name in ("window", "max_peers", "max_event_names"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
