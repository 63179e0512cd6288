"""Which link and store the coordinator uses, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from dmiddleware.registry import Registry
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.conversation import Link

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
