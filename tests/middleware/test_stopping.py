"""A training process that is stopped by a signal saves first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dmiddleware.data import load_checkpoint
from tests.variants import mostly_slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from middleware import (
    Experiment, OffPolicyLearner, SnapshotSaver, StepCollector, data_pusher, eps_greedy_handler
)

envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
policy = DQNPolicy.for_env(envs, seed=0, model={"encoder_hidden_sizes": [8]}, batch_size=8)
buffer = TensorBuffer(1000, seed=0)
experiment = Experiment("stopped", policy)

def report(ctx):
    if ctx.total_step == 20:
        print("running", flush=True)

with Task() as task:
    task.use(eps_greedy_handler(policy)).use(StepCollector(policy, envs, n_sample=16))
    task.use(data_pusher(buffer)).use(OffPolicyLearner(policy, buffer))
    task.use(experiment).use(SnapshotSaver(experiment.run)).use(report)
    task.run()
"""


@pytest.mark.process
@pytest.mark.parametrize("name", mostly_slow(["SIGTERM", "SIGINT"], keep=1))
def test_signal_leaves_a_snapshot_and_the_final_checkpoint(tmp_path: Path, name: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert program.stdout is not None
        line = program.stdout.readline()
        while line and line != "running\n":
            line = program.stdout.readline()
        program.send_signal(getattr(signal, name))
        output, _ = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait(timeout=60)
    run = tmp_path / "runs" / "stopped"
    final = load_checkpoint(run / "ckpt" / "final.safetensors")
    (path,) = (run / "snapshots").glob("step_*")
    snapshot = load_checkpoint(path)
    assert final["last_iter"] == snapshot["task"]["context"]["values"]["train_iter"] > 0, output
    assert name in (run / "final_ctx.json").read_text()
    assert name in output
