"""Names of events: patterns, and the names under which tasks exchange events with their peers."""

from __future__ import annotations

import functools
from typing import Final

__all__ = ["ROLE_EVENTS", "base_name", "is_glob", "scoped_name", "task_number"]

ROLE_EVENTS: Final = "task.role."
"""Never emitted. A peer that subscribes to it has the role whose name follows."""

_SCOPE: Final = " (task "
_GLOB_CHARACTERS: Final = frozenset("*?[")


def is_glob(pattern: str) -> bool:
    """Return whether a pattern may match several names; no event has such a name."""
    return not _GLOB_CHARACTERS.isdisjoint(pattern)


def scoped_name(name: str, number: int) -> str:
    """Return the name under which the n-th task of a program exchanges an event with its peers.

    The first task uses the event's own name.
    """
    return name if number == 1 else f"{name}{_SCOPE}{number})"


@functools.lru_cache(maxsize=1024)
def base_name(name: str) -> str:
    """Return the event's own name, whichever task exchanges it."""
    return name.partition(_SCOPE)[0] if name[-1:] == ")" else name


@functools.lru_cache(maxsize=1024)
def task_number(name: str) -> int:
    """Return the number of the task that exchanges an event under a name."""
    if name[-1:] != ")":
        return 1
    _, scope, number = name.rpartition(_SCOPE)
    return int(number[:-1]) if scope and number[:-1].isdecimal() else 1
