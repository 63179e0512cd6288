import contextlib
import dataclasses
import importlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from dmiddleware.data import as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.launch.cli import ditask
from dmiddleware.policy import PPOPolicy
from dmiddleware.program import run_program
from middleware import ExperimentSettings
from tests.dmiddleware.runs.test_saved_policy import saved
from tests.variants import mostly_slow

NAMES = [
    "cartpole_dqn",
    "cartpole_dqn_per_nstep",
    "cartpole_preemptible",
    "cartpole_ppo",
    "pendulum_gail",
    "custom_middleware",
    "custom_policy_per_env",
    "bc_offline",
    "bitflip_her",
    "golf_pdqn",
    "cartpole_sqil",
    "cartpole_dqfd",
    "cartpole_cql",
    "mountain_car_rlpd",
    "tictactoe_self_play",
    "doorkey_rnd",
    "rover_student",
]
LONG = (
    "cartpole_dqn_per_nstep",
    "cartpole_preemptible",
    "doorkey_rnd",
    "pendulum_gail",
    "cartpole_sqil",
    "cartpole_dqfd",
    "cartpole_cql",
    "mountain_car_rlpd",
)
SHORT = [at for at, name in enumerate(NAMES) if name not in LONG]
# Enough for each to collect, learn and evaluate.
STEPS = dict.fromkeys(NAMES, 1200) | {"doorkey_rnd": 2048}
# Episodes of an untrained policy are long.
OPTIONS = {
    "bc_offline": ("--max-train-iter", "20"),
    "cartpole_cql": ("--max-train-iter", "20", "--n-rows", "200"),
    "doorkey_rnd": ("--env.env-kwargs", "max_steps=30"),
    "rover_student": ("--teacher", "teacher.safetensors"),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@dataclasses.dataclass
class Call:
    exit_code: int
    stdout: str
    stderr: str


def call(name: str, *options: str) -> Call:
    """Run an example with these options."""
    example = importlib.import_module(f"examples.{name}")
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_program(example.main, options)
        except SystemExit as stopped:
            code = stopped.code
    return Call(code, out.getvalue(), err.getvalue())


def shortly(name: str) -> list[str]:
    """Return the options that make an example short."""
    return ["--experiment.n-fresh-episode", "3", *OPTIONS.get(name, ())]


@pytest.mark.parametrize("name", mostly_slow(NAMES, keep=SHORT))
def test_example_trains_and_its_checkpoint_can_be_played(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "pendulum_gail":
        data = request.getfixturevalue("offline_data")
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(data))
    if name == "rover_student":
        with make_env_manager("dmiddleware.zoo.tensor_envs:Rover", env_num=1) as envs:
            saved(PPOPolicy.for_env(envs, seed=0), Path("teacher.safetensors"))
    steps = str(STEPS[name])
    short = ("--exp-name", "short", "--max-env-step", steps, *shortly(name))
    result = call(name, "--seed", "3", *short)
    assert result.exit_code == 0
    last = result.stdout.splitlines()[-1]
    told = re.fullmatch(
        r"mean return (-?[\d.]+) over (\d+) fresh episodes of the best policy, after ([\d,]+) env "
        r"steps and ([\d,]+) updates in [\d.]+ s; files in (runs/short)/",
        last,
    )
    assert told is not None, last
    assert int(told[4].replace(",", "")) > 0
    folder = Path(told[5])
    found = {path.name for path in folder.iterdir()}
    assert {"ckpt", "tb", "config.yaml", "curve.png", "log.txt"} <= found
    assert list((folder / "tb").glob("events.*"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed"] == config["arguments"]["seed"] == 3
    assert config["program"] == f"examples.{name}.main"
    own = {
        "custom_policy_per_env": ("--policy", f"examples.{name}:make_policy"),
        "tictactoe_self_play": ("--env", f"examples.{name}:make_env"),
    }.get(name, ())
    played = CliRunner().invoke(ditask, ["play", str(folder), "--episodes", "3", *own])
    assert played.exit_code == 0, played.output
    assert "over 3 episodes of " in played.output


def test_second_run_with_the_same_name_gets_a_new_folder() -> None:
    for _ in range(2):
        options = shortly("cartpole_ppo")
        call("cartpole_ppo", "--exp-name", "same", "--max-env-step", "600", *options)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["same", "same-2"]


@pytest.mark.slow
def test_same_seed_trains_the_same() -> None:
    main = importlib.import_module("examples.cartpole_dqn").main
    short = ExperimentSettings(n_fresh_episode=3)
    results = [main(seed=5, max_env_step=1200, experiment=short) for _ in range(2)]
    assert results[0].mean_return == results[1].mean_return
    assert results[0].train_iter == results[1].train_iter


@pytest.mark.parametrize(
    "options",
    [("--seed", "-1"), ("--max-env-step", "0")],
    ids=lambda options: options[0],
)
def test_number_out_of_range_is_a_usage_error(options: tuple[str, str]) -> None:
    result = call("cartpole_dqn", *options)
    assert result.exit_code == 2
    assert f"{options[0].strip('-').replace('-', '_')} must be an integer ≥" in result.stderr
    assert not Path("runs").exists()


def test_policy_per_env_restores_its_target_network() -> None:
    make_policy = importlib.import_module("examples.custom_policy_per_env").make_policy
    policy, other = make_policy(seed=0), make_policy(seed=1)
    batch = as_tree(
        {
            "obs": torch.randn(8, 4),
            "next_obs": torch.randn(8, 4),
            "action": torch.zeros(8, dtype=torch.int64),
            "reward": torch.ones(8),
            "discount": torch.full((8,), 0.9),
            "terminated": torch.zeros(8, dtype=torch.bool),
        }
    )
    policy.learn_mode.forward(batch)
    other.learn_mode.load_state_dict(policy.learn_mode.state_dict())
    assert policy.learn_mode.forward(batch) == other.learn_mode.forward(batch)


@pytest.mark.parametrize("name", NAMES)
def test_example_offers_its_options(name: str) -> None:
    result = call(name, "--help")
    for option in ("seed", "exp-name", "max-env-step"):
        assert f"--{option}" in result.stdout
    assert name in result.stdout
