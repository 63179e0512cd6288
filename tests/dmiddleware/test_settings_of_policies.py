"""The settings of the stock algorithms say what their options say."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.config import Option
from dmiddleware.errors import ConfigError
from dmiddleware.policy import POLICY_REGISTRY
from dmiddleware.schedule import Schedule
from dmiddleware.settings import describe, from_nested, nested, plain_values
from tests.dmiddleware.settings_of_policies import SETTINGS

NOT_SETTINGS = ("on_policy", "traj_len_inf")
"""What the class fixes, and what only a worker of the classic interface reads."""


def stock_names() -> list[str]:
    named = {POLICY_REGISTRY.get(name): name for name in reversed(list(POLICY_REGISTRY))}
    return [name for cls, name in named.items() if cls.__module__.startswith("dmiddleware.")]


def options(name: str) -> dict[str, Option]:
    found = POLICY_REGISTRY.get(name).options()
    return {path: option for path, option in found.items() if path not in NOT_SETTINGS}


def in_american_english(text: str) -> str:
    text = re.sub(r"(ormal|eneral|ptim)is", r"\1iz", text).replace("data set", "dataset")
    return text.replace("a whole number", "an integer")


def as_sentence_start(text: str) -> str:
    return f"{text[0].lower()}{text[1:]}."


def test_every_stock_algorithm_has_settings() -> None:
    assert set(SETTINGS) == set(stock_names())


@pytest.mark.parametrize("name", SETTINGS)
def test_defaults_ranges_and_sentences_are_those_of_the_options(name: str) -> None:
    declared = {info.path: info for info in describe(SETTINGS[name])}
    known = options(name)
    eps = {path: known.pop(path) for path in list(known) if path.startswith("other.eps.")}
    if eps:
        parts = {path.rpartition(".")[2]: option.default for path, option in eps.items()}
        if parts["type"] == "constant":
            parts = {"type": "constant", "start": parts["start"]}
        assert Schedule.of(declared.pop("other.eps").default) == Schedule.of(parts)
    assert set(declared) == set(known)
    for path, option in known.items():
        info = declared[path]
        assert info.default == option.default, path
        assert info.words == in_american_english(option.range.words), path
        meaning = info.meaning[0].lower() + info.meaning[1:]
        assert meaning == as_sentence_start(in_american_english(option.meaning)), path


@pytest.mark.parametrize("name", SETTINGS)
def test_plain_and_nested_values_are_read_back(name: str) -> None:
    settings = SETTINGS[name](seed=3, model={"hidden_sizes": [64]})
    assert SETTINGS[name](**plain_values(settings)) == settings
    assert from_nested(SETTINGS[name], nested(settings)) == settings


values = st.one_of(
    st.sampled_from([0, 1, 0.5, 2.0, -1, 10**400, True, None, "tanh", "mse", "1e-4", (), [1]]),
    st.floats(),
    st.integers(),
    st.text(),
    st.builds(Schedule.linear, st.floats(-1, 2), st.floats(-1, 2)),
    st.just(object()),
)


@settings(deadline=None, max_examples=400)
@given(st.data(), st.sampled_from(sorted(SETTINGS)), values)
def test_exactly_the_values_are_taken_that_the_options_take(
    data: st.DataObject, name: str, value: Any
) -> None:
    known = options(name)
    path = data.draw(st.sampled_from([one for one in known if not one.startswith("other.eps")]))
    *sections, key = path.split(".")
    nested_value = {sections[0]: {key: value}} if sections else {key: value}
    if takes(known[path], value):
        try:
            from_nested(SETTINGS[name], nested_value)
        except ConfigError as error:  # of the combination with others
            assert " must be " in str(error) and known[path].range.words not in str(error)
    else:
        with pytest.raises(ConfigError, match=rf"{path}( must be|: )"):
            from_nested(SETTINGS[name], nested_value)


def takes(option: Option, value: Any) -> bool:
    try:
        fits = option.range.fits(value)
    except (ConfigError, OverflowError):
        return False
    if "list of numbers" in option.range.words and isinstance(value, list | tuple | bytes):
        return isinstance(value, list | tuple)  # that they are numbers is seen later today
    return bool(fits)
