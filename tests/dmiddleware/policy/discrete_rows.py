"""Random rows of an environment with discrete actions."""

from __future__ import annotations

from typing import Any

import torch

from dmiddleware.tree import Batch, as_tree

__all__ = ["discrete_rows"]


def discrete_rows(
    n: int, n_obs: int, n_actions: int, *, seed: int = 0, ends_every: int = 4, **columns: Any
) -> Batch:
    """Return random transitions ``[n, …]``.

    Args:
        n: how many.
        n_obs: length of an observation.
        n_actions: number of actions.
        seed: of all numbers.
        ends_every: in each group of this many rows, the first one ends its episode.
        **columns: further columns.
    """
    generator = torch.Generator().manual_seed(seed)
    obs, next_obs = torch.randn(2, n, n_obs, generator=generator)
    return as_tree(
        {
            "obs": obs,
            "next_obs": next_obs,
            "action": torch.randint(n_actions, (n,), generator=generator),
            "reward": torch.randn(n, generator=generator),
            "terminated": torch.arange(n) % ends_every == 0,
            **columns,
        }
    )
