"""Exploration: epsilon-greedy actions."""

from __future__ import annotations

import torch

from dmiddleware.rl.distribution import mask_logit

__all__ = ["epsilon_greedy"]

_FEW = 64


def epsilon_greedy(
    q: torch.Tensor,
    eps: float | torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Take a uniformly random action with probability ``eps``, else the best one.

    A call draws the same number of random numbers for every ``eps``, so runs that differ only in
    ``eps`` stay comparable.

    Args:
        q: ``[…, A]`` action values.
        eps: probability of a random action; a tensor ``[…]`` gives each row its own.
        generator: source of randomness, on the values' device; None: torch's own.
        mask: ``[…, A]`` bool, True where the action is allowed; no other action is ever chosen.

    Returns:
        ``[…]`` int64 actions.

    Raises:
        ValueError: if the mask allows no action in a row, on the CPU.
    """
    rows, n_actions = q.shape[:-1], q.shape[-1]
    if mask is not None:
        if q.is_cpu and not bool(mask.any(-1).all()):  # on a device, checking would wait for it
            raise ValueError(
                "the action mask allows no action in at least one row; allow one in each"
            )
        explore = torch.rand(rows, generator=generator, device=q.device) < eps
        # The largest of independent uniform numbers is equally likely to be any allowed one.
        lottery = torch.rand(q.shape, generator=generator, device=q.device)
        uniform = lottery.masked_fill_(~mask, -1.0).argmax(-1)
        return torch.where(explore, uniform, mask_logit(q, mask).argmax(-1))
    # Whether to explore, and which action then. No action's probability is off by more than 2**-53.
    draws = torch.rand((2, *rows), dtype=torch.float64, generator=generator, device=q.device)
    if not (q.is_cpu and len(rows) == 1 and rows[0] <= _FEW and isinstance(eps, float | int)):
        return torch.where(draws[0] < eps, (draws[1] * n_actions).long(), q.argmax(-1))
    # Row by row: for a few numbers, lists are much faster than torch calls.
    action = (q.detach() if q.requires_grad else q).numpy().argmax(-1)
    chances, lots = draws.tolist()
    for row, chance in enumerate(chances):
        if chance < eps:
            action[row] = int(lots[row] * n_actions)
    return torch.from_numpy(action)
