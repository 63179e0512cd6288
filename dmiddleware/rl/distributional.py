"""Losses of distributional Q-learning."""

from __future__ import annotations

import torch

__all__ = ["categorical_target", "quantile_huber_loss", "taken_rows"]


def taken_rows(output: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return ``[B, N]``: what ``output`` ``[B, A, N]`` has for the actions ``[B]`` int64."""
    index = action[:, None, None].expand(-1, 1, output.shape[-1])
    return output.gather(1, index).squeeze(1)


@torch.no_grad()
def categorical_target(
    next_prob: torch.Tensor,
    reward: torch.Tensor,
    terminated: torch.Tensor,
    *,
    discount: float | torch.Tensor,
    support: torch.Tensor,
) -> torch.Tensor:
    """Project the distribution of ``reward + discount * next return`` onto the support.

    Source: Bellemare et al., "A Distributional Perspective on RL" (2017), equation 7.

    Args:
        next_prob: ``[B, N]`` probabilities of the next return.
        reward: ``[B]``.
        terminated: ``[B]`` bool, True where nothing follows.
        discount: gamma, or ``[B]``.
        support: ``[N]`` returns, evenly spaced.

    Returns:
        ``[B, N]`` probabilities.
    """
    gamma = torch.zeros_like(reward).add_(discount).masked_fill_(terminated, 0.0)
    moved = (reward[:, None] + gamma[:, None] * support).clamp(support[0], support[-1])
    width = (support[-1] - support[0]) / (len(support) - 1)
    # Each return shares its probability between its two neighbours on the support.
    share = 1.0 - (moved[:, None, :] - support[None, :, None]).abs() / width
    return (share.clamp_(0.0, 1.0) * next_prob[:, None, :]).sum(-1)


def quantile_huber_loss(
    quantiles: torch.Tensor, target: torch.Tensor, *, kappa: float = 1.0
) -> torch.Tensor:
    """Return the quantile regression loss of each row.

    Source: Dabney et al., "Distributional RL with Quantile Regression" (2018), equation 10 and
    algorithm 1.

    Args:
        quantiles: ``[B, N]``, at the middles of ``N`` equal intervals of [0, 1].
        target: ``[B, M]`` samples or quantiles of the target, without gradient.
        kappa: where Huber's loss turns from quadratic to linear.

    Returns:
        ``[B]``: summed over the quantiles, averaged over the target's.
    """
    n = quantiles.shape[-1]
    tau = (torch.arange(n, device=quantiles.device) + 0.5) / n
    error = target[:, None, :] - quantiles[:, :, None]
    size = error.abs()
    huber = torch.where(size <= kappa, 0.5 * error.square(), kappa * (size - 0.5 * kappa))
    weight = (tau[:, None] - (error.detach() < 0).float()).abs()
    return (weight * huber / kappa).sum(1).mean(-1)
