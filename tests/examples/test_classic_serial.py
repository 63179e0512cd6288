"""The example with the classic workers."""

import importlib
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.launch.cli import ditask
from dmiddleware.program import run_program


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the example, and return its last line."""
    example = importlib.import_module("examples.classic_serial")
    run_program(example.main, options)
    return capsys.readouterr().out.splitlines()[-1]


def test_the_classic_example_trains_and_its_checkpoint_can_be_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = call(capsys, "--seed", "3", "--exp-name", "short", "--max-env-step", "1400")
    told = re.fullmatch(
        r"mean return [\d.]+ over 100 fresh episodes of the best policy, "
        r"after ([\d,]+) env steps; checkpoint in (.*)",
        last,
    )
    assert told is not None, last
    assert 1400 <= int(told[1].replace(",", "")) < 1500
    own = ("--policy", "examples.classic_serial:make_policy", "--env", "CartPole-v1")
    played = CliRunner().invoke(ditask, ["play", told[2], "--episodes", "3", *own])
    assert played.exit_code == 0, played.output
    assert "over 3 episodes of CartPole-v1" in played.output


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_classic_example_solves_cartpole(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    told = re.match(r"mean return ([\d.]+) ", call(capsys, "--seed", str(seed)))
    assert told is not None
    assert float(told[1]) >= 475
