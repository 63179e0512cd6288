"""The line of the user's program to which an error belongs."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["CrashReport", "is_of_program", "program_line"]

_OUR_CODE: Final = tuple(
    str(Path(__file__).parents[2] / name) + os.sep for name in ("dmiddleware", "middleware")
)
_INSTALLED: Final = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STACK_HEADING: Final = re.compile(
    r'(?:Current thread|Thread) 0x|  (?:File "|\.\.\.|<)|Extension modules: |$'
)
_FRAME: Final = re.compile(r'  File "(.+)", line (\d+) in ')


def program_line(frames: Iterable[tuple[str, int | None]]) -> str:
    """Return the innermost line of the user's program, as ``file:line``.

    Args:
        frames: file and line of each frame, the innermost first. Without a frame of the program,
            one of an installed package counts, and without such a frame any.

    Returns:
        The line; empty without frames.
    """
    lines = list(frames)
    outside = [frame for frame in lines if not frame[0].startswith((*_OUR_CODE, "<"))]
    program = [frame for frame in outside if not _is_installed(frame[0])]
    for file, line in program or outside or lines:
        return f"{Path(file).name}:{line}"
    return ""


def is_of_program(file: str) -> bool:
    """Return whether a file belongs to the user's program."""
    return not (file.startswith((*_OUR_CODE, "<frozen ")) or _is_installed(file))


def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or any(folder in file for folder in _PACKAGES)


class CrashReport:
    """Finds the line that crashed a process in what Python's ``faulthandler`` has printed."""

    def __init__(self) -> None:
        self._frames: list[tuple[str, int | None]] = []
        self._in_stacks = False
        self._is_current = False

    def feed(self, line: str) -> bool:
        """Take one line of the output of the process.

        Returns:
            Whether it belongs to the stacks, which can be many lines.
        """
        if line.startswith("Fatal Python error: "):
            self._in_stacks, self._is_current, self._frames = True, False, []
            return False
        self._in_stacks = self._in_stacks and _STACK_HEADING.match(line) is not None
        if line.startswith(("Current thread ", "Thread ")):
            self._is_current = self._in_stacks and line.startswith("Current")
        elif self._in_stacks and self._is_current and (match := _FRAME.match(line)):
            self._frames.append((match[1], int(match[2])))
        return self._in_stacks

    @property
    def where(self) -> str:
        """The line of the program, as ``file:line``; empty: not known."""
        return program_line(self._frames)
