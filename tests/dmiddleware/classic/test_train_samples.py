"""What the stock policies make of a trajectory: samples for workers that learn from lists."""

import pytest
import torch

from dmiddleware.classic import as_collect_mode, as_learn_mode
from dmiddleware.policy import DQNPolicy, PPOPolicy
from dmiddleware.rl import gae

MODEL = {"obs_shape": 1, "action_shape": 2}
REWARDS = (1.0, 2.0, 4.0, 8.0)


def trajectory(*, ends: str = "") -> list[dict]:
    """Four steps; the last one terminates, is truncated, or just the last that was collected."""
    return [
        {
            "obs": torch.tensor([float(step)]),
            "next_obs": torch.tensor([float(step + 1)]),
            "action": torch.tensor(step % 2),
            "reward": torch.tensor(reward),
            "done": torch.tensor(step == 3 and ends != ""),
            "terminated": torch.tensor(step == 3 and ends == "terminated"),
            "truncated": torch.tensor(step == 3 and ends == "truncated"),
            "value": torch.tensor(0.5 * step),
            "log_prob": torch.tensor(-0.7),
            "episode_id": torch.tensor(3),
        }
        for step, reward in enumerate(REWARDS)
    ]


def test_dqn_makes_n_step_samples_of_a_trajectory():
    policy = DQNPolicy({"model": MODEL, "n_step": 3, "discount": 0.5})
    samples = as_collect_mode(policy, user="test").get_train_sample(trajectory(ends="terminated"))
    assert [float(sample["reward"]) for sample in samples] == [3.0, 6.0, 8.0, 8.0]
    assert [float(sample["next_obs"]) for sample in samples] == [3.0, 4.0, 4.0, 4.0]
    assert [float(sample["discount"]) for sample in samples] == [0.125, 0.125, 0.25, 0.5]
    assert [bool(sample["terminated"]) for sample in samples] == [False, True, True, True]
    assert [float(sample["obs"]) for sample in samples] == [0.0, 1.0, 2.0, 3.0]
    as_learn_mode(policy, user="test").forward(samples)


def test_dqn_with_one_step_stores_transitions_as_they_are():
    transitions = trajectory()
    policy = DQNPolicy({"model": MODEL})
    assert as_collect_mode(policy, user="test").get_train_sample(transitions) is transitions


@pytest.mark.parametrize("ends", ["terminated", "truncated", ""])
def test_ppo_makes_samples_with_advantages_and_returns(ends):
    policy = PPOPolicy({"model": MODEL, "discount": 0.9, "gae_lambda": 0.8})
    transitions = trajectory(ends=ends)
    samples = as_collect_mode(policy, user="test").get_train_sample(transitions)
    last = policy.value_fn(torch.tensor([[4.0]]))
    adv, ret = gae(
        torch.tensor(REWARDS),
        torch.tensor([0.0, 0.5, 1.0, 1.5]),
        torch.cat([torch.tensor([0.5, 1.0, 1.5]), last]),
        torch.tensor([False, False, False, ends == "terminated"]),
        torch.tensor([False, False, False, True]),
        discount=0.9,
        gae_lambda=0.8,
    )
    torch.testing.assert_close(torch.stack([sample["adv"] for sample in samples]), adv)
    torch.testing.assert_close(torch.stack([sample["ret"] for sample in samples]), ret)
    as_learn_mode(policy, user="test").forward(samples)


def test_ppo_normalizes_the_returns_of_its_samples():
    policy = PPOPolicy({"model": MODEL, "value_norm": True})
    samples = as_collect_mode(policy, user="test").get_train_sample(trajectory(ends="terminated"))
    stats = policy.return_stats
    assert stats.count == 4
    mean = sum(float(sample["ret"]) for sample in samples) / 4
    assert float(stats.mean) == pytest.approx(mean)
