"""Losses of behavior cloning: supervised learning of an expert's actions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dmiddleware.errors import StructureError
from dmiddleware.rl.distribution import (
    Bernoulli,
    Categorical,
    Distribution,
    Gaussian,
    Hybrid,
    MultiCategorical,
    TanhGaussian,
)
from dmiddleware.rl.td import check_shape, weighted_mean
from dmiddleware.tree import leaves_by_path

__all__ = ["bc_hits", "bc_loss"]


def bc_loss(
    distribution: Distribution,
    action: Any,
    *,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the loss of cloning actions of any kind.

    Choices and bits have the cross-entropy, summed over those of an action; continuous actions the
    squared error to the distribution's mode, averaged over their dimensions. The losses of a
    hybrid's parts are added up.

    Args:
        distribution: the policy's, over ``[B]``.
        action: the expert's raw actions.
        weight: ``[B]`` weights of the samples.
        label_smoothing: share of the target spread evenly over all allowed options, in ``[0, 1]``.

    Raises:
        StructureError: if actions or weights are of another shape, or choices are not integers.
    """
    match distribution:
        case Hybrid():
            by_path = leaves_by_path(action)
            losses = [
                bc_loss(part, by_path[path], weight=weight, label_smoothing=label_smoothing)
                for path, part in distribution.parts.items()
            ]
            return torch.stack(losses).sum()
        case Categorical():
            logit = distribution.logit
            check_shape(logit.shape[:-1], action=action)
            if action.is_floating_point():
                raise StructureError(
                    f"discrete actions must be integers, got {action.dtype}; convert them with "
                    ".long(), or learn from a model with action_space='continuous'"
                )
            if weight is None and label_smoothing == 0.0:
                return F.cross_entropy(logit, action.long())
            errors = _choice_errors(logit, action.long(), label_smoothing)
        case MultiCategorical():
            logit = distribution.choices.logit
            check_shape(logit.shape[:-1], action=action)
            errors = _choice_errors(logit, action.long(), label_smoothing).sum(-1)
        case Bernoulli():
            check_shape(distribution.logit.shape, action=action)
            errors = _bit_errors(distribution.logit, action, label_smoothing).sum(-1)
        case Gaussian() | TanhGaussian():
            mean = distribution.mode()
            check_shape(mean.shape, action=action)
            errors = F.mse_loss(mean, action, reduction="none").mean(-1)
        case _:
            raise TypeError(f"no loss is known for a {type(distribution).__name__}")
    return weighted_mean(errors, weight)


def bc_hits(distribution: Distribution, action: Any) -> torch.Tensor | None:
    """Return ``[B]`` bool, whether the most likely choices and bits are all those of the expert.

    Args:
        distribution: the policy's, over ``[B]``.
        action: the expert's raw actions.

    Returns:
        None if the action has no choices and bits.
    """
    match distribution:
        case Hybrid():
            by_path = leaves_by_path(action)
            every = [bc_hits(part, by_path[path]) for path, part in distribution.parts.items()]
            present = [hits for hits in every if hits is not None]
            return torch.stack(present).all(0) if present else None
        case Categorical():
            return torch.eq(distribution.mode(), action)
        case MultiCategorical() | Bernoulli():
            return torch.eq(distribution.mode(), action).all(-1)
    return None


def _choice_errors(logit: torch.Tensor, action: torch.Tensor, smoothing: float) -> torch.Tensor:
    log_probs = F.log_softmax(logit, dim=-1)
    errors = -log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    if smoothing == 0.0:
        return errors
    possible = _is_possible(logit)
    even = -log_probs.masked_fill(~possible, 0.0).sum(-1) / possible.sum(-1)
    return (1.0 - smoothing) * errors + smoothing * even


def _bit_errors(logit: torch.Tensor, action: torch.Tensor, smoothing: float) -> torch.Tensor:
    target = (1.0 - smoothing) * action.to(logit.dtype) + 0.5 * smoothing
    target = target.masked_fill(~_is_possible(logit), 0.0)
    return F.binary_cross_entropy_with_logits(logit, target, reduction="none")


def _is_possible(logit: torch.Tensor) -> torch.Tensor:
    # Masks give forbidden options the lowest number; see dmiddleware.rl.distribution.
    return logit > torch.finfo(logit.dtype).min
