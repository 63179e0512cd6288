"""Soft Q-learning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.policy import SQLPolicy
from dmiddleware.rl import soft_value
from dmiddleware.tree import as_tree
from tests.dmiddleware.policy.discrete_rows import discrete_rows

MODEL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16]}


def made(**cfg: Any) -> SQLPolicy:
    return SQLPolicy({"model": MODEL, "seed": 0, "alpha": 0.3, **cfg})


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_loss_is_that_of_the_paper(is_masked: bool) -> None:
    policy, data = made(loss="mse"), discrete_rows(8, 4, 3)
    allowed = torch.ones(8, 3, dtype=torch.bool)
    if is_masked:
        allowed[::2, 1] = False
        data["next_action_mask"] = allowed
    with torch.no_grad():
        q = policy.model(data["obs"])["logit"]
        next_q = policy.q.target(data["next_obs"])["logit"]
    loss = 0.0
    for row in range(8):
        # Equation 4, with a sum over the allowed actions in place of the integral.
        powers = [math.exp(float(next_q[row, a]) / 0.3) for a in range(3) if allowed[row, a]]
        value = 0.0 if data["terminated"][row] else 0.3 * math.log(sum(powers))
        error = float(data["reward"][row] + 0.99 * value - q[row, data["action"][row]])
        loss += error**2 / 8
    assert policy.learn_mode.forward(data)["total_loss"] == pytest.approx(loss, rel=1e-4)


def test_the_soft_value_is_the_expected_value_plus_the_weighted_entropy() -> None:
    q = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]])
    prob = (q / 0.5).softmax(-1)
    wanted = (prob * q).sum(-1) - 0.5 * (prob * prob.log()).sum(-1)
    torch.testing.assert_close(soft_value(q, 0.5), wanted)
    assert soft_value(torch.tensor([1e4, 0.0]), 1e-3) == 1e4


def test_collecting_draws_actions_by_their_values_and_evaluating_takes_the_best() -> None:
    policy, obs = made(), torch.randn(1, 4).expand(20_000, 4)
    output = policy.collect_mode.forward(obs)
    frequency = output["action"].bincount(minlength=3) / 20_000
    torch.testing.assert_close(
        frequency, (output["logit"][0] / 0.3).softmax(-1), rtol=0, atol=0.015
    )
    assert policy.eval_mode.forward(obs)["action"].unique() == output["logit"][0].argmax()
    uniform = policy.collect_mode.forward(obs, eps=1.0)["action"].bincount(minlength=3) / 20_000
    torch.testing.assert_close(uniform, torch.full((3,), 1 / 3), rtol=0, atol=0.015)


def test_it_explores_by_itself_unless_it_needs_an_epsilon() -> None:
    assert made().explores
    assert not made(eps=0.1).explores


def test_a_best_next_action_has_no_place_in_it() -> None:
    with pytest.raises(ConfigError, match="double"):
        made(double=True)


def test_it_finds_the_soft_values_of_one_state() -> None:
    """Every action leads to the same state, so V = α log Σ exp(r / α) / (1 - γ)."""
    policy = made(
        model={"obs_shape": 1, "action_shape": 2, "encoder_hidden_sizes": [8]},
        discount=0.5, learning_rate=0.01, target_update_freq=10,
    )  # fmt: skip
    reward, obs = torch.tensor([1.0, 0.8]), torch.ones(2, 1)
    batch = as_tree(
        {
            "obs": obs,
            "next_obs": obs,
            "action": torch.arange(2),
            "reward": reward,
            "terminated": torch.zeros(2, dtype=torch.bool),
        }
    )
    for _ in range(400):
        policy.learn_mode.forward(batch)
    value = 0.3 * math.log(sum(math.exp(r / 0.3) for r in (1.0, 0.8))) / 0.5
    q = policy.collect_mode.forward(obs)["logit"][0]
    torch.testing.assert_close(q, reward + 0.5 * value, rtol=0, atol=0.01)
