"""What a run leaves at its very end is true, whatever happens there."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dmiddleware import Task
from dmiddleware.data import TensorBuffer, load_checkpoint
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DQNPolicy
from dmiddleware.runs.statistics import short
from middleware import (
    CkptSaver,
    DataPusher,
    EpsGreedyHandler,
    Experiment,
    InteractionEvaluator,
    OffPolicyLearner,
    OnlineRLContext,
    RunFolder,
    StepCollector,
    TerminationChecker,
)
from middleware.programs import train

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Judge(InteractionEvaluator):
    """An evaluator whose final evaluation can fail."""

    failure: BaseException | None = None

    def evaluate_fresh(self, policy_state: Any, **options: Any) -> list[float]:
        if self.failure is not None:
            raise self.failure
        return super().evaluate_fresh(policy_state, **options)


def chain(*, resume: bool = False, env_steps: int = 200) -> tuple[Task[Any], Judge, Experiment]:
    envs, judged = (make_env_manager("CartPole-v1", env_num=2, seed=seed) for seed in (0, 1))
    policy = DQNPolicy.for_env(envs, seed=0, model={"encoder_hidden_sizes": [8]}, batch_size=16)
    buffer = TensorBuffer(1000, seed=0)
    judge = Judge(policy, judged, n_episode=2, every_env_step=100)
    run = RunFolder.create("run", resume=resume)
    experiment = Experiment(run, policy, n_fresh_episode=2)
    task = Task(seed=0)
    task.use(EpsGreedyHandler(policy)).use(StepCollector(policy, envs, n_sample=20))
    task.use(DataPusher(buffer)).use(OffPolicyLearner(policy, buffer)).use(judge).use(experiment)
    return task.use(TerminationChecker(max_env_step=env_steps)), judge, experiment


def result() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(Path("runs/run/result.json").read_text())
    return fields


@pytest.mark.parametrize("failure", [RuntimeError("env broke"), KeyboardInterrupt(), OSError("no")])
def test_a_final_evaluation_that_fails_fails_the_run_and_leaves_its_counters(
    failure: BaseException,
) -> None:
    task, judge, experiment = chain()
    judge.failure = failure
    with pytest.raises(type(failure)), task:
        task.run()
    fields = result()
    assert (fields["mean_return"], fields["last_return"], fields["n_episode"]) == (None, None, 0)
    assert fields["env_step"] == 200
    assert [at for at, _ in fields["evaluations"]] == [20, 100, 200]
    assert experiment.result.env_step == 200
    load_checkpoint("runs/run/ckpt/best.safetensors")
    load_checkpoint("runs/run/ckpt/final.safetensors")


def test_a_resumed_run_that_fails_does_not_leave_the_result_of_the_earlier_one() -> None:
    task, _, _ = chain()
    with task:
        task.run()
    assert result()["mean_return"] is not None

    def fail(ctx: OnlineRLContext) -> None:
        if ctx.env_step >= 100:
            raise RuntimeError("no")

    task, _, _ = chain(resume=True)
    with pytest.raises(RuntimeError, match="no"), task.use(fail):
        task.run()
    assert (result()["mean_return"], result()["env_step"]) == (None, 100)


def test_a_run_that_is_refused_leaves_the_result_of_the_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, _, _ = chain()
    with task:
        task.run()
    before = result()

    def refuse(self: CkptSaver, task: Task[Any]) -> None:
        raise ConfigError("other settings")

    monkeypatch.setattr(CkptSaver, "setup", refuse)
    task, _, _ = chain(resume=True)
    with pytest.raises(ConfigError, match="other settings"), task:
        task.run()
    assert result() == before


def test_a_last_policy_that_was_not_evaluated_and_is_better_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {
        "eval_env_num": 10,
        "evaluator": {"n_episode": 10, "every_train_iter": 100_000},
        "experiment": {"n_fresh_episode": 10},
    }
    with caplog.at_level(logging.WARNING):
        ended = train("ppo", "CartPole-v1", max_env_step=5000, **options)
    assert ended.last_return > 3 * ended.mean_return  # only the untrained policy was evaluated
    (said,) = (one.getMessage() for one in caplog.records if "last policy" in one.getMessage())
    assert short(ended.last_return) in said and "final.safetensors" in said


KILLED = """
import os, signal
from middleware import Experiment, InteractionEvaluator
from middleware.programs import train

def killed(self, *args, **options):
    os.kill(os.getpid(), signal.SIGTERM)

InteractionEvaluator.evaluate_fresh = killed
train("ppo", "CartPole-v1", exp_name="run", max_env_step=600, collector={"n_sample": 256},
      eval_env_num=2, evaluator={"n_episode": 2})
"""


@pytest.mark.process
def test_a_run_that_is_killed_in_its_final_evaluation_leaves_its_counters() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), done.stderr
    assert (result()["mean_return"], result()["env_step"]) == (None, 768)
