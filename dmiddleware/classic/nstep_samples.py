"""Samples of several steps as DI-engine has them: the rewards side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dmiddleware.tree import Batch, with_columns

__all__ = ["nstep_samples", "with_summed_rewards"]

_LAST: tuple[str, ...] = ("next_obs", "next_action_mask", "done", "terminated", "truncated")
"""What a sample has of the last of its steps."""


def nstep_samples(
    transitions: Sequence[Mapping[str, Any]], n: int, discount: float
) -> list[dict[str, Any]]:
    """Return the transitions of one trajectory with the rewards of ``n`` steps each.

    Args:
        transitions: of one trajectory, in order.
        n: the number of steps.
        discount: γ.

    Returns:
        New dictionaries: ``reward`` ``[n]``, filled up with zeros near the end of the trajectory,
        and ``value_gamma``, the factor of the value after these steps. What comes after the steps
        is that of the last one.
    """
    rewards = torch.stack([torch.as_tensor(row["reward"]).reshape(()) for row in transitions])
    padded = torch.cat([rewards.float(), torch.zeros(n - 1)])
    samples = []
    for step, row in enumerate(transitions):
        last = min(step + n, len(transitions)) - 1
        after = {name: transitions[last][name] for name in _LAST if name in row}
        sample = {**row, **after, "reward": padded[step : step + n]}
        samples.append({**sample, "value_gamma": torch.tensor(discount ** (last - step + 1))})
    return samples


def with_summed_rewards(batch: Batch, discount: float) -> Batch:
    """Return samples of several steps with one reward each, as the algorithms here take them.

    Args:
        batch: ``[B, …]``; a batch without ``value_gamma`` is returned as it is.
        discount: γ.

    Returns:
        The batch with the discounted sum as ``reward`` ``[B]``, and ``value_gamma`` as
        ``discount``. It is terminal where the last step is ``done`` and not ``truncated``.
    """
    if "value_gamma" not in batch:
        return batch
    reward = batch["reward"]
    if reward.dim() > 1:
        reward = reward @ discount ** torch.arange(reward.shape[1], device=reward.device).float()
    terminated = batch["done"].bool()
    if "truncated" in batch:
        terminated = terminated & ~batch["truncated"].bool()
    factor = batch["value_gamma"].float().reshape(reward.shape)
    return with_columns(batch, reward=reward, terminated=terminated, discount=factor)
