"""Modules that the processes of envs and workers import before they receive what to do.

A program whose modules are found in an unusual way, such as one of DI-engine, adds the module that
makes them importable.
"""

from __future__ import annotations

__all__ = ["add_first_import", "first_imports", "remove_first_import"]

_names: list[str] = []


def first_imports() -> tuple[str, ...]:
    """Return the names of the modules, in their order."""
    return tuple(_names)


def add_first_import(name: str) -> None:
    """Let processes of envs and workers that start from now on import a module first."""
    if name not in _names:
        _names.append(name)


def remove_first_import(name: str) -> None:
    """Let processes of envs and workers that start from now on no longer import the module."""
    if name in _names:
        _names.remove(name)
