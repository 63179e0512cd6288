"""The settings of the stock algorithms are declared, documented, typed and read back."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.classic.policy_config import from_nested, nested
from dmiddleware.errors import ConfigError
from dmiddleware.policy import POLICY_REGISTRY, PolicySettings
from dmiddleware.schedule import Schedule
from dmiddleware.settings import describe, hints_of, plain_values
from tests.dmiddleware.policy.every_policy import EVERY
from tests.type_checker import type_check

SETTINGS = list(dict.fromkeys(cls.settings_class() for cls in EVERY))
PROGRAM = """
from dmiddleware.policy import DQNSettings, QMIXPolicy, SACPolicy, TD3BCPolicy

def read(sac: SACPolicy, td3_bc: TD3BCPolicy, qmix: QMIXPolicy) -> None:
    reveal_type(sac.cfg.target_tau)
    reveal_type(sac.cfg.target_entropy)
    reveal_type(td3_bc.cfg.noise)
    reveal_type(td3_bc.cfg.norm_clip)
    reveal_type(qmix.cfg.batch_size)
    sac.cfg.target_ta

DQNSettings(n_step=3, loss="mse")
DQNSettings(n_step="three")
DQNSettings(nstep=3)
"""


def stock() -> list[Any]:
    return [cls for cls in map(POLICY_REGISTRY.get, POLICY_REGISTRY) if is_stock(cls)]


def is_stock(cls: type) -> bool:
    return cls.__module__.startswith("dmiddleware.")


def test_every_stock_algorithm_names_a_class_of_its_own_file() -> None:
    for cls in stock():
        found = cls.settings_class()
        assert found is not PolicySettings
        assert found.__module__ == cls.__module__, cls


READ_BY_CHAINS = {"batch_size", "discount", "norm_clip", "eps"}
"""Settings that learners, buffers, statistics and handlers read."""


def names_in(code: CodeType) -> set[str]:
    """Return the attributes and globals that a function, with those inside it, reads."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inner)


def codes_of(cls: type) -> Iterator[CodeType]:
    """Return the functions of a class, without inherited ones that nothing calls any more."""
    for name in dir(cls):
        for definition in (vars(base)[name] for base in cls.__mro__ if name in vars(base)):
            if isinstance(definition, functools.cached_property):
                definition = definition.func
            function = getattr(definition, "fget", getattr(definition, "__func__", definition))
            function = inspect.unwrap(function)
            if not inspect.isfunction(function):
                break
            yield function.__code__
            if not {"super", name} <= names_in(function.__code__):
                break
    for module in {base.__module__ for base in cls.__mro__ if is_stock(base)}:
        for function in filter(inspect.isfunction, vars(sys.modules[module]).values()):
            yield function.__code__


def test_a_setting_that_an_algorithm_does_not_read_has_one_value() -> None:
    reads = {cls: set[str]().union(*map(names_in, codes_of(cls))) for cls in stock()}
    by_some = set().union(*reads.values()) - READ_BY_CHAINS
    for cls, names in reads.items():
        hints = hints_of(cls.settings_class())
        unread = [info.name for info in describe(cls.settings_class()) if info.name not in names]
        for name in by_some.intersection(unread):
            assert get_origin(hints[name]) is Literal, f"{cls.__name__} ignores {name}"
            assert len(get_args(hints[name])) == 1, f"{cls.__name__} ignores {name}"


@pytest.mark.parametrize("cls", SETTINGS)
def test_every_setting_has_a_sentence(cls: type[PolicySettings]) -> None:
    for info in describe(cls):
        assert info.meaning.endswith("."), info.name


@pytest.mark.parametrize("cls", SETTINGS)
def test_plain_and_nested_values_are_read_back(cls: type[PolicySettings]) -> None:
    made = cls(seed=3, model={"hidden_sizes": [64]})
    assert cls(**plain_values(made)) == made
    assert from_nested(cls, nested(made)) == made


values = st.one_of(
    st.sampled_from([0, 1, 0.5, 2.0, -1, 10**400, True, None, "tanh", "mse", "1e-4", (), [1]]),
    st.floats(),
    st.integers(),
    st.text(),
    st.builds(Schedule.linear, st.floats(-1, 2), st.floats(-1, 2)),
    st.just(object()),
)


@settings(deadline=None, max_examples=400)
@given(st.data(), st.sampled_from(SETTINGS), values)
def test_a_value_is_kept_or_refused_with_its_name(
    data: st.DataObject, cls: type[PolicySettings], value: Any
) -> None:
    name = data.draw(st.sampled_from([info.name for info in describe(cls)]))
    try:
        made = cls(**{name: value})
    except ConfigError as error:
        assert name in str(error)
    else:
        kept = getattr(made, name)
        # No float is exactly an integer such as 2**53 + 1: the nearest one is kept.
        is_nearest = isinstance(kept, float) and kept == float(value)
        assert kept == value or is_nearest or kept == tuple(value)


@pytest.mark.process
def test_a_type_checker_knows_the_settings_of_a_policy(tmp_path: Path) -> None:
    told = type_check(PROGRAM, tmp_path)
    assert told[:5] == [
        f'note: Revealed type is "{kind}"'
        for kind in (
            "float",
            "float | None",
            "Literal['gaussian'] | Literal['ou']",
            "float | None",
            "int",
        )
    ]
    assert 'has no attribute "target_ta"' in told[5]
    assert 'Argument "n_step" to "DQNSettings" has incompatible type "str"' in told[6]
    assert 'Unexpected keyword argument "nstep" for "DQNSettings"' in told[7]
