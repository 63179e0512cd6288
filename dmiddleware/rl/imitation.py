"""Losses of behaviour cloning: supervised learning of an expert's actions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dmiddleware.errors import StructureError

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
        StructureError: if actions or weights are of another shape, or actions no integers.
    """
    _check_shape("action", action, logit.shape[:-1])
    _check_shape("weight", weight, logit.shape[:-1])
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
    _check_shape("action", action, mu.shape)
    _check_shape("weight", weight, mu.shape[:-1])
    error = F.mse_loss(mu, action, reduction="none").mean(-1)
    return (error if weight is None else error * weight).mean()


def _check_shape(name: str, column: torch.Tensor | None, wanted: torch.Size) -> None:
    """Refuse a column that would be broadcast, each row against every other."""
    if column is not None and column.shape != wanted:
        raise StructureError(
            f"{name} has shape {tuple(column.shape)}, but the network's output asks for "
            f"{tuple(wanted)}; squeeze it, or add a dimension with .unsqueeze(-1)"
        )
