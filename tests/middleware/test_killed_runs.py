"""Runs that are killed leave a snapshot, whatever trains them, and are continued from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dmiddleware.data import save_dataset
from dmiddleware.env import make_env_manager
from dmiddleware.launch.cli import ditask
from dmiddleware.policy import BCPolicy
from dmiddleware.rollout import RolloutCollector
from tests.faults.killed_run import killed_run
from tests.middleware.killing_envs import KILL_AT, pendulum
from tests.variants import mostly_slow
from tests.warm_process import run_warm

ROOT = Path(__file__).parents[2]
DITASK = ("-m", "dmiddleware.launch")
CARTPOLE = "tests.middleware.killing_envs:cartpole"
PENDULUM = "tests.middleware.killing_envs:pendulum"
SHORT = ("--evaluator.n-episode", "2", "--experiment.n-fresh-episode", "10", "--exp-name", "run")
ONLINE = (*SHORT, "--eval-env-num", "2", "--evaluator.every-train-iter", "1000000")
OFFLINE = ("--env.env-num", "2", *SHORT, "--evaluator.every-train-iter", "1100")
PPO = ("ppo", CARTPOLE, *ONLINE, "--collector.n-sample", "256", "--max-env-step", "6000")
DQN = ("dqn", CARTPOLE, *ONLINE, "--learner.update-per-collect", "1", "--max-env-step", "6000")
BC = ("bc", PENDULUM, *OFFLINE, "--data", "rows.safetensors", "--max-train-iter", "1500")
BC_POLICY = ("--policy.batch-size", "8", "--learner.update-per-collect", "50")


def run(folder: Path, *words: str, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), KILL_AT: str(kill_at)}
    return run_warm(words, cwd=folder, env=env, timeout=110)


def write_rows(path: Path) -> None:
    with make_env_manager(pendulum, env_num=2, seed=0) as envs:
        policy = BCPolicy.for_env(envs, seed=0)
        save_dataset(path, RolloutCollector(policy, envs).collect(200))


# Per case: the words of the training, and after how many steps of envs it is killed.
CASES = {
    "on-policy": ((*DITASK, "train", *PPO), 4000),
    "off-policy": ((*DITASK, "train", *DQN), 4000),
    "offline": ((*DITASK, "train", *BC, *BC_POLICY), 50),
    "printed": ((*DITASK, "--main", "printed.main", "--package", "."), 4000),
}


@pytest.mark.process
@pytest.mark.parametrize("case", mostly_slow(CASES, keep=1))
def test_a_run_that_was_killed_continues_from_a_snapshot(case: str, tmp_path: Path) -> None:
    words, kill_at = CASES[case]
    if case == "offline":
        write_rows(tmp_path / "rows.safetensors")
    if case == "printed":
        code = CliRunner().invoke(ditask, ["train", *PPO, "--show-chain"]).stdout
        (tmp_path / "printed.py").write_text(code)
    killed = run(tmp_path, *words, kill_at=kill_at)
    output = killed.stdout + killed.stderr
    assert killed.returncode == -signal.SIGKILL or "killed by SIGKILL" in output, output
    folder = tmp_path / "runs" / "run"
    assert list((folder / "snapshots").glob("step_*"))
    before = (folder / "metrics.jsonl").read_text().splitlines()
    resumed = run(tmp_path, *DITASK, "resume", "runs/run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed at step" in (folder / "log.txt").read_text()
    assert (folder / "metrics.jsonl").read_text().splitlines()[0] == before[0]
    result = json.loads((folder / "result.json").read_text())
    assert result["train_iter"] >= 1500 if case == "offline" else result["env_step"] >= 6000


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_run_of_several_processes_that_was_killed_continues_from_a_snapshot(algo: str) -> None:
    kind = {"ppo": "on_policy", "dqn": "off_policy"}[algo]
    result = killed_run(
        "ipc",
        kills=1,
        main=f"middleware.programs.{kind}.{kind}",
        roles="learner=1,collector=1,evaluator=1",
        arguments=("--config", f"zoo:{algo}/CartPole-v1", "--exp-name", "run"),
        solved=None,
    )
    assert result.holds, result


def test_a_run_that_ended_before_its_first_snapshot_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("program: train.main\nchain:\n- SnapshotSaver: {}\n")
    refused = CliRunner().invoke(ditask, ["resume", str(tmp_path)])
    assert refused.exit_code == 1
    assert "start it again" in refused.output and "put SnapshotSaver" not in refused.output
