"""How a run ends: signals that save it, and what a finished run does when it is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dmiddleware import OnlineRLContext, Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from middleware import (
    SnapshotSaver,
    StepCollector,
    eps_greedy_handler,
    interaction_evaluator,
    termination_checker,
)

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 90.0

PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from middleware import (
    CkptSaver, OffPolicyLearner, RunFolder, SnapshotSaver, StepCollector, data_pusher,
    eps_greedy_handler,
)

torch.set_num_threads(1)
folder, mode = Path(sys.argv[1]), sys.argv[2]
policy = DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}})
env = make_env_manager("CartPole-v1", env_num=2, mode=mode)
buffer = TensorBuffer(500)
run = RunFolder(folder)
steps = []

def step(ctx):
    steps.append("begin")
    (folder / "ready").touch()
    time.sleep(0.02)
    if sys.argv[3] == "blocked" and len(steps) > 3:
        (folder / "blocked").touch()
        ctx.task.wait_for("never", 100.0) if mode == "sync" else time.sleep(100.0)
    yield
    steps.append("end")

try:
    with Task() as task:
        task.use(step).use(CkptSaver(policy.learn_mode, run))
        task.use(SnapshotSaver(run, {"policy": policy.learn_mode, "buffer": buffer}))
        task.use(eps_greedy_handler(start=1.0, end=0.1, decay_steps=50))
        task.use(StepCollector(policy.collect_mode, env, n_sample=8)).use(data_pusher(buffer))
        task.use(OffPolicyLearner(policy.learn_mode, buffer, batch_size=8))
        task.run()
finally:
    counts = {"begun": steps.count("begin"), "ended": steps.count("end")}
    outcome = {"reason": task.stop_reason, **counts}
    (folder / "outcome.json").write_text(json.dumps(outcome))
"""


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", PROGRAM, str(folder), *options]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_file(process: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path.name} was not written"
        time.sleep(0.02)


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "reason", "exit_code", "options"),
    [
        (signal.SIGINT, "received SIGINT (Ctrl-C)", -signal.SIGINT, ("async", "running")),
        (signal.SIGTERM, "received SIGTERM", 143, ("sync", "running")),
        (signal.SIGINT, "received SIGINT (Ctrl-C)", -signal.SIGINT, ("sync", "blocked")),
    ],
)
def test_a_signal_ends_the_step_in_order_and_saves_the_run(
    tmp_path: Path, number: int, reason: str, exit_code: int, options: tuple[str, str]
) -> None:
    process = start(tmp_path / "run", *options)
    wait_for_file(process, tmp_path / "run" / ("ready" if options[1] == "running" else "blocked"))
    os.killpg(process.pid, number)  # as a terminal does: env workers get it too
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == exit_code, errors
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["reason"] == reason
    n_blocked = 1 if options[1] == "blocked" else 0
    assert outcome["begun"] == outcome["ended"] + n_blocked
    assert list((tmp_path / "run").rglob("step_*.safetensors")), "no snapshot"
    assert list((tmp_path / "run").rglob("final.safetensors")), "no final checkpoint"
    assert "send it again to stop now" in errors


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_second_signal_interrupts_at_once(tmp_path: Path, number: int, exit_code: int) -> None:
    process = start(tmp_path / "run", "async", "blocked")
    wait_for_file(process, tmp_path / "run" / "blocked")
    process.send_signal(number)
    assert process.stderr is not None
    assert "send it again to stop now" in process.stderr.readline()
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == exit_code


@pytest.mark.process
def test_a_run_restores_the_handlers_of_signals(tmp_path: Path) -> None:
    program = """
import signal
from dmiddleware import Task

def mine(number, frame): pass

def look(ctx):
    seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

seen = []
signal.signal(signal.SIGTERM, mine)
with Task() as task:
    task.use(look).run(max_step=1)
look(None)
during, after = seen
assert during[1] is mine and after == (signal.default_int_handler, mine), seen
assert during[0] is not signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=DEADLINE_S)


class Run:
    """A chain that collects until a limit, and can be resumed."""

    def __init__(self, folder: Path, *stoppers: Any, **evaluation: Any) -> None:
        policy = DQNPolicy(
            {"model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}
        )
        env = make_env_manager("CartPole-v1", env_num=2)
        self.n_steps = 0
        self.snapshots = SnapshotSaver(folder, {"policy": policy.learn_mode})
        self.task = Task(OnlineRLContext())
        self.task.use(self.snapshots).use(eps_greedy_handler(start=1.0, end=0.1, decay_steps=50))
        self.task.use(StepCollector(policy.collect_mode, env, n_sample=10)).use(self.count)
        if evaluation:
            eval_env = make_env_manager("CartPole-v1", env_num=1)
            self.task.use(
                interaction_evaluator(
                    policy.eval_mode, eval_env, n_episode=1, every_train_iter=1, **evaluation
                )
            )
        for stopper in stoppers:
            self.task.use(stopper)

    def count(self, ctx: Any) -> None:
        self.n_steps += 1
        ctx.train_iter += 1

    def resume(self) -> int:
        """Resume the run, and return how many steps it runs then."""
        with self.task:
            assert self.snapshots.resume(self.task)
            self.task.run(max_step=10)
            return self.n_steps


def run_to_the_end(run: Run) -> None:
    with run.task:
        run.task.run()


def test_a_run_that_has_reached_its_limit_runs_no_further_step_when_resumed(
    tmp_path: Path,
) -> None:
    run_to_the_end(Run(tmp_path, termination_checker(max_env_step=30)))
    finished = Run(tmp_path, termination_checker(max_env_step=30))
    assert finished.resume() == 0
    assert finished.task.stop_reason == "env_step reached 30 (max_env_step is 30)"
    assert finished.task.ctx.env_step == 30


def test_a_run_with_a_higher_limit_continues_when_resumed(tmp_path: Path) -> None:
    run_to_the_end(Run(tmp_path, termination_checker(max_env_step=30)))
    longer = Run(tmp_path, termination_checker(max_env_step=50))
    assert longer.resume() == 2


def test_a_run_that_has_reached_its_stop_value_runs_no_further_step_when_resumed(
    tmp_path: Path,
) -> None:
    run_to_the_end(Run(tmp_path, stop_value=1.0))
    assert Run(tmp_path, stop_value=1.0).resume() == 0
    assert Run(tmp_path, stop_value=1000.0).resume() == 10


def test_a_run_that_custom_middleware_stopped_runs_no_further_step_when_resumed(
    tmp_path: Path,
) -> None:
    def stop(ctx: Any) -> None:
        ctx.task.stop("solved")

    run_to_the_end(Run(tmp_path, stop))
    finished = Run(tmp_path, stop)
    assert finished.resume() == 0
    assert finished.task.stop_reason == "solved"
