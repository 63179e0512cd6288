"""Returns and advantages over trajectories, time first.

``terminated`` means that the episode ended, so future rewards are 0;
``done`` (``terminated or truncated``) means that the next row belongs to another episode. Only
``terminated`` stops bootstrapping, a time limit does not (Pardo et al., "Time Limits in
Reinforcement Learning", 2018).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dmiddleware.rl.recurrence import check_fraction, check_time_first, discounted_scan

__all__ = [
    "Advantage",
    "NStepReturn",
    "gae",
    "nstep_return",
    "discounted_return",
    "lambda_return",
    "explained_variance",
    "take_rows",
]


class Advantage(NamedTuple):
    """The result of :func:`gae`.

    Attributes:
        adv: ``[T, …]`` advantages.
        ret: ``[T, …]`` returns, ``adv + value``: the value function's target.
    """

    adv: torch.Tensor
    ret: torch.Tensor


class NStepReturn(NamedTuple):
    """The result of :func:`nstep_return`: the parts of an n-step target.

    The target is ``reward + discount * (1 - terminated) * V(next_obs[bootstrap_row])``.

    Attributes:
        reward: ``[T, …]`` discounted sum of the next ``k`` rewards.
        discount: ``[T, …]`` ``discount ** k``.
        bootstrap_row: ``[T, …]`` int64, the row of the last step summed up (``t + k - 1``), whose
            ``next_obs`` to bootstrap from; :func:`take_rows` fetches it.
        terminated: ``[T, …]`` bool, whether that step truly ended the episode.
    """

    reward: torch.Tensor
    discount: torch.Tensor
    bootstrap_row: torch.Tensor
    terminated: torch.Tensor


@torch.no_grad()
def gae(
    reward: torch.Tensor,
    value: torch.Tensor,
    next_value: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> Advantage:
    """Estimate advantages (Schulman et al., "High-Dimensional Continuous Control Using GAE", 2016).

    The TD residual of equation 10, ``delta = reward + discount * V(s') - V(s)``, bootstraps unless
    the step terminated; the exponentially weighted sum of equation 16 is cut where ``done``.

    Args:
        reward: ``[T, …]`` float32.
        value: ``[T, …]`` V of each row's observation.
        next_value: ``[T, …]`` V of each row's true successor; not read where terminated.
        terminated: ``[T, …]`` bool.
        done: ``[T, …]`` bool, terminated or truncated.
        discount: gamma, in ``[0, 1]``.
        gae_lambda: lambda, in ``[0, 1]``.

    Returns:
        Advantages and returns, ``[T, …]``, without gradient.

    Raises:
        StructureError: if shapes differ, ``T`` is 0, or a mask is not bool.
        ValueError: if ``discount`` or ``gae_lambda`` is outside ``[0, 1]``.
    """
    check_fraction(discount=discount, gae_lambda=gae_lambda)
    check_time_first(reward, value=value, next_value=next_value, terminated=terminated, done=done)
    delta = next_value.masked_fill(terminated, 0.0).mul_(discount).add_(reward).sub_(value)
    factor = torch.full_like(delta, discount * gae_lambda).masked_fill_(done, 0.0)
    adv = discounted_scan(delta, factor)
    return Advantage(adv, adv + value)


@torch.no_grad()
def nstep_return(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    *,
    n: int,
    discount: float,
) -> NStepReturn:
    """Sum up to ``n`` rewards ahead of each row (Sutton and Barto, 2nd edition, equation 7.1).

    The sum of a row stops early, with ``k < n``, at the end of its episode or of the data. It then
    still bootstraps from the last row that it covers, unless that row terminated.

    A :class:`~dmiddleware.data.TensorBuffer` computes the same for rows that are linked by episode,
    in numpy. There are two, because this one is part of updates (R2D2): it works on any device,
    never waits for it, and can be compiled.

    Args:
        reward: ``[T, …]`` float32.
        terminated: ``[T, …]`` bool.
        done: ``[T, …]`` bool, terminated or truncated.
        n: how many rewards to sum, at least 1.
        discount: gamma, in ``[0, 1]``.

    Raises:
        StructureError: if shapes differ, ``T`` is 0, or a mask is not bool.
        ValueError: if ``n`` is below 1 or ``discount`` outside ``[0, 1]``.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    check_fraction(discount=discount)
    check_time_first(reward, terminated=terminated, done=done)
    reward = _as_float(reward)
    n_steps = reward.shape[0]
    factor = torch.full_like(reward, discount).masked_fill_(done, 0.0)[:-1]
    total = reward.clone()
    for _ in range(min(n, n_steps) - 1):
        # Horner's rule: what row t + 1 sums in m steps, row t takes in m + 1.
        torch.add(reward[:-1], factor * total[1:], out=total[:-1])
    row = torch.arange(n_steps, device=reward.device).view(-1, *[1] * (reward.dim() - 1))
    index = torch.minimum(_last_row_of_episode(done, row), row + (n - 1))
    powers = discount ** torch.arange(n + 1, device=reward.device, dtype=reward.dtype)
    return NStepReturn(
        reward=total,
        discount=powers[index - row + 1],
        bootstrap_row=index,
        terminated=terminated.gather(0, index),
    )


@torch.no_grad()
def discounted_return(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    *,
    discount: float,
    next_value: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum all discounted rewards to the end of each row's episode (Monte-Carlo returns).

    Args:
        reward: ``[T, …]`` float32.
        terminated: ``[T, …]`` bool.
        done: ``[T, …]`` bool, terminated or truncated.
        discount: gamma, in ``[0, 1]``.
        next_value: ``[T, …]`` V of each row's true successor. With it, the sum of an episode that
            was truncated, or that continues after the last row, ends in ``discount * next_value``;
            without it (the default) such a sum just ends.

    Returns:
        ``[T, …]`` returns, without gradient.

    Raises:
        StructureError: if shapes differ, ``T`` is 0, or a mask is not bool.
        ValueError: if ``discount`` is outside ``[0, 1]``.
    """
    check_fraction(discount=discount)
    check_time_first(reward, terminated=terminated, done=done, next_value=next_value)
    reward = _as_float(reward)
    factor = torch.full_like(reward, discount).masked_fill_(done, 0.0)
    if next_value is not None:
        # The rows at which a sum ends, although the episode continues.
        cut = done & ~terminated
        cut[-1] = ~terminated[-1]
        reward = reward + discount * torch.where(cut, next_value, 0.0)
    return discounted_scan(reward, factor)


@torch.no_grad()
def lambda_return(
    reward: torch.Tensor,
    next_value: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    *,
    discount: float,
    trace_decay: float,
) -> torch.Tensor:
    """Mix the n-step returns of all lengths (Sutton and Barto, 2nd edition, section 12.1).

    ``G[t] = reward + discount * ((1 - trace_decay) * next_value + trace_decay * G[t + 1])``, which
    bootstraps from ``next_value`` alone where ``done`` and at the end of the data. With the value
    of the best action, it is Peng's Q(λ) (Peng and Williams, "Incremental Multi-Step Q-Learning",
    1994).

    Args:
        reward: ``[T, …]`` float32.
        next_value: ``[T, …]`` V of each row's true successor; not read where terminated.
        terminated: ``[T, …]`` bool.
        done: ``[T, …]`` bool.
        discount: gamma, in ``[0, 1]``.
        trace_decay: lambda, in ``[0, 1]``.

    Returns:
        ``[T, …]`` returns, without gradient.

    Raises:
        StructureError: if shapes differ, ``T`` is 0, or a mask is not bool.
        ValueError: if ``discount`` or ``trace_decay`` is outside ``[0, 1]``.
    """
    check_fraction(discount=discount, trace_decay=trace_decay)
    check_time_first(reward, next_value=next_value, terminated=terminated, done=done)
    traced = torch.full_like(next_value, trace_decay).masked_fill_(done, 0.0)
    traced[-1] = 0.0
    bootstrapped = next_value.masked_fill(terminated, 0.0) * (1.0 - traced)
    return discounted_scan(bootstrapped.mul_(discount).add_(reward), discount * traced)


@torch.no_grad()
def explained_variance(
    value: torch.Tensor, ret: torch.Tensor, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return which part of the variance of returns a value function explains, a scalar.

    ``1 - Var(ret - value) / Var(ret)``: 1 for exact values, 0 for a constant, and less for values
    that are worse than a constant. If all returns are equal, it is NaN.

    Args:
        value: ``[…]`` estimates.
        ret: ``[…]`` returns.
        mask: ``[…]`` bool, which of them count; None: all.
    """
    if mask is not None:
        value, ret = value[mask], ret[mask]
    variance = ret.var(correction=0).double()
    residual = (ret - value).var(correction=0).double()
    return (1.0 - residual / variance).masked_fill(variance == 0, torch.nan)


def take_rows(column: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Take ``column[index[t, e…], e…]``: for each row, the time step in ``index``.

    Args:
        column: ``[T, E…, …]``, such as ``next_obs`` with its own dimensions at the end.
        index: ``[T, E…]`` int64, such as ``NStepReturn.bootstrap_row``.

    Returns:
        ``[T, E…, …]`` like ``column``.
    """
    places = [
        torch.arange(size, device=index.device).view(-1, *[1] * (index.dim() - 1 - dim))
        for dim, size in enumerate(index.shape[1:], start=1)
    ]
    return column[(index, *places)]


def _as_float(reward: torch.Tensor) -> torch.Tensor:
    """Return integer rewards as float32, because factors of their dtype would be integers too."""
    return reward if reward.is_floating_point() else reward.float()


def _last_row_of_episode(done: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the first row from it on where ``done``, else the last row."""
    last = done.shape[0] - 1
    ends = torch.where(done, row, last)
    return ends.flip(0).cummin(0).values.flip(0)
