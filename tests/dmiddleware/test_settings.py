"""Settings: declared once, checked, described, and read back from plain values."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import yaml
from annotated_types import Gt, Le, Lt
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dmiddleware.classic.policy_config import from_nested, nested
from dmiddleware.errors import ConfigError
from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import (
    Count,
    Fraction,
    NonNegative,
    Number,
    Numbers,
    Options,
    Positive,
    Settings,
    Whole,
    checked,
    describe,
    plain_values,
    settings_table,
)


class Base(Settings):
    """Common to all."""

    discount: Fraction = 0.99
    """γ, the discount
    of future rewards."""
    batch_size: Count = 64
    """Rows per update."""
    learning_rate: LearningRate = 1e-3
    """Adam's learning rate."""


class Actor(Settings):
    """Of actors."""

    bounding: Literal["rescale", "tanh"] = "rescale"
    """How actions keep within the bounds."""
    low: Numbers | None = None


class Every(Actor, Base):
    """One field of each kind."""

    batch_size = 256
    bounding: Literal["tanh"] = "tanh"
    number: Number = 0.0
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    whole: Whole = 0
    tau: Annotated[float, Gt(0), Le(1)] = 1.0
    expectile: Annotated[float, Gt(0), Lt(1)] = 0.5
    dual_clip: Annotated[float, Gt(1)] | None = None
    entropy_weight: Annotated[float | Schedule, Scheduled(NonNegative)] = 0.0
    auto: bool = True
    name: str = ""
    model: Options = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.whole != 7, "whole", "other than 7")


class Explores(Settings):
    """A schedule as the default."""

    eps: Annotated[float | Schedule, Scheduled(Fraction)] = Schedule.linear(1.0, 0.05, decay=10_000)


class Needed(Settings):
    """A setting without a default."""

    seed: Whole


class WrongDefault(Settings):
    """A default that is not allowed."""

    alpha: Positive = -1.0


