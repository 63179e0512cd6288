"""A recurrent policy in a chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmiddleware import OnlineRLContext, Task, middleware
from middleware import OnPolicyLearner, SnapshotSaver, StepCollector, interaction_evaluator
from tests.dmiddleware.recurrent_policy import GRUPolicy, masked_cartpole

N_STEPS = 12


class Run:
    """Collects, learns through time and evaluates; keeps what was collected."""

    def __init__(self, folder: Path) -> None:
        self.policy = GRUPolicy(seed=0)
        self.batches: list[Any] = []
        self.evaluations: list[float] = []

        @middleware(reads=("trajectories",), writes=("train_data",))
        def hand_over(ctx: Any) -> None:
            self.batches.append(ctx.trajectories)
            ctx.train_data = ctx.trajectories

        self.snapshots = SnapshotSaver(folder)
        self.task = Task(OnlineRLContext(), seed=0)
        self.task.use(self.snapshots)
        self.task.use(StepCollector(self.policy, masked_cartpole(2, seed=1), n_sample=10))
        self.task.use(hand_over)
        self.task.use(OnPolicyLearner(self.policy, batch_size=5, epochs=1))
        self.task.use(
            interaction_evaluator(
                self.policy, masked_cartpole(2, seed=2), n_episode=2, every_train_iter=3
            )
        )
        self.task.use(self.note)

    def note(self, ctx: Any) -> None:
        if ctx.eval_value is not None:
            self.evaluations.append(ctx.eval_value)

    def weights(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.policy.learn_mode.state_dict()["model"]
        return state


@pytest.mark.parametrize("stopped_after", [1, 5])
def test_a_run_resumed_in_the_middle_of_an_episode_is_exact(
    tmp_path: Path, stopped_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the ids of the episodes of two runs differ, whatever the seeds.
    monkeypatch.setattr("secrets.randbits", lambda n_bits: 7)
    whole = Run(tmp_path / "whole")
    with whole.task:
        whole.task.run(max_step=N_STEPS)
    stopped = Run(tmp_path / "run")
    with stopped.task:
        stopped.task.run(max_step=stopped_after)
        stopped.snapshots.save(stopped.task)
    assert not stopped.batches[-1]["done"][-1].all()
    resumed = Run(tmp_path / "run")
    with resumed.task:
        assert resumed.snapshots.resume(resumed.task)
        resumed.task.run(max_step=N_STEPS - stopped_after)
    continues = ~resumed.batches[0]["is_first"][0]
    assert continues.any()
    assert (resumed.batches[0]["state"][0][continues] != 0).any()
    for expected, found in zip(whole.batches, stopped.batches + resumed.batches, strict=True):
        assert set(expected) == set(found)
        assert [n for n in expected if not torch.equal(expected[n], found[n])] == []
    assert stopped.evaluations + resumed.evaluations == whole.evaluations
    weights = resumed.weights()
    assert all(torch.equal(leaf, weights[name]) for name, leaf in whole.weights().items())
