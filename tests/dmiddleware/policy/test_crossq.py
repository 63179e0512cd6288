"""CrossQ."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from dmiddleware import Task
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, NonFiniteLoss
from dmiddleware.policy import CrossQPolicy
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.tree import Batch, as_tree
from middleware import DataPusher, OffPolicyLearner, OnlineRLContext, StepCollector

SMALL = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [16, 16]}


def made(model: dict[str, Any] = SMALL, **options: Any) -> CrossQPolicy:
    shapes = {"obs_shape": 3, "action_shape": 2, "action_space": "continuous"}
    return CrossQPolicy({"model": {**shapes, **model}, "seed": 0, **options})


def some_rows(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(2, 32, 3, generator=generator)
    return as_tree(
        {
            **{"obs": obs[0], "next_obs": 3 * obs[1] + 1, "reward": obs[0, :, 0]},
            "action": torch.rand(32, 2, generator=generator) * 2 - 1,
            "terminated": torch.arange(32) % 4 == 0,
        }
    )


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.named_buffers()}


def drawn(actor: nn.Module, obs: torch.Tensor, noise: torch.Tensor) -> tuple[Any, Any]:
    """Return the actions that noise makes, and their log-densities."""
    output = actor(obs)
    before = output["mu"] + output["sigma"] * noise
    slope = 1.0 / before.double().cosh().square()  # of tanh
    normal = torch.distributions.Normal(output["mu"], output["sigma"])
    return before.tanh(), (normal.log_prob(before) - slope.log().float()).sum(-1)


def noise_of_next_update(policy: CrossQPolicy, rows: Batch) -> dict[str, Any]:
    policy.learn_generator.manual_seed(0)
    noise = policy.draw(dict(rows.items()))
    policy.learn_generator.manual_seed(0)
    return noise


def test_the_loss_of_the_critics_is_that_of_one_joint_forward() -> None:
    policy, rows = made(), some_rows()
    policy.learn_mode.forward(some_rows(seed=1))  # so that the statistics are not those at first
    noise = noise_of_next_update(policy, rows)
    critic, actor = policy.critic.module, policy.actor.module
    state = buffers(policy.model)
    with torch.no_grad():
        next_action, log_prob = drawn(actor.eval(), rows["next_obs"], noise["next_noise"])
        obs = torch.cat([rows["obs"], rows["next_obs"]])
        joint = critic.train()(obs, torch.cat([rows["action"], next_action]))
        q, next_q = joint[:, :32], joint[:, 32:]
        value = next_q.amin(0) - log_prob  # the first temperature is 1
        target = rows["reward"] + 0.99 * value * ~rows["terminated"]
        loss = 0.5 * (q - target).square().mean(-1).sum()
    after = buffers(critic)
    policy.model.load_state_dict(state, strict=False)
    output = policy.learn_mode.forward(rows)
    assert output["critic_loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, value in critic.named_buffers():
        torch.testing.assert_close(value, after[name])


def test_the_next_values_have_no_gradient() -> None:
    policy, rows = made(discount=1.0), some_rows()
    noise = noise_of_next_update(policy, rows)
    critic, actor = policy.critic.module, policy.actor.module
    state = buffers(policy.model)
    with torch.no_grad():
        next_action, log_prob = drawn(actor.eval(), rows["next_obs"], noise["next_noise"])
    obs = torch.cat([rows["obs"], rows["next_obs"]])
    q, next_q = critic.train()(obs, torch.cat([rows["action"], next_action])).chunk(2, 1)
    target = rows["reward"] + (next_q.detach().amin(0) - log_prob) * ~rows["terminated"]
    parameters = list(critic.parameters())
    wanted = torch.autograd.grad(0.5 * (q - target).square().mean(-1).sum(), parameters)
    policy.model.load_state_dict(state, strict=False)
    policy.learn_mode.forward(rows)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


def test_the_actor_moves_in_every_third_update_by_the_running_statistics() -> None:
    policy = made()
    for number in range(1, 7):
        rows = some_rows(number)
        actor, critic = policy.actor.module, policy.critic.module
        before = [p.clone() for p in actor.parameters()]
        of_actor = buffers(actor)
        alpha = policy.temperature.module.log_alpha.exp().item()
        noise = noise_of_next_update(policy, rows)
        output = policy.learn_mode.forward(rows)
        moved = number % 3 == 0
        assert ("policy_loss" in output) is ("entropy" in output) is moved
        changed = [not torch.equal(p, q) for p, q in zip(before, actor.parameters(), strict=True)]
        assert any(changed) is moved
        assert (policy.temperature.module.log_alpha.exp().item() != alpha) is moved
        same = [torch.equal(of_actor[name], value) for name, value in actor.named_buffers()]
        assert all(same) is not moved
        if not moved:
            continue
        for parameter, value in zip(actor.parameters(), before, strict=True):
            parameter.data.copy_(value)
        actor.load_state_dict(of_actor, strict=False)
        with torch.no_grad():
            action, log_prob = drawn(actor.train(), rows["obs"], noise["noise"])
            q = critic.eval()(rows["obs"], action).amin(0)
        assert output["policy_loss"] == pytest.approx(
            (alpha * log_prob - q).mean().item(), rel=1e-3
        )
        policy = made()  # the parameters were put back, but not the optimizer
        for seed in range(1, number + 1):
            policy.learn_mode.forward(some_rows(seed))


def test_there_are_no_target_networks() -> None:
    policy = made()
    assert not any(component.has_target for component in policy.components.values())
    with pytest.raises(ConfigError, match="target_tau"):
        made(target_tau=0.005)


def test_networks_are_those_of_the_paper() -> None:
    policy = CrossQPolicy.for_env(gym.make("Pendulum-v1"))
    kinds = [type(layer).__name__ for layer in policy.critic.module.layers]
    block = ["EnsembleLinear", "ReLU", "BatchRenorm"]
    assert kinds == ["BatchRenorm", *block, *block, "EnsembleLinear"]
    assert policy.critic.module.layers[1].weight.shape == (2, 4, 2048)
    assert (
        sum(type(layer).__name__ == "BatchRenorm" for layer in policy.actor.module.modules()) == 3
    )
    assert [
        policy.components[name].optimizer.param_groups[0]["betas"][0]  # type: ignore[union-attr]
        for name in ("critic", "actor", "temperature")
    ] == [0.5, 0.5, 0.9]


def test_running_statistics_are_saved_and_sent_to_collectors() -> None:
    policy, other = made(), made()
    for seed in range(3):
        policy.learn_mode.forward(some_rows(seed))
    obs = some_rows(9)["obs"]
    wanted = policy.eval_mode.forward(obs)["action"]
    assert not torch.equal(other.eval_mode.forward(obs)["action"], wanted)
    other.collect_mode.load_state_dict(policy.collect_mode.state_dict())
    assert torch.equal(other.eval_mode.forward(obs)["action"], wanted)
    other.learn_mode.load_state_dict(policy.learn_mode.state_dict())
    losses = [p.learn_mode.forward(some_rows(5))["critic_loss"] for p in (policy, other)]
    assert losses[0] == losses[1]


def test_rows_that_are_not_finite_leave_the_policy_as_it_was() -> None:
    policy, rows = made(), some_rows()
    rows["reward"][3] = torch.nan
    rows["obs"][5, 1] = torch.inf
    weights = [p.clone() for p in policy.model.parameters()]
    with pytest.raises(NonFiniteLoss):
        policy.learn_mode.forward(rows)
    assert all(map(torch.equal, weights, policy.model.parameters()))
    assert all(value.isfinite().all() for value in policy.model.buffers())
    policy.learn_mode.forward(some_rows())


def test_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="multi_gpu must be False"):
        made(multi_gpu=True)


@pytest.mark.slow
@pytest.mark.learning
def test_it_learns_to_swing_a_pendulum_up() -> None:
    model = {"actor_hidden_sizes": [64, 64], "critic_hidden_sizes": [64, 64]}
    with Task(OnlineRLContext(), seed=0) as task:
        envs = make_env_manager("Pendulum-v1", env_num=1, seed=0)
        policy = CrossQPolicy.for_env(envs, seed=0, model=model, batch_size=64)
        buffer = TensorBuffer(10_000, seed=0)
        task.use(StepCollector(policy, envs, n_sample=8, random_steps=256))
        task.use(DataPusher(buffer)).use(OffPolicyLearner(policy, buffer, update_per_collect=8))
        task.run(max_step=500)
    with make_env_manager("Pendulum-v1", env_num=10, seed=1) as envs:
        assert np.mean(evaluate_episodes(policy, envs, 20).get_episode_return()) > -250
