"""Batch-constrained deep Q-learning."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.errors import SpaceError
from dmiddleware.model import BCQNetwork
from dmiddleware.policy import BCQPolicy
from dmiddleware.tree import Batch, index_rows

from .mixed_data import Follow, bc_regret, mixed_rows, regret, train

SMALL = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [16], "vae_hidden_sizes": [16]}


def made(**options: Any) -> BCQPolicy:
    return BCQPolicy.for_env(Follow(), seed=0, model=SMALL, **options)


def some_rows() -> Batch:
    return index_rows(mixed_rows(), slice(0, 32))


def network(policy: BCQPolicy) -> BCQNetwork:
    assert isinstance(policy.model, BCQNetwork)
    return policy.model


def test_the_losses_are_those_of_algorithm_1() -> None:
    options = {"n_actions": 3, "min_weight": 0.6, "max_perturbation": 0.2}
    policy, rows = made(**options), some_rows()
    model, raw = network(policy), rows["action"] / 2
    policy.learn_generator.manual_seed(0)
    noise, latent, next_latent = policy.draw(dict(rows.items())).values()
    policy.learn_generator.manual_seed(0)
    with torch.no_grad():
        mean, std = model.vae.encode(rows["obs"], raw)
        rebuilt = model.vae.decode(rows["obs"], mean + std * noise)
        normal = torch.distributions.Normal(0.0, 1.0)
        divergence = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, std), normal
        )
        vae_loss = (rebuilt - raw).square().mean() + 0.5 * divergence.mean()
        q = model.critic(rows["obs"], raw)
    output = policy.learn_mode.forward(rows)
    assert output["vae_loss"] == pytest.approx(vae_loss.item(), rel=1e-4)

    # The autoencoder has made its step; the targets have moved after the update.
    with torch.no_grad():
        best = torch.full((len(raw),), -torch.inf)
        before = made(**options)
        for n in range(3):
            part = next_latent[n * len(raw) : (n + 1) * len(raw)].clamp(-0.5, 0.5)
            drawn = model.vae.decode(rows["next_obs"], part)
            offset = before.model.actor(rows["next_obs"], drawn)
            action = (drawn + 0.2 * offset).clamp(-1, 1)
            first, second = before.model.critic(rows["next_obs"], action)
            mixed = 0.6 * torch.minimum(first, second) + 0.4 * torch.maximum(first, second)
            best = torch.maximum(best, mixed)
        target = rows["reward"] + 0.99 * best * ~rows["terminated"]
        critic_loss = (q - target).square().mean(-1).sum()
        drawn = model.vae.decode(rows["obs"], latent.clamp(-0.5, 0.5))
        action = (drawn + 0.2 * before.model.actor(rows["obs"], drawn)).clamp(-1, 1)
        actor_loss = -model.critic(rows["obs"], action)[0].mean()
    assert output["critic_loss"] == pytest.approx(critic_loss.item(), rel=1e-4)
    assert output["actor_loss"] == pytest.approx(actor_loss.item(), rel=1e-4)
    total = vae_loss + critic_loss + actor_loss
    assert output["total_loss"] == pytest.approx(total.item(), rel=1e-4)


def test_the_losses_of_others_do_not_change_the_autoencoder() -> None:
    policy, rows = made(learning_rate_vae=1e-12), some_rows()
    before = [parameter.clone() for parameter in network(policy).vae.parameters()]
    for _ in range(3):
        policy.learn_mode.forward(rows)
    for old, new in zip(before, network(policy).vae.parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=1e-9)


def test_it_acts_by_the_best_of_the_drawn_actions() -> None:
    policy, obs = made(n_actions=200), torch.rand(5, 2)
    model = network(policy)
    action = policy.eval_mode.forward(obs)["action"] / 2
    latent = (torch.rand(2000, 5, 2) - 0.5).clamp(-0.5, 0.5)
    with torch.no_grad():
        every = obs.expand(2000, 5, 2)
        drawn = model.vae.decode(every.reshape(-1, 2), latent.reshape(-1, 2))
        drawn = drawn + 0.05 * model.actor(every.reshape(-1, 2), drawn)
        value = model.critic(every.reshape(-1, 2), drawn)[0].view(2000, 5)
        chosen = model.critic(obs, action)[0]
    assert (chosen > value.quantile(0.9, dim=0)).all()


def test_actions_stay_near_those_of_the_data() -> None:
    """Where the data has one action, no other is taken, whatever its value is."""
    rows = some_rows()
    rows["action"] = torch.full_like(rows["action"], 1.0)
    policy = made(max_perturbation=0.1, learning_rate_vae=1e-2)
    for _ in range(300):
        policy.learn_mode.forward(rows)
    action = policy.eval_mode.forward(rows["obs"])["action"]
    assert (action - 1.0).abs().max() < 0.3


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(SpaceError, match="needs a Box of actions"):
        BCQPolicy.for_env(gym.make("CartPole-v1"))


def test_evaluations_do_not_change_what_is_collected() -> None:
    policies = made(), made()
    policies[0].eval_mode.forward(torch.zeros(3, 2))
    actions = [policy.collect_mode.forward(torch.zeros(3, 2))["action"] for policy in policies]
    assert torch.equal(*actions)


@pytest.mark.slow
@pytest.mark.learning
def test_it_beats_cloning_on_mixed_data() -> None:
    policy = made(learning_rate_critic=3e-3, learning_rate_vae=3e-3)
    assert bc_regret() > 0.8
    assert regret(train(policy, 600)) < bc_regret() / 3
