"""How messages travel between the coordinator and its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

from dmiddleware.registry import Registry
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.messages import Message

__all__ = [
    "COORDINATOR_LINK_REGISTRY",
    "WORKER_ENTRY_POINTS",
    "Link",
    "create_coordinator_link",
    "import_worker_entry_point",
]

WORKER_ENTRY_POINTS: Final = "dmiddleware.workers"
"""The entry-point group of modules that register links and communicating workers.

An entry point has the name that its module registers. So a package above this one, such as
``middleware``, can provide a kind of worker without being imported here.
"""


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
            DeliveryTimeout: if the peer is unknown, or takes nothing before the link's timeout.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        """Return the next message and its sender, or None after ``timeout_s`` seconds."""
        ...

    def close(self, deadline_s: float) -> None:
        """Deliver what was sent, within ``deadline_s`` seconds, and end; may be called twice."""
        ...


COORDINATOR_LINK_REGISTRY: Registry[Callable[[Mapping[str, Any]], tuple[Link, Store]]] = Registry(
    "coordinator link"
)
"""Functions that open the coordinator's end of a link, and the store of the run, by name.

A function gets the coordinator's whole config (``main`` and ``system``) and returns both, ready to
use. The coordinator closes the link.
"""


def create_coordinator_link(cfg: Mapping[str, Any]) -> tuple[Link, Store]:
    """Open the link and the store that ``cfg.system.coordinator.type`` names.

    Args:
        cfg: the coordinator's config: ``main`` and ``system``.

    Raises:
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    name = cfg["system"]["coordinator"]["type"]
    if name not in COORDINATOR_LINK_REGISTRY:
        import_worker_entry_point(name)
    return COORDINATOR_LINK_REGISTRY.get(name)(cfg)


def import_worker_entry_point(name: str) -> None:
    """Import the modules that installed packages provide for the workers ``name``, if any."""
    for entry in entry_points(group=WORKER_ENTRY_POINTS, name=name):
        entry.load()
