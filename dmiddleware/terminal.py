"""What needs a terminal: programs that ask for input, and displays that are drawn again."""

from __future__ import annotations

import bdb
from typing import Protocol

__all__ = ["can_redraw", "needs_terminal"]


class _Stream(Protocol):
    def isatty(self) -> bool: ...


def can_redraw(stream: _Stream | None) -> bool | None:
    """Return ``force_terminal`` of a rich console: False: lines stay as they are; None: rich knows.

    rich takes ``FORCE_COLOR`` for a terminal. Notebooks and CI set it for the programs that they
    start, whose output goes to a pipe.
    """
    try:
        return None if stream is not None and stream.isatty() else False
    except ValueError:  # it is closed
        return False


def needs_terminal(error: BaseException | None) -> bool:
    """Return whether ``breakpoint()``, ``pdb`` or ``input()`` has found no input.

    Args:
        error: the error that followed; also one that contains it, or was raised because of it.
    """
    if error is None:
        return False
    if isinstance(error, bdb.BdbQuit):
        return True
    if isinstance(error, EOFError) and "reading a line" in str(error):
        return True
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(needs_terminal, (*inner, error.__cause__, error.__context__)))
