"""What ``help()`` and editors show of settings: the sentences below their fields."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pydoc
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from dmiddleware.docstrings import with_arguments
from dmiddleware.env import make_env_manager
from dmiddleware.settings import Count, Settings, Whole, describe, takes_options

PACKAGES = ("middleware", *(f"dmiddleware.{name}" for name in ("data", "env", "policy", "reward")))


class RowSettings(Settings):
    """The options of :class:`Rows`."""

    size: Count
    """Capacity
    in rows."""
    name: str = "rows"
    "What messages call it."


class MoreRowSettings(RowSettings):
    """The options of more rows."""

    size: Count = 3
    start: Whole = 0
    "The first one."


class Rows:
    """Rows.

    Raises:
        ConfigError: for an option.
    """

    @takes_options(RowSettings)
    def __init__(self, source: str, settings: RowSettings) -> None:
        self.settings = settings


@takes_options(RowSettings)
def make_rows(source: str, settings: RowSettings) -> Rows:
    """Make rows.

    Args:
        source: where they come from.

    Returns:
        The rows.
    """
    return Rows(source, settings=settings)


def test_a_class_of_settings_explains_its_fields_and_those_that_it_inherits() -> None:
    assert MoreRowSettings.__doc__ == textwrap.dedent("""\
        The options of more rows.

        Args:
            size: Capacity in rows. An integer ≥ 1.
            name: What messages call it.
            start: The first one. An integer ≥ 0.""")


def test_what_takes_settings_explains_them_as_arguments() -> None:
    assert inspect.getdoc(Rows) == textwrap.dedent("""\
        Rows.

        Args:
            size: Capacity in rows. An integer ≥ 1.
            name: What messages call it.

        Raises:
            ConfigError: for an option.""")
    assert make_rows.__doc__ == textwrap.dedent("""\
        Make rows.

        Args:
            source: where they come from.
            size: Capacity in rows. An integer ≥ 1.
            name: What messages call it.

        Returns:
            The rows.""")


@pytest.mark.parametrize("subject", [RowSettings, Rows, make_rows])
def test_help_shows_them(subject: object) -> None:
    assert "Capacity in rows. An integer ≥ 1." in pydoc.render_doc(subject)


def test_arguments_that_are_written_stay_as_they_are() -> None:
    written = "Do it.\n\n    Args:\n        size: by hand,\n            in two lines.\n    "
    assert with_arguments(written, {"size": "Other."}) == inspect.cleandoc(written)
    assert with_arguments("", {"size": "Rows."}) == "Args:\n    size: Rows."
    assert with_arguments("Do it.", {}) == "Do it."


def test_a_class_that_is_sent_to_another_process_explains_itself_there() -> None:
    class Local(RowSettings):
        """Of a function."""

        more: Count = 1
        "More rows."

    assert "more: More rows." in str(Local.__doc__)
    copy = cloudpickle.loads(cloudpickle.dumps(Local))
    assert copy(size=2).more == 1
    assert str(copy.__doc__).startswith("Of a function.")


def of_packages(select: Callable[[Any], bool]) -> Iterator[Any]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if select(getattr(module, name)):
                yield pytest.param(getattr(module, name), id=name)


def takes_fields(subject: Any) -> bool:
    if subject is make_env_manager:
        return True
    takes = "settings" in getattr(subject, "__annotations__", {}) and isinstance(subject, type)
    return takes and isinstance(getattr(subject.__init__, "__signature__", None), inspect.Signature)


def is_settings(subject: Any) -> bool:
    return isinstance(subject, type) and issubclass(subject, Settings) and subject is not Settings


@pytest.mark.parametrize("subject", [*of_packages(is_settings), *of_packages(takes_fields)])
def test_every_option_of_the_stock_is_explained(subject: Any) -> None:
    text = inspect.getdoc(subject) or ""
    (section,) = re.findall(r"^Args:\n((?: +.*\n?)+)", text, re.MULTILINE)
    explained = re.findall(r"^    (\w+): \S", section, re.MULTILINE)
    names = [name for name in inspect.signature(subject).parameters if name != "self"]
    assert set(names) <= set(explained)
    assert len(explained) == len(set(explained))


def test_every_field_of_the_stock_has_a_sentence() -> None:
    classes = [param.values[0] for param in of_packages(is_settings)]
    assert len(classes) > 40
    for cls in classes:
        assert all(one.meaning for one in describe(cls)), cls
        assert len(dataclasses.fields(cls)) == len(describe(cls))
