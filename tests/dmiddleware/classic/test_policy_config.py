"""Settings as the nested configs of DI-engine have them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dmiddleware.classic.policy_config import from_nested, nested
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DQNSettings, SACSettings
from dmiddleware.schedule import Schedule


def test_settings_are_nested_as_di_engine_nests_them() -> None:
    cfg = nested(SACSettings(batch_size=3, discount=0.5, action_bounding="tanh"))
    assert cfg["discount_factor"] == 0.5
    assert cfg["action_bounding"] == "tanh"
    assert cfg["learn"]["batch_size"] == 3
    assert nested(DQNSettings(eps=0.1))["other"]["eps"] == 0.1


def test_a_schedule_needs_only_the_attributes_that_differ() -> None:
    falling = {"learn": {"learning_rate": {"start": 1, "end": 0}}}
    assert from_nested(DQNSettings, falling) == DQNSettings(learning_rate=Schedule.linear(1, 0))
    standard = DQNSettings().eps
    assert isinstance(standard, Schedule)
    eps = from_nested(DQNSettings, {"other": {"eps": {"decay": 9}}}).eps
    assert eps == dataclasses.replace(standard, decay=9)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"learn": {"batch_size": 0}}, "learn.batch_size must be an integer ≥ 1, got 0"),
        ({"discount_factor": 2.0}, "discount_factor must be a number from 0 to 1, got 2.0"),
    ],
)
def test_messages_name_the_path_of_the_config(wrong: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_nested(DQNSettings, wrong)
    assert part in str(raised.value)
