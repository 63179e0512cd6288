"""A small offline problem: half of the data is good and half is bad, so cloning all of it fails.

An episode has four steps. The reward is highest, 1, where the action equals a function of the
observation; good episodes act like that, bad ones do the opposite.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.env import make_env_manager
from dmiddleware.policy import BCPolicy
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.tree import Batch, as_tree, index_rows

LENGTH = 4


def best_action(obs: Any) -> Any:
    """Return the best action ``[…]`` for observations ``[…, 2]``."""
    return 0.5 + 0.3 * obs[..., 0]


class Follow(gym.Env[Any, Any]):
    """An env with this reward; its observations are independent of the actions."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._obs = 0, self._draw()
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 1.0 - float(np.square(action[0] / 2 - best_action(self._obs)))
        self._step, self._obs = self._step + 1, self._draw()
        return self._obs, reward, self._step == LENGTH, False, {}

    def _draw(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)


def mixed_rows(n_episodes: int = 500, seed: int = 0) -> Batch:
    """Return ``[4 n, …]`` rows of good and bad episodes, in equal shares."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.rand(n_episodes, LENGTH + 1, 2, generator=generator) * 2 - 1
    is_good = torch.arange(n_episodes) % 2 == 0
    raw = torch.where(is_good[:, None], 1.0, -1.0) * best_action(obs[:, :-1])
    raw = (raw + 0.2 * torch.randn(raw.shape, generator=generator)).clamp(-1.0, 1.0)
    last = torch.zeros(n_episodes, LENGTH, dtype=torch.bool)
    last[:, -1] = True
    episode_id = torch.arange(n_episodes)[:, None].expand(-1, LENGTH)
    columns = {
        "obs": obs[:, :-1],
        "next_obs": obs[:, 1:],
        "action": 2 * raw.unsqueeze(-1),
        "reward": 1.0 - (raw - best_action(obs[:, :-1])).square(),
        "done": last,
        "terminated": last,
        "truncated": torch.zeros_like(last),
        "episode_id": episode_id,
    }
    return as_tree({name: column.flatten(0, 1) for name, column in columns.items()})


def train(policy: Any, n_updates: int, *, batch_size: int = 128) -> Any:
    """Let a policy learn from random rows of the mixed data."""
    rows, generator = mixed_rows(), torch.Generator().manual_seed(1)
    for _ in range(n_updates):
        chosen = torch.randint(len(rows["done"]), (batch_size,), generator=generator)
        policy.learn_mode.forward(index_rows(rows, chosen))
    return policy


def regret(policy: Any) -> float:
    """Return how far the mean return of 50 episodes is below the best possible."""
    with make_env_manager(Follow, env_num=25, seed=5) as envs:
        returns = evaluate_episodes(policy, envs, 50).get_episode_return()
    return LENGTH - float(np.mean(returns))


@functools.cache
def bc_regret() -> float:
    """Return the regret of behavior cloning, which does what is between good and bad."""
    return regret(train(BCPolicy.for_env(Follow(), seed=0, learning_rate=3e-3), 300))