def refused(cls: type[Settings], **values: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        cls(**values)
    return str(raised.value)


def test_settings_are_frozen_and_take_keywords_only() -> None:
    settings = Every(batch_size=1, learning_rate=1, low=[1, 2.5])
    assert (settings.batch_size, settings.learning_rate, settings.low) == (1, 1.0, (1.0, 2.5))
    assert isinstance(settings.learning_rate, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.batch_size = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Every(3)  # type: ignore[misc]
    with pytest.raises(ConfigError, match="batch_size"):
        dataclasses.replace(settings, batch_size=0)
    assert pickle.loads(pickle.dumps(settings)) == settings
    parameter = inspect.signature(Every).parameters["batch_size"]
    assert (parameter.default, parameter.annotation) == (256, int)
    assert not inspect.signature(Settings).parameters


def test_a_subclass_gives_an_inherited_field_another_default() -> None:
    assert Base().batch_size == 64
    assert Every().batch_size == 256
    info = {info.name: info for info in describe(Every)}["batch_size"]
    assert (info.default, info.words, info.meaning) == (256, "an integer ≥ 1", "Rows per update.")
    assert "batch_size" in refused(Every, batch_size=0)


class TheirDefault(Base):
    batch_size = 5


class Beside(Base):
    obs_norm: bool = False


class FromBoth(Beside, TheirDefault):
    pass


def test_the_class_that_declares_a_default_counts_not_the_order_of_the_bases() -> None:
    assert FromBoth().batch_size == 5
    assert list(inspect.signature(FromBoth).parameters).count("batch_size") == 1


def test_unknown_names_are_answered_with_the_nearest_known_one() -> None:
    assert "Every: unknown setting gamma; did you mean discount?" in refused(Every, gamma=0.9)
    assert "did you mean batch_size?" in refused(Every, batchsize=3)
    assert "known are: bounding, low" in refused(Actor, color=3)
    assert "got 'rescal'; did you mean 'rescale'?" in refused(Actor, bounding="rescal")


def test_every_problem_is_reported_with_path_value_and_what_is_allowed() -> None:
    text = refused(Every, batch_size=0, tau=2, bounding="clip", low=["a"], model=3)
    for part in (
        "Every: ",
        "batch_size must be an integer ≥ 1, got 0",
        "tau must be a number above 0, up to 1, got 2",
        "bounding must be 'tanh', got 'clip'",
        "low must be a list of numbers or None, got ['a']",
        "model must be a dictionary, got 3",
    ):
        assert part in text
    assert refused(Needed) == "Needed: seed must be given: an integer ≥ 0"
    assert "alpha must be a positive number, got -1.0" in refused(WrongDefault)


def test_text_is_not_a_number_and_yaml_is_explained() -> None:
    assert "YAML reads 1e-4 as text" in refused(Every, learning_rate="1e-4")
    assert "got 'fast'" in refused(Every, learning_rate="fast")


def test_combinations_are_refused_by_the_path_of_one_setting() -> None:
    assert refused(Every, whole=7) == "Every: whole must be other than 7, got 7"
    with pytest.raises(ConfigError, match=r"learn.whole must be other than 7, got 7"):
        from_nested(Every, {"learn": {"whole": 7}})


def test_a_schedule_has_the_range_of_its_setting() -> None:
    falling = Schedule.linear(1e-3, 0.0, decay=10)
    assert Every(learning_rate=falling).learning_rate == falling
    assert Every(learning_rate=plain_values(falling)).learning_rate == falling
    assert "learning_rate: each value of its schedule must be a number ≥ 0" in refused(
        Every, learning_rate=Schedule.linear(1e-3, -1.0)
    )
    assert "did you mean: start" in refused(Every, learning_rate={"strt": 1.0})
    assert "or a schedule, got 0" in refused(Every, learning_rate=0)


def test_numbers_of_numpy_and_whole_floats_are_numbers() -> None:
    settings = Every(
        batch_size=1e6, whole=np.int64(3), positive=np.float32(0.5), low=np.array([1, 2])
    )
    assert (settings.batch_size, settings.whole) == (1_000_000, 3)
    assert (settings.positive, settings.low) == (0.5, (1.0, 2.0))
    assert type(settings.batch_size) is type(settings.whole) is int
    assert "got 1.5" in refused(Every, batch_size=1.5)


def test_an_argument_is_checked_as_a_setting_is() -> None:
    assert checked("n", np.int64(3), Count) == checked("n", 3.0, Count) == 3
    assert checked("n", None, Count | None) is None
    for value, words in ((0, "≥ 1, got 0"), (True, "got True"), ("3", "got the text '3'")):
        with pytest.raises(ConfigError, match=f"n must be an integer .*{words}"):
            checked("n", value, Count)


def is_real(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_real(value) and abs(value) <= sys.float_info.max


def is_whole(value: Any) -> bool:
    return is_real(value) and value == value // 1


def is_schedule(value: Any, low: float) -> bool:
    return isinstance(value, Schedule) and value.bounds[0] >= low


ALLOWED: Mapping[str, Callable[[Any], bool]] = {
    "discount": lambda value: is_number(value) and 0 <= value <= 1,
    "batch_size": lambda value: is_whole(value) and value >= 1,
    "learning_rate": lambda value: (is_number(value) and value > 0) or is_schedule(value, 0),
    "bounding": lambda value: value == "tanh",
    "low": lambda value: (
        value is None or (isinstance(value, list | tuple) and all(map(is_number, value)))
    ),
    "number": is_number,
    "positive": lambda value: is_number(value) and value > 0,
    "non_negative": lambda value: is_number(value) and value >= 0,
    "whole": lambda value: is_whole(value) and value >= 0 and value != 7,
    "tau": lambda value: is_number(value) and 0 < value <= 1,
    "expectile": lambda value: is_number(value) and 0 < value < 1,
    "dual_clip": lambda value: value is None or (is_number(value) and value > 1),
    "entropy_weight": lambda value: (is_number(value) and value >= 0) or is_schedule(value, 0),
    "auto": lambda value: isinstance(value, bool),
    "name": lambda value: isinstance(value, str),
    "model": lambda value: isinstance(value, dict),
}
"""What each field of ``Every`` takes, written once more by hand."""

INFOS = {info.name: info for info in describe(Every)}

no_deadline = hypothesis_settings(deadline=None)
finite = st.floats(allow_nan=False, allow_infinity=False)
schedules = st.builds(
    Schedule.linear, finite, finite, decay=st.floats(1e-3, 1e9), by=st.sampled_from(["update"])
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
values = st.one_of(
    st.sampled_from([0, 1, 0.0, 1.0, 0.5, -1, 7, 10**400, "tanh", "1e-4", "True", True, b"", ()]),
    st.floats(),
    plain.filter(lambda value: not isinstance(value, dict)),
    st.dictionaries(st.just("hidden"), st.integers(), min_size=1),
    schedules,
    st.floats(0, 1).map(np.float64),
    st.just(object()),
)


@no_deadline
@given(st.sampled_from(sorted(ALLOWED)), values)
def test_a_value_is_taken_exactly_if_its_declaration_allows_it(name: str, value: Any) -> None:
    if ALLOWED[name](value):
        taken = getattr(Every(**{name: value}), name)
        wanted = tuple(value) if name == "low" and isinstance(value, list) else value
        assert taken == wanted
        return
    text = refused(Every, **{name: value})
    info = INFOS[name]
    assert text.startswith(f"Every: {name}")
    schedule_words = "schedule" in info.words and isinstance(value, Schedule | dict)
    if not schedule_words and value != 7:
        assert f"must be {info.words}, got " in text
        if not isinstance(value, str):
            assert text.endswith(f"got {value!r}")


@no_deadline
@given(st.text().filter(lambda name: name not in ALLOWED))
def test_any_unknown_name_is_refused(name: str) -> None:
    assert f"Every: unknown setting {name}; " in refused(Every, **{name: 1})


every = st.builds(
    Every,
    discount=st.floats(0, 1),
    batch_size=st.integers(1, 10**9),
    learning_rate=st.floats(1e-9, 1e9) | st.builds(Schedule.constant, st.floats(0, 1)),
    low=st.none() | st.lists(finite, max_size=3),
    number=finite,
    dual_clip=st.none() | st.floats(1, exclude_min=True, allow_infinity=False),
    entropy_weight=st.just(Schedule.piecewise([(0, 1.0), (10, 0.0)])),
    auto=st.booleans(),
    name=st.text(),
    model=st.dictionaries(st.text(), plain, max_size=3),
)


@no_deadline
@given(every)
def test_plain_values_are_read_back(settings: Every) -> None:
    assert Every(**plain_values(settings)) == settings
    assert from_nested(Every, nested(settings)) == settings


def test_yaml_is_read_back() -> None:
    settings = Every(
        learning_rate=Schedule.linear(6.25e-5, 0.0, by="update"), low=[-1, 1e-9], model={"a": [1]}
    )
    text = yaml.safe_dump(plain_values(settings))
    assert Every(**yaml.safe_load(text)) == settings


def test_a_schedule_is_read_from_its_attributes() -> None:
    assert Explores(eps={"start": 1, "end": 0}).eps == Schedule.linear(1, 0)


def test_the_table_has_a_row_for_each_setting() -> None:
    rows = settings_table(Base).splitlines()
    assert rows[0] == "| name | default | values | meaning |"
    assert rows[2] == (
        "| `discount` | `0.99` | a number from 0 to 1 | γ, the discount of future rewards. |"
    )
    assert "| `learning_rate` | `0.001` | a positive number, or a schedule |" in rows[4]
    assert (
        settings_table(Needed).splitlines()[2] == "| `seed` | must be given | an integer ≥ 0 |  |"
    )


def test_plain_values_are_what_yaml_can_write() -> None:
    value = {"a": np.float32(0.5), 1: (np.arange(2), {Path("x")}), "f": math.sqrt, "c": Schedule}
    assert plain_values(value) == {
        "a": 0.5,
        "1": [[0, 1], ["x"]],
        "f": "math.sqrt",
        "c": "dmiddleware.schedule.Schedule",
    }


@pytest.mark.process
def test_settings_of_a_program_are_sent_to_a_process_by_value() -> None:
    program = (
        "import dmiddleware.settings as s, cloudpickle\n"
        "class A(s.Settings):\n    x: s.Positive = 1.0\n"
        "class B(A):\n    x = 2\n"
        "print(cloudpickle.dumps((A, B, A(x=3))).hex())"
    )
    sent = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.PIPE, text=True
    )
    base, cls, settings = pickle.loads(bytes.fromhex(sent.stdout))
    assert (base().x, cls().x, settings.x) == (1.0, 2.0, 3.0)
    assert "x must be a positive number, got 0" in refused(cls, x=0)
    assert describe(cls)[0].default == 2


@pytest.mark.process
def test_declaring_settings_does_not_import_pydantic() -> None:
    program = (
        "import sys, dmiddleware.settings as s\n"
        "class A(s.Settings):\n    x: s.Positive = 1.0\n"
        "assert not {'pydantic', 'torch', 'numpy'} & sys.modules.keys()\n"
        "assert A(x=2).x == 2.0 and 'pydantic' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_argument_that_is_settings_is_checked() -> None:
    class Inner(Settings):
        size: Count = 1

    assert checked("inner", Inner(size=2), Annotated[Inner, "a note"]) == Inner(size=2)
    with pytest.raises(ConfigError, match="inner"):
        checked("inner", 3, Annotated[Inner, "a note"])
