"""Each offline algorithm learns from the datasets that the example makes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from dmiddleware.program import run_program
from tests.dmiddleware.env.optional import needed
from tests.variants import mostly_slow

needed("minari")

from examples import make_offline_data, offline  # noqa: E402


@pytest.fixture(autouse=True)
def here(offline_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(offline_data))


def test_the_datasets_have_the_rows_of_their_kinds() -> None:
    rows = {kind: make_offline_data.load("Pendulum-v1", kind) for kind in make_offline_data.KINDS}
    counts = {kind: len(one["done"]) for kind, one in rows.items()}
    assert counts == {"random": 2400, "medium": 2400, "expert": 2400, "replay": 320, "mixed": 2400}
    assert rows["mixed"]["action"].abs().max() <= 2.0
    assert not rows["random"]["action"].equal(rows["medium"]["action"])


def train_a_little(algo: str) -> str:
    """Train small networks by 100 updates, and return what the example prints."""
    small = ["actor_hidden_sizes=[8]", "critic_hidden_sizes=[8]"]
    others = {
        "bc": ["encoder_hidden_sizes=[8]"],
        "dt": ["embed_size=8", "n_layers=1", "context_length=4"],
    }
    options = ["--algo", algo, "--max-train-iter", "100", "--exp-name", "short", "--seed", "3"]
    options += ["--policy.batch-size", "16", "--policy.model", *others.get(algo, small)]
    options += ["--experiment.n-fresh-episode", "10"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_program(offline.main, options)
    return out.getvalue()


@pytest.mark.parametrize("algo", mostly_slow(offline.POLICIES, keep=[0, 5]))  # BC, IQL
def test_an_algorithm_learns_from_the_mixed_data(algo: str) -> None:
    told = train_a_little(algo)
    assert "fresh episodes of the best policy" in told
    assert "100 updates" in told
    assert (Path("runs") / "short" / "ckpt" / "best.safetensors").exists()


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("algo", offline.POLICIES)
def test_its_update_is_one_graph_that_stays_valid(algo: str, n_graphs: Callable[[], int]) -> None:
    train_a_little(algo)
    assert 1 <= n_graphs() <= 2  # TD3+BC updates its actor every second time


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("algo", sorted({*offline.POLICIES} - {"dt"}))  # its dropout needs CUDA
def test_it_learns_with_outputs_that_are_read_late(algo: str) -> None:
    assert "100 updates" in train_a_little(algo)


def test_a_missing_dataset_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(make_offline_data, "make", made.append)
    with pytest.raises(Exception, match="not on this machine"):
        make_offline_data.load("HalfCheetah-v5", "mixed")
    assert made == ["HalfCheetah-v5"]
