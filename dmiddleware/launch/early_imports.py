"""What one process may import for all nodes of a program, found without running any of it."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import Final

from dmiddleware.launch.main_function import find_source, parse

__all__ = ["THE_DOOR", "early_imports", "early_modules"]

THE_DOOR: Final = "dmiddleware.ding"
"""Makes the modules of DI-engine importable in the process that imports it; no code does so by
itself."""

_BEHIND_THE_DOOR: Final = ("ding", "ditk", "gym")

_OURS: Final = ("dmiddleware", "middleware")
_EARLY: Final = (*_OURS, "torch")


def early_imports(main: str, package: Path, *, ding: bool = False) -> list[str]:
    """Return what the modules of a program import and a process may import before it is forked.

    That is torch, and the modules and names of this project. The modules of the program are not
    among them: what they do when they are imported, they may do in each node. Nothing is, if one of
    them names the environment variables: libraries read some of these when they are loaded, so the
    program may set them before it imports a library.

    Args:
        main: ``package.module.function``.
        package: the folder with the modules of the program.
        ding: whether the program is one of DI-engine. The folder may be a checkout of it, whose
            modules are not imported.
    """
    folder = package.resolve()
    modules: set[str] = set()
    visited: set[str] = set()
    program = main.rpartition(".")[0]
    waiting = [program]
    behind_the_door = _BEHIND_THE_DOOR if ding else ()
    while waiting:
        name = waiting.pop()
        if name in visited or not name:
            continue
        visited.add(name)
        root = name.partition(".")[0]
        # The program may be in a checkout of DI-engine, as ding.example.dqn.
        if root in behind_the_door and program.startswith(f"{name}."):
            continue
        if root in _EARLY or (root in behind_the_door and name != program):
            modules.add(name)
            continue
        waiting.append(name.rpartition(".")[0])
        file = find_source(name, [str(folder)])
        if file is None or not file.resolve().is_relative_to(folder):
            continue
        tree = parse(file)
        if tree is None or _names_variables(tree):
            return []
        waiting += _imported(tree, name if file.name == "__init__.py" else name.rpartition(".")[0])
    return [THE_DOOR, *sorted(modules)] if ding else sorted(modules)


def early_modules(loaded: Iterable[str]) -> list[str]:
    """Return those of the loaded modules that :func:`early_imports` could return.

    Of torch it is only the package, and of this project only what its packages contain directly.
    """
    return [name for name in loaded if name in _EARLY or name.rpartition(".")[0] in _OURS]


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the names that a module of a package imports, and the modules that they are in."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                with contextlib.suppress(ImportError):  # the nodes report it
                    source = resolve_name("." * level + (module or ""), package)
                    yield source
                    yield from (f"{source}.{alias.name}" for alias in names if alias.name != "*")


def _names_variables(tree: ast.Module) -> bool:
    """Return whether a module reads or sets environment variables."""
    return any(
        name in ("environ", "putenv")
        for node in ast.walk(tree)
        for name in (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", ""))
    )
