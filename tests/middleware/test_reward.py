"""Learned rewards in a chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.data import Batch, as_tree
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.pipeline import middleware
from dmiddleware.policy import Component, adam
from dmiddleware.reward import IntrinsicCritic, RewardModel
from dmiddleware.settings import plain_values
from middleware import IntrinsicAdvantage, OnlineRLContext, RewardLearner, Role


class Constant(RewardModel):
    """The reward is a number that each update moves by 1, starting at 0."""

    columns = ("obs",)

    def __init__(self, *, learns_first: bool) -> None:
        self.learns_first = learns_first  # type: ignore[misc]  # for this object only
        self.number = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.number.weight)
        super().__init__({"number": Component(self.number, adam(1.0))}, batch_size=100, epochs=1)

    def reward_of(self, batch: Batch) -> torch.Tensor:
        return self.number(batch["obs"]).squeeze(-1)

    def update_minibatch(self, batch: Batch) -> dict[str, torch.Tensor]:
        loss = -self.reward_of(batch).mean()
        self.components["number"].step(loss)
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


def test_all_agents_of_a_team_get_the_reward_of_the_model(run_steps: Any) -> None:
    reward = torch.arange(27.0).reshape(3, 3, 3)  # as many steps as envs and agents
    obs, rows = torch.arange(9.0).reshape(3, 3, 1), {}

    @middleware(writes=("trajectories",))
    def give_team(ctx: OnlineRLContext) -> None:
        done = torch.zeros(3, 3, dtype=torch.bool)
        ctx.trajectories = as_tree({"obs": obs, "reward": reward, "done": done})

    learner = RewardLearner(Constant(learns_first=True), env_weight=2.0)
    run_steps(give_team, learner, lambda ctx: rows.update(ctx.trajectories.items()))
    torch.testing.assert_close(rows["reward"], obs + 2.0 * reward)
    torch.testing.assert_close(rows["learned_reward"], obs.squeeze(-1))


def test_snapshots_and_the_config_have_the_model() -> None:
    model = Constant(learns_first=True)
    learner = RewardLearner(model, weight=0.5)
    assert learner.snapshot_parts == {"reward_model": model}
    assert plain_values(learner.settings) == {"name": None, "weight": 0.5, "env_weight": 0.0}
    assert learner.components == {"model": model}
    assert model.settings == {"batch_size": 100, "epochs": 1}
    assert learner.roles == (Role.LEARNER,)


@middleware(writes=("train_data",))
def give_advantages(ctx: OnlineRLContext) -> None:
    done = torch.zeros(3, 2, dtype=torch.bool)
    obs = torch.arange(6.0).reshape(3, 2, 1)
    ctx.train_data = as_tree(
        {"obs": obs, "next_obs": obs + 1, "done": done, "adv": torch.ones(3, 2)}
    )


def test_the_advantages_of_learned_rewards_are_added_with_a_weight(run_steps: Any) -> None:
    critic = IntrinsicCritic((1,), hidden_sizes=(4,))
    model = Constant(learns_first=True)
    given = IntrinsicAdvantage(model, critic, weight=0.5)
    found = {}

    def note(ctx: OnlineRLContext) -> None:
        found.update(ctx.train_data.items(), logged=dict(ctx.logged))

    run_steps(give_advantages, given, note)
    torch.testing.assert_close(found["adv"], 1.0 + 0.5 * found["learned_adv"])
    assert found["learned_adv"].abs().min() > 0.0
    torch.testing.assert_close(found["learned_reward"], torch.arange(6.0).reshape(3, 2))
    assert found["logged"]["reward/learned"] == pytest.approx(2.5)
    assert found["logged"]["reward/value_loss"] > 0.0
    assert given.snapshot_parts == {"reward_model": model, "intrinsic_critic": critic}
    assert given.components["critic"].settings["learning_rate"] == 3e-4
    assert given.settings.weight == 0.5


def test_one_learned_reward_for_several_agents_is_refused(run_steps: Any) -> None:
    @middleware(reads=("train_data",), writes=("train_data",))
    def for_two_agents(ctx: OnlineRLContext) -> None:
        ctx.train_data["adv"] = torch.ones(3, 2, 2)

    critic = IntrinsicCritic((1,), hidden_sizes=(4,))
    given = IntrinsicAdvantage(Constant(learns_first=True), critic)
    with pytest.raises(StructureError, match=r"are \[3, 2, 2\], .* rewards \[3, 2\]"):
        run_steps(give_advantages, for_two_agents, given)


def test_an_argument_that_is_not_a_critic_is_refused() -> None:
    with pytest.raises(ConfigError, match="IntrinsicAdvantage takes an IntrinsicCritic"):
        IntrinsicAdvantage(Constant(learns_first=True), torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_an_argument_that_is_not_a_reward_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="RewardLearner takes a RewardModel"):
        RewardLearner(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
