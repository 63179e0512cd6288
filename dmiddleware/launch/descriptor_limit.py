"""The number of files and sockets that a process may have open (``ulimit -n``)."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Final

from dmiddleware.errors import LaunchError
from dmiddleware.launch.plan import NodePlan

__all__ = ["descriptors_needed", "raise_descriptor_limit"]

_PROGRAM_DESCRIPTORS: Final = 256
_PEER_DESCRIPTORS: Final = 4
_PROCESS_DESCRIPTORS: Final = 5
_JOINING_DESCRIPTORS: Final = 4096


def descriptors_needed(plans: Sequence[NodePlan]) -> int:
    """Return how many descriptors the launcher or one of its nodes needs, whichever needs more."""
    peers = max(plan.n_peers for plan in plans)
    return _PROGRAM_DESCRIPTORS + max(_PEER_DESCRIPTORS * peers, _PROCESS_DESCRIPTORS * len(plans))


def raise_descriptor_limit(needed: int) -> None:
    """Raise this process's soft limit, which the processes that it starts inherit.

    The limit is raised beyond what is needed if the hard limit allows it, so that nodes of other
    launchers can join.

    Raises:
        LaunchError: if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = float("inf") if hard == resource.RLIM_INFINITY else hard
    if allowed < needed:
        raise LaunchError(
            f"this run needs up to {needed} open files in one process, but the system allows "
            f"{hard}; raise the hard limit (ulimit -Hn {needed}, or LimitNOFILE of the service), "
            "or start fewer processes"
        )
    target = int(min(allowed, max(needed, _JOINING_DESCRIPTORS)))
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
