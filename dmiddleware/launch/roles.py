"""The roles whose names mean something to the launcher; it passes all others on.

A program names its roles itself. The launcher does not import it, so these names stand here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

__all__ = [
    "COORDINATOR",
    "FEEDER",
    "KNOWN_ROLES",
    "LEAD",
    "UNDECIDED",
    "has_role",
    "roles_by_position",
]

LEAD: Final = "learner"
"""The others connect to the nodes with this role, and the run succeeds if they do.

Those of one host run their tasks as one, as ranks of a process group, unless the run has a
coordinator.
"""

FEEDER: Final = "collector"
"""Each node with this role sends its data to one of the leads."""

COORDINATOR: Final = "coordinator"
"""A node with this role talks to all others, and each lead runs by itself."""

_OBSERVER: Final = "evaluator"

UNDECIDED: Final = "none"
"""The word for processes whose roles the program decides, as in ``--roles none``."""

KNOWN_ROLES: Final = (LEAD, FEEDER, _OBSERVER, COORDINATOR, "aggregator")
"""Names that are not taken for a misspelling of another one."""


def has_role(role: str, nodes: Iterable[Collection[str]]) -> bool:
    """Return whether one of the nodes has the role, given the roles of each."""
    return any(role in roles for roles in nodes)


def roles_by_position(count: int) -> list[tuple[str, ...]]:
    """Return the roles of each node of a run that names none; a single node has no role."""
    if count == 1:
        return [()]
    if count == 2:
        return [(LEAD,), (FEEDER, _OBSERVER)]
    return [(LEAD,), *[(FEEDER,)] * (count - 2), (_OBSERVER,)]
