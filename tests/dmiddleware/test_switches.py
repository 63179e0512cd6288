"""Flags of the command line that also take texts."""

from __future__ import annotations

from typing import Any

import pytest

from dmiddleware.command_line import arguments_of, offered_options
from dmiddleware.policy import PPOSettings


def main(seed: int = 0, policy: PPOSettings = PPOSettings(compile=True)) -> None:
    """Train."""


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], True),
        (["--policy.no-compile"], False),
        (["--policy.no_compile", "--seed", "3"], False),
        (["--policy.compile", "--seed", "3"], True),
        (["--policy.compile"], True),
        (["--policy.compile", "graphs"], "graphs"),
        (["--policy.compile=graphs"], "graphs"),
        (["--policy.compile", "false"], False),
        (["--policy.compile", "True"], True),
    ],
)
def test_a_flag_that_takes_a_text_is_still_a_flag(words: list[str], value: Any) -> None:
    assert arguments_of(main, words)["policy"].compile == value


@pytest.mark.parametrize(
    "words", [["--policy.compile", "graph"], ["--policy.compile=1"], ["--policy.compile", "None"]]
)
def test_other_texts_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments_of(main, words)
    assert "must be true, false or graphs" in " ".join(capsys.readouterr().err.split())


def test_a_sweep_gives_such_a_flag_its_value() -> None:
    flags = offered_options(main, []).flags
    assert flags["policy.cuda"]
    assert not flags["policy.compile"]
