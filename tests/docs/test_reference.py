"""Every public name has a docstring, and a place in the reference."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import dmiddleware
from dmiddleware.settings import Settings, describe
from tests.docs.pages import ROOT

SINGLE_MODULES = ("dmiddleware.settings", "dmiddleware.errors", "dmiddleware.registry")
SINGLE_MODULES += ("dmiddleware.seeding", "dmiddleware.program", "dmiddleware.command_line")
SINGLE_MODULES += ("middleware.programs",)


def public_packages() -> list[str]:
    """The packages whose names are public: those directly below dmiddleware, and middleware."""
    below = [f"dmiddleware.{m.name}" for m in pkgutil.iter_modules(dmiddleware.__path__) if m.ispkg]
    named = [name for name in below if getattr(importlib.import_module(name), "__all__", None)]
    return [*named, *SINGLE_MODULES, "middleware"]


PACKAGES = public_packages()
NAMES = [(p, n) for p in PACKAGES for n in importlib.import_module(p).__all__]


def documented_data(module: str) -> set[str]:
    """Names that are assigned in a package's modules, with a docstring below the assignment."""
    path = Path(importlib.import_module(module).__file__)
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    found = set()
    for file in files:
        for statement, following in itertools.pairwise(ast.parse(file.read_text()).body):
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package):
    module = importlib.import_module(package)
    data = documented_data(package)
    for name in module.__all__:
        thing = getattr(module, name)
        if name == "Batch":
            continue  # a class of another library; the page of the data package describes it
        if issubclass(type(thing), type) or inspect.isroutine(thing):
            docstring = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
            # A dataclass without one gets its signature for a docstring.
            assert docstring and not docstring.startswith(f"{name}("), f"{package}.{name}"
        else:
            assert name in data, f"{package}.{name} needs a docstring below its assignment"


def test_public_packages_are_in_the_reference():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^\.\. automodule:: ([\w.]+)$", pages, re.MULTILINE))
    assert set(PACKAGES) <= shown


def test_the_top_level_offers_nothing_that_the_reference_lacks():
    known = {name for _, name in NAMES}
    assert set(dmiddleware.__all__) <= known


def test_the_tables_of_options_are_current():
    write = runpy.run_path(str(ROOT / "docs" / "write_configuration.py"))
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert page == write["page_with_tables"](), "run: python docs/write_configuration.py"


def test_every_option_of_the_stock_policies_and_workers_is_documented():
    write = runpy.run_path(str(ROOT / "docs" / "write_configuration.py"))
    for cls in write["configured_classes"]():
        if issubclass(cls, Settings):
            assert all(setting.meaning for setting in describe(cls)), cls.__name__
            continue
        defaults = cls.default_config()
        del defaults["cfg_type"]
        assert set(paths_of(defaults)) == set(cls.options()), cls.__name__


def paths_of(config: dict[str, object], prefix: str = "") -> list[str]:
    """The paths of a nested config, such as learn.batch_size."""
    paths = []
    for key, value in config.items():
        inner = isinstance(value, dict) and value
        paths += paths_of(value, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return paths


def test_the_guide_lists_all_stock_middleware() -> None:
    module = importlib.import_module("middleware")
    page = (ROOT / "docs/guide/stock-middleware.md").read_text()
    listed = set(re.findall(r"middleware\.(\w+)[>`]", page))
    named = {getattr(module, name) for name in listed}
    others = {module.RunFolder, module.ExperimentResult}
    classes = filter(inspect.isclass, vars(module).values())
    others |= {one for one in classes if issubclass(one, Settings)}
    assert named == {getattr(module, name) for name in module.__all__} - others
