"""D4PG."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dmiddleware.errors import ConfigError, PolicyOutputError
from dmiddleware.policy import D4PGPolicy
from dmiddleware.tree import as_tree

from .one_step_task import SMALL, distance_after, random_rows

ATOMS = {**SMALL, "n_atoms": 11, "v_min": -5.0, "v_max": 5.0}


def made(**cfg: Any) -> D4PGPolicy:
    return D4PGPolicy({"model": ATOMS, "seed": 0, "n_step": 1, **cfg})


def projected(prob: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return probabilities at -5, -4, …, 5 of returns ``[N]``, by the loop of the C51 paper."""
    shares = torch.zeros(11)
    for mass, value in zip(prob, moved.clamp(-5.0, 5.0), strict=True):
        low = int(torch.floor(value + 5.0))
        part = float(value + 5.0) - low
        shares[low] += mass * (1 - part)
        if part:
            shares[low + 1] += mass * part
    return shares


def test_the_losses_are_those_of_the_paper() -> None:
    policy, data, support = made(), random_rows(), torch.linspace(-5.0, 5.0, 11)
    with torch.no_grad():
        next_action = policy.actor.target(data["next_obs"])["mu"].tanh()
        next_prob = policy.critic.target(data["next_obs"], next_action)[0].softmax(-1)
        log_prob = policy.critic.module(data["obs"], data["action"])[0].log_softmax(-1)
    losses = []
    for row in range(8):
        discount = 0.0 if data["terminated"][row] else 0.99
        target = projected(next_prob[row], data["reward"][row] + discount * support)
        losses.append(float(-(target * log_prob[row]).sum()))
    chosen = policy.actor.module(data["obs"])["mu"].tanh().detach()
    output = policy.learn_mode.forward(data)
    assert output["critic_loss"] == pytest.approx(sum(losses) / 8, rel=1e-4)
    with torch.no_grad():
        prob = policy.critic.module(data["obs"], chosen)[0].softmax(-1)
    assert output["actor_loss"] == pytest.approx(-float((prob @ support).mean()), rel=1e-4)


def test_weights_weigh_the_loss_and_priorities_are_divergences() -> None:
    data = random_rows()
    outputs = [
        made(priority=True).learn_mode.forward(as_tree({**data, **columns}))
        for columns in ({}, {"weight": torch.full((8,), 0.5)})
    ]
    assert outputs[1]["critic_loss"] == pytest.approx(0.5 * outputs[0]["critic_loss"])
    assert torch.equal(outputs[0]["priority"], outputs[1]["priority"])
    assert (outputs[0]["priority"] >= 0).all() and outputs[0]["priority"].max() > 0.1


def test_it_solves_a_task_of_one_step() -> None:
    model = {**ATOMS, "action_shape": 1, "v_min": -40.0, "v_max": 0.0}
    policy = made(model=model, learning_rate_critic=3e-3, learning_rate_actor=1e-3)
    assert distance_after(400, policy) < 0.15


def test_returns_outside_of_the_range_are_refused_or_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    returns = torch.tensor([-300.0])
    plain = D4PGPolicy({"model": SMALL, "seed": 0, "n_step": 1})
    with pytest.raises(ConfigError, match="v_min"):
        plain.learn_mode.spec.check_returns(returns, torch.zeros(1), returns)
    policy, data = made(), random_rows()
    policy.learn_mode.spec.check_returns(returns, torch.zeros(1), returns)
    data["reward"][:] = -300.0
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert policy.learn_mode.forward(data)["clipped_share"] == 1.0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_model_without_a_support_is_refused() -> None:
    model = made().model
    del model.support
    with pytest.raises(PolicyOutputError, match="support"):
        D4PGPolicy({"seed": 0}, model=model).learn_mode.forward(random_rows())
