"""Munchausen DQN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.policy import MDQNPolicy
from dmiddleware.tree import as_tree
from tests.dmiddleware.policy.discrete_rows import discrete_rows

MODEL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16]}


def made(**cfg: Any) -> MDQNPolicy:
    return MDQNPolicy({"model": MODEL, "seed": 0, **cfg})


def log_policy(q: torch.Tensor, temperature: float) -> torch.Tensor:
    return (q / temperature).softmax(-1).log()


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_the_loss_is_that_of_the_paper(clip: float) -> None:
    policy = made(loss="mse", temperature=0.3, munchausen_weight=0.8, munchausen_clip=clip)
    data = discrete_rows(8, 4, 3)
    with torch.no_grad():
        q = policy.model(data["obs"])["logit"]
        target_q = policy.q.target(data["obs"])["logit"]
        next_q = policy.q.target(data["next_obs"])["logit"]
    loss, bonuses = 0.0, []
    for row in range(8):
        # Equation 2, with the log-policy clipped.
        action = data["action"][row]
        scaled = 0.3 * float(log_policy(target_q[row], 0.3)[action])
        bonuses.append(0.8 * min(max(scaled, -clip), 0.0))
        log_prob = log_policy(next_q[row], 0.3)
        value = float((log_prob.exp() * (next_q[row] - 0.3 * log_prob)).sum())
        follows = 0.0 if data["terminated"][row] else 0.99 * value
        loss += (float(data["reward"][row] - q[row, action]) + bonuses[-1] + follows) ** 2 / 8
    output = policy.learn_mode.forward(data)
    assert output["total_loss"] == pytest.approx(loss, rel=1e-4)
    assert output["munchausen_bonus"] == pytest.approx(sum(bonuses) / 8, rel=1e-4)


def test_only_allowed_actions_have_a_probability() -> None:
    policy, data = made(temperature=0.3), discrete_rows(8, 4, 3)
    mask = torch.zeros(8, 3, dtype=torch.bool).scatter_(1, data["action"].unsqueeze(-1), True)
    output = policy.learn_mode.forward(as_tree({**data, "action_mask": mask}))
    assert output["munchausen_bonus"] == 0.0  # the only allowed action has the probability 1


def test_what_does_not_belong_to_it_is_refused() -> None:
    for name, value in (("double", True), ("n_step", 3)):
        with pytest.raises(ConfigError, match=name):
            made(**{name: value})


def test_it_finds_the_values_of_one_state() -> None:
    """Every action leads to the same state.

    With V the soft value, Q = r + α (Q - V) + γ V, so (1 - α) Q = r + (γ - α) V, and
    V = (1 - α) τ log Σ exp(r / ((1 - α) τ)) / (1 - γ).
    """
    policy = made(
        model={"obs_shape": 1, "action_shape": 2, "encoder_hidden_sizes": [8]},
        discount=0.8, temperature=0.3, munchausen_weight=0.5, munchausen_clip=10.0,
        learning_rate=0.01, target_update_freq=10,
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
    for _ in range(800):
        policy.learn_mode.forward(batch)
    value = 0.15 * math.log(sum(math.exp(r / 0.15) for r in (1.0, 0.8))) / 0.2
    q = policy.collect_mode.forward(obs)["logit"][0]
    torch.testing.assert_close(q, (reward + 0.3 * value) / 0.5, rtol=0, atol=0.03)
