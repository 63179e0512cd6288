"""Links between peers of one process, for tests and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from dmiddleware.errors import DeliveryTimeout
from dmiddleware.flow_control import FairQueue
from dmiddleware.worker.coordinator.conversation import Answer, Ask, Said
from dmiddleware.worker.coordinator.messages import Joined, Left
from dmiddleware.worker.errors import CoordinatorError

__all__ = ["MemoryLink", "MemoryNetwork"]


class MemoryNetwork:
    """Connects peers of one process; thread-safe.

    Args:
        idle: called with the timeout, instead of waiting, when a peer receives and has no message.
            A test that runs all peers in one thread lets the others work there, and advances its
            clock.

    Example:
        >>> network = MemoryNetwork()
        >>> coordinator = network.connect("coordinator", "coordinator")
        >>> worker = network.connect("worker-0", "collector")
        >>> coordinator.receive(1.0)
        ('worker-0', Joined(role='collector'))
    """

    def __init__(self, *, idle: Callable[[float], None] | None = None) -> None:
        self._idle = idle
        self._changed = threading.Condition()
        self._roles: dict[str, str] = {}
        self._queues: dict[str, FairQueue[tuple[str, Said]]] = {}

    def connect(self, uid: str, role: str) -> MemoryLink:
        """Connect a peer; the others receive ``Joined``, and the peer receives it for each of them.

        Raises:
            CoordinatorError: if a peer of this name is connected.
        """
        with self._changed:
            if uid in self._roles:
                raise CoordinatorError(f"a peer {uid!r} is already connected; choose another uid")
            queue = FairQueue[tuple[str, Said]](changed=self._changed)
            for other, other_role in self._roles.items():
                self._queues[other].put((uid, Joined(role)))
                queue.put((other, Joined(other_role)))
            self._roles[uid] = role
            self._queues[uid] = queue
        return MemoryLink(self, uid)

    def disconnect(self, uid: str, reason: str) -> None:
        """Disconnect a peer as if its process had died; the others receive ``Left``."""
        with self._changed:
            if self._roles.pop(uid, None) is None:
                return
            self._queues.pop(uid).close()
            for queue in self._queues.values():
                queue.put((uid, Left(reason)))

    def roles(self, uid: str) -> dict[str, str]:
        """Return the roles of the peers of ``uid``."""
        with self._changed:
            return {other: role for other, role in self._roles.items() if other != uid}

    def deliver(self, sender: str, peer: str, message: Ask | Answer) -> None:
        """Put a message into a peer's queue.

        Raises:
            DeliveryTimeout: if one of the two is not connected.
        """
        with self._changed:
            if sender not in self._roles or peer not in self._roles:
                raise DeliveryTimeout(f"{peer!r} is not connected to {sender!r}; nothing was sent")
            self._queues[peer].put((sender, message))

    def take(self, uid: str, timeout_s: float) -> tuple[str, Said] | None:
        """Take the oldest message of a peer's queue, or None after ``timeout_s`` seconds."""
        if self._idle is not None and timeout_s > 0 and not self._queues.get(uid):
            self._idle(timeout_s)
            timeout_s = 0.0
        queue = self._queues.get(uid)
        return None if queue is None else queue.take(timeout_s)


class MemoryLink:
    """A peer's :class:`~dmiddleware.worker.comm.Link` in a :class:`MemoryNetwork`.

    Args:
        network: the network, whose ``connect`` creates links.
        uid: the peer's name.
    """

    def __init__(self, network: MemoryNetwork, uid: str) -> None:
        self._network = network
        self._uid = uid

    @property
    def uid(self) -> str:
        """The peer's name."""
        return self._uid

    def peers(self) -> Mapping[str, str]:
        """Return the role of each other peer, by uid."""
        return self._network.roles(self._uid)

    def send(self, peer: str, message: Ask | Answer) -> None:
        """Send to a peer.

        Raises:
            DeliveryTimeout: if the peer or this link is not connected.
        """
        self._network.deliver(self._uid, peer, message)

    def receive(self, timeout_s: float) -> tuple[str, Said] | None:
        """Return what has arrived next, and from whom; None after ``timeout_s`` seconds.

        A closed link returns None at once.
        """
        return self._network.take(self._uid, timeout_s)

    def close(self, deadline_s: float = 0.0) -> None:
        """Disconnect; what was sent has already arrived. May be called twice."""
        self._network.disconnect(self._uid, "closed")
