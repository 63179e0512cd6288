"""Two teams that learn in one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmiddleware.data import load_checkpoint
from dmiddleware.program import run_program
from examples import red_and_blue
from tests.examples.test_distributed import run_example

SUMMARY = re.compile(r"(red|blue): mean return (-?[\d.]+) over \d+ fresh")
SHORT = ("--max-env-step", "1500", "--exp-name", "short", "--experiment.n-fresh-episode", "3")


def test_both_teams_learn_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_program(red_and_blue.main, [*SHORT, "--collector.n-sample", "256", "--game.env-num", "4"])
    assert [name for name, _ in SUMMARY.findall(capsys.readouterr().out)] == ["red", "blue"]
    for name, kind in (("red", "MAPPOPolicy"), ("blue", "SACPolicy")):
        saved = load_checkpoint(tmp_path / "runs" / "short" / "ckpt" / name / "final.safetensors")
        assert kind in str(saved["policy"])
        assert saved["last_iter"] > 0


def test_the_program_is_short_enough_to_read() -> None:
    assert len(Path(str(red_and_blue.__file__)).read_text().splitlines()) <= 90


@pytest.mark.process
@pytest.mark.parametrize(
    "roles",
    [
        "learner:red=1,learner:blue=1,collector=1,evaluator=1",
        pytest.param("learner=1,collector=2,evaluator=1", marks=pytest.mark.slow),
    ],
)
def test_both_teams_learn_in_several_processes(tmp_path: Path, roles: str) -> None:
    text = run_example(tmp_path, "red_and_blue", 2500, "--roles", roles)
    (steps,) = re.findall(r"stopped: env_step of red reached ([\d,]+)", text)
    assert int(steps.replace(",", "")) >= 2500
    assert sorted(name for name, _ in SUMMARY.findall(text)) == ["blue", "red"]
    for name in ("red", "blue"):
        saved = load_checkpoint(tmp_path / "runs" / "short" / "ckpt" / name / "final.safetensors")
        assert saved["last_iter"] > 0
