"""Sampling, log-probabilities and entropies of action distributions, as plain functions.

They do what ``torch.distributions`` does, without its objects and argument checks, which cost more
than the arithmetic for a handful of environments.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = [
    "ActionSample",
    "mask_logit",
    "categorical_sample",
    "categorical_log_prob",
    "categorical_entropy",
    "gaussian_sample",
    "gaussian_log_prob",
    "gaussian_entropy",
]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
# The largest float32 below 1 that atanh maps to a finite number with some room to spare.
_SQUASH_LIMIT = 1.0 - 1e-6


class ActionSample(NamedTuple):
    """Actions drawn from a policy.

    Attributes:
        action: ``[…]`` int64, or ``[…, A]`` floating point.
        log_prob: ``[…]`` their log-probability (density).
    """

    action: torch.Tensor
    log_prob: torch.Tensor


def mask_logit(logit: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Make the actions that ``mask`` forbids impossible.

    The forbidden logits become the lowest finite number, not minus infinity, so that entropies and
    gradients stay finite (Huang and Ontañón, "A Closer Look at Invalid Action Masking", 2022).

    Args:
        logit: ``[…, A]``.
        mask: ``[…, A]`` bool, True where the action is allowed; each row allows at least one.

    Raises:
        ValueError: if a row allows no action.
    """
    if not bool(mask.any(-1).all()):
        raise ValueError("the action mask allows no action in at least one row; allow one in each")
    return logit.masked_fill(~mask, torch.finfo(logit.dtype).min)


def categorical_sample(
    logit: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    mask: torch.Tensor | None = None,
) -> ActionSample:
    """Draw one action per row.

    Args:
        logit: ``[…, A]``, not necessarily normalised.
        generator: source of randomness, on the logits' device; None: torch's own.
        mask: ``[…, A]`` bool, True where the action is allowed.

    Raises:
        RuntimeError: if a logit is NaN.
        ValueError: if the mask allows no action in a row.
    """
    log_prob = F.log_softmax(logit if mask is None else mask_logit(logit, mask), dim=-1)
    flat = log_prob.exp().reshape(-1, logit.shape[-1])
    action = torch.multinomial(flat, 1, generator=generator).reshape(logit.shape[:-1])
    return ActionSample(action, log_prob.gather(-1, action.unsqueeze(-1)).squeeze(-1))


def categorical_log_prob(logit: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return ``[…]`` log-probabilities of ``action [… ]`` int64 under ``logit [… , A]``."""
    log_prob = F.log_softmax(logit, dim=-1)
    return log_prob.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logit: torch.Tensor) -> torch.Tensor:
    """Return ``[…]`` entropies, in nats, of the distributions with logits ``[…, A]``."""
    log_prob = F.log_softmax(logit, dim=-1)
    return -(log_prob.exp() * log_prob).sum(-1)


def gaussian_sample(
    mu: torch.Tensor,
    sigma: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    squash: bool = False,
) -> ActionSample:
    """Draw from a diagonal Gaussian; with ``squash``, pass the draw through tanh.

    The draw is reparametrised: gradients flow from the action to ``mu`` and ``sigma``.

    Args:
        mu: ``[…, A]``.
        sigma: ``[…, A]`` standard deviations, positive.
        generator: source of randomness, on the same device; None: torch's own.
        squash: give actions in ``(-1, 1)``, with the log-density corrected as in Haarnoja et al.,
            "Soft Actor-Critic" (2018), appendix C.
    """
    noise = torch.empty_like(mu).normal_(generator=generator)
    raw = mu + sigma * noise
    log_prob = _gaussian_log_density(noise, sigma)
    if not squash:
        return ActionSample(raw, log_prob)
    return ActionSample(raw.tanh(), log_prob - _log_tanh_slope(raw))


def gaussian_log_prob(
    mu: torch.Tensor, sigma: torch.Tensor, action: torch.Tensor, *, squash: bool = False
) -> torch.Tensor:
    """Return ``[…]`` log-densities of ``action [… , A]`` under a diagonal Gaussian.

    Args:
        mu: ``[…, A]``.
        sigma: ``[…, A]`` standard deviations, positive.
        action: ``[…, A]``; with ``squash``, in ``[-1, 1]``, clamped to within 1e-6 of the bounds,
            where the density is undefined.
        squash: the actions went through tanh.
    """
    if not squash:
        return _gaussian_log_density((action - mu) / sigma, sigma)
    raw = action.clamp(-_SQUASH_LIMIT, _SQUASH_LIMIT).atanh()
    return _gaussian_log_density((raw - mu) / sigma, sigma) - _log_tanh_slope(raw)


def gaussian_entropy(sigma: torch.Tensor) -> torch.Tensor:
    """Return ``[…]`` entropies, in nats, of diagonal Gaussians (not squashed), sigma ``[…, A]``."""
    return (sigma.log() + (0.5 + _HALF_LOG_2PI)).sum(-1)


def _gaussian_log_density(normalised: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return (-0.5 * normalised.square() - sigma.log() - _HALF_LOG_2PI).sum(-1)


def _log_tanh_slope(raw: torch.Tensor) -> torch.Tensor:
    # log(1 - tanh(x)^2) written so that it neither overflows nor cancels for large |x|.
    return (2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))).sum(-1)
