"""Losses of distributional Q-learning."""

from __future__ import annotations

import torch

__all__ = ["categorical_target", "interval_middles", "quantile_huber_loss", "taken_rows"]


def interval_middles(n: int, *, device: torch.device | None = None) -> torch.Tensor:
    """Return ``[n]``: the middles of ``n`` equal intervals of [0, 1]."""
    return (torch.arange(n, device=device) + 0.5) / n


def taken_rows(output: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return the part of an output that belongs to the actions.

    Args:
        output: ``[B, A]`` or ``[B, A, N]``.
        action: ``[B]`` int64, from 0.

    Returns:
        ``[B]`` or ``[B, N]``.
    """
    index = action.unsqueeze(-1)
    if output.dim() > 2:
        index = index.unsqueeze(-1).expand(-1, 1, output.shape[-1])
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
    quantiles: torch.Tensor,
    target: torch.Tensor,
    *,
    tau: torch.Tensor | None = None,
    kappa: float = 1.0,
) -> torch.Tensor:
    """Return the quantile regression loss of each row.

    Source: Dabney et al., "Distributional RL with Quantile Regression" (2018), equation 10 and
    algorithm 1; with fractions, Dabney et al., "Implicit Quantile Networks" (2018), equation 3.

    Args:
        quantiles: ``[B, N]``.
        target: ``[B, M]`` samples or quantiles of the target, without gradient.
        tau: ``[B, N]`` or ``[N]``, the fractions that the quantiles belong to; None: the middles of
            ``N`` equal intervals of [0, 1].
        kappa: where Huber's loss turns from quadratic to linear.

    Returns:
        ``[B]``: summed over the quantiles, averaged over the target's.
    """
    if tau is None:
        tau = interval_middles(quantiles.shape[-1], device=quantiles.device)
    error = target[:, None, :] - quantiles[:, :, None]
    size = error.abs()
    huber = torch.where(size <= kappa, 0.5 * error.square(), kappa * (size - 0.5 * kappa))
    weight = (tau.unsqueeze(-1) - (error.detach() < 0).float()).abs()
    return (weight * huber / kappa).sum(1).mean(-1)
