"""How messages travel between the coordinator and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dmiddleware.worker.coordinator.messages import Message

__all__ = ["Link"]


class Link(Protocol):
    """Carries messages between authenticated peers, reliably and in order.

    A peer that connects or disappears is reported by :meth:`receive`, as
    :class:`~dmiddleware.worker.coordinator.messages.Joined` and
    :class:`~dmiddleware.worker.coordinator.messages.Left` with the peer's uid.
    """

    @property
    def uid(self) -> str:
        """The name of this process among its peers."""
        ...

    def peers(self) -> Mapping[str, str]:
        """Return the role of each connected peer, by uid."""
        ...

    def send(self, peer: str, message: Message) -> None:
        """Send a message to a peer; returns once the link has accepted it.

        Raises:
            DeliveryError: if the peer is unknown, or takes nothing before the link's timeout.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        """Return the next message and its sender, or None after ``timeout_s`` seconds."""
        ...

    def close(self, deadline_s: float) -> None:
        """Deliver what was sent, within ``deadline_s`` seconds, and end; may be called twice."""
        ...
