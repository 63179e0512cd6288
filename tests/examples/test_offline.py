"""Each offline algorithm learns from the datasets that the example makes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from middleware import Experiment
from tests.dmiddleware.env.optional import needed

needed("minari")

from examples import make_offline_data, offline  # noqa: E402


@pytest.fixture(autouse=True)
def here(offline_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(offline_data))
    short = functools.partial(Experiment, n_fresh_episode=10)
    monkeypatch.setattr(offline, "Experiment", short)


def test_the_datasets_have_the_rows_of_their_kinds() -> None:
    rows = {kind: make_offline_data.load("Pendulum-v1", kind) for kind in make_offline_data.KINDS}
    counts = {kind: len(one["done"]) for kind, one in rows.items()}
    assert counts == {"random": 2400, "medium": 2400, "expert": 2400, "replay": 320, "mixed": 2400}
    assert rows["mixed"]["action"].abs().max() <= 2.0
    assert not rows["random"]["action"].equal(rows["medium"]["action"])


@pytest.mark.parametrize("algo", offline.POLICIES)
def test_an_algorithm_learns_from_the_mixed_data(algo: str, monkeypatch: Any) -> None:
    cls, options = offline.POLICIES[algo]
    small: dict[str, Any] = {"actor_hidden_sizes": [8], "critic_hidden_sizes": [8]}
    others: dict[str, dict[str, Any]] = {
        "bc": {"encoder_hidden_sizes": [8]},
        "dt": {"embed_size": 8, "n_layers": 1, "context_length": 4},
    }
    small = others.get(algo, small)
    monkeypatch.setitem(
        offline.POLICIES, algo, (cls, {**options, "batch_size": 16, "model": small})
    )
    result = CliRunner().invoke(
        offline.command,
        ["--algo", algo, "--max-train-iter", "100", "--exp-name", "short", "--seed", "3"],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert "fresh episodes of the best policy" in result.stdout
    assert "100 updates" in result.stdout
    assert (Path("runs") / "short" / "ckpt" / "best.safetensors").exists()


def test_a_missing_dataset_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(make_offline_data, "make", made.append)
    with pytest.raises(Exception, match="not on this machine"):
        make_offline_data.load("HalfCheetah-v5", "mixed")
    assert made == ["HalfCheetah-v5"]
