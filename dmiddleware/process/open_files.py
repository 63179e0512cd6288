"""Errors of processes that have too many files and sockets open."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

__all__ = ["explained", "naming_the_limit"]

_SYSTEM_REMEDY: Final = "raise fs.file-max, or end other programs"
_MOST: Final = 1 << 20


def explained(error: BaseException) -> str:
    """Return the text of an error; too many open files with their number, limit and remedy."""
    number = getattr(error, "errno", None)
    if number == errno.ENFILE:
        return f"the system has too many files and sockets open; {_SYSTEM_REMEDY}"
    if number != errno.EMFILE:
        return str(error)
    return (
        f"this process has too many files and sockets open{_count()}; raise the limit with "
        "ulimit -n before the start (LimitNOFILE of a service), or use fewer of them, such as "
        "fewer envs or more envs_per_process"
    )


@contextlib.contextmanager
def naming_the_limit(doing: str) -> Iterator[None]:
    """Say in a block what could not be done when too many files and sockets are open.

    Args:
        doing: what the block does, as in "start the process of env 3".

    Raises:
        OSError: the same error, with what is known.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise OSError(error.errno, f"cannot {doing}: {explained(error)}") from error


def _count() -> str:
    """Return how many are open, and how many may be, where the system tells.

    Nothing can be opened to find out.
    """
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return ""
    n_open = sum(map(_is_open, range(min(limit, _MOST) if limit >= 0 else _MOST)))
    return f" (its limit is {limit}, and {n_open} are open now)"


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
