"""Implicit Q-learning."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.errors import SpaceError
from dmiddleware.policy import IQLPolicy
from dmiddleware.policy.iql import expectile_loss
from dmiddleware.tree import Batch, index_rows

from .mixed_data import Follow, bc_regret, mixed_rows, regret, train

SMALL = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [16]}


def made(**options: Any) -> IQLPolicy:
    return IQLPolicy.for_env(Follow(), seed=0, model=SMALL, **options)


def some_rows() -> Batch:
    return index_rows(mixed_rows(), slice(0, 32))


def test_the_losses_are_those_of_equations_5_to_7() -> None:
    policy, rows = made(expectile=0.8, inverse_temperature=2.0), some_rows()
    parts = policy.components
    actor, critic, value = (parts[name].module for name in ("actor", "critic", "value"))
    raw = rows["action"] / 2
    with torch.no_grad():
        q = parts["critic"].target(rows["obs"], raw).amin(0)
        first_errors = q - value(rows["obs"])
        value_loss = ((0.8 - (first_errors < 0).float()).abs() * first_errors.square()).mean()
        gaussian = torch.distributions.Normal(*actor(rows["obs"]).values())
        log_prob = gaussian.log_prob(raw).sum(-1)
        q_before = critic(rows["obs"], raw)
    output = policy.learn_mode.forward(rows)
    assert output["value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    with torch.no_grad():  # the state value has made its step
        weight = (2.0 * (q - value(rows["obs"]))).exp()
        following = value(rows["next_obs"]) * ~rows["terminated"]
    wanted = -(weight * log_prob).mean().item()
    assert output["policy_loss"] == pytest.approx(wanted, rel=1e-4)
    target = rows["reward"] + 0.99 * following
    wanted = (q_before - target).square().mean(-1).sum().item()
    assert output["critic_loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("expectile", "wanted"), [(0.5, 0.5), (0.9, 0.9), (0.1, 0.1)])
def test_the_expectile_of_two_equal_shares(expectile: float, wanted: float) -> None:
    """Of the values 0 and 1, the loss is least at the expectile itself."""
    samples = torch.tensor([0.0, 1.0])
    grid = torch.linspace(0, 1, 101)
    losses = [expectile_loss(samples - at, expectile).item() for at in grid]
    assert grid[losses.index(min(losses))].item() == pytest.approx(wanted, abs=0.011)


def test_weights_of_advantages_are_limited() -> None:
    policy, rows = made(inverse_temperature=1e6, max_advantage_weight=7.0), some_rows()
    assert 0.0 <= policy.learn_mode.forward(rows)["advantage_weight"] <= 7.0


def test_evaluating_takes_the_mean_and_collecting_draws() -> None:
    policy, obs = made(), torch.rand(64, 2)
    greedy = [policy.eval_mode.forward(obs)["action"] for _ in range(2)]
    drawn = [policy.collect_mode.forward(obs)["action"] for _ in range(2)]
    assert torch.equal(*greedy)
    assert not torch.equal(*drawn)
    assert torch.stack(drawn).abs().max() <= 2.0


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(SpaceError, match="needs a Box of actions"):
        IQLPolicy.for_env(gym.make("CartPole-v1"))


def test_collectors_receive_the_actor_alone() -> None:
    names = made().collect_mode.state_dict()["model"]
    assert names
    assert all(name.startswith("actor.") for name in names)


@pytest.mark.slow
@pytest.mark.learning
def test_it_beats_cloning_on_mixed_data() -> None:
    rates = {f"learning_rate_{part}": 3e-3 for part in ("actor", "critic", "value")}
    policy = made(**rates, inverse_temperature=10.0, target_tau=0.05)
    assert bc_regret() > 0.8
    assert regret(train(policy, 400)) < bc_regret() / 3
