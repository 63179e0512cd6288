"""The losses of proximal policy optimization."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dmiddleware.rl.td import check_shape

__all__ = ["PPOPolicyLoss", "ppo_policy_loss", "ppo_value_loss"]


class PPOPolicyLoss(NamedTuple):
    """The result of :func:`ppo_policy_loss`.

    Attributes:
        loss: scalar, with gradient.
        approx_kl: scalar, without gradient: ``mean(ratio - 1 - log(ratio))`` for the new policy's
            probabilities over the old one's, an estimate of ``KL(old || new)`` that is never
            negative (Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx).
        clip_fraction: scalar, without gradient: the share of ratios outside the clip range.
    """

    loss: torch.Tensor
    approx_kl: torch.Tensor
    clip_fraction: torch.Tensor


def ppo_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    adv: torch.Tensor,
    *,
    clip_ratio: float | torch.Tensor = 0.2,
    dual_clip: float | None = None,
    weight: torch.Tensor | None = None,
) -> PPOPolicyLoss:
    """Return the clipped surrogate objective, negated (Schulman et al., "PPO", 2017, equation 7).

    Args:
        log_prob: ``[B]`` of the actions under the policy that learns.
        old_log_prob: ``[B]`` of the actions under the policy that collected them.
        adv: ``[B]`` advantages, normalized or not.
        clip_ratio: epsilon of the paper, positive; a scalar tensor is not checked.
        dual_clip: also bound the objective from below by ``dual_clip * adv`` where the advantage is
            negative (Ye et al., "Mastering Complex Control in MOBA Games", 2020, equation 5);
            above 1; None: no lower bound.
        weight: ``[B]`` weights of the samples. The two estimates are weighted means, which do not
            depend on the scale of the weights; the loss is the mean of the weighted objectives.

    Raises:
        StructureError: if the columns are not all of one shape.
        ValueError: if ``clip_ratio`` is not positive or ``dual_clip`` not above 1.
    """
    check_shape(log_prob.shape, old_log_prob=old_log_prob, adv=adv, weight=weight)
    if not isinstance(clip_ratio, torch.Tensor) and clip_ratio <= 0.0:
        raise ValueError(f"clip_ratio must be positive, got {clip_ratio}")
    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    low: Any = 1.0 - clip_ratio
    clipped = ratio.clamp(low, 1.0 + clip_ratio)
    objective = torch.minimum(ratio * adv, clipped * adv)
    if dual_clip is not None:
        if dual_clip <= 1.0:
            raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
        floor = torch.maximum(objective, dual_clip * adv)
        objective = torch.where(adv < 0.0, floor, objective)
    if weight is not None:
        objective = objective * weight
    with torch.no_grad():
        kl = ratio - 1.0 - log_ratio
        clipped = ((ratio - 1.0).abs() > clip_ratio).to(ratio.dtype)
        if weight is not None:
            share = weight.to(ratio.dtype)
            share = share / share.mean().clamp_min(torch.finfo(ratio.dtype).tiny)
            kl, clipped = kl * share, clipped * share
    return PPOPolicyLoss(-objective.mean(), kl.mean(), clipped.mean())


def ppo_value_loss(
    value: torch.Tensor,
    ret: torch.Tensor,
    *,
    old_value: torch.Tensor | None = None,
    clip_range: float | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return half the mean squared error of the value function.

    With ``clip_range``, the error of an estimate that left ``old_value ± clip_range`` is the larger
    of its own and the clipped estimate's, as in OpenAI Baselines' PPO2 (Huang et al., "The 37
    Implementation Details of PPO", 2022, detail 9).

    Args:
        value: ``[B]`` estimates, with gradient.
        ret: ``[B]`` targets.
        old_value: ``[B]`` estimates of the policy that collected; needed for ``clip_range``.
        clip_range: how far an estimate may move before it is clipped, positive; None: no clipping.
        weight: ``[B]`` weights of the samples.

    Raises:
        StructureError: if the columns are not all of one shape.
        ValueError: if ``clip_range`` is not positive, or given without ``old_value``.
    """
    check_shape(value.shape, ret=ret, old_value=old_value, weight=weight)
    error = (value - ret).square()
    if clip_range is not None:
        if clip_range <= 0.0:
            raise ValueError(f"clip_range must be positive, got {clip_range}")
        if old_value is None:
            raise ValueError("clip_range needs old_value, the estimates at collecting; give it")
        clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - ret).square())
    if weight is not None:
        error = error * weight
    return 0.5 * error.mean()
