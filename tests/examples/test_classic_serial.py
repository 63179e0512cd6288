"""The example with the classic workers."""

import importlib
import re
from pathlib import Path

import pytest
from click.testing import CliRunner


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*options: str) -> str:
    from examples.common import command

    example = importlib.import_module("examples.classic_serial")
    program = command(example.ENV, example.make_policy, example.main)
    result = CliRunner().invoke(program, list(options), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.splitlines()[-1]


def test_the_classic_example_trains_and_its_checkpoint_can_be_played() -> None:
    last = call("--seed", "3", "--exp-name", "short", "--max-env-step", "1400")
    told = re.fullmatch(
        r"mean return [\d.]+ over 100 fresh episodes of the best policy, "
        r"after ([\d,]+) env steps; checkpoint in (.*)",
        last,
    )
    assert told is not None, last
    assert 1400 <= int(told[1].replace(",", "")) < 1500
    assert "mean return" in call("--evaluate", told[2], "--episodes", "3")


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_classic_example_solves_cartpole(seed: int) -> None:
    told = re.match(r"mean return ([\d.]+) ", call("--seed", str(seed)))
    assert told is not None
    assert float(told[1]) >= 475
