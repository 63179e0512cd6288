"""Implicit quantile networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.policy import IQNPolicy
from tests.dmiddleware.policy.discrete_rows import discrete_rows

MODEL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16], "n_quantiles": 5}


def made(**learn: Any) -> IQNPolicy:
    return IQNPolicy({"model": MODEL, "seed": 0, "n_tau": 3, "n_tau_target": 4, **learn})


def batch(n: int = 6) -> Any:
    return discrete_rows(n, 4, 3, ends_every=3)


@pytest.mark.parametrize("double", [True, False])
def test_the_loss_is_that_of_the_paper(double: bool) -> None:
    policy, data = made(double=double), batch()
    part = policy.components["q"]
    generator = torch.Generator()
    generator.set_state(policy.learn_generator.get_state())
    tau, tau_target = (torch.rand(6, n, generator=generator) for n in (3, 4))
    wanted = 0.0
    with torch.no_grad():
        own = part.module(data["obs"], tau=tau)["quantiles"]
        following = part.target(data["next_obs"], tau=tau_target)
        judge = following["logit"]
        if double:
            choice = torch.rand(6, 5, generator=generator)
            judge = part.module(data["next_obs"], tau=choice)["logit"]
    for row in range(6):
        best = int(judge[row].argmax())
        for i in range(3):
            for j in range(4):
                # Equation 3.
                z = own[row, data["action"][row], i]
                follows = 0.0 if data["terminated"][row] else following["quantiles"][row, best, j]
                error = float(data["reward"][row] + 0.99 * follows - z)
                huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                wanted += abs(float(tau[row, i]) - (error < 0)) * huber / 4 / 6
    assert policy.learn_mode.forward(data)["total_loss"] == pytest.approx(wanted, rel=1e-4)


def test_acting_draws_fractions_and_evaluating_does_not() -> None:
    policy, obs = made(), torch.randn(50, 4)
    logits = [policy.collect_mode.forward(obs)["logit"] for _ in range(2)]
    assert not torch.equal(*logits)
    before = policy.generator.get_state()
    with torch.no_grad():
        fixed = policy.model(obs)["logit"]
    assert torch.equal(policy.eval_mode.forward(obs)["action"], fixed.argmax(-1))
    assert torch.equal(policy.generator.get_state(), before)


def test_acting_continues_with_the_same_draws_after_a_restart() -> None:
    policy, other, obs = made(), IQNPolicy({"model": MODEL, "seed": 1}), torch.randn(9, 4)
    policy.collect_mode.forward(obs)
    other.learn_mode.load_state_dict(policy.learn_mode.state_dict())
    logits = [one.collect_mode.forward(obs)["logit"] for one in (policy, other)]
    assert torch.equal(*logits)


def test_it_learns_a_distribution_and_not_only_its_mean() -> None:
    """One state: the return is 0 or 1 with the same probability."""
    policy = made(learning_rate=0.01)
    data = batch(64)
    data["obs"][:] = 0.0
    data["terminated"][:] = True
    data["reward"][:] = (torch.arange(64) % 2).float()
    for _ in range(300):
        policy.learn_mode.forward(data)
    tau = torch.tensor([[0.1, 0.9]])
    with torch.no_grad():
        low, high = policy.model(torch.zeros(1, 4), tau=tau)["quantiles"][0].T
    assert low.max() < 0.3
    assert high.min() > 0.7
