"""tyro makes a command line of settings: their names, ranges, defaults and sentences."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from dmiddleware.policy import (
    MAPPOSettings,
    PolicySettings,
    RainbowSettings,
    SACSettings,
)
from dmiddleware.schedule import Schedule

tyro = pytest.importorskip("tyro")


def number_or_schedule(texts: list[str]) -> float | Schedule:
    try:
        return float(texts[0])
    except ValueError:
        return Schedule.parse(texts[0])


def read(cls: type[PolicySettings], *arguments: str) -> Any:
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def of_schedules(info: Any) -> Any:
        if Schedule not in typing.get_args(info.type):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="NUMBER|SCHEDULE",
            instance_from_str=number_or_schedule,
            is_instance=lambda value: isinstance(value, float | Schedule),
            str_from_instance=lambda value: [str(value)],
        )

    return tyro.cli(cls, args=arguments, registry=registry)


def test_arguments_become_settings() -> None:
    found = read(RainbowSettings, "--batch-size", "8", "--no-double", "--eps", "0.1")
    assert found == RainbowSettings(batch_size=8, double=False, eps=0.1)
    assert read(RainbowSettings) == RainbowSettings()
    assert read(SACSettings, "--action-low", "-1", "2") == SACSettings(action_low=(-1, 2))


def test_a_schedule_is_written_like_a_call() -> None:
    found = read(SACSettings, "--learning-rate-q", "linear(1e-3,0,1000)")
    assert found.learning_rate_q == Schedule.linear(1e-3, 0, decay=1000)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (SACSettings, ("--batch-size", "0"), "batch_size must be an integer ≥ 1, got 0"),
        (SACSettings, ("--learning-rate-q", "linear(1,-1,9)"), "must be a number ≥ 0, got -1"),
        (SACSettings, ("--learning-rate-q", "line(1,0)"), "a schedule must be like linear"),
        (SACSettings, ("--action-bounding", "clip"), "clip"),
        (SACSettings, ("--batchsize", "3"), "--batch-size"),
        (MAPPOSettings, ("--reward-norm",), "reward_norm must be False with several agents"),
    ],
)
def test_wrong_arguments_are_refused(
    cls: type[PolicySettings],
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read(cls, *arguments)
    assert message in words(capsys)


def test_the_help_has_the_sentences_and_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(RainbowSettings, "--help")
    text = words(capsys)
    assert "Rows per update. (default: 32)" in text
    assert "Number of rewards in an n-step target. (default: 3)" in text
    assert "--learning-rate NUMBER|SCHEDULE Adam's learning rate. (default: 6.25e-05)" in text


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed text, without the boxes around it."""
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).replace("│", " ").split())
