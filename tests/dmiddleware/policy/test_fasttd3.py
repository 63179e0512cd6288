"""FastTD3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import FastTD3Policy
from dmiddleware.rl import categorical_target
from dmiddleware.rollout import RolloutCollector

from .one_step_task import SMALL, distance_after, random_rows

ATOMS = {**SMALL, "n_atoms": 11, "v_min": -5.0, "v_max": 5.0}


def made(**cfg: Any) -> FastTD3Policy:
    return FastTD3Policy({"model": ATOMS, "seed": 0, "batch_size": 8, "obs_norm": False, **cfg})


def test_the_target_is_the_distribution_with_the_smaller_mean() -> None:
    policy, data, support = made(target_noise=0.0), random_rows(), torch.linspace(-5.0, 5.0, 11)
    with torch.no_grad():  # so that neither critic is always the smaller one
        for parameter in policy.critic.target.parameters():
            parameter.mul_(5.0)
    with torch.no_grad():
        next_action = policy.actor.target(data["next_obs"])["mu"].tanh()
        probs = policy.critic.target(data["next_obs"], next_action).softmax(-1)
        log_probs = policy.critic.module(data["obs"], data["action"]).log_softmax(-1)
    smaller = [int((probs[:, row] @ support).argmin()) for row in range(8)]
    assert set(smaller) == {0, 1}
    chosen = torch.stack([probs[critic, row] for row, critic in enumerate(smaller)])
    target = categorical_target(
        chosen, data["reward"], data["terminated"], discount=0.99, support=support
    )
    loss = -(target * log_probs).sum(-1).sum(0).mean()
    assert policy.learn_mode.forward(data)["critic_loss"] == pytest.approx(float(loss), rel=1e-4)


def test_the_actor_follows_the_smaller_mean() -> None:
    policy, data, support = made(actor_update_freq=1), random_rows(), torch.linspace(-5.0, 5.0, 11)
    chosen = policy.actor.module(data["obs"])["mu"].tanh().detach()
    output = policy.learn_mode.forward(data)
    with torch.no_grad():
        means = policy.critic.module(data["obs"], chosen).softmax(-1) @ support
    assert output["actor_loss"] == pytest.approx(-float(means.amin(0).mean()), rel=1e-4)


def test_each_env_has_noise_of_its_own_size_for_an_episode() -> None:
    policy = made(noise_sigma_min=0.2, noise_sigma=0.6)
    obs, n = torch.zeros(500, 3), 500
    state = policy.initial_state(n)
    assert not state.any()
    actions, sizes = [], []
    for _ in range(200):
        acted = policy.collect_mode.forward(obs, env_id=np.arange(n), state=state)
        state = acted["state"]
        actions.append(acted["action"])
        sizes.append(state)
    assert all(torch.equal(size, sizes[0]) for size in sizes)
    assert 0.2 <= sizes[0].min() < 0.22 and 0.58 < sizes[0].max() <= 0.6
    assert abs(sizes[0].mean() - 0.4) < 0.02
    center = policy.eval_mode.forward(obs[:1], env_id=np.arange(1))["action"]
    calm = sizes[0][:, 0] < 0.3  # hardly anything is clipped there
    spread = (torch.stack(actions) - center).square().mean(0).sqrt()[calm, 0]
    torch.testing.assert_close(spread, sizes[0][calm, 0], rtol=0.25, atol=0.0)
    other = policy.collect_mode.forward(obs, env_id=np.arange(n), state=policy.initial_state(n))
    assert not torch.equal(other["state"], state)


def test_rows_have_the_size_of_the_noise_which_changes_with_the_episode() -> None:
    with make_env_manager("Pendulum-v1", env_num=2, seed=0) as envs:
        policy = FastTD3Policy.for_env(
            envs, seed=0, model={"v_min": -2000.0, "actor_hidden_sizes": [16]}
        )
        rows = RolloutCollector(policy, envs).collect(2 * 402)
    sizes = rows["state"][..., 0]
    assert not sizes[[0, 200, 400]].any()
    for start in (1, 201):
        part = sizes[start : start + 199]
        assert torch.equal(part, part[:1].expand_as(part))
    assert (sizes[1] != sizes[201]).all()


def test_weights_decay() -> None:
    policy = made(weight_decay=0.5)
    for part in (policy.actor, policy.critic):
        assert part.optimizer is not None
        assert part.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_range_of_noise_that_is_empty_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"noise_sigma_min must be at most noise_sigma=0\.1"):
        made(noise_sigma=0.1, noise_sigma_min=0.2)
    with pytest.raises(ConfigError, match="noise"):
        made(noise="ou")


def test_it_learns_the_best_action() -> None:
    model = {**ATOMS, "action_shape": 1, "v_min": -30.0, "v_max": 1.0, "n_atoms": 51}
    rates = {"learning_rate_actor": 1e-2, "learning_rate_critic": 1e-2}
    policy = made(model=model, weight_decay=0.0, **rates)
    assert distance_after(400, policy) < 0.1
