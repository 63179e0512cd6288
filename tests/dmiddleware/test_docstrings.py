"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import dmiddleware
import middleware


def modules_with_examples():
    for package in (dmiddleware, middleware):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            spec = found.module_finder.find_spec(found.name)
            if ">>> " in spec.loader.get_source(found.name):
                starts_processes = found.name.startswith("dmiddleware.launch")
                marks = [pytest.mark.process] if starts_processes else []
                yield pytest.param(found.name, marks=marks)


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_the_examples_in_the_docstrings_are_true(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, attempted = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert attempted > 0
    assert failed == 0
