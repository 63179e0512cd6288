"""The role that this process has in a classic run."""

from __future__ import annotations

from dmiddleware.pipeline.current_node import current_node
from dmiddleware.worker.parallel_run import PROCESS_ROLE_REGISTRY

__all__ = ["role_of_this_process"]


@PROCESS_ROLE_REGISTRY.register("router")
def role_of_this_process() -> str | None:
    """Return the role that ditask has given to this process; None if it was not started by it.

    That is ``none`` if the program should decide, which a classic run cannot.
    """
    node = current_node()
    if node is None:
        return None
    return "none" if node.decides_roles else next(iter(node.roles), "")
