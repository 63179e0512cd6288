"""Every entry of the zoo trains, can be resumed, and its policy can be played."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result

from dmiddleware.command_line import arguments_of
from dmiddleware.launch.cli import ditask
from dmiddleware.zoo import algorithms, tuned
from middleware.programs.parts import make_policy
from middleware.programs.train import program_of, tuned_arguments
from tests.dmiddleware.env.optional import needed
from tests.variants import mostly_slow

ENTRIES = [
    (algo, env)
    for algo in algorithms()
    for env in tuned(algo).entries
    if tuned(algo).program != "offline"
]
KEPT = [
    ("a2c", "CartPole-v1"),
    ("ppo_recurrent", "dmiddleware.zoo.envs:CartPolePositions-v1"),
    ("ppo", "HalfCheetah-v5"),
    ("qmix", "dmiddleware.zoo.envs:TwoStepGame"),
    ("r2d2", "dmiddleware.zoo.envs:CartPolePositions-v1"),
]
MOSTLY_SLOW = mostly_slow(ENTRIES, keep=[ENTRIES.index(one) for one in KEPT])
EXTRAS = {
    "ALE/Pong-v5": "ale_py",
    "HalfCheetah-v5": "mujoco",
    "Hopper-v5": "mujoco",
    "LunarLander-v3": "Box2D",
    "Pong-v5": "envpool",
    "mpe2.simple_spread_v3:parallel_env": "mpe2",
}
# Enough for each to collect, learn and evaluate.
STEPS = {
    "ALE/Pong-v5": 500,
    "HalfCheetah-v5": 400,
    "Hopper-v5": 400,
    "LunarLander-v3": 700,
    "Pendulum-v1": 400,
    "mpe2.simple_spread_v3:parallel_env": 3200,
}
ON_POLICY_STEPS = {"Acrobot-v1": 2048, "LunarLander-v3": 2048, "Pendulum-v1": 2048}
# Episodes of an untrained policy are long.
OPTIONS = {
    "ALE/Pong-v5": ("max_episode_steps=200",),
    "HalfCheetah-v5": ("max_episode_steps=100",),
    "LunarLander-v3": ("max_episode_steps=100",),
    "Pong-v5": ("max_episode_steps=100",),
}
TOLD = re.compile(
    r"mean return (-?[\d.]+) over (\d+) fresh episodes of the best policy, after ([\d,]+) env "
    r"steps and ([\d,]+) updates in [\d.]+ s; files in (runs/short)/"
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(*words: str) -> Result:
    return CliRunner().invoke(ditask, words)


def shortly(algo: str, env: str) -> list[str]:
    """Return the options that make a training short."""
    if env in EXTRAS:
        needed(EXTRAS[env])
    words = ["--seed", "3", "--exp-name", "short", "--eval-env-num", "2"]
    words += ["--evaluator.n-episode", "2", "--experiment.n-fresh-episode", "3"]
    if env in OPTIONS:
        kwargs = tuned_arguments(algo, env)["env"].env_kwargs
        line = [f"{name}={value}" for name, value in kwargs.items()]
        words += ["--env.env-kwargs", *line, *OPTIONS[env]]
    if tuned(algo).program == "off_policy" and algo not in OF_ITS_OWN:
        words += ["--collector.random-steps", "320"]
    return words


OF_ITS_OWN = {"ppo_offpolicy", "ppg_offpolicy"}
"""Algorithms of the program off_policy that learn from the actions of their own distribution."""


def steps_of(algo: str, env: str) -> int:
    on_policy = ON_POLICY_STEPS if tuned(algo).program == "on_policy" else {}
    return on_policy.get(env, STEPS.get(env, 1200))


@pytest.mark.parametrize(("algo", "env"), MOSTLY_SLOW)
def test_an_entry_trains_and_its_policy_can_be_played(algo: str, env: str) -> None:
    n_steps = steps_of(algo, env)
    found = call("train", algo, env, *shortly(algo, env), "--max-env-step", str(n_steps))
    assert found.exit_code == 0, found.output
    told = TOLD.fullmatch(found.stdout.splitlines()[-1])
    assert told is not None, found.stdout
    assert int(told[3].replace(",", "")) >= n_steps
    assert int(told[4].replace(",", "")) > 0
    folder = Path(told[5])
    files = {path.name for path in folder.iterdir()}
    assert {"ckpt", "tb", "config.yaml", "curve.png", "log.txt"} <= files
    assert list((folder / "tb").glob("events.*"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["seed"] == config["arguments"]["seed"] == 3
    program = tuned(algo).program
    assert config["program"] == f"middleware.programs.{program}.{program}"
    if env == "Pong-v5":
        return  # EnvPool makes its envs itself
    played = call("play", "runs/short", "--episodes", "3")
    assert played.exit_code == 0, played.output
    assert "over 3 episodes of" in played.output


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["sac", "ppo"])
def test_a_run_in_mujoco_that_was_stopped_is_resumed(algo: str) -> None:
    env = "Hopper-v5" if algo == "sac" else "HalfCheetah-v5"
    options, n_steps = shortly(algo, env), steps_of(algo, env)
    saved = ["--snapshots.every-train-iter", "8"]
    if algo == "sac":
        saved += ["--buffer.size", "1000"]
    first = call("train", algo, env, *options, *saved, "--max-env-step", str(n_steps))
    assert first.exit_code == 0, first.output
    further = ("--max-env-step", str(2 * n_steps), "--resume")
    second = call("train", algo, env, *options, *saved, *further)
    assert second.exit_code == 0, second.output
    result = json.loads(Path("runs/short/result.json").read_text())
    assert "resumed at step" in Path("runs/short/log.txt").read_text()
    assert result["env_step"] >= 2 * n_steps
    assert len(list(Path("runs").iterdir())) == 1


@pytest.mark.parametrize(("algo", "env"), ENTRIES)
def test_the_settings_of_an_entry_are_valid(algo: str, env: str) -> None:
    if env in EXTRAS:
        needed(EXTRAS[env])
    given = tuned_arguments(algo, env)
    policy = make_policy(algo, given["env"], given["policy"], seed=0)
    if env == "LunarLander-v3":
        assert policy.eval_mode.forward(torch.zeros(2, 8))["action"].shape == (2,)
    if env in ("HalfCheetah-v5", "Hopper-v5"):
        n_obs, n_actions = (17, 6) if env == "HalfCheetah-v5" else (11, 3)
        acted = policy.eval_mode.forward(torch.zeros(2, n_obs))["action"]
        assert acted.shape == (2, n_actions)
    if tuned(algo).program == "off_policy":
        explores = {
            "rainbow",
            "discrete_sac",
            "sac",
            "td3",
            "ddpg",
            "d4pg",
            "tqc",
            "crossq",
            "fasttd3",
            "sql",
            *OF_ITS_OWN,
        }
        assert policy.explores is (algo in explores)


@pytest.mark.parametrize(("algo", "env"), MOSTLY_SLOW)
def test_an_entry_offers_its_options(
    algo: str, env: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments_of(program_of(algo), ["--config", f"zoo:{algo}/{env}", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for option in ("seed", "exp-name", "max-env-step", "resume", "policy.learning-rate"):
        assert f"--{option}" in told


def test_an_unknown_algorithm_is_a_usage_error() -> None:
    found = call("--parallel-workers", "2", "train", "sarsa", "CartPole-v1")
    assert found.exit_code == 2
    assert "unknown algorithm sarsa" in found.output


def test_words_that_name_no_env_are_a_usage_error() -> None:
    for words in (("train",), ("train", "dqn"), ("train", "dqn", "--seed")):
        found = call("--parallel-workers", "2", *words)
        assert found.exit_code == 2
        assert "name an algorithm and an env after train" in found.output


def test_an_option_of_ditask_after_the_command_is_a_usage_error() -> None:
    for words in (("--parallel-workers", "4"), ("--roles=learner=1",)):
        found = call("train", "dqn", "CartPole-v1", *words)
        assert found.exit_code == 2
        assert "comes before the command" in found.output
        assert not Path("runs").exists()


@pytest.mark.parametrize("algo", [one for one in algorithms() if tuned(one).program != "offline"])
def test_a_run_of_40_000_env_steps_is_evaluated_more_than_three_times(algo: str) -> None:
    arguments = tuned_arguments(algo, "an env without an entry")
    evaluator = arguments["evaluator"]
    every = evaluator.every_env_step or 10_000
    if evaluator.every_train_iter is not None:
        collector, learner = arguments["collector"], arguments["learner"]
        every = evaluator.every_train_iter * collector.n_sample / learner.update_per_collect
    assert every <= 10_000
