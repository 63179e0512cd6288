"""Returns, advantages and scales of values, with DI-engine's names and arguments."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import torch

from dmiddleware import rl
from dmiddleware.rl.recurrence import discounted_scan

__all__ = [
    "alive",
    "as_like",
    "compute_q_retraces",
    "discount_cumsum",
    "gae",
    "gae_data",
    "generalized_lambda_returns",
    "inv_symlog",
    "multistep_forward_view",
    "nstep_return",
    "nstep_return_data",
    "shape_fn_gae",
    "symlog",
    "td_lambda_data",
    "td_lambda_error",
    "upgo_returns",
    "value_inv_transform",
    "value_transform",
    "view_similar",
]

gae_data = namedtuple("gae_data", "value next_value reward done traj_flag")
nstep_return_data = namedtuple("nstep_return_data", "reward next_value done")
td_lambda_data = namedtuple("td_lambda_data", "value reward weight")


def as_like(x: Any, target: torch.Tensor) -> torch.Tensor:
    """Return a number or a tensor in the dtype and on the device of ``target``."""
    return torch.as_tensor(x, dtype=target.dtype, device=target.device)


def view_similar(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Add dimensions at the end of ``x`` until it has as many as ``target``."""
    return x.view(*x.shape, *[1] * (target.dim() - x.dim()))


def alive(done: torch.Tensor | None, target: torch.Tensor) -> torch.Tensor:
    """Return ``1 - done`` as factors for ``target``; None: nothing is done."""
    if done is None:
        return torch.ones_like(target)
    return view_similar(1.0 - done.to(target.dtype), target)


def gae(data: Any, gamma: float = 0.99, lambda_: float = 0.97) -> torch.Tensor:
    """Return the advantages of :func:`dmiddleware.rl.gae`, ``[T, …]``.

    Args:
        data: a ``gae_data`` of ``[T, …]`` tensors. ``done`` stops bootstrapping (None: never), and
            ``traj_flag`` ends a trajectory (None: where ``done``). Values may have a dimension of
            agents at the end that rewards and flags do not have.
        gamma: the discount.
        lambda_: lambda of the paper.
    """
    value, next_value, reward, done, traj_flag = data
    done = torch.zeros_like(reward) if done is None else done
    columns = (reward, done, done if traj_flag is None else traj_flag)
    reward, terminated, ends = (view_similar(x, value).expand_as(value) for x in columns)
    return rl.gae(
        reward,
        value,
        next_value,
        terminated.bool(),
        ends.bool(),
        discount=gamma,
        gae_lambda=lambda_,
    ).adv


def shape_fn_gae(args: Any, kwargs: Any) -> torch.Size:
    """Return the shape of the rewards of a call of :func:`gae`."""
    shape: torch.Size = (args[0] if args else kwargs["data"]).reward.shape
    return shape


def nstep_return(data: Any, gamma: Any, nstep: int, value_gamma: Any = None) -> torch.Tensor:
    """Return ``sum(gamma**k * reward[k]) + gamma**nstep * next_value``, ``[B, …]``.

    Source: Sutton and Barto, 2nd edition, equation 7.1.

    Args:
        data: an ``nstep_return_data``: rewards ``[nstep, B]``, values ``[B, …]`` and flags ``[B]``.
        gamma: the discount, or a list of ``B`` discounts (NGU).
        nstep: the number of rewards.
        value_gamma: the discount of the value, if it is not ``gamma**nstep``.

    Raises:
        TypeError: if ``gamma`` is neither a number nor a list.
        ValueError: if there are not ``nstep`` rewards.
    """
    reward: torch.Tensor = data.reward
    next_value: torch.Tensor = data.next_value
    if reward.shape[0] != nstep:
        raise ValueError(f"there are {reward.shape[0]} rewards, but nstep is {nstep}")
    if isinstance(gamma, list):
        base = torch.stack([as_like(number, reward) for number in gamma])
    elif isinstance(gamma, float | int):
        base = as_like(gamma, reward)
    else:
        raise TypeError(f"gamma must be a number or a list of them, got {type(gamma).__name__}")
    powers = torch.stack([base**k for k in range(nstep)])
    total = (reward * view_similar(powers, reward)).sum(0)
    discount = base**nstep if value_gamma is None else as_like(value_gamma, next_value)
    bootstrap = view_similar(discount, next_value) * next_value * alive(data.done, next_value)
    return view_similar(total, next_value) + bootstrap


