"""The error tree matches its drawing, and each error can be caught by either base class."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from dmiddleware import errors
from dmiddleware.errors import DMiddlewareError
from dmiddleware.worker import errors as worker_errors
from dmiddleware.worker.errors import TaskFail

CLASSES = [getattr(errors, name) for name in errors.__all__]
WORKERS = [getattr(worker_errors, name) for name in worker_errors.__all__]


def drawn():
    """Read the docstring's drawing: each class with its parent and the built-in beside it."""
    tree, path = {}, []
    for line in inspect.getdoc(errors).splitlines():
        match = re.match(r" {4}([│├└─ ]*)(\w+)(?: \((\w+)\))?(?: |$)", line)
        if match is not None and match[2] in errors.__all__:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            tree[match[2]] = (path[depth - 1] if depth else None, match[3])
    return tree


def test_the_tree_in_the_docstring_is_right():
    tree = drawn()
    assert set(tree) == set(errors.__all__)
    for cls in CLASSES:
        parent, builtin = tree[cls.__name__]
        bases = [base.__name__ for base in cls.__bases__]
        if parent is None:
            assert cls is DMiddlewareError
        else:
            assert bases == [parent, *([builtin] if builtin else [])], cls


def test_every_public_error_is_listed():
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("cls", [*CLASSES, *WORKERS])
def test_every_error_has_its_message_and_can_be_pickled(cls):
    text = "what happened, with 3, and what to do"
    error = cls({"task_id": "t"}, text) if cls is TaskFail else cls(text)
    assert isinstance(error, DMiddlewareError)
    assert str(error) == "what happened, with 3, and what to do"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert cls.__doc__


def test_errors_are_also_built_in_errors():
    builtin_of = {name: builtin for name, (_, builtin) in drawn().items()}
    for cls in CLASSES:
        if not cls.__subclasses__():
            assert builtin_of[cls.__name__] is not None, cls
    for cls in WORKERS:
        base, builtin = cls.__bases__
        assert issubclass(base, DMiddlewareError)
        assert builtin.__module__ == "builtins"
