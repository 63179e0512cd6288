"""Constructors that take the fields of their settings as keyword arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import ConfigError
from dmiddleware.settings import Count, Settings, TakesSettings, Whole, takes_options
from tests.type_checker import type_check


class CollectorSettings(Settings):
    """Two fields, one of which must be given."""

    n_sample: Count
    """Env steps in each step of the task."""
    random_steps: Whole = 0
    """Env steps with random actions."""


class Other(Settings):
    """Not those of the collector."""


class Collector(TakesSettings[CollectorSettings]):
    """Its last parameter is its settings."""

    @takes_options(CollectorSettings)
    def __init__(self, policy: str, env_num: int, settings: CollectorSettings) -> None:
        self.policy, self.env_num, self.settings = policy, env_num, settings


class Child(Collector):
    """Inherits the constructor."""


@takes_options(CollectorSettings)
def make(policy: str, settings: CollectorSettings) -> tuple[str, CollectorSettings]:
    return policy, settings


@takes_options(CollectorSettings)
def make_settings(settings: CollectorSettings) -> CollectorSettings:
    return settings


def build(*args: Any, cls: Any = Collector, **kwargs: Any) -> Any:
    return cls(*args, **kwargs)


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        build("dqn", 2, **given)
    return str(raised.value)


def test_fields_are_keyword_arguments() -> None:
    built = Collector("dqn", 2, n_sample=8)
    assert (built.policy, built.env_num) == ("dqn", 2)
    assert built.settings == CollectorSettings(n_sample=8, random_steps=0)
    assert build(policy="dqn", env_num=2, n_sample=8).settings == built.settings
    assert make("dqn", n_sample=8) == ("dqn", built.settings)


def test_a_class_is_built_of_its_settings_and_what_differs() -> None:
    settings = CollectorSettings(n_sample=8)
    built = Collector.of(settings, "dqn", 2)
    assert (built.policy, built.env_num) == ("dqn", 2)
    assert built.settings is settings
    assert Child.of(settings, "dqn", 2, random_steps=3).settings == CollectorSettings(
        n_sample=8, random_steps=3
    )
    for changes, message in (
        ({"n_smple": 1}, "Collector: unknown keyword n_smple; did you mean n_sample?"),
        ({"n_sample": 0}, "Collector: n_sample must be an integer ≥ 1, got 0"),
    ):
        with pytest.raises(ConfigError) as raised:
            Collector.of(settings, "dqn", 2, **changes)
        assert str(raised.value) == message
    for changes in ({}, {"n_sample": 1}):
        with pytest.raises(ConfigError, match=r"settings must be a CollectorSettings, got Other"):
            build(Other(), "dqn", 2, cls=Collector.of, **changes)
    with pytest.raises(TypeError, match="env_num"):
        build(settings, "dqn", cls=Collector.of)


def test_a_function_takes_its_settings_and_what_differs() -> None:
    settings = CollectorSettings(n_sample=8)
    assert make_settings(settings) is settings
    assert make_settings(settings, random_steps=3).random_steps == 3
    assert make_settings(n_sample=8) == settings


def test_settings_in_the_place_of_options_are_answered_with_the_other_constructor() -> None:
    with pytest.raises(ConfigError, match=r"^Collector: .* Collector\.of\(settings, \.\.\.\)"):
        build("dqn", 2, CollectorSettings(n_sample=8))


def test_messages_name_what_is_built() -> None:
    assert refused(n_sample=0) == "Collector: n_sample must be an integer ≥ 1, got 0"
    assert refused() == "Collector: n_sample must be given: an integer ≥ 1"
    with pytest.raises(ConfigError, match=r"^Child: n_sample"):
        build("dqn", 2, cls=Child, n_sample=0)
    with pytest.raises(ConfigError, match=r"^make: n_sample"):
        make("dqn", n_sample=0)


def test_an_unknown_keyword_is_answered_with_the_known_ones() -> None:
    assert refused(n_smple=8) == "Collector: unknown keyword n_smple; did you mean n_sample?"
    assert "did you mean n_sample?" in refused(rollout_length=8)
    assert "did you mean env_num?" in refused(n_envs=8, n_sample=1)


def test_a_missing_argument_is_the_usual_error() -> None:
    with pytest.raises(TypeError, match="env_num"):
        build("dqn", n_sample=8)


def test_the_signature_has_the_fields() -> None:
    for subject in (Collector, Child):
        assert str(inspect.signature(subject)).startswith(
            "(policy: 'str', env_num: 'int', *, n_sample: int, random_steps: int = 0)"
        )
    parameters = inspect.signature(make).parameters
    assert list(parameters) == ["policy", "n_sample", "random_steps"]


CHECKED = """
from dmiddleware.settings import Count, Settings, TakesSettings, Whole, takes_options

class CollectorSettings(Settings):
    n_sample: Count
    random_steps: Whole = 0

class Collector(TakesSettings[CollectorSettings]):
    @takes_options(CollectorSettings)
    def __init__(self, policy: str, env_num: int, settings: CollectorSettings) -> None:
        self.settings = settings

one: int = Collector("dqn", 2, n_sample=8).settings.random_steps
settings = CollectorSettings(n_sample=8)
two: int = Collector.of(settings, "dqn", 2, random_steps=1).settings.random_steps
reveal_type(Collector)
Collector("dqn", 2, n_sample="8")
Collector("dqn", 2, n_smple=8, n_sample=8)
Collector("dqn", 2)
Collector(1, 2, n_sample=8)
Collector.of(settings, "dqn", "2")
"""


@pytest.mark.process
def test_a_type_checker_knows_the_fields(tmp_path: Path) -> None:
    found = type_check(CHECKED, tmp_path)
    assert found == [
        'note: Revealed type is "def (str, int, *, n_sample: int, random_steps: int =) -> '
        'program.Collector"',
        'error: Argument "n_sample" to "Collector" has incompatible type "str"; expected "int"'
        "  [arg-type]",
        'error: Unexpected keyword argument "n_smple" for "Collector"; did you mean "n_sample"?'
        "  [call-arg]",
        'error: Missing named argument "n_sample" for "Collector"  [call-arg]',
        'error: Argument 1 to "Collector" has incompatible type "int"; expected "str"  [arg-type]',
        'error: No overload variant of "of" of "TakesSettings" matches argument types '
        '"CollectorSettings", "str", "str"  [call-overload]',
        "note: Possible overload variants:",
        "note:     def of(cls, CollectorSettings, /, **changes: Any) -> Collector",
        "note:     def of(cls, CollectorSettings, str, /, **changes: Any) -> Collector",
        "note:     def of(cls, CollectorSettings, str, int, /, **changes: Any) -> Collector",
    ]
