"""A finished run that is resumed runs no further step, unless its limit was raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.policy import DQNPolicy
from middleware import (
    SnapshotSaver,
    StepCollector,
    eps_greedy_handler,
    interaction_evaluator,
    termination_checker,
)


class Run:
    """A chain that collects until a limit, and can be resumed."""

    def __init__(self, folder: Path, *stoppers: Any, **evaluation: Any) -> None:
        policy = DQNPolicy(
            {
                "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
                "eps": {"type": "linear", "start": 1.0, "end": 0.1, "decay": 50},
            }
        )
        env = make_env_manager("CartPole-v1", env_num=2)
        self.n_steps = 0
        self.snapshots = SnapshotSaver(folder)
        self.task = Task()
        self.task.use(self.snapshots).use(eps_greedy_handler(policy))
        self.task.use(StepCollector(policy, env, n_sample=10)).use(self.count)
        if evaluation:
            eval_env = make_env_manager("CartPole-v1", env_num=1)
            self.task.use(
                interaction_evaluator(
                    policy, eval_env, n_episode=1, every_train_iter=1, **evaluation
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


def test_a_resumed_run_has_the_evaluations_in_a_row_that_it_was_saved_with(tmp_path: Path) -> None:
    run_to_the_end(Run(tmp_path, stop_value=1.0, stop_evaluations=4))
    assert Run(tmp_path, stop_value=1.0, stop_evaluations=4).resume() == 0
    assert Run(tmp_path, stop_value=1000.0, stop_evaluations=4).resume() == 10


def test_a_run_that_custom_middleware_stopped_runs_no_further_step_when_resumed(
    tmp_path: Path,
) -> None:
    def stop(ctx: Any) -> None:
        ctx.task.stop("solved")

    run_to_the_end(Run(tmp_path, stop))
    finished = Run(tmp_path, stop)
    assert finished.resume() == 0
    assert finished.task.stop_reason == "solved"
