"""Networks in bfloat16: what is rounded, and what stays float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware import Task
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.policy import DQNPolicy, PPOPolicy, SACPolicy
from dmiddleware.tree import leaves
from dmiddleware.zoo.tensor_envs import CartPole
from middleware import GAEEstimator, OnlineRLContext, OnPolicyLearner, StepCollector
from tests.dmiddleware.policy.every_policy import EVERY, batch_for, made, others_are_slow


@pytest.mark.parametrize("cls", others_are_slow(EVERY))
def test_networks_round_and_everything_else_is_float32(cls: Any) -> None:
    rounded, exact = made(cls, autocast="bfloat16"), made(cls)
    batch = batch_for(exact)
    for policy in (rounded, exact):
        for _ in range(2):
            policy.learn_mode.forward(batch)
    states = [policy.learn_mode.state_dict() for policy in (rounded, exact)]
    assert states[0]["model"].keys() == states[1]["model"].keys()
    pairs = [(value, states[1]["model"][name]) for name, value in states[0]["model"].items()]
    assert all(first.dtype == second.dtype for first, second in pairs)
    assert not all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.parametrize("cls", [DQNPolicy, PPOPolicy, SACPolicy])
def test_outputs_are_float32_and_copies_round_their_own_weights(cls: Any) -> None:
    rounded, exact = made(cls, autocast="bfloat16"), made(cls)
    batch = batch_for(exact)
    assert set(rounded.components) == set(exact.components)
    obs = batch["obs"][:4]
    network = rounded.model if cls is not SACPolicy else rounded.actor.module
    same = exact.model if cls is not SACPolicy else exact.actor.module
    for (path, output), (_, other) in zip(leaves(network(obs)), leaves(same(obs)), strict=True):
        assert output.dtype is torch.float32, path
        assert torch.allclose(output, other, atol=0.05), path
    if cls is DQNPolicy:
        with torch.no_grad():
            for parameter in rounded.q.target.parameters():
                parameter.zero_()
        assert not rounded.q.target(obs)["logit"].any()
        assert rounded.model(obs)["logit"].any()


@pytest.mark.slow
def test_ppo_balances_the_pole_in_bfloat16() -> None:
    envs = make_env_manager(CartPole, env_num=64, seed=0)
    policy = PPOPolicy.for_env(envs, seed=0, autocast="bfloat16", batch_size=256)
    lengths = []
    with Task(OnlineRLContext(), seed=0) as task:
        task.use(StepCollector(policy, envs, n_sample=64 * 32))
        task.use(GAEEstimator(policy))
        task.use(OnPolicyLearner(policy))
        for _ in range(30):
            task.run(1)
            n_ends = int(task.ctx.trajectories["done"].sum())
            lengths.append(64 * 32 / max(n_ends, 1))
    assert lengths[0] < 40
    assert max(lengths) > 200


@pytest.mark.parametrize("value", ["float16", "bf16", True, 16])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="autocast must be 'bfloat16' or None"):
        DQNPolicy({"autocast": value, "model": {"obs_shape": 4, "action_shape": 2}})
