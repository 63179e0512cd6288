import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dmiddleware.data import as_tree
from dmiddleware.env import EnvSettings
from dmiddleware.program import run_program
from middleware import ExperimentSettings
from tests.dmiddleware.env.optional import needed
from tests.variants import mostly_slow

NAMES = [
    "cartpole_dqn",
    "cartpole_dqn_per_nstep",
    "cartpole_preemptible",
    "cartpole_ppo",
    "pendulum_ppo",
    "cartpole_a2c",
    "cartpole_impala",
    "pendulum_gail",
    "pendulum_sac",
    "pendulum",
    "mujoco",
    "mujoco_ppo",
    "acrobot_dqn",
    "cartpole_memory_ppo",
    "cartpole_memory_r2d2",
    "recall_ppo",
    "custom_middleware",
    "custom_policy_per_env",
    "bc_offline",
    "lunarlander",
    "bitflip_her",
    "two_step_game",
    "simple_spread",
    "tictactoe_self_play",
    "doorkey_rnd",
]
SLOW = ["pong_dqn", "pong_ppo", "lunarlander_onpolicy"]
ALL = [*NAMES, *SLOW]
LONG = {"acrobot_dqn", "pendulum_gail", "pendulum_ppo", "pendulum_sac", "simple_spread", *SLOW}
SHORT = [at for at, name in enumerate(ALL) if name not in LONG]
# Enough for each to collect, learn and evaluate.
STEPS = dict.fromkeys(NAMES, 1200) | {
    "pendulum_sac": 400,
    "pendulum": 400,
    "mujoco": 80,
    "mujoco_ppo": 600,
    "doorkey_rnd": 2048,
    "pong_dqn": 500,
    "simple_spread": 3200,
    "pong_ppo": 1024,
    "lunarlander_onpolicy": 16_384,
}
# Episodes of an untrained policy are long, except for those of Hopper.
OPTIONS = {
    "bc_offline": ("--max-train-iter", "20"),
    "doorkey_rnd": ("--env.env-kwargs", "max_steps=30"),
    "lunarlander": ("--env.env-kwargs", "max_episode_steps=100"),
    "lunarlander_onpolicy": ("--env.env-kwargs", "max_episode_steps=100"),
    "mujoco": (
        *("--env.id", "Hopper-v5", "--collector.random-steps", "40"),
        *("--policy.batch-size", "16"),
    ),
    "mujoco_ppo": ("--env.id", "Hopper-v5"),
    "pong_dqn": (
        *("--env.env-kwargs", "max_episode_steps=200"),
        *("--collector.random-steps", "320"),
    ),
    "pong_ppo": ("--env.env-kwargs", "max_episode_steps=100"),
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
            run_program(example.main, options, make_policy=example.make_policy)
        except SystemExit as stopped:
            code = stopped.code
    return Call(code, out.getvalue(), err.getvalue())


def shortly(name: str) -> list[str]:
    """Return the options that make an example short."""
    if name.startswith("lunarlander"):
        needed("Box2D")
    return ["--experiment.n-fresh-episode", "3", *OPTIONS.get(name, ())]


@pytest.mark.parametrize("name", mostly_slow(ALL, keep=SHORT))
def test_example_trains_and_its_checkpoint_can_be_played(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name.startswith("mujoco") and "CI" not in os.environ:
        pytest.importorskip("mujoco")
    if name == "pendulum_gail":
        data = request.getfixturevalue("offline_data")
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(data))
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
    ckpt = folder / "ckpt" / "best.safetensors"
    played = call(name, "--evaluate", str(ckpt), "--episodes", "3")
    assert played.exit_code == 0
    assert f"over 3 fresh episodes of {ckpt}" in played.stdout


def test_second_run_with_the_same_name_gets_a_new_folder() -> None:
    for _ in range(2):
        options = shortly("cartpole_ppo")
        call("cartpole_ppo", "--exp-name", "same", "--max-env-step", "600", *options)
    assert sorted(path.name for path in Path("runs").iterdir()) == ["same", "same-2"]


@pytest.mark.parametrize("name", mostly_slow(["mujoco", "mujoco_ppo"], keep=1))
def test_a_run_that_was_stopped_is_resumed(name: str) -> None:
    if "CI" not in os.environ:
        pytest.importorskip("mujoco")
    options = ("--exp-name", "stopped", *shortly(name))
    first = call(name, *options, "--max-env-step", str(STEPS[name]))
    second = call(name, *options, "--max-env-step", str(2 * STEPS[name]), "--resume")
    assert (first.exit_code, second.exit_code) == (0, 0)
    result = json.loads(Path("runs/stopped/result.json").read_text())
    assert "resumed at step" in Path("runs/stopped/log.txt").read_text()
    assert result["env_step"] >= 2 * STEPS[name]
    assert len(list(Path("runs").iterdir())) == 1


def test_same_seed_trains_the_same() -> None:
    main = importlib.import_module("examples.cartpole_dqn").main
    short = ExperimentSettings(n_fresh_episode=3)
    results = [main(seed=5, max_env_step=1200, experiment=short) for _ in range(2)]
    assert results[0].mean_return == results[1].mean_return
    assert results[0].train_iter == results[1].train_iter


@pytest.fixture
def ckpt() -> Path:
    from dmiddleware.data import save_checkpoint

    policy = importlib.import_module("examples.cartpole_dqn").make_policy()
    path = Path("policy.safetensors")
    save_checkpoint(path, policy.learn_mode.state_dict())
    return path


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_episode_is_filmed(ckpt: Path, suffix: str) -> None:
    film = Path(f"film{suffix}")
    result = call("cartpole_dqn", "--evaluate", str(ckpt), "--episodes", "2", "--video", str(film))
    assert result.exit_code == 0
    assert f"saved an episode to {film}" in result.stdout
    assert film.stat().st_size > 500


def test_checkpoint_of_another_model_is_rejected_in_one_line(ckpt: Path) -> None:
    result = call("acrobot_dqn", "--evaluate", str(ckpt))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "belongs to another model" in result.stderr


def test_missing_checkpoint_is_reported_in_one_line() -> None:
    result = call("cartpole_dqn", "--evaluate", "nothing.safetensors")
    assert result.exit_code == 1
    assert "nothing.safetensors" in result.stderr


def test_video_without_a_checkpoint_is_a_usage_error() -> None:
    result = call("cartpole_dqn", "--video", "film.gif")
    assert result.exit_code == 2
    assert "name one with --evaluate" in result.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "options",
    [("--seed", "-1"), ("--max-env-step", "0"), ("--episodes", "0")],
    ids=lambda options: options[0],
)
def test_number_out_of_range_is_a_usage_error(options: tuple[str, str]) -> None:
    result = call("cartpole_dqn", *options)
    assert result.exit_code == 2
    assert f"{options[0].strip('-').replace('-', '_')} must be an integer ≥" in result.stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("film", "message"),
    [("film", "must end in"), ("film.txt", "must end in"), ("nowhere/film.gif", "does not exist")],
)
def test_film_that_cannot_be_written_is_rejected_before_playing(
    ckpt: Path, film: str, message: str
) -> None:
    result = call("cartpole_dqn", "--evaluate", str(ckpt), "--video", film)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "mean return" not in result.stdout


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


