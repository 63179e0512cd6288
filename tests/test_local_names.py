"""Local names say a thing, not the role of a word in a sentence: `row`, not `one`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# fmt: off
WORDS = frozenset({
    "one", "other", "own", "found", "given", "known", "wanted", "taken", "kept", "held", "made",
    "said", "told", "seen", "left", "asked", "named", "those", "that", "this", "it", "which",
    "what", "whom", "such", "them",
})
# fmt: on


def local_names(function: ast.AST) -> set[str]:
    """Return the names that a function assigns, and those of the parameters of its lambdas."""
    nodes = list(ast.walk(function))
    assigned = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    lambdas = [x for x in nodes if isinstance(x, ast.Lambda)]
    return assigned | {parameter.arg for x in lambdas for parameter in x.args.args}


def functions_named_by_role(source: str) -> list[str]:
    """Return the functions of a module in which such a name occurs."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and local_names(node) & WORDS
    ]


def test_local_names_are_things() -> None:
    files = [file for top in ("dmiddleware", "middleware") for file in (ROOT / top).rglob("*.py")]
    named = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        if not {"classic", "worker"} & set(file.relative_to(ROOT).parts[:2])
        for name in functions_named_by_role(file.read_text(encoding="utf-8"))
    ]
    assert not named


def test_names_of_loops_and_lambdas_count_too() -> None:
    source = """
def f(rows):
    return [one for one in rows]

def g(rows):
    return sorted(rows, key=lambda other: other.at)

def h(rows):
    own = row = rows[0]
    return own, row

def fine(one):
    return [row for row in one]
"""
    assert functions_named_by_role(source) == ["f", "g", "h"]
