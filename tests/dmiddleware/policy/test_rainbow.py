"""Noisy networks, and Rainbow, which explores with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.classic import as_command_mode
from dmiddleware.policy import C51Policy, DQNPolicy, IQNPolicy, QRDQNPolicy, RainbowPolicy
from dmiddleware.rl import categorical_target, taken_rows
from tests.dmiddleware.policy.discrete_rows import discrete_rows

SMALL = {"obs_shape": 4, "action_shape": 3, "encoder_hidden_sizes": [16]}
NOISY = pytest.mark.parametrize(
    "make", [DQNPolicy, C51Policy, QRDQNPolicy, IQNPolicy, RainbowPolicy]
)


def made(make: Any = RainbowPolicy, seed: int = 0, **cfg: Any) -> Any:
    return make({"model": {**SMALL, "noisy": True}, "seed": seed, **cfg})


def batch(n: int = 8, seed: int = 0) -> Any:
    return discrete_rows(n, 4, 3, seed=seed, discount=torch.full((n,), 0.99**3))


@NOISY
def test_each_env_acts_with_noise_of_its_own_and_evaluating_has_none(make: Any) -> None:
    policy, obs = made(make), torch.ones(40, 4)
    logits = [policy.collect_mode.forward(obs)["logit"] for _ in range(2)]
    assert (logits[0] - logits[1]).abs().amax(1).min() > 1e-4
    assert (logits[0][1:] - logits[0][:-1]).abs().amax(1).min() > 1e-4
    before = policy.generator.get_state()
    with torch.no_grad():
        still = policy.model(obs)["logit"]
    assert torch.equal(policy.eval_mode.forward(obs)["action"], still.argmax(-1))
    assert torch.equal(policy.generator.get_state(), before)


@NOISY
def test_noise_takes_the_place_of_random_actions(make: Any) -> None:
    assert made(make).explores
    plain = make({"model": {**SMALL, "noisy": False}})
    assert not plain.explores


@NOISY
def test_an_interrupted_run_continues_bit_for_bit(make: Any) -> None:
    whole, first, second = (made(make, seed, n_step=3) for seed in (0, 0, 1))
    obs = torch.randn(5, 4)
    outputs = [whole.learn_mode.forward(batch(seed=seed)) for seed in range(4)]
    for policy in (whole, first):
        policy.collect_mode.forward(obs)
    for seed in range(2):
        first.learn_mode.forward(batch(seed=seed))
    second.learn_mode.load_state_dict(first.learn_mode.state_dict())
    resumed = [second.learn_mode.forward(batch(seed=seed)) for seed in (2, 3)]
    for ours, theirs in zip(resumed, outputs[2:], strict=True):
        assert ours["total_loss"] == theirs["total_loss"]
    logits = [policy.collect_mode.forward(obs)["logit"] for policy in (whole, second)]
    assert torch.equal(*logits)


def test_the_loss_has_three_draws_of_the_noise() -> None:
    policy, data = made(), batch()
    part = policy.components["q"]
    generator = torch.Generator()
    generator.set_state(policy.learn_generator.get_state())
    n_noise = policy.model.n_noise
    online, target, choice = (torch.randn(n_noise, generator=generator) for _ in range(3))
    with torch.no_grad():
        best = part.module(data["next_obs"], choice)["logit"].argmax(-1)
        prob = taken_rows(part.target(data["next_obs"], target)["log_prob"].exp(), best)
        wanted = categorical_target(
            prob,
            data["reward"],
            data["terminated"],
            discount=0.99**3,
            support=part.target.support,
        )
        log_prob = taken_rows(part.module(data["obs"], online)["log_prob"], data["action"])
    loss = -(wanted * log_prob).sum(-1).mean()
    assert policy.learn_mode.forward(data)["total_loss"] == pytest.approx(loss.item(), rel=1e-4)


def test_rainbow_has_all_extensions_by_default() -> None:
    policy = RainbowPolicy({"model": SMALL, "seed": 0})
    model = policy.model
    assert model.n_noise > 0
    assert model.value_head is not None
    assert (policy.n_step, policy.cfg.double) == (3, True)
    assert policy.learn_mode.forward(batch())["priority"].shape == (8,)
    mode = as_command_mode(policy, user="the test")
    setting = mode.get_setting_collect({"envstep": 0})
    assert setting == {"eps": 0.0}


def test_noise_learns_how_large_it_is() -> None:
    policy = made(learning_rate=1e-3)
    head = policy.model.head[0]
    before = head.weight_sigma.detach().clone()
    for seed in range(3):
        policy.learn_mode.forward(batch(seed=seed))
    assert not torch.equal(head.weight_sigma, before)
