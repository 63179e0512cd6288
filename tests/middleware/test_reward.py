"""Learned rewards in a chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.data import Batch, as_tree
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import OnlineRLContext, Role, middleware
from dmiddleware.policy import Part, adam
from dmiddleware.reward import RewardModel
from middleware import RewardLearner


class Constant(RewardModel):
    """The reward is a number that each update moves by 1, starting at 0."""

    columns = ("obs",)

    def __init__(self, *, learns_first: bool) -> None:
        self.learns_first = learns_first  # type: ignore[misc]  # for this object only
        self.number = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.number.weight)
        super().__init__({"number": Part(self.number, adam(1.0))}, batch_size=100, epochs=1)

    def _reward(self, batch: Batch) -> torch.Tensor:
        return self.number(batch["obs"]).squeeze(-1)

    def _update(self, batch: Batch) -> dict[str, torch.Tensor]:
        loss = -self._reward(batch).mean()
        self._parts["number"].step(loss)
        return {"loss": loss}


@middleware(writes=("trajectories",))
def give(ctx: OnlineRLContext) -> None:
    ctx.trajectories = as_tree(
        {
            "obs": torch.ones(3, 2, 1),
            "reward": torch.full((3, 2), 5.0),
            "done": torch.zeros(3, 2, dtype=torch.bool),
        }
    )


@pytest.mark.parametrize(("learns_first", "expected"), [(True, 1.0), (False, 0.0)])
def test_rewards_are_replaced_before_or_after_learning(
    run_steps: Any, learns_first: bool, expected: float
) -> None:
    logged: dict[str, float] = {}
    rewards = []

    def note(ctx: OnlineRLContext) -> None:
        logged.update(ctx.logged)
        rewards.append(ctx.trajectories["reward"])

    run_steps(give, RewardLearner(Constant(learns_first=learns_first)), note)
    torch.testing.assert_close(rewards[0], torch.full((3, 2), expected))
    assert logged["reward/env"] == 5.0
    assert logged["reward/learned"] == pytest.approx(expected)
    assert logged["reward/loss"] == 0.0


def test_the_rewards_of_the_environment_can_be_kept_with_a_weight(run_steps: Any) -> None:
    rewards = []
    learner = RewardLearner(Constant(learns_first=True), weight=0.5, env_weight=2.0)
    run_steps(give, learner, lambda ctx: rewards.append(ctx.trajectories["reward"]), n_steps=2)
    assert [float(one[0, 0]) for one in rewards] == pytest.approx([10.5, 11.0], abs=1e-3)


def test_snapshots_and_the_config_have_the_model() -> None:
    model = Constant(learns_first=True)
    learner = RewardLearner(model, weight=0.5)
    assert learner.snapshot_parts == {"reward_model": model}
    assert learner.settings == {
        "model": "Constant", "batch_size": 100, "epochs": 1, "weight": 0.5, "env_weight": 0.0
    }  # fmt: skip
    assert learner.roles == (Role.LEARNER,)


def test_an_argument_that_is_not_a_reward_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="RewardLearner takes a RewardModel"):
        RewardLearner(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
