"""EDAC and SAC-N."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.policy import EDACPolicy
from dmiddleware.tree import Batch, as_tree

from .mixed_data import Follow, bc_regret, regret, train

SMALL = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [16], "n_critics": 4}


def made(model: dict[str, Any] = SMALL, **options: Any) -> EDACPolicy:
    shapes = {"obs_shape": 3, "action_shape": 2, "action_space": "continuous"}
    return EDACPolicy({"model": {**shapes, **model}, "seed": 0, **options})


def some_rows() -> Batch:
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(2, 32, 3, generator=generator)
    return as_tree(
        {
            **{"obs": obs[0], "next_obs": obs[1], "reward": obs[0, :, 0]},
            "action": torch.rand(32, 2, generator=generator) * 2 - 1,
            "terminated": torch.arange(32) % 4 == 0,
        }
    )


def critic_of(policy: EDACPolicy) -> nn.Module:
    return policy.critic.module


def similarity_of_all_pairs(policy: EDACPolicy, rows: Batch) -> torch.Tensor:
    """Equation 4 by a loop over pairs of critics, each differentiated by itself."""
    action = rows["action"].clone().requires_grad_()
    q = critic_of(policy)(rows["obs"], action)
    gradients = [torch.autograd.grad(values.sum(), action, create_graph=True)[0] for values in q]
    total = torch.zeros(())
    for one, other in itertools.permutations(gradients, 2):
        total = total + torch.cosine_similarity(one, other, dim=-1).mean()
    return total / (len(gradients) - 1)


@pytest.mark.parametrize("backup_entropy", [True, False])
@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_the_loss_of_the_critics_is_that_of_algorithm_1(eta: float, backup_entropy: bool) -> None:
    policy, rows = made(eta=eta, backup_entropy=backup_entropy), some_rows()
    policy.learn_generator.manual_seed(0)
    next_noise = policy.draw(dict(rows.items()))["next_noise"]
    policy.learn_generator.manual_seed(0)
    with torch.no_grad():
        output = policy.actor.module(rows["next_obs"])
        before = output["mu"] + output["sigma"] * next_noise
        gaussian = torch.distributions.Normal(output["mu"], output["sigma"])
        action = before.tanh()
        log_prob = (gaussian.log_prob(before) - (1 - action.square()).log()).sum(-1)
        value = policy.critic.target(rows["next_obs"], action).amin(0)
        if backup_entropy:
            value = value - log_prob  # the first temperature is 1
        target = rows["reward"] + 0.99 * value * ~rows["terminated"]
        q = critic_of(policy)(rows["obs"], rows["action"])
        wanted = (q - target).square().mean(-1).sum()
    similarity = similarity_of_all_pairs(policy, rows)
    got = policy.learn_mode.forward(rows)
    assert got["critic_loss"] == pytest.approx((wanted + eta * similarity).item(), rel=1e-4)
    assert ("gradient_similarity" in got) is (eta > 0)
    if eta > 0:
        assert got["gradient_similarity"] == pytest.approx(similarity.item(), rel=1e-4)


def test_the_step_follows_the_gradient_of_gradients() -> None:
    policy, rows = made(eta=3.0), some_rows()
    rows["reward"], rows["terminated"] = rows["reward"] * 0, rows["terminated"] | True
    q = critic_of(policy)(rows["obs"], rows["action"])
    loss = q.square().mean(-1).sum() + 3.0 * similarity_of_all_pairs(policy, rows)
    parameters = list(critic_of(policy).parameters())
    wanted = torch.autograd.grad(loss, parameters, allow_unused=True)
    policy.learn_mode.forward(rows)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


def test_the_penalty_makes_critics_disagree() -> None:
    similarities = []
    for eta in (1e-9, 5.0):
        model = {**SMALL, "critic_hidden_sizes": [32, 32]}
        policy, rows = made(model, eta=eta, learning_rate_q=1e-3), some_rows()
        for _ in range(100):
            similarity = policy.learn_mode.forward(rows)["gradient_similarity"]
        similarities.append(similarity)
    assert similarities[1] < similarities[0] - 0.5


def test_a_single_critic_is_refused_unless_there_is_no_penalty() -> None:
    with pytest.raises(ConfigError, match=r"at least two critics.*n_critics=1"):
        made({**SMALL, "n_critics": 1})
    made({**SMALL, "n_critics": 1}, eta=0.0)


@pytest.mark.slow
@pytest.mark.learning
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_it_beats_cloning_on_mixed_data(eta: float) -> None:
    model = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [32, 32], "n_critics": 4}
    rates = {"learning_rate_q": 3e-3, "learning_rate_policy": 3e-3}
    policy = EDACPolicy.for_env(Follow(), seed=0, model=model, eta=eta, alpha=0.1, **rates)
    assert bc_regret() > 0.8
    assert regret(train(policy, 600)) < bc_regret() / 3
