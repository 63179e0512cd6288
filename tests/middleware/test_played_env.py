"""What a run records of its env is played, shown and compared."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from dmiddleware.env import EnvSettings
from dmiddleware.launch.cli import ditask
from dmiddleware.runs.record import RunRecord, differing_settings
from middleware.programs import train
from tests.dmiddleware.env.wrapped_envs import (
    Corridor,
    Maker,
    Mirror,
    Pay,
    Secretive,
    make_mirrored,
)
from tests.variants import mostly_slow
from tests.warm_process import run_warm

HERE = "tests.dmiddleware.env.wrapped_envs"
SHORT: dict[str, Any] = {
    "max_env_step": 128,
    "eval_env_num": 2,
    "evaluator": {"n_episode": 2},
    "experiment": {"n_fresh_episode": 2},
    "collector": {"n_sample": 64, "random_steps": 64},
    "learner": {"update_per_collect": 1},
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(*words: object) -> Result:
    return CliRunner().invoke(ditask, list(map(str, words)))


def config_of(run: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    return config


def test_play_wraps_the_env_as_the_run_did() -> None:
    paid = functools.partial(Pay, factor=-7)
    result = train("dqn", Corridor, wrappers=[Mirror, paid], **SHORT)
    names = [f"{HERE}:Mirror", f"{HERE}:Pay(factor=-7)"]
    assert config_of(result.path)["env"]["wrappers"] == names
    assert config_of(result.path)["arguments"]["env"]["wrappers"] == names
    played = ran("play", result.path, "--episodes", 3)
    assert played.exit_code == 0, played.output
    assert f"mean return {result.mean_return:.1f} over 3 episodes" in played.output
    assert f"in {', '.join(names)}" in played.output and "note" not in played.output
    other = ran("play", result.path, "--episodes", 3, "--env", f"{HERE}:Corridor")
    assert other.exit_code == 0 and names[1] in other.output, "a note has the wrappers"
    assert "note" in other.output
    replaced = ran("play", result.path, "--episodes", 3, "--wrapper", f"{HERE}:Pay(factor=0)")
    assert "mean return 0.0 over" in replaced.output or "mean return -0.0" in replaced.output
    exported = ran("export", result.path, "--format", "torch")
    assert exported.exit_code == 0, exported.output
    card = (result.path / "export" / "README.md").read_text()
    assert f"wrapped in `{names[0]}`, `{names[1]}`" in card


def test_settings_that_differ_have_the_wrappers() -> None:
    envs = (
        EnvSettings(Corridor, env_num=2),
        EnvSettings(Corridor, env_num=2, wrappers=[Pay]),
        EnvSettings(Corridor, env_num=2, wrappers=[functools.partial(Pay, factor=3)]),
    )
    runs = [RunRecord.load(train("dqn", env, **SHORT).path) for env in envs]
    sides = [[run] for run in runs]
    assert differing_settings(sides) == {
        "env.wrappers": [[None], [[f"{HERE}:Pay"]], [[f"{HERE}:Pay(factor=3)"]]]
    }


def test_the_env_that_judges_is_played_if_it_is_another_one() -> None:
    env = EnvSettings(Corridor, env_num=2, env_kwargs={"length": 9})
    result = train("dqn", env, eval_env_kwargs={"length": 1}, **SHORT)
    config = config_of(result.path)
    assert config["env"]["env_kwargs"] == {"length": 9}
    assert config["eval_env"]["env_kwargs"] == {"length": 1}
    played = ran("play", result.path, "--episodes", 2)
    assert f"mean return {result.mean_return:.1f} over" in played.output


@pytest.mark.parametrize("wrapper", [lambda env: Mirror(env), functools.partial(Pay, more=[Pay])])
def test_play_refuses_wrappers_that_cannot_be_imported(wrapper: Any) -> None:
    result = train("dqn", Corridor, wrappers=[wrapper], **SHORT)
    (name,) = config_of(result.path)["env"]["wrappers"]
    played = ran("play", result.path)
    assert played.exit_code == 1 and "mean return" not in played.output
    assert name in " ".join(played.output.split()) and "--wrapper" in played.output
    assert ran("play", result.path, "--wrapper", f"{HERE}:Pay").exit_code == 0


def test_runs_that_recorded_no_wrappers_are_played_with_a_note() -> None:
    result = train("dqn", Corridor, **SHORT)
    config = config_of(result.path)
    assert "note" not in ran("play", result.path, "--episodes", 1).output
    del config["env"]["wrappers"]
    (result.path / "config.yaml").write_text(yaml.safe_dump(config))
    played = ran("play", result.path, "--episodes", 1)
    assert played.exit_code == 0 and "did not record whether its env has wrappers" in played.output


def test_the_command_line_wraps_envs(tmp_path: Path) -> None:
    options = ("--max-env-step", 64, "--evaluator.n-episode", 2, "--eval-env-num", 2)
    named = ("--wrapper", f"{HERE}:Mirror", f"--wrapper={HERE}:Pay(factor=0.5)")
    fresh = ("--experiment.n-fresh-episode", 2)
    done = ran("train", "dqn", f"{HERE}:Corridor", *named, *options, *fresh)
    assert done.exit_code == 0, done.output
    names = [f"{HERE}:Mirror", f"{HERE}:Pay(factor=0.5)"]
    assert config_of(Path("runs/dqn-Corridor"))["env"]["wrappers"] == names
    shown = ran("train", "dqn", f"{HERE}:Corridor", *named, "--show-chain")
    assert f'wrappers=("{names[0]}", "{names[1]}")' in shown.output
    wrong = ran("train", "dqn", f"{HERE}:Corridor", "--wrapper", "nowhere:W", *options)
    assert wrong.exit_code == 1 and "nowhere:W" in wrong.output


# pytest asks parameters for their names, which one of these refuses.
MAKERS: list[tuple[Any, str]] = [
    (functools.partial(Corridor, length=2), "dqn-Corridor"),
    (functools.partial(Corridor, 2, goal=(1, 2)), "dqn-Corridor"),
    (functools.partial(Corridor, extra=Secretive(2)), "dqn-Corridor"),
    (Maker(2), "dqn-Maker"),
    (Maker(2).__call__, "dqn-__call__"),
    (Secretive(2), "dqn-Secretive"),
    (lambda: Corridor(2), "dqn-lambda"),
    (make_mirrored, "dqn-make_mirrored"),
    (EnvSettings(Corridor, env_num=2, env_kwargs={"extra": Secretive(2)}), "dqn-Corridor"),
    (EnvSettings(Corridor, env_num=2, wrappers=[lambda env: Mirror(env)]), "dqn-Corridor"),
]


@pytest.mark.parametrize("at", mostly_slow(range(len(MAKERS)), keep=[0, 5, 9]))
def test_whatever_makes_an_env_a_run_has_a_result(at: int) -> None:
    env, name = MAKERS[at]
    result = train("dqn", env, **SHORT)
    assert result.path.name == name
    assert result.policy([0.0, 2.0]) in (0, 1)
    names: dict[str, Any] = {"__name__": "copied"}
    exec(compile(ast.parse(result.chain), "chain.py", "exec"), names)
    if "<" in result.chain:
        with pytest.raises(NotImplementedError, match=r"put in .*<"):
            names["main"]()
    else:
        assert "put_in" not in result.chain
        assert names["main"]().mean_return == result.mean_return


PROGRAM = """
import gymnasium as gym
import helper
from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy, DQNSettings
from dmiddleware.program import run_program
from middleware import (
    DataPusher, EpsGreedyHandler, Experiment, InteractionEvaluator, OffPolicyLearner, RunFolder,
    SnapshotSaver, StepCollector, TerminationChecker,
)

