"""PPO from a replay buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dmiddleware.classic import as_collect_mode, create_policy
from dmiddleware.data import TensorBuffer
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Task
from dmiddleware.policy import OffPolicyPPOPolicy
from dmiddleware.rl import gae
from dmiddleware.rollout import RolloutCollector
from middleware import DataPusher, GAEEstimator, OffPolicyLearner, StepCollector
from tests.dmiddleware.policy.every_policy import batch_for, made

SMALL = {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [16]}


def test_the_loss_of_old_rows_is_that_of_the_paper() -> None:
    policy = made(OffPolicyPPOPolicy, learning_rate=0.02, entropy_weight=0.03, clip_ratio=0.1)
    batch = batch_for(policy)
    for _ in range(5):
        policy.learn_mode.forward(batch)
    output = policy.model(batch["obs"])
    distribution = torch.distributions.Categorical(logits=output["logit"])
    ratio = (distribution.log_prob(batch["action"]) - batch["log_prob"]).exp()
    clipped = ratio.clamp(0.9, 1.1)
    policy_loss = -torch.minimum(ratio * batch["adv"], clipped * batch["adv"]).mean()
    value_loss = 0.5 * (output["value"] - batch["ret"]).square().mean()
    wanted = policy_loss + 0.5 * value_loss - 0.03 * distribution.entropy().mean()
    got = policy.learn_mode.forward(batch)
    assert got["clip_fraction"] == pytest.approx(((ratio - 1).abs() > 0.1).float().mean().item())
    assert got["clip_fraction"] > 0
    assert got["total_loss"] == pytest.approx(wanted.item(), rel=1e-4)


def test_a_row_that_moved_beyond_the_clip_range_teaches_the_policy_nothing() -> None:
    policy = made(OffPolicyPPOPolicy, value_weight=0.0, entropy_weight=0.0)
    batch = batch_for(policy)
    batch["log_prob"] = batch["log_prob"] - 1.0  # the ratio is e
    batch["adv"] = torch.ones_like(batch["adv"])
    policy.learn_mode.forward(batch)
    gradients = [one.grad for one in policy.model.parameters() if one.grad is not None]
    assert gradients
    assert all(not gradient.any() for gradient in gradients)


def test_rows_keep_the_advantages_that_they_were_stored_with() -> None:
    buffer = TensorBuffer(64, seed=0)
    with Task(seed=0) as task:
        envs = make_env_manager("CartPole-v1", env_num=2, seed=0)
        policy = OffPolicyPPOPolicy.for_env(envs, seed=0, batch_size=16, discount=0.9)
        task.use(StepCollector(policy, envs, n_sample=32)).use(GAEEstimator(policy))
        task.use(DataPusher(buffer, what="train_data"))
        task.use(OffPolicyLearner(policy, buffer, update_per_collect=3))
        task.run(max_step=1)
    rows = buffer.get(buffer.index)
    with make_env_manager("CartPole-v1", env_num=2, seed=0) as envs:
        again = OffPolicyPPOPolicy.for_env(envs, seed=0)
        collected = RolloutCollector(again, envs).collect(32)
    value = collected["value"]
    next_value = again.spec.value_fn(collected["next_obs"])
    wanted = gae(
        *(collected["reward"], value, next_value, collected["terminated"], collected["done"]),
        discount=0.9,
        gae_lambda=0.95,
    )
    assert task.ctx.train_iter == 3
    stored = torch.sort(rows["adv"].flatten()).values
    torch.testing.assert_close(stored, torch.sort(wanted.adv.flatten()).values)


def test_a_worker_gets_rows_with_advantages() -> None:
    policy = create_policy({"type": "ppo_offpolicy", "model": SMALL, "discount_factor": 0.5})
    obs = torch.zeros(2, 4)
    rows: dict[str, Any] = {
        **{"obs": obs, "next_obs": obs, "action": torch.zeros(2, dtype=torch.int64)},
        **{"reward": torch.tensor([1.0, 2.0]), "value": torch.tensor([0.5, 0.25])},
        **{"terminated": torch.tensor([False, True]), "done": torch.tensor([False, True])},
    }
    mode = as_collect_mode(policy, user="the test")
    samples = mode.get_train_sample([{name: rows[name][t] for name in rows} for t in range(2)])
    last = 2.0 - 0.25
    first = 1.0 + 0.5 * 0.25 - 0.5 + 0.5 * 0.95 * last
    assert [float(sample["adv"]) for sample in samples] == pytest.approx([first, last])


@pytest.mark.parametrize(
    "option", [{"epoch_per_collect": 2}, {"recompute_advantage": True}, {"target_kl": 0.1}]
)
def test_what_belongs_to_epochs_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        made(OffPolicyPPOPolicy, **option)
