"""TD3+BC."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.policy import TD3BCPolicy
from dmiddleware.tree import Batch, as_tree, index_rows

from .mixed_data import Follow, bc_regret, mixed_rows, regret, train

SMALL = {"actor_hidden_sizes": [16], "critic_hidden_sizes": [16]}


def made(**options: Any) -> TD3BCPolicy:
    return TD3BCPolicy.for_env(Follow(), seed=0, model=SMALL, **options)


def some_rows() -> Batch:
    return index_rows(mixed_rows(), slice(0, 32))


def test_the_actor_balances_values_and_cloning_as_equations_3_and_5_say() -> None:
    policy, rows = made(obs_norm=False, actor_update_freq=1, bc_alpha=1.5), some_rows()
    actor, critic = (policy.components[name].module for name in ("actor", "critic"))
    with torch.no_grad():
        chosen = actor(rows["obs"])["mu"].tanh()
    output = policy.learn_mode.forward(rows)
    with torch.no_grad():
        q = critic(rows["obs"], chosen)[0]  # the actor's step follows that of the critics
    cloning = (chosen - rows["action"] / 2).square().mean()
    wanted = cloning - 1.5 * q.mean() / q.abs().mean()
    assert output["actor_loss"] == pytest.approx(wanted.item(), rel=1e-4)


def test_observations_are_normalized_with_the_statistics_of_the_data() -> None:
    rows = mixed_rows()
    rows["obs"] = rows["obs"] * 100 + 500
    policy = made()
    policy.observe(rows["obs"])
    mean, std = rows["obs"].mean(0), rows["obs"].std(0, correction=0)
    actor = policy.components["actor"].module
    with torch.no_grad():
        wanted = 2 * actor((rows["obs"] - mean) / std)["mu"].tanh()
    acted = policy.eval_mode.forward(rows["obs"])["action"]
    torch.testing.assert_close(acted, wanted, rtol=1e-4, atol=1e-4)


def test_observations_are_normalized_where_it_learns() -> None:
    moved = some_rows()
    for name in ("obs", "next_obs"):
        moved[name] = moved[name] * 100 + 500
    outputs = []
    for rows in (some_rows(), moved):
        policy = made()
        policy.observe(rows["obs"])
        outputs.append(policy.learn_mode.forward(rows)["critic_loss"])
    assert outputs[0] == pytest.approx(outputs[1], rel=1e-2)


def test_learning_before_observing_the_data_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"policy\.observe"):
        made().learn_mode.forward(some_rows())


def test_collectors_receive_the_statistics() -> None:
    ours, theirs = made(), made()
    ours.observe(mixed_rows()["obs"])
    theirs.collect_mode.load_state_dict(ours.collect_mode.state_dict())
    obs = torch.rand(5, 2)
    actions = [policy.eval_mode.forward(obs)["action"] for policy in (ours, theirs)]
    assert torch.equal(*actions)


def test_a_model_of_unknown_observations_cannot_normalize_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor = self.critic = nn.Linear(2, 1)

    with pytest.raises(ConfigError, match="obs_norm is True, but the shape"):
        TD3BCPolicy(model=Model())


def test_nested_observations_are_normalized_too() -> None:
    shape = {"a": 2, "b": 1}
    cfg = {"model": {"obs_shape": shape, "action_shape": 1, "action_space": "continuous", **SMALL}}
    losses = []
    for scale in (1.0, 100.0):
        policy = TD3BCPolicy({**cfg, "seed": 0})
        rows = dict(some_rows().items())
        for name in ("obs", "next_obs"):
            column = scale * rows[name]
            rows[name] = as_tree({"a": column, "b": column[:, :1]})
        policy.observe(rows["obs"])
        losses.append(policy.learn_mode.forward(as_tree(rows))["critic_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.learning
def test_it_beats_cloning_on_mixed_data() -> None:
    policy = made(learning_rate_critic=3e-3, learning_rate_actor=3e-3)
    policy.observe(mixed_rows()["obs"])
    assert bc_regret() > 0.8
    assert regret(train(policy, 400)) < bc_regret() / 3
