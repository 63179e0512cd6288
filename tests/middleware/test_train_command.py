"""``ditask train``: an algorithm and an env by name, with options."""

from __future__ import annotations

import itertools
import json
import os
import re

import pytest
import yaml
from click.testing import CliRunner

from dmiddleware.launch.cli import ditask
from dmiddleware.zoo import algorithms, tuned
from tests.variants import mostly_slow

QUICK = ("--evaluator.n-episode", "2", "--eval-env-num", "2", "--experiment.n-fresh-episode", "4")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*line):
    return CliRunner().invoke(ditask, ["train", *line])


def test_it_trains_with_options_over_the_tuned_settings(tmp_path):
    options = ("--seed", "1", "--policy.learning-rate", "3e-4", "--max-env-step", "1200")
    found = call("dqn", "CartPole-v1", *options, *QUICK)
    assert found.exit_code == 0, found.output
    assert "files in runs/dqn-CartPole-v1/" in found.output
    config = yaml.safe_load((tmp_path / "runs/dqn-CartPole-v1/config.yaml").read_text())
    assert config["policy"]["learning_rate"] == 3e-4
    assert (
        config["policy"]["n_step"]
        == tuned("dqn").entries["CartPole-v1"].options["policy"]["n_step"]
    )
    assert config["seed"] == 1
    assert config["program"] == "middleware.programs.off_policy.off_policy"


@pytest.mark.parametrize("where", mostly_slow(["run folder", "working directory"], keep=1))
def test_a_run_may_be_in_a_folder_whose_name_is_not_unicode(where, tmp_path, monkeypatch):
    name = os.fsdecode(b"n\xe9")
    try:
        (tmp_path / name).mkdir()
    except OSError:
        pytest.skip("this system has no such folders")
    if where == "working directory":
        monkeypatch.chdir(name)
        name = "run"
    options = ("--exp-name", name, "--max-env-step", "300", *QUICK)
    found = call("dqn", "CartPole-v1", *options)
    assert found.exit_code == 0, found.output
    found = call("dqn", "CartPole-v1", *options, "--max-env-step", "1200", "--resume")
    assert found.exit_code == 0, found.output
    for command in (
        ("play", "--episodes", "1"),
        ("export",),
        ("export", "--format", "torch"),
        ("report",),
    ):
        found = CliRunner().invoke(ditask, [command[0], f"runs/{name}", *command[1:]])
        assert found.exit_code == 0, found.output


@pytest.mark.parametrize(
    ("algo", "limit"),
    mostly_slow(itertools.product(["dqn", "ppo"], ["max-train-iter", "max-time-s"]), keep=[1, 2]),
)
def test_the_first_limit_that_is_reached_ends_a_run(algo, limit, tmp_path):
    found = call(algo, "CartPole-v1", f"--{limit}", "1", *QUICK)
    assert found.exit_code == 0, found.output
    result = json.loads((tmp_path / f"runs/{algo}-CartPole-v1/result.json").read_text())
    assert result["train_iter"] >= 1 and result["env_step"] < 20_000
    assert limit == "max-train-iter" or result["train_s"] >= 1


def test_the_list_has_all_algorithms_and_their_results():
    found = call("--list")
    assert found.exit_code == 0
    listed = {line.split()[0] for line in found.output.splitlines() if line}
    assert set(algorithms()) <= listed
    one = call("dqn", "--list").output
    assert "LunarLander-v3" in one
    assert "\nppo" not in one


def test_the_list_has_steps_to_a_goal_or_returns_after_a_budget():
    lines = {tuple(line.split()[:2]): line for line in call("--list").output.splitlines() if line}
    n_goals = 0
    for algo in algorithms():
        for env, entry in tuned(algo).entries.items():
            line, result = lines[algo, env], entry.result
            if entry.stop_value is not None and result is not None:
                n_goals += 1
                assert f" {entry.stop_value:g}" in line
                assert result.steps is None or all(f"{at:,}" in line for at in result.steps)
                is_partial = f"{result.n_reached} of {result.n_seed}" in line
                assert is_partial == (0 < result.n_reached < result.n_seed)
            elif result is not None:
                assert f"{result.best:,.1f}" in line and f"{result.last:,.1f}" in line
    assert n_goals > 20


def test_the_list_points_to_nothing_that_an_installed_package_lacks():
    assert not re.search(r"docs/|examples/|\.md\b", call("--list").output)


def test_the_chain_can_be_printed():
    found = call("ppo", "CartPole-v1", "--show-chain", "--seed", "4")
    assert found.exit_code == 0, found.output
    assert "def main(seed: int = 4)" in found.output
    compile(found.output, "chain.py", "exec")


def test_help_is_that_of_the_program():
    found = call("sac", "Pendulum-v1", "--help")
    assert found.exit_code == 0
    assert "--policy.learning-rate-q" in found.output
    assert "--policy.clip-ratio" not in found.output
    assert "--list" in call("--help").output


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ((), "ditask train dqn CartPole-v1"),
        (("dqn",), "ditask train dqn CartPole-v1"),
        (("ppoo", "CartPole-v1"), "did you mean ppo"),
        (("dqn", "CartPool-v1"), "CartPole-v1"),
        (("dqn", "CartPole-v1", "--polcy.batch-size", "3"), "policy.batch-size"),
        (("dqn", "CartPole-v1", "--policy.batch-size", "0"), "integer ≥ 1"),
        (("sac", "CartPole-v1"), "discrete"),
    ],
)
def test_slips_are_refused_with_the_nearest_name(line, words):
    found = call(*line)
    assert found.exit_code != 0
    assert words in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize("missing", ["mujoco", "Box2D", "ale_py", "minigrid"])
def test_a_missing_extra_is_named(missing, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == missing else find(name, *rest),
    )
    env = {
        "mujoco": "Hopper-v5",
        "Box2D": "LunarLander-v3",
        "ale_py": "ALE/Pong-v5",
        "minigrid": "MiniGrid-Empty-5x5-v0",
    }[missing]
    found = call("ppo", env)
    assert found.exit_code == 1
    assert "pip install 'dmiddleware[" in found.output