SMALL = DQNSettings(batch_size=16, model={{"encoder_hidden_sizes": [8]}})

class Own(DQNPolicy):
    pass

class Mirror(gym.ActionWrapper):
    def action(self, action):
        return 1 - action

def make_policy(policy: DQNSettings = SMALL) -> Own:
    return Own.for_env(make_env_manager("CartPole-v1", env_num=1), policy, seed=0)

def main(policy: DQNSettings = SMALL, max_env_step: int = 64) -> None:
    agent = make_policy(policy)
    run = RunFolder.create("own")
    saver = SnapshotSaver(run)
    with Task(seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=2, wrappers=[Mirror])
        judged = make_env_manager("CartPole-v1", env_num=2, wrappers=[Mirror])
        buffer = TensorBuffer(1000, seed=0)
        task.use(EpsGreedyHandler(agent)).use(StepCollector(agent, envs, n_sample=64))
        task.use(DataPusher(buffer)).use(OffPolicyLearner(agent, buffer, update_per_collect=1))
        task.use(InteractionEvaluator(agent, judged, n_episode=2))
        task.use(Experiment(run, agent, n_fresh_episode=2)).use(saver)
        task.use(TerminationChecker(max_env_step=max_env_step))
        saver.resume(task)
        task.run()

{start}run_program(main)
"""


def program(*words: str) -> subprocess.CompletedProcess[str]:
    return run_warm(words, cwd=Path(), env=os.environ, timeout=110)


@pytest.mark.process
def test_a_script_is_resumed_and_its_own_classes_are_played(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").touch()
    source = PROGRAM.format(start='if __name__ == "__main__":\n    ')
    (folder / "trainer.py").write_text(source)
    done = program("scripts/trainer.py")
    assert done.returncode == 0, done.stderr
    config = config_of(Path("runs/own"))
    assert (config["program"], config["launch"]) == ("trainer.main", {"package": "scripts"})
    assert config["env"]["wrappers"] == ["trainer:Mirror"]
    made = ("--policy", "trainer:make_policy")
    played = program("-m", "dmiddleware.launch", "play", "runs/own", "--episodes", "2", *made)
    assert played.returncode == 0, played.stderr
    assert "in trainer:Mirror" in played.stdout
    resumed = program(
        "-m", "dmiddleware.launch", "resume", "runs/own", "--", "--max-env-step", "128"
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed at step" in Path("runs/own/log.txt").read_text()
    exported = ran("export", "runs/own", "--format", "torch", *made)
    assert exported.exit_code == 0, exported.output


@pytest.mark.slow
@pytest.mark.process
def test_a_script_that_importing_would_run_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "helper.py").touch()
    (tmp_path / "trainer.py").write_text(PROGRAM.format(start=""))
    assert program("trainer.py").returncode == 0
    for words in (("play", "runs/own", "--policy", "trainer:make_policy"), ("resume", "runs/own")):
        refused = program("-m", "dmiddleware.launch", *words)
        assert refused.returncode == 1 and "__main__" in refused.stderr
