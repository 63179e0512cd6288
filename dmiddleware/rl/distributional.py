"""Losses of distributional Q-learning."""

from __future__ import annotations

import torch

__all__ = [
    "categorical_target",
    "clipped_share",
    "interval_middles",
    "quantile_huber_loss",
]


def interval_middles(n: int, *, device: torch.device | None = None) -> torch.Tensor:
    """Return ``[n]``: the middles of ``n`` equal intervals of [0, 1]."""
    return (torch.arange(n, device=device) + 0.5) / n


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
    moved = _moved_support(reward, terminated, discount=discount, support=support)
    moved = moved.clamp(support[0], support[-1])
    position = (moved - support[0]) / _spacing(support)
    index = torch.arange(len(support), dtype=position.dtype, device=position.device)
    # Each return shares its probability between its two neighbors on the support.
    share = (position[:, None, :] - index[None, :, None]).abs_().neg_().add_(1.0).clamp_(min=0.0)
    return share.mul_(next_prob[:, None, :]).sum(-1)


@torch.no_grad()
def clipped_share(
    next_prob: torch.Tensor,
    reward: torch.Tensor,
    terminated: torch.Tensor,
    *,
    discount: float | torch.Tensor,
    support: torch.Tensor,
) -> torch.Tensor:
    """Return how much of the target distribution :func:`categorical_target` clips.

    A return is clipped if it lies outside of the support by more than half of the distance between
    two neighbors. Near 0, the support is wide enough. Above a few per cent, the network cannot
    represent the returns.

    Args:
        next_prob: ``[B, N]`` probabilities of the next return.
        reward: ``[B]``.
        terminated: ``[B]`` bool, True where nothing follows.
        discount: gamma, or ``[B]``.
        support: ``[N]`` returns, evenly spaced.

    Returns:
        A scalar from 0 to 1, the mean over the rows of the clipped probability.
    """
    moved = _moved_support(reward, terminated, discount=discount, support=support)
    margin = 0.5 * _spacing(support)
    outside = (moved < support[0] - margin) | (moved > support[-1] + margin)
    return (next_prob * outside).sum(-1).mean()


def _moved_support(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    *,
    discount: float | torch.Tensor,
    support: torch.Tensor,
) -> torch.Tensor:
    """Return ``[B, N]``: where each of the next returns lies, one step earlier."""
    gamma = torch.zeros_like(reward).add_(discount).masked_fill_(terminated, 0.0)
    return reward[:, None] + gamma[:, None] * support


def _spacing(support: torch.Tensor) -> torch.Tensor:
    return (support[-1] - support[0]) / (len(support) - 1)


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
    # Autograd would keep several tensors [B, N, M]. With c = clamp(error, -kappa, kappa), Huber's
    # loss is c * (error - c / 2), and c is its derivative, so one pass gives both. Errors below 0
    # weigh 1 - tau, those above tau.
    with torch.no_grad():
        error = target[:, None, :] - quantiles[:, :, None]
        slope = error.clamp(-kappa, kappa)
        below = slope.clamp(max=0.0)
        gradient = -(tau * slope.sum(-1) + (1.0 - 2.0 * tau) * below.sum(-1))
        error.sub_(slope, alpha=0.5)
        loss, loss_below = slope.mul_(error).sum(-1), below.mul_(error).sum(-1)
        loss = tau * loss + (1.0 - 2.0 * tau) * loss_below
    per_quantile = loss + gradient * (quantiles - quantiles.detach())
    return per_quantile.sum(-1) / (kappa * target.shape[-1])
