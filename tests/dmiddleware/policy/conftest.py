"""Batches and policies that several tests use."""

from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

from dmiddleware.policy import Policy
from dmiddleware.tree import as_tree

OBS = 4
ACTIONS = 2
SMALL = {"obs_shape": OBS, "action_shape": ACTIONS, "encoder_hidden_sizes": [16]}


@pytest.fixture
def small():
    """A model config for CartPole."""
    return dict(SMALL)


@pytest.fixture
def transitions():
    """Make a batch of random CartPole-like transitions, the same for the same seed."""

    def make(n=32, seed=0, **columns):
        generator = torch.Generator().manual_seed(seed)
        terminated = torch.rand(n, generator=generator) < 0.2
        return as_tree(
            {
                "obs": torch.randn(n, OBS, generator=generator),
                "next_obs": torch.randn(n, OBS, generator=generator),
                "action": torch.randint(ACTIONS, (n,), generator=generator),
                "reward": torch.randn(n, generator=generator),
                "terminated": terminated,
                "truncated": torch.zeros(n, dtype=torch.bool),
                "done": terminated.clone(),
                "collect_iter": torch.arange(n) + 7,
                **columns,
            }
        )

    return make


@pytest.fixture
def ppo_batch():
    """Make a PPO minibatch out of what the policy itself would collect."""

    def make(policy, n=32, seed=0, obs_size=OBS):
        generator = torch.Generator().manual_seed(seed)
        obs = torch.randn(n, obs_size, generator=generator)
        output = policy.collect_mode.forward(obs)
        adv = torch.randn(n, generator=generator)
        return as_tree({**output, "obs": obs, "adv": adv, "ret": adv + output["value"]})

    return make


class Spaces(NamedTuple):
    """The spaces of an env, in place of the env."""

    observation_space: gym.Space
    action_space: gym.Space


@pytest.fixture
def cartpole_spaces():
    box = gym.spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    return Spaces(box, gym.spaces.Discrete(ACTIONS))


@pytest.fixture
def pendulum_spaces():
    return Spaces(
        gym.spaces.Box(-8.0, 8.0, (3,), np.float32),
        gym.spaces.Box(np.float32([-2.0]), np.float32([2.0]), dtype=np.float32),
    )


class _Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(OBS, ACTIONS)

    def forward(self, obs):
        return {"logit": self.layer(obs)}


class Batched(Policy):
    """A policy that acts by a linear layer, and learns nothing."""

    n_step = 2

    def learn(self, batch):
        return {"total_loss": 0.0}

    def act_collect(self, obs, env_id, *, shift=0):
        logit = self.model(obs)["logit"]
        return {
            "action": (logit.argmax(-1) + shift + torch.from_numpy(env_id)) % ACTIONS,
            "logit": logit,
        }

    def act_eval(self, obs, env_id):
        return {"action": self.model(obs)["logit"].argmax(-1)}

    def train_batch(self, batch):
        reward, done = batch["reward"], batch["done"]
        total = reward.clone()
        alive = torch.ones_like(done)
        for k in range(1, self.n_step):
            alive = alive[:-1] & ~done[k - 1 : -1]
            total[:-k] += reward[k:] * alive
        return as_tree({**{key: batch[key] for key in batch}, "reward": total})


@pytest.fixture
def linear():
    """Make the model that both example policies share; always the same one."""

    def make():
        torch.manual_seed(0)
        return _Linear()

    return make


@pytest.fixture
def batched(linear):
    return Batched({}, model=linear())
