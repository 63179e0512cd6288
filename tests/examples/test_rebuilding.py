"""A run is rebuilt from its config.yaml alone: the same parameters come out."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

import pytest
import yaml

from dmiddleware.data import load_checkpoint
from dmiddleware.program import run_program
from middleware.programs.train import program_of
from tests.examples.algorithms import POSITIONS, TWO_STEPS
from tests.variants import mostly_slow

SHORT = ("--experiment.n-fresh-episode", "2", "--seed", "4", "--exp-name", "first")
RUNS = {
    "cartpole_dqn": (
        *("--max-env-step", "1500", "--policy.learning-rate", "linear(1e-3,1e-4,2000)"),
        *("--policy.model", "dueling=true", "--buffer.size", "1000", "--env.env-num", "4"),
    ),
    "cartpole_ppo": ("--max-env-step", "1024", "--policy.clip-ratio", "0.1"),
    "zoo:tqc/Pendulum-v1": (
        *("--max-env-step", "300", "--policy.batch-size", "16"),
        *("--env.env-kwargs", "g=9.0", "--evaluator.every-train-iter", "1000"),
    ),
    "bc_offline": (
        *("--max-env-step", "1500", "--max-train-iter", "20"),
        *("--policy.model", "encoder_hidden_sizes=[16]"),
    ),
    f"zoo:ppo_recurrent/{POSITIONS}": (
        *("--max-env-step", "2000", "--policy.model", "hidden_size=16"),
    ),
    f"zoo:vdn/{TWO_STEPS}": ("--max-env-step", "600", "--collector.n-sample", "32"),
}


def parameters_of(run: Path) -> str:
    """Return the hash of the parameters at the end of a run."""
    digest = hashlib.sha256()
    model = load_checkpoint(run / "ckpt" / "final.safetensors")["model"]
    for name, value in sorted(model.items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", mostly_slow(RUNS, keep=[1, 5]))
def test_a_run_is_rebuilt_from_its_config(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith("zoo:"):
        algo = name.removeprefix("zoo:").partition("/")[0]
        main, given = program_of(algo), ("--config", name)
    else:
        main, given = importlib.import_module(f"examples.{name}").main, ()
    run_program(main, [*given, *SHORT, *RUNS[name]])
    first, again = Path("runs/first"), Path("runs/first-2")
    run_program(main, ["--config", str(first / "config.yaml")])
    assert parameters_of(again) == parameters_of(first)
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in (first, again)]
    for part in ("program", "arguments", "seed", "env", "policy", "versions", "git"):
        assert configs[0][part] == configs[1][part]
    assert configs[0]["versions"]["torch"] and len(configs[0]["git"]["commit"]) == 40
    # A change to one setting alone is seen.
    run_program(main, ["--config", str(first / "config.yaml"), "--seed", "5"])
    assert parameters_of(Path("runs/first-3")) != parameters_of(first)
