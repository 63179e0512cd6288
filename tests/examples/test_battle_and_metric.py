"""Self-play on tic-tac-toe, and the digits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmiddleware.program import run_program


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_tictactoe_plays_itself_and_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples import tictactoe

    monkeypatch.setattr(tictactoe, "EVAL_EPISODES", 50)
    run_program(tictactoe.main, ["--iterations", "2", "--exp-name", "short"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"lost \d+ of 100 games as first player", last)
    assert (Path("short") / "ckpt_learner" / "final.safetensors").exists()


def test_training_on_tictactoe_stops_when_no_game_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import tictactoe

    asked = []
    monkeypatch.setattr(tictactoe, "count_losses", lambda *args, **at: asked.append(at) or 0)
    tictactoe.train(tictactoe.make_policy(), seed=0, exp_name="stops", iterations=9, eval_every=2)
    assert [one["train_iter"] for one in asked] == [2 * tictactoe.UPDATES]


def test_digits_are_learned_in_a_few_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import digits

    run_program(digits.main, ["--epochs", "3", "--exp-name", "short"])
    last = capsys.readouterr().out.splitlines()[-1]
    told = re.fullmatch(r"accuracy on held-out digits: ([\d.]+)%", last)
    assert told is not None
    assert float(told[1]) > 85
    assert (Path("short") / "ckpt_learner" / "ckpt_best.safetensors").exists()


def test_digits_are_split_without_overlap() -> None:
    from examples.digits import digits

    parts = [{tuple(image.tolist()) for image, _ in part} for part in digits()]
    assert [len(part) for part in digits()] == [1149, 288, 360]
    assert not (parts[0] & parts[2] or parts[1] & parts[2])


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_the_first_player_of_tictactoe_loses_none_of_100_games(seed: int) -> None:
    from examples.tictactoe import main

    assert main(seed, "full") == 0


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.parametrize("seed", range(3))
def test_97_percent_of_the_held_out_digits_are_read(seed: int) -> None:
    from examples.digits import main

    assert main(seed, "full") >= 0.97
