"""Programs that ask for input in a process that has no terminal."""

from __future__ import annotations

import bdb

__all__ = ["needs_terminal"]


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
