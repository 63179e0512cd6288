"""V-trace: targets for data that an older policy collected."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmiddleware.rl.recurrence import check_fraction, check_time_first, discounted_scan

__all__ = ["VTrace", "vtrace"]


class VTrace(NamedTuple):
    """The result of :func:`vtrace`.

    Attributes:
        value: ``[T, …]`` targets of the value function, ``v_s``.
        adv: ``[T, …]`` advantages of the policy gradient, ``rho_s * (r_s + gamma * v_(s+1) -
            V(x_s))``.
    """

    value: torch.Tensor
    adv: torch.Tensor


@torch.no_grad()
def vtrace(
    reward: torch.Tensor,
    value: torch.Tensor,
    next_value: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    *,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    discount: float,
    trace_decay: float = 1.0,
    rho_clip: float | None = 1.0,
    c_clip: float | None = 1.0,
    adv_rho_clip: float | None = 1.0,
) -> VTrace:
    """Correct n-step targets for the policy that acted (Espeholt et al., "IMPALA", 2018).

    With ``ratio = exp(log_prob - old_log_prob)``, ``rho = min(rho_clip, ratio)`` and
    ``c = trace_decay * min(c_clip, ratio)``, the targets of equation 1 are, as remark 1 has them,
    ``v[s] = V[s] + rho[s] * (reward[s] + discount * V[s + 1] - V[s]) + discount * c[s] * (v[s + 1]
    - V[s + 1])``. If the same policy acted, and no ratio is clipped below 1, they are the n-step
    Bellman targets of equation 2. The advantages are those of section 4.2.

    Args:
        reward: ``[T, …]`` float32.
        value: ``[T, …]`` V of each row's observation.
        next_value: ``[T, …]`` V of each row's true successor; not read where terminated.
        terminated: ``[T, …]`` bool.
        done: ``[T, …]`` bool, terminated or truncated.
        log_prob: ``[T, …]`` of the actions under the policy that learns.
        old_log_prob: ``[T, …]`` of the actions under the policy that acted.
        discount: gamma, in ``[0, 1]``.
        trace_decay: lambda of remark 2, in ``[0, 1]``.
        rho_clip: bound of the ratios of the TD errors; it decides which policy's values the targets
            are. None: no bound.
        c_clip: bound of the ratios of the traces; it decides how fast values are learned. None: no
            bound.
        adv_rho_clip: bound of the ratios of the advantages. None: no bound.

    Returns:
        Targets and advantages, ``[T, …]``, without gradient.

    Raises:
        StructureError: if shapes differ, ``T`` is 0, or a mask is not bool.
        ValueError: if ``discount`` or ``trace_decay`` is outside ``[0, 1]``, a bound is not
            positive, or ``rho_clip`` is below ``c_clip``.

    Example:
        >>> reward, value, log_prob = torch.ones(3, 1), torch.zeros(3, 1), torch.zeros(3, 1)
        >>> last = torch.tensor([[False], [False], [True]])
        >>> vtrace(
        ...     reward, value, value, last, last,
        ...     log_prob=log_prob, old_log_prob=log_prob, discount=0.5,
        ... ).value.flatten().tolist()
        [1.75, 1.5, 1.0]
    """
    check_fraction(discount=discount, trace_decay=trace_decay)
    _check_bounds(rho_clip=rho_clip, c_clip=c_clip, adv_rho_clip=adv_rho_clip)
    check_time_first(
        reward,
        value=value,
        next_value=next_value,
        terminated=terminated,
        done=done,
        log_prob=log_prob,
        old_log_prob=old_log_prob,
    )
    ratio = (log_prob - old_log_prob).exp()
    bootstrap = next_value.masked_fill(terminated, 0.0)
    error = bootstrap.mul(discount).add_(reward).sub_(value).mul_(_clipped(ratio, rho_clip))
    factor = _clipped(ratio, c_clip).mul(discount * trace_decay).masked_fill_(done, 0.0)
    target = discounted_scan(error, factor).add_(value)
    # Where an episode ends or is cut, the successor has a value, but its target is unknown.
    following = bootstrap.clone()
    following[:-1] = torch.where(done[:-1], bootstrap[:-1], target[1:])
    adv = following.mul_(discount).add_(reward).sub_(value).mul_(_clipped(ratio, adv_rho_clip))
    return VTrace(target, adv)


def _clipped(ratio: torch.Tensor, bound: float | None) -> torch.Tensor:
    return ratio if bound is None else ratio.clamp(max=bound)


def _check_bounds(**bounds: float | None) -> None:
    for name, bound in bounds.items():
        if bound is not None and not bound > 0.0:
            raise ValueError(f"{name} must be positive, or None for no bound, got {bound}")
    rho, c = bounds["rho_clip"], bounds["c_clip"]
    if rho is not None and (c is None or rho < c):
        raise ValueError(f"rho_clip must be at least c_clip, got {rho} and {c}")
