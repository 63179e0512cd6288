"""The critic of learned rewards, whose sum does not end with the episode."""

from typing import Any

import pytest
import torch

from dmiddleware.data import Batch, as_tree
from dmiddleware.env import make_env_manager
from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.policy import BCPolicy, DQNPolicy, PPOPolicy
from dmiddleware.reward import IntrinsicCritic


def rows(seed: int = 0, shape: tuple[int, ...] = (6, 2), *, ends: bool = False) -> Batch:
    """Return consecutive rows of random observations and rewards."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.rand((shape[0] + 1, *shape[1:], 3), generator=generator)
    done = torch.zeros(shape, dtype=torch.bool)
    if ends:
        done[2] = True
    return as_tree(
        {
            "obs": obs[:-1],
            "next_obs": obs[1:],
            "done": done,
            "terminated": done,
            "episode_id": done.long().cumsum(0),
            "learned_reward": torch.rand(shape, generator=generator),
        }
    )


def critic(obs_shape: Any = 3, **options: Any) -> IntrinsicCritic:
    return IntrinsicCritic(obs_shape, **{"hidden_sizes": (16,), **options})


def test_the_sum_of_the_rewards_does_not_end_with_the_episode() -> None:
    going, ending = critic().estimate(rows()), critic().estimate(rows(ends=True))
    for name in ("learned_adv", "learned_return"):
        assert torch.equal(going[name], ending[name])
        assert going[name].shape == (6, 2)
        assert going[name].dtype == torch.float32


def test_returns_are_the_discounted_rewards_and_the_value_of_the_last_successor() -> None:
    made, data = critic(discount=0.9, gae_lambda=1.0), rows()
    returns = made.estimate(data)["learned_return"]
    # The value of the last successor, by the same statistics: a discount of 1 and rewards of 0.
    last = returns[-1] - data["learned_reward"][-1]
    expected = last / 0.9
    for row in reversed(range(6)):
        expected = data["learned_reward"][row] + 0.9 * expected
        torch.testing.assert_close(returns[row], expected)


def test_values_follow_the_rewards() -> None:
    made, data = critic(learning_rate=1e-2, discount=0.0, gae_lambda=0.0), rows(shape=(64, 2))
    data["learned_reward"] = data["obs"][..., 0]
    losses = [made.update(made.estimate(data))["value_loss"] for _ in range(150)]
    assert losses[-1] < 0.2 * losses[0]
    adv = made.estimate(data)["learned_adv"]
    assert adv.square().mean() < 0.2 * data["learned_reward"].var()


def test_one_lane_is_estimated_too() -> None:
    assert critic().estimate(rows(shape=(6,)))["learned_adv"].shape == (6,)


def test_the_critic_sees_small_images_through_small_convolutions() -> None:
    made, data = critic((3, 7, 7), conv_layers=((4, 3, 2),)), rows()
    for name in ("obs", "next_obs"):
        data[name] = torch.rand(*data["done"].shape, 3, 7, 7)
    assert made.update(made.estimate(data))["value_loss"] > 0
    assert made.settings["conv_layers"] == ((4, 3, 2),)


def test_the_state_restores_every_later_estimate() -> None:
    made, other = critic(seed=0, batch_size=4), critic(seed=1, batch_size=4)
    made.update(made.estimate(rows()))
    other.load_state_dict(made.state_dict())
    for seed in range(2):
        one, two = made.estimate(rows(seed)), other.estimate(rows(seed))
        assert torch.equal(one["learned_adv"], two["learned_adv"])
        assert made.update(one) == other.update(two)


def test_the_policy_gives_the_settings() -> None:
    with make_env_manager("CartPole-v1", env_num=1, seed=0) as envs:
        policy = PPOPolicy.for_env(envs, seed=3, discount=0.9, gae_lambda=0.8)
        made = IntrinsicCritic.for_env(envs, policy, epochs=2)
        assert made.settings == {
            "batch_size": 256, "epochs": 2, "learning_rate": 3e-4, "discount": 0.9,
            "gae_lambda": 0.8, "hidden_sizes": None, "conv_layers": None,
        }  # fmt: skip


def test_policies_that_cannot_use_it_are_refused() -> None:
    with make_env_manager("CartPole-v1", env_num=1, seed=0) as envs:
        for kind, needed in ((DQNPolicy, "λ"), (BCPolicy, "discount")):
            with pytest.raises(ConfigError, match=needed):
                IntrinsicCritic.for_env(envs, kind.for_env(envs))
        policy = PPOPolicy.for_env(envs, recompute_advantage=True)
        with pytest.raises(ConfigError, match="recompute_advantage"):
            IntrinsicCritic.for_env(envs, policy)


def test_rows_without_learned_rewards_are_refused() -> None:
    without = rows()
    del without["learned_reward"]
    with pytest.raises(StructureError, match="no column learned_reward"):
        critic().estimate(without)
