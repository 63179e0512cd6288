"""Truncated quantile critics."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from dmiddleware.errors import ConfigError
from dmiddleware.policy import TQCPolicy

from .one_step_task import SMALL, distance_after, random_rows

N_CRITICS, N_QUANTILES = 3, 4

MODEL = {**SMALL, "n_critics": N_CRITICS, "n_quantiles": N_QUANTILES}


def made(**learn: Any) -> TQCPolicy:
    return TQCPolicy({"model": MODEL, "seed": 0, "n_dropped_quantiles": 1, **learn})


def noise_of(policy: TQCPolicy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the noise of the next update of a batch of 8."""
    generator = torch.Generator()
    generator.set_state(policy.learn_generator.get_state())
    noise, next_noise = torch.randn(2, 8, 2, generator=generator)
    return noise, next_noise


def drawn(actor: Any, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return actions and their log-densities."""
    output = actor(obs)
    raw = output["mu"] + output["sigma"] * noise
    log_prob = torch.distributions.Normal(output["mu"], output["sigma"]).log_prob(raw)
    return raw.tanh(), (log_prob - (1 - raw.tanh().square()).log()).sum(-1)


def test_the_critics_learn_the_mixture_without_its_largest_quantiles() -> None:
    policy, data = made(alpha=0.5), random_rows()
    parts = policy.components
    _, next_noise = noise_of(policy)
    with torch.no_grad():
        action, log_prob = drawn(parts["actor"].module, data["next_obs"], next_noise)
        following = parts["critic"].target(data["next_obs"], action)
        quantiles = parts["critic"].module(data["obs"], data["action"])
    total = 0.0
    for b in range(8):
        pooled = sorted(following[:, b].flatten().tolist())[:-N_CRITICS]
        assert len(pooled) == N_CRITICS * (N_QUANTILES - 1)
        bootstrap = 0.0 if data["terminated"][b] else 0.99
        targets = [
            data["reward"][b].item() + bootstrap * (z - 0.5 * log_prob[b].item()) for z in pooled
        ]
        for critic in range(N_CRITICS):
            for m, quantile in enumerate(quantiles[critic, b].tolist()):
                tau = (2 * m + 1) / (2 * N_QUANTILES)
                for target in targets:
                    error = target - quantile
                    huber = 0.5 * error**2 if abs(error) <= 1 else abs(error) - 0.5
                    total += abs(tau - (error < 0)) * huber / (N_QUANTILES * len(targets) * 8)
    output = policy.learn_mode.forward(data)
    assert output["critic_loss"] == pytest.approx(total, rel=1e-4)
    assert output["q_value"] == pytest.approx(quantiles.mean().item(), rel=1e-4)


def test_the_actor_maximizes_the_mean_of_all_quantiles() -> None:
    policy, data = made(alpha=0.5), random_rows()
    parts = policy.components
    noise, _ = noise_of(policy)
    with torch.no_grad():
        action, log_prob = drawn(parts["actor"].module, data["obs"], noise)
    output = policy.learn_mode.forward(data)
    with torch.no_grad():
        # The actor follows the critics after their step.
        value = parts["critic"].module(data["obs"], action).permute(1, 0, 2).flatten(1).mean(-1)
    assert output["policy_loss"] == pytest.approx((0.5 * log_prob - value).mean().item(), rel=1e-4)


def test_the_networks_are_those_of_the_paper() -> None:
    env = gym.make("Pendulum-v1")
    critic = TQCPolicy.for_env(env).model.critic
    assert critic(torch.zeros(2, 3), torch.zeros(2, 1)).shape == (5, 2, 25)
    assert [layer.weight.shape[-1] for layer in critic.layers[::2]] == [512, 512, 512, 25]
    small = TQCPolicy.for_env(env, model={"n_critics": 2}).model.critic
    assert (small.n_critics, small.n_quantiles) == (2, 25)


@pytest.mark.parametrize("dropped", [N_QUANTILES, -1, 1.5])
def test_a_target_without_quantiles_is_refused(dropped: float) -> None:
    with pytest.raises(ConfigError, match="n_dropped_quantiles"):
        made(n_dropped_quantiles=dropped)


def test_critics_without_quantiles_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set model\.n_quantiles"):
        TQCPolicy({"model": {**MODEL, "n_quantiles": None}})


def test_weights_of_prioritized_replay_enter_the_loss() -> None:
    policy, data = made(), random_rows()
    data["weight"] = torch.zeros(8)
    output = policy.learn_mode.forward(data)
    assert output["critic_loss"] == 0.0
    assert output["priority"].shape == (8,)
    assert (output["priority"] > 0).all()


def test_an_interrupted_run_continues_bit_for_bit() -> None:
    whole, first = made(), made()
    outputs = [whole.learn_mode.forward(random_rows(seed=seed)) for seed in range(4)]
    for seed in range(2):
        first.learn_mode.forward(random_rows(seed=seed))
    second = TQCPolicy({"model": MODEL, "seed": 1, "n_dropped_quantiles": 1})
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    assert [second.learn_mode.forward(random_rows(seed=seed)) for seed in range(2, 4)] == outputs[
        2:
    ]


@pytest.mark.slow
@pytest.mark.learning
def test_it_learns_to_follow_a_target() -> None:
    """One step: the reward is highest where the action equals the first entry of obs."""
    rates = {f"learning_rate_{part}": 3e-3 for part in ("q", "policy", "alpha")}
    policy = TQCPolicy(
        {
            "model": {**MODEL, "action_shape": 1},
            "seed": 0,
            **rates,
            "target_entropy": -3.0,
            "n_dropped_quantiles": 1,
        }
    )
    assert distance_after(600, policy) < 0.15
