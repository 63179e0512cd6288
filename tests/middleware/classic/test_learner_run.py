"""A learner with hooks in a chain of middleware."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmiddleware.data import save_checkpoint
from dmiddleware.policy import DQNPolicy
from dmiddleware.worker.learner import BaseLearner, LearnerHook
from middleware import OnlineRLContext
from middleware.classic import LearnerRun
from middleware.learn import OffPolicyLearner
from tests.middleware.small_dqn import filled, small


@pytest.fixture
def dqn() -> DQNPolicy:
    return DQNPolicy(small(16))


class Note(LearnerHook):
    def __init__(self, tape: list[Any], position: str) -> None:
        super().__init__(f"note_{position}", 10, position=position)
        self._tape = tape

    def __call__(self, engine: Any) -> None:
        self._tape.append((self.position, engine.train_iter, engine.collector_envstep))


def hooked(policy: DQNPolicy, tape: list[Any], folder: Path, **hooks: Any) -> BaseLearner:
    none = {"save_ckpt_after_run": False, "save_ckpt_after_iter": 1_000_000}
    learner = BaseLearner(
        {"hook": {**none, **hooks}}, policy=policy.learn_mode, exp_name=str(folder)
    )
    for position in ("before_run", "before_iter", "after_iter", "after_run"):
        learner.register_hook(Note(tape, position))
    return learner


def test_hooks_of_a_learner_run_around_each_update_and_the_run(
    run_steps: Any, dqn: DQNPolicy, tmp_path: Path
) -> None:
    tape: list[Any] = []
    with hooked(dqn, tape, tmp_path) as learner:
        run = LearnerRun(learner)
        updater = OffPolicyLearner(run, filled(), update_per_collect=2)
        ctx = run_steps(run, updater, ctx=OnlineRLContext(env_step=80))
    assert ctx.train_iter == learner.train_iter == 2
    assert tape == [
        ("before_run", 0, -1),
        ("before_iter", 0, 80),
        ("after_iter", 0, 80),
        ("before_iter", 1, 80),
        ("after_iter", 1, 80),
        ("after_run", 2, 80),
    ]


def test_hooks_of_the_end_run_after_an_error_too(
    run_steps: Any, dqn: DQNPolicy, tmp_path: Path
) -> None:
    def fail(ctx: OnlineRLContext) -> None:
        raise RuntimeError("no")

    tape: list[Any] = []
    with hooked(dqn, tape, tmp_path) as learner, pytest.raises(RuntimeError, match="no"):
        run = LearnerRun(learner)
        run_steps(run, OffPolicyLearner(run, filled()), fail)
    assert tape[-1][0] == "after_run"


def test_run_continues_from_the_checkpoint_that_a_hook_loads(
    run_steps: Any, dqn: DQNPolicy, tmp_path: Path
) -> None:
    path = tmp_path / "before.safetensors"
    save_checkpoint(path, {**dqn.learn_mode.state_dict(), "last_iter": 40, "last_step": 320})
    with hooked(dqn, [], tmp_path, load_ckpt_before_run=str(path)) as learner:
        run = LearnerRun(learner)
        ctx = run_steps(run, OffPolicyLearner(run, filled()))
    assert ctx.train_iter == learner.train_iter == 41
