"""What classes say about their fields and arguments, for ``help()``, editors and the reference."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["sentences_below", "with_arguments"]

_WIDTH: Final = 100
_SECTION: Final = re.compile(r"[A-Z]\w+:")
_ARGUMENTS: Final = "Args:"


def sentences_below(cls: type) -> Mapping[str, str]:
    """Return the sentences below the fields that a class itself declares, by field.

    They are read from the source of its module; a class without source, as in an interactive
    session, has none.
    """
    return _sentences_in(cls.__module__).get(cls.__qualname__, {})


@functools.cache
def _sentences_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the sentences of all classes of a module, by their qualified names."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, SyntaxError, TypeError):
        return {}
    return dict(_classes_in(tree, ""))


def _classes_in(parent: ast.AST, path: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    for node in ast.iter_child_nodes(parent):
        below = path
        if isinstance(node, ast.ClassDef):
            below = f"{path}{node.name}."
            yield f"{path}{node.name}", _sentences_of(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            below = f"{path}{node.name}.<locals>."
        yield from _classes_in(node, below)


def _sentences_of(node: ast.ClassDef) -> Mapping[str, str]:
    sentences = {}
    for statement, following in itertools.pairwise(node.body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        match targets, following:
            case [ast.Name(name)], ast.Expr(ast.Constant(str(text))):
                sentences[name] = " ".join(text.split())
    return sentences


def with_arguments(docstring: str, arguments: Mapping[str, str]) -> str:
    """Return a docstring in Google's style, with further arguments.

    Args:
        docstring: the docstring; those that its section ``Args:`` has stay as they are.
        arguments: what the others mean, by name.
    """
    lines = inspect.cleandoc(docstring).splitlines()
    sections = [at for at, line in enumerate(lines) if _SECTION.fullmatch(line)]
    begin = next((at for at in sections if lines[at] == _ARGUMENTS), None)
    end = next((at for at in sections if begin is None or at > begin), len(lines))
    section = lines[end if begin is None else begin : end]
    has = {line.strip().partition(":")[0] for line in section}
    new = [
        line
        for name, meaning in arguments.items()
        if name not in has
        for line in textwrap.wrap(
            f"{name}: {meaning}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8,
            break_long_words=False, break_on_hyphens=False,
        )
    ]  # fmt: skip
    if not new:
        return "\n".join(lines)
    section = [*(section or [_ARGUMENTS]), *new]
    before = lines[: end if begin is None else begin]
    parts = ("\n".join(part).strip("\n") for part in (before, _without_gap(section), lines[end:]))
    return "\n\n".join(part for part in parts if part)


def _without_gap(section: list[str]) -> list[str]:
    """Return the lines of a section without the empty lines between its entries."""
    return [line for line in section if line.strip()]
