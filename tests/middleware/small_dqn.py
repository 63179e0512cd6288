"""Rows and buffers for tests of learning, with policies small enough to learn at once."""

from typing import Any

import torch

from dmiddleware.data import TensorBuffer, as_tree
from dmiddleware.policy import DQNPolicy

SMALL = {"seed": 0, "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]}}


def make_policy() -> DQNPolicy:
    return DQNPolicy(SMALL)


def fill(policy: DQNPolicy, value: float) -> None:
    """Set every parameter to the value, to identify the update by the weights."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.fill_(value)


def small(batch_size: int, **learn: Any) -> dict[str, Any]:
    """Return the config of a small policy with this batch size."""
    return {**SMALL, "batch_size": batch_size, **learn}


def transitions(n: int, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    return as_tree(
        {
            "obs": torch.randn(n, 4, generator=draw),
            "action": torch.randint(2, (n,), generator=draw),
            "reward": torch.rand(n, generator=draw),
            "next_obs": torch.randn(n, 4, generator=draw),
            "done": torch.zeros(n, dtype=torch.bool),
            "terminated": torch.zeros(n, dtype=torch.bool),
            "truncated": torch.zeros(n, dtype=torch.bool),
            "episode_id": torch.zeros(n, dtype=torch.int64),
            "collect_iter": torch.full((n,), 3),
        }
    )


def filled(n: int = 64, **options: Any) -> TensorBuffer:
    buffer = TensorBuffer(1000, seed=0, **options)
    buffer.push(transitions(n))
    return buffer


def priorities_in_two_halves(batch: Any) -> list[dict[str, Any]]:
    return [{"priority": half + 1} for half in batch["reward"].split(16)]
