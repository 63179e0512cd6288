"""The options of a node."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dmiddleware.router.protocol.handshake import MIN_EVENT_BYTES, PeerLimits
from dmiddleware.router.protocol.membership import HEARTBEAT_S, MISSED_HEARTBEATS
from dmiddleware.router.wire.frame import MAX_FRAME_BYTES

__all__ = ["NodeOptions", "half_of_memory"]

_MAX_FRAGMENT_BYTES: Final = MAX_FRAME_BYTES // 8
_CONTAINER_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""The limit of this process's control group, as containers see it: version 2, and version 1."""


def half_of_memory() -> int:
    """Return half of the memory that this machine, or its container, has, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return max(MIN_EVENT_BYTES, min(limits) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Limits and timeouts of a node.

    Attributes:
        max_event_bytes: how much memory this node grants for the large events of its peers, until
            they are taken from its inboxes. A larger event is refused where it is emitted. Default:
            half of the memory of this machine, or of its container.
        outbox_bytes: how many bytes may wait for one peer before emitters block; counted apart for
            events that are acknowledged when accepted, and when handled.
        inbox_bytes: how many bytes from one peer may wait for their handlers before the peer has
            to wait.
        batch_bytes: small events share frames of up to this size.
        fragment_bytes: events of more than four times this size are sent in fragments of this size.
        heartbeat_s: seconds between two heartbeats.
        missed_heartbeats: how many heartbeats a peer may miss before it counts as disconnected.
        forget_after_s: how many seconds accepted events are kept for a disconnected peer.
        max_lossy: how many lossy events may wait for one peer.
        max_peers: how many peers this node accepts.
        max_event_names: how many event names one peer may use, and how many it may subscribe to.

    Raises:
        ValueError: if ``max_event_bytes`` or another limit is too small.
    """

    max_event_bytes: int = field(default_factory=half_of_memory)
    outbox_bytes: int = 8 << 20
    inbox_bytes: int = 64 << 20
    batch_bytes: int = 1 << 19
    fragment_bytes: int = 4 << 20
    heartbeat_s: float = HEARTBEAT_S
    missed_heartbeats: int = MISSED_HEARTBEATS
    forget_after_s: float = 120.0
    max_lossy: int = 1024
    max_peers: int = 4096
    max_event_names: int = 1024

    @property
    def limits(self) -> PeerLimits:
        """What the node announces to its peers."""
        return PeerLimits(
            self.max_event_bytes, self.inbox_bytes, self.outbox_bytes, self.max_event_names
        )

    @property
    def largest_whole_bytes(self) -> int:
        """The size up to which an event is sent as a whole."""
        return 4 * self.fragment_bytes

    def __post_init__(self) -> None:
        if self.max_event_bytes < MIN_EVENT_BYTES:
            raise ValueError(
                f"max_event_bytes must be at least {MIN_EVENT_BYTES}, got {self.max_event_bytes}"
            )
        if not 1 <= self.fragment_bytes <= _MAX_FRAGMENT_BYTES:
            raise ValueError(
                f"fragment_bytes must be from 1 to {_MAX_FRAGMENT_BYTES}, got {self.fragment_bytes}"
            )
        for name in ("inbox_bytes", "outbox_bytes", "max_peers", "max_event_names"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