@pytest.mark.parametrize("algo", mostly_slow(["tqc", "ddpg"], keep=1))
def test_each_algorithm_for_the_pendulum_trains(algo: str) -> None:
    options = ("--algo", algo, "--max-env-step", "300", *shortly("pendulum"))
    assert call("pendulum", *options).exit_code == 0
    played = call(
        "pendulum", "--evaluate", "runs/pendulum/ckpt/best.safetensors", "--episodes", "1"
    )
    assert "over 1 fresh episodes" in played.stdout


@pytest.mark.parametrize("algo", ["td3", "tqc"])
def test_the_settings_of_each_algorithm_for_mujoco_are_valid(algo: str) -> None:
    if "CI" not in os.environ:
        pytest.importorskip("mujoco")
    example = importlib.import_module("examples.mujoco")
    policy = example.make_policy(EnvSettings("Hopper-v5", env_num=1), algo=algo)
    assert policy.eval_mode.forward(torch.zeros(2, 11))["action"].shape == (2, 3)


def test_another_environment_than_the_listed_ones_is_a_usage_error() -> None:
    result = call("mujoco_ppo", "--env.id", "Humanoid-v5")
    assert result.exit_code == 2
    message = " ".join(result.stderr.replace("│", " ").split())
    assert "env.id must be one of HalfCheetah-v5, Hopper-v5, got 'Humanoid-v5'" in message


@pytest.mark.parametrize("algo", ["c51", "qrdqn", "iqn"])
def test_the_settings_of_each_algorithm_for_the_lunar_lander_are_valid(algo: str) -> None:
    policy = importlib.import_module("examples.lunarlander").make_policy(algo=algo)
    assert policy.eval_mode.forward(torch.zeros(2, 8))["action"].shape == (2,)
    assert not policy.explores


@pytest.mark.parametrize("algo", ["rainbow", "discrete_sac"])
def test_an_algorithm_for_the_lunar_lander_explores_by_itself(algo: str) -> None:
    options = ("--algo", algo, "--max-env-step", "1100", *shortly("lunarlander"))
    assert call("lunarlander", *options).exit_code == 0
    ckpt = "runs/lunarlander/ckpt/best.safetensors"
    played = call("lunarlander", "--evaluate", ckpt, "--episodes", "1")
    assert "over 1 fresh episodes" in played.stdout


def test_a2c_learns_from_the_lunar_lander() -> None:
    options = ("--algo", "a2c", "--max-env-step", "2000", *shortly("lunarlander_onpolicy"))
    assert ", after 2,048 env steps and 2 updates" in call("lunarlander_onpolicy", *options).stdout


def test_an_unknown_algorithm_is_a_usage_error() -> None:
    result = call("lunarlander", "--algo", "sarsa")
    assert result.exit_code == 2
    assert "invalid choice 'sarsa'" in result.stderr and "'dqn', 'c51'" in result.stderr


@pytest.mark.parametrize("name", mostly_slow(ALL, keep=len(NAMES)))
def test_example_offers_its_options(name: str) -> None:
    result = call(name, "--help")
    for option in ("seed", "exp-name", "max-env-step", "evaluate", "episodes", "video"):
        assert f"--{option}" in result.stdout
    assert name in result.stdout
