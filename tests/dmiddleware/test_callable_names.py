"""Callables have names by which they are imported again, or that say why they cannot be."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmiddleware.callable_names import callable_named, described, name_of, recorded, short_name
from dmiddleware.errors import ConfigError

named_lambda = lambda: 3  # noqa: E731 (the lambda has a name in this module)


class Outer:
    """A class with a class and methods inside."""

    class Inner:
        """A class inside another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = (args, kwargs)

    @classmethod
    def make(cls) -> Outer:
        """Make one."""
        return cls()

    def __call__(self) -> None:
        """Do nothing."""

    def method(self) -> None:
        """Do nothing."""


class Broken:
    """An object that raises at whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __call__(self) -> None:
        """Do nothing."""


def shadowed() -> int:
    return 1


first_shadowed = shadowed


def shadowed() -> int:  # type: ignore[no-redef]
    return 2


@pytest.mark.parametrize(
    "function",
    [Outer, Outer.Inner, Outer.make, named_lambda, shadowed, first_shadowed, gym.make, np.sign],
)
def test_what_a_module_has_is_imported_by_its_name(function: Callable[..., Any]) -> None:
    again = callable_named(name_of(function))
    assert again == function


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.lists(plain, max_size=3), st.dictionaries(st.sampled_from("abc"), plain, max_size=3))
def test_plain_arguments_of_a_partial_are_read_back(args: Any, kwargs: Any) -> None:
    made = callable_named(name_of(functools.partial(Outer, *args, **kwargs)))()
    assert made.given == (tuple(args), kwargs)


def test_numbers_of_numpy_and_infinity_are_plain() -> None:
    name = name_of(functools.partial(Outer, np.float64(0.5), low=-math.inf, high=np.int8(3)))
    assert name == f"{__name__}:Outer(0.5, low=-inf, high=3)"
    assert callable_named(name)().given == ((0.5,), {"low": -math.inf, "high": 3})


def local() -> list[Any]:
    """Return callables that no module has."""

    class Local:
        """A class in a function."""

    contains_itself: list[Any] = []
    contains_itself.append(contains_itself)
    return [
        Local,
        lambda: 0,
        Outer(),
        Outer().method,
        Broken(),
        functools.partial(Outer, object()),
        functools.partial(Outer, Broken()),
        functools.partial(Outer, np.zeros(3)),
        functools.partial(Outer, named_lambda),
        functools.partial(Outer, contains_itself),
        functools.partial(Local, 3),
    ]


@pytest.mark.parametrize("at", range(len(local())))
def test_what_cannot_be_imported_is_refused_with_its_name(at: int) -> None:
    name = name_of(local()[at])
    assert name == name_of(local()[at]), "the name has no address"
    assert "<" in name and "0x" not in name and name.startswith(__name__)
    with pytest.raises(ConfigError) as refused:
        callable_named(name)
    assert name in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "math",
        "math:",
        ":sqrt",
        "math:nothing",
        "nowhere:f",
        "math:pi",
        "math:sqrt(x",
        "math:f(open)",
    ],
)
def test_wrong_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("(", r"\(").replace(")", r"\)")):
        callable_named(name)


def test_descriptions_are_those_of_every_process() -> None:
    assert described(Broken()) == f"<unsaved: {__name__}.Broken>"
    assert described(object()) == "<unsaved: object object>"
    assert recorded({"a": (1, {2}), "b": [Outer]}) == {"a": [1, [2]], "b": [described(Outer)]}


def test_short_names_have_neither_module_nor_arguments() -> None:
    names = ["m.n:Outer.Inner(3, a=':')", "m:f", "m:<lambda>", "m:g.<locals>.h"]
    assert [short_name(name) for name in names] == ["Inner", "f", "lambda", "h"]


SCRIPT = """
from dmiddleware.callable_names import name_of

class Own:
    pass

{start}print(name_of(Own))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("start", "name"), [('if __name__ == "__main__":\n    ', "program:Own"), ("", "__main__:<Own>")]
)
def test_a_script_is_imported_only_if_that_does_not_run_it(
    start: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(SCRIPT.format(start=start))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == name, done.stderr
