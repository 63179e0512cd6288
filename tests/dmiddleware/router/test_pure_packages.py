"""The wire format and the protocol do no input or output and read no clock."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dmiddleware.router

IMPURE = frozenset(
    {"threading", "socket", "selectors", "select", "time", "asyncio", "subprocess", "mmap", "pynng"}
)
MODULES = sorted(
    path
    for package in ("wire", "protocol")
    for path in (Path(dmiddleware.router.__file__).parent / package).glob("*.py")
)


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_pure_module_imports_nothing_with_side_effects(path: Path) -> None:
    assert not {name.partition(".")[0] for name in imported_packages(path)} & IMPURE
    for name in imported_packages(path):
        assert not name.startswith(("dmiddleware.router.runtime", "dmiddleware.router.transport"))
