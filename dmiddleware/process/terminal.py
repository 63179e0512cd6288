"""What terminals can show and redraw, and programs that ask for input without having a terminal."""

from __future__ import annotations

import bdb
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Protocol, TextIO

__all__ = ["can_redraw", "drop_unwritten", "needs_terminal", "printable", "print_any_text"]


class _Stream(Protocol):
    def isatty(self) -> bool: ...


def printable(text: object) -> str:
    """Return a text that can be printed and drawn; a path, for example, need not be Unicode."""
    return str(text).encode(errors="backslashreplace").decode()


def print_any_text() -> None:
    """Let the standard streams of this process escape what they cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def drop_unwritten(stream: TextIO | None) -> None:
    """Flush a stream, or drop what it cannot write: Python would try again at the end, and fail."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        try:
            stream.flush()
        except OSError:
            _flush_to_nowhere(stream)


def _flush_to_nowhere(stream: TextIO) -> None:
    descriptor = stream.fileno()
    copy = os.dup(descriptor)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
        stream.flush()
    finally:
        os.dup2(copy, descriptor)
        os.close(copy)


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