def multistep_forward_view(
    bootstrap_values: torch.Tensor,
    rewards: torch.Tensor,
    gammas: Any,
    lambda_: Any,
    done: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return lambda returns, with gradient (Sutton and Barto, 2nd edition, equation 12.18).

    Args:
        bootstrap_values: ``[T, B]`` values of the successors.
        rewards: ``[T, B]``.
        gammas: discounts, a number or ``[T, B]``.
        lambda_: a number or ``[T, B]``; that of the last step is not used.
        done: ``[T, B]``, where an episode ends.
    """
    gammas, lambda_ = (as_like(x, rewards).expand_as(rewards) for x in (gammas, lambda_))
    gammas = gammas * alive(done, rewards)
    total = rewards[-1] + gammas[-1] * bootstrap_values[-1]
    totals = [total]
    for t in range(len(rewards) - 2, -1, -1):
        mixed = lambda_[t] * total + (1.0 - lambda_[t]) * bootstrap_values[t]
        total = rewards[t] + gammas[t] * mixed
        totals.append(total)
    return torch.stack(totals[::-1])


def generalized_lambda_returns(
    bootstrap_values: torch.Tensor,
    rewards: torch.Tensor,
    gammas: Any,
    lambda_: Any,
    done: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return :func:`multistep_forward_view` for values ``[T + 1, B]`` of steps 0 to T."""
    return multistep_forward_view(bootstrap_values[1:], rewards, gammas, lambda_, done)


def td_lambda_error(data: Any, gamma: float = 0.9, lambda_: float = 0.8) -> torch.Tensor:
    """Return half the mean squared error of values ``[T + 1, B]`` and their lambda returns."""
    value, reward, weight = data
    with torch.no_grad():
        target = generalized_lambda_returns(value, reward, gamma, lambda_)
    error: torch.Tensor = 0.5 * (value[:-1] - target).square()
    return (error if weight is None else error * weight).mean()


def upgo_returns(rewards: torch.Tensor, bootstrap_values: torch.Tensor) -> torch.Tensor:
    """Return ``[T, B]``: returns that follow the trajectory while it does better than expected.

    Source: Vinyals et al., "Grandmaster level in StarCraft II" (2019), methods, UPGO.

    Args:
        rewards: ``[T, B]``.
        bootstrap_values: ``[T + 1, B]`` values of steps 0 to T.
    """
    is_better = rewards + bootstrap_values[1:] >= bootstrap_values[:-1]
    follows = torch.cat([is_better[1:], torch.ones_like(is_better[-1:])])
    return generalized_lambda_returns(bootstrap_values, rewards, 1.0, follows)


def compute_q_retraces(
    q_values: torch.Tensor,
    v_pred: torch.Tensor,
    rewards: torch.Tensor,
    actions: torch.Tensor,
    weights: torch.Tensor,
    ratio: torch.Tensor,
    gamma: float = 0.9,
) -> torch.Tensor:
    """Return the Retrace targets of ACER, ``[T + 1, B, 1]``, without gradient.

    Source: Wang et al., "Sample Efficient Actor-Critic with Experience Replay" (2017), equation 5.

    Args:
        q_values: ``[T + 1, B, N]``.
        v_pred: ``[T + 1, B, 1]``.
        rewards: ``[T, B]``.
        actions: ``[T, B]`` int64.
        weights: ``[T, B]``, 0 where an episode ended.
        ratio: ``[T, B, N]``, the policy's probabilities over those of the policy that acted.
        gamma: the discount.
    """
    index = actions.unsqueeze(-1)
    trace = torch.zeros_like(v_pred)
    trace[:-1] = ratio.gather(-1, index).clamp(max=1.0)
    q_taken = torch.zeros_like(v_pred)
    q_taken[:-1] = q_values[:-1].gather(-1, index)
    discount = gamma * weights.unsqueeze(-1)
    step = rewards.unsqueeze(-1) + discount * (v_pred - trace * q_taken)[1:]
    return torch.cat([discounted_scan(step, discount * trace[1:]), v_pred[-1:]]).detach()


def discount_cumsum(x: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """Return the returns to go of rewards ``[T]``, as Decision Transformer conditions on them."""
    if gamma != 1.0:
        raise ValueError(f"Decision Transformer's returns to go have gamma 1.0, got {gamma}")
    return np.cumsum(x[::-1], axis=0, dtype=x.dtype)[::-1].copy()


def value_transform(x: torch.Tensor, eps: float = 1e-2) -> torch.Tensor:
    """Return :func:`dmiddleware.rl.rescale_value`, with DI-engine's default slope."""
    return rl.rescale_value(x, slope=eps)


def value_inv_transform(x: torch.Tensor, eps: float = 1e-2) -> torch.Tensor:
    """Return :func:`dmiddleware.rl.unscale_value`, with DI-engine's default slope."""
    return rl.unscale_value(x, slope=eps)


def symlog(x: torch.Tensor) -> torch.Tensor:
    """Return ``sign(x) * log(|x| + 1)`` (Hafner et al., "DreamerV3", 2023, equation 9)."""
    return x.sign() * x.abs().log1p()


def inv_symlog(x: torch.Tensor) -> torch.Tensor:
    """Return the inverse of :func:`symlog`."""
    return x.sign() * x.abs().expm1()
