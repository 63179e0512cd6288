"""The roles whose names mean something to the launcher; it passes all others on.

A program names its roles itself. The launcher does not import it, so these names stand here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from dmiddleware.errors import LaunchError
from dmiddleware.pipeline.context import is_part_name
from dmiddleware.pipeline.middleware import misspelled_role

__all__ = [
    "COORDINATOR",
    "FEEDER",
    "KNOWN_ROLES",
    "LEAD",
    "UNDECIDED",
    "check_role",
    "has_role",
    "kind_of",
    "leads",
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


def kind_of(role: str) -> str:
    """Return the role without the part of the chain that it is for: that of ``learner:red``."""
    return role.partition(":")[0]


def leads(roles: Iterable[str]) -> bool:
    """Return whether a node with these roles is a lead: of all parts, or of one (``learner:red``).

    All nodes connect to the leads, and the run succeeds if they do. The one whose role is
    :data:`LEAD` itself decides what a run has one of.
    """
    return any(kind_of(role) == LEAD for role in roles)


def check_role(name: str) -> None:
    """Refuse a misspelled role, or one for a part of the chain without a valid name.

    Raises:
        LaunchError: with what was meant.
    """
    kind, colon, part = name.partition(":")
    if kind not in (*KNOWN_ROLES, UNDECIDED) and (near := misspelled_role(kind, KNOWN_ROLES)):
        raise LaunchError(f"--roles: unknown role {name!r}; did you mean {near}{colon}{part}?")
    if colon and (kind == UNDECIDED or not is_part_name(part)):
        raise LaunchError(
            f"--roles: {name!r} does not name a role for a part of the chain; write it as "
            f"role:name, as in {LEAD}:red=1"
        )


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
