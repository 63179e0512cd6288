"""How much of the public signatures is ``Any``, which a type checker does not check."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
BAR = 0.03

ROOMS = ["dmiddleware/pipeline", "middleware"]


class Annotation(NamedTuple):
    """One annotation of a public signature.

    Attributes:
        where: the file and line, and the name of the parameter, field or function.
        bare: whether it is ``Any``, or another name for it, with or without None.
    """

    where: str
    bare: bool


def annotations(folder: Path) -> Iterator[Annotation]:
    """Yield the annotations of the public functions, methods and fields below a folder."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")}
    names = {"Any", *_aliases(trees.values())}
    for path, tree in trees.items():
        for name, annotation in _public(tree.body):
            where = f"{path.relative_to(ROOT)}:{annotation.lineno} {name}"
            yield Annotation(where, _is_bare(annotation, names))


def _aliases(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names that are bound to ``Any``."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            if not isinstance(node.value, ast.Constant) and _is_bare(node.value, {"Any"}):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _is_bare(node: ast.expr | None, names: set[str]) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _is_bare(ast.parse(node.value, mode="eval").body, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_bare(node.left, names) or _is_bare(node.right, names)
    if isinstance(node, ast.Attribute):
        return node.attr in names
    return isinstance(node, ast.Name) and node.id in names


def _public(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and annotation of what a module or a class makes public."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if _is_public(node.name):
                yield from _of_function(node)
        elif isinstance(node, ast.ClassDef):
            if _is_public(node.name):
                yield from _public(node.body)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_alias = isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"
            if _is_public(node.target.id) and not is_alias:
                yield node.target.id, node.annotation


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    args = node.args
    further = [one for one in (args.vararg, args.kwarg) if one is not None]
    for one in (*args.posonlyargs, *args.args, *args.kwonlyargs, *further):
        if one.annotation is not None:
            yield f"{node.name}({one.arg})", one.annotation
    if node.returns is not None:
        yield f"{node.name}()", node.returns


@pytest.mark.parametrize("room", ROOMS)
def test_few_annotations_of_public_signatures_are_any(room: str) -> None:
    found = list(annotations(ROOT / room))
    bare = [one.where for one in found if one.bare]
    assert len(bare) <= BAR * len(found), "\n".join([f"{len(bare)} of {len(found)}:", *bare])


def test_names_that_mean_any_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "module.py").write_text(
        "from typing import Any, TypeAlias\n"
        "Whatever: TypeAlias = Any\n"
        "class Public:\n"
        "    a: Any = None\n"
        "    b: 'Whatever | None' = None\n"
        "    c: dict[str, Any] = {}\n"
        "    def f(self, x: int, *args: Any, **kwargs: Whatever) -> Any | None: ...\n"
        "    def _g(self, x: Any) -> Any: ...\n"
        "class _Private:\n"
        "    a: Any = None\n"
    )
    found = {one.where.split(" ")[1]: one.bare for one in annotations(tmp_path)}
    assert found == {
        "a": True, "b": True, "c": False,
        "f(x)": False, "f(args)": True, "f(kwargs)": True, "f()": True,
    }  # fmt: skip
