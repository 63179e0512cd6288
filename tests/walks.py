"""What the two walks share: which calls count, and how they are printed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import TypeAlias

__all__ = ["ROOT", "Function", "by_file", "function_of", "print_walk"]

ROOT = Path(__file__).resolve().parents[1]

Function: TypeAlias = tuple[str, str]
"""A file of the project, and the qualified name of a function in it."""


def function_of(frame: FrameType) -> Function | None:
    """Return the function that was called; None unless it is one of the project with a name."""
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    is_ours = file.startswith((f"{ROOT}/dmiddleware", f"{ROOT}/middleware"))
    if not is_ours or name.endswith(("<lambda>", "comp>", "genexpr>")):
        return None
    return str(Path(file).relative_to(ROOT)), name


def by_file(functions: Iterable[Function]) -> dict[str, list[str]]:
    """Return the names by file, in the order of the first of each file."""
    files: dict[str, list[str]] = {}
    for file, name in functions:
        files.setdefault(file, []).append(name)
    return files


def print_walk(walk: Callable[[Path], dict[str, list[str]]]) -> None:
    """Walk in a temporary folder and print it; with ``--count``, only how many functions it has."""
    with tempfile.TemporaryDirectory() as folder:
        files = walk(Path(folder))
    if "--count" not in sys.argv:
        for file, names in files.items():
            print(file, *(f"    {name}" for name in names), sep="\n")
    print(f"{sum(map(len, files.values()))} functions in {len(files)} files")
