"""Losses of behaviour cloning: supervised learning of an expert's actions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dmiddleware.errors import StructureError
from dmiddleware.rl.rows import check_shape

__all__ = ["bc_discrete_loss", "bc_continuous_loss"]


def bc_discrete_loss(
    logit: torch.Tensor,
    action: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the mean cross-entropy of the expert's actions.

    Args:
        logit: ``[B, A]``.
        action: ``[B]`` integers, the expert's.
        weight: ``[B]`` weights of the samples.
        label_smoothing: share of the target spread evenly over all actions, in ``[0, 1]``.

    Raises:
        StructureError: if actions or weights are of another shape, or actions are not integers.
    """
    check_shape(logit.shape[:-1], action=action, weight=weight)
    if action.is_floating_point():
        raise StructureError(
            f"discrete actions must be integers, got {action.dtype}; convert them with .long(), or "
            "learn from a model with action_space='continuous'"
        )
    action = action.long()
    if weight is None:
        return F.cross_entropy(logit, action, label_smoothing=label_smoothing)
    loss = F.cross_entropy(logit, action, label_smoothing=label_smoothing, reduction="none")
    return (loss * weight).mean()


def bc_continuous_loss(
    mu: torch.Tensor, action: torch.Tensor, *, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean squared error to the expert's actions, averaged over their dimensions.

    Args:
        mu: ``[B, A]`` the actions that the policy would take.
        action: ``[B, A]`` the expert's.
        weight: ``[B]`` weights of the samples.

    Raises:
        StructureError: if actions or weights are of another shape.
    """
    check_shape(mu.shape, action=action)
    check_shape(mu.shape[:-1], weight=weight)
    error = F.mse_loss(mu, action, reduction="none").mean(-1)
    return (error if weight is None else error * weight).mean()
