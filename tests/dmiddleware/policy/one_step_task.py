"""A task of one step, in which an action is best if it equals the first entry of obs."""

from __future__ import annotations

from typing import Any

import torch

from dmiddleware.policy import Policy
from dmiddleware.tree import Batch, as_tree

__all__ = ["SMALL", "distance_after", "random_rows"]

SMALL = {
    "obs_shape": 3,
    "action_shape": 2,
    "action_space": "continuous",
    "actor_hidden_sizes": [16],
    "critic_hidden_sizes": [16],
}
"""The arguments of a small network for :func:`random_rows`."""


def random_rows(n: int = 8, seed: int = 0) -> Batch:
    """Return random transitions ``[n, …]`` with 3 entries of obs and 2 of actions."""
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, n, 3, generator=generator)
    return as_tree(
        {
            "obs": obs,
            "next_obs": next_obs,
            "action": torch.rand(n, 2, generator=generator) * 1.8 - 0.9,
            "reward": torch.randn(n, generator=generator),
            "terminated": torch.arange(n) % 4 == 0,
        }
    )


def distance_after(n_updates: int, policy: Policy[Any]) -> float:
    """Train a policy of one action, and return how far it is from the first entry of obs."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_updates):
        obs = torch.rand(128, 3, generator=generator) * 1.6 - 0.8
        action = torch.rand(128, 1, generator=generator) * 2 - 1
        reward = -(action[:, 0] - obs[:, 0]).square() * 10
        ends = torch.ones(128, dtype=torch.bool)
        columns = {"obs": obs, "action": action, "reward": reward}
        policy.learn_mode.forward(as_tree({**columns, "next_obs": obs, "terminated": ends}))
    obs = torch.rand(64, 3, generator=generator) * 1.6 - 0.8
    action = policy.eval_mode.forward(obs)["action"]
    return float((action[:, 0] - obs[:, 0]).abs().mean())
