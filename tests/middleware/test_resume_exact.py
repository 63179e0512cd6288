"""Stock chains continue exactly, and what does not is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware import Task
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DecisionTransformerPolicy, DQNPolicy
from dmiddleware.testing import assert_resume_exact
from middleware import Experiment, RunFolder, SnapshotSaver, TerminationChecker
from tests.dmiddleware.policy.every_policy import EVERY, made
from tests.middleware.test_saved_config import usual_chain


def chain_of(
    cls: Any, *further: Callable[[], Any]
) -> Callable[[Path], tuple[Task[Any], SnapshotSaver]]:
    """Return a program with the usual chain of a policy."""

    def main(folder: Path) -> tuple[Task[Any], SnapshotSaver]:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        policy = made(cls)
        run = RunFolder(folder)
        snapshots = SnapshotSaver(run)
        task = Task(seed=0)
        for one in usual_chain(policy):
            task.use(one)
        task.use(Experiment(run, policy)).use(snapshots)
        task.use(TerminationChecker(max_time_s=1000.0))
        for make in further:
            task.use(make())
        return task, snapshots

    return main


IN_MAKE_TEST = ("DQNPolicy", "PPOPolicy", "RecurrentPPOPolicy")


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(
            cls, id=cls.__name__, marks=() if cls.__name__ in IN_MAKE_TEST else pytest.mark.slow
        )
        for cls in EVERY
        if cls is not DecisionTransformerPolicy  # its chain has no online context
    ],
)
def test_the_stock_chain_of_every_policy_resumes_exactly(cls: Any) -> None:
    assert_resume_exact(chain_of(cls), n_step=5)


class Forgets:
    """A middleware that changes what it does after a resume."""

    def __init__(self, saves: bool) -> None:
        self.n, self.saves = 0, saves

    def __call__(self, ctx: Any) -> None:
        self.n += 1
        ctx.env_episode += self.n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        if self.saves:
            self.n = state["n"]


def test_the_first_thing_that_differs_is_named() -> None:
    assert_resume_exact(chain_of(DQNPolicy, lambda: Forgets(saves=True)), n_step=4)
    with pytest.raises(AssertionError, match=r"after step 1 .* differs in .*(env_episode|\bn\b)"):
        assert_resume_exact(chain_of(DQNPolicy, lambda: Forgets(saves=False)), n_step=4)


def test_one_step_cannot_be_interrupted() -> None:
    with pytest.raises(ConfigError, match="n_step"):
        assert_resume_exact(chain_of(DQNPolicy), n_step=1)
