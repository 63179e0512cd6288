"""Temporal-difference targets and losses, and the priorities that follow from them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from dmiddleware.errors import StructureError

__all__ = [
    "TDLoss",
    "check_shape",
    "ensemble_td_loss",
    "q_target",
    "sequence_priority",
    "soft_value",
    "taken_rows",
    "td_loss",
    "td_target",
    "weighted_mean",
]


class TDLoss(NamedTuple):
    """The result of :func:`td_loss` and :func:`ensemble_td_loss`.

    Attributes:
        loss: scalar, with gradient.
        td_error: ``[B]`` target minus estimate, without gradient; its absolute value is the
            priority of prioritized replay.
    """

    loss: torch.Tensor
    td_error: torch.Tensor


@torch.no_grad()
def td_target(
    next_value: torch.Tensor,
    reward: torch.Tensor,
    terminated: torch.Tensor,
    *,
    discount: float | torch.Tensor,
) -> torch.Tensor:
    """Return ``reward + discount * next_value``, and only ``reward`` where the episode terminated.

    Source: Sutton and Barto, "Reinforcement Learning", 2nd edition (2018), section 6.1; with
    n-step sums, equation 7.1.

    Args:
        next_value: ``[B]`` values of the successors, or ``[B, N]`` samples or quantiles of their
            returns.
        reward: ``[B]`` float32, or an n-step sum.
        terminated: ``[B]`` bool, True where nothing is bootstrapped.
        discount: gamma, or ``[B]`` ``gamma ** k`` of n-step sums.

    Returns:
        Targets in the shape of ``next_value``, without gradient.

    Raises:
        StructureError: if rewards, flags or discounts are not ``[B]``.
    """
    of_rows = discount if isinstance(discount, torch.Tensor) and discount.dim() else None
    check_shape(
        next_value.shape[: max(reward.dim(), 1)],
        reward=reward,
        terminated=terminated,
        discount=of_rows,
    )
    if next_value.dim() > reward.dim():
        reward, terminated = reward.unsqueeze(-1), terminated.unsqueeze(-1)
        discount = discount if of_rows is None else of_rows.unsqueeze(-1)
    return next_value.masked_fill(terminated, 0.0).mul_(discount).add_(reward)


@torch.no_grad()
def q_target(
    next_q: torch.Tensor,
    reward: torch.Tensor,
    terminated: torch.Tensor,
    *,
    discount: float | torch.Tensor,
    next_q_online: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``reward + discount * Q(s', a')``, unless the episode terminated.

    Without ``next_q_online`` the next action is the target network's own best (Mnih et al.,
    "Human-level control", 2015); with it, the online network's best (van Hasselt et al., "Deep
    Reinforcement Learning with Double Q-learning", 2016, equation 4).

    Args:
        next_q: ``[B, A]`` the target network's values at the successor.
        reward: ``[B]`` float32, or an n-step sum.
        terminated: ``[B]`` bool, True where nothing is bootstrapped.
        discount: gamma, or ``[B]`` ``gamma ** k`` of n-step sums.
        next_q_online: ``[B, A]`` the online network's values at the successor.

    Returns:
        ``[B]`` targets, without gradient.

    Raises:
        StructureError: if rewards or flags are not ``[B]``.
    """
    if next_q_online is None:
        bootstrap = next_q.amax(-1)
    else:
        best = next_q_online.argmax(-1, keepdim=True)
        bootstrap = next_q.gather(-1, best).squeeze(-1)
    return td_target(bootstrap, reward, terminated, discount=discount)


def soft_value(q: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``τ log Σ_a exp(q_a / τ)``: the largest of expected value plus ``τ`` times entropy.

    A policy has it that takes action a with a probability in proportion to ``exp(q_a / τ)``.

    Source: Haarnoja et al., "Reinforcement Learning with Deep Energy-Based Policies" (2017),
    equation 4.

    Args:
        q: ``[…, A]`` action values, minus infinity or the lowest number for forbidden actions.
        temperature: ``τ``.

    Returns:
        ``[…]``.
    """
    return temperature * (q / temperature).logsumexp(-1)


def taken_rows(output: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return a network's output for the given actions.

    Args:
        output: ``[…, A]`` or ``[…, A, N]``.
        action: ``[…]`` int64, from 0.

    Returns:
        ``[…]`` or ``[…, N]``.
    """
    choices = action.dim()
    index = action.unsqueeze(-1)
    if output.dim() > index.dim():
        index = index.unsqueeze(-1).expand(*index.shape, output.shape[-1])
    return output.gather(choices, index).squeeze(choices)


def weighted_mean(losses: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of losses ``[B]``, weighted as prioritized replay needs it.

    Source: Schaul et al., "Prioritized Experience Replay" (2016), algorithm 1.

    Args:
        losses: ``[B]``.
        weight: ``[B]`` importance weights; None: all are 1.

    Raises:
        StructureError: if the weights are not ``[B]``.
    """
    check_shape(losses.shape, weight=weight)
    return (losses if weight is None else losses * weight).mean()


def ensemble_td_loss(
    q: torch.Tensor, target: torch.Tensor, *, weight: torch.Tensor | None = None
) -> TDLoss:
    """Compare the values that several critics give the same actions with one target.

    Args:
        q: ``[N, B]`` the values of ``N`` critics.
        target: ``[B]`` from :func:`td_target`.
        weight: ``[B]`` importance weights of prioritized replay (Schaul et al., 2016).

    Returns:
        The weighted mean of the squared errors, summed over the critics. ``td_error`` is the mean
        of their absolute errors.

    Raises:
        StructureError: if targets or weights are not ``[B]``.
    """
    check_shape(q.shape[1:], target=target, weight=weight)
    error = target - q
    return TDLoss(weighted_mean(error.square().sum(0), weight), error.detach().abs().mean(0))


def td_loss(
    q: torch.Tensor,
    action: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    criterion: Literal["huber", "mse"] = "huber",
    huber_delta: float = 1.0,
) -> TDLoss:
    """Compare the values of the actions taken with their targets.

    Args:
        q: ``[B, A]`` the online network's values.
        action: ``[B]`` int64.
        target: ``[B]`` from :func:`q_target`.
        weight: ``[B]`` importance weights of prioritized replay (Schaul et al., 2016); the loss is
            the mean of the weighted errors.
        criterion: ``"huber"`` (its gradient is the error clipped to ``±huber_delta``, as in Mnih et
            al., 2015) or ``"mse"`` (the plain mean of squared errors).
        huber_delta: where Huber's loss turns from quadratic to linear.

    Raises:
        StructureError: if actions, targets or weights are not ``[B]``.
        ValueError: for another criterion.
    """
    check_shape(q.shape[:-1], action=action, target=target, weight=weight)
    predicted = taken_rows(q, action)
    reduction = "mean" if weight is None else "none"
    if criterion == "huber":
        loss = F.huber_loss(predicted, target, reduction=reduction, delta=huber_delta)
    elif criterion == "mse":
        loss = F.mse_loss(predicted, target, reduction=reduction)
    else:
        raise ValueError(f"criterion must be 'huber' or 'mse', got {criterion!r}")
    if weight is not None:
        loss = (loss * weight).mean()
    return TDLoss(loss, target - predicted.detach())


@torch.no_grad()
def sequence_priority(
    td_error: torch.Tensor, mask: torch.Tensor | None = None, *, eta: float = 0.9
) -> torch.Tensor:
    """Return the priority of sequences: ``eta * max |error| + (1 - eta) * mean |error|``.

    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning"
    (R2D2), ICLR 2019, section 2.3.

    Args:
        td_error: ``[T, B]`` errors of the rows that are learned from, without burn-in.
        mask: ``[T, B]`` bool, False for padding; None: there is none. A sequence without any rows
            gets priority 0.
        eta: weight of the largest error.

    Returns:
        ``[B]`` priorities, without gradient.

    Raises:
        StructureError: if the mask does not have the errors' shape.
    """
    check_shape(td_error.shape, mask=mask)
    error = td_error.abs()
    if mask is None:
        return eta * error.amax(0) + (1 - eta) * error.mean(0)
    error = error.masked_fill(~mask, 0.0)
    mean = error.sum(0) / mask.sum(0).clamp(min=1)
    return eta * error.amax(0) + (1 - eta) * mean


def check_shape(wanted: torch.Size, **columns: torch.Tensor | None) -> None:
    """Reject columns that would be broadcast, combining every row with every other.

    Args:
        wanted: the shape that follows from the network's output.
        **columns: the columns by name; None is skipped.

    Raises:
        StructureError: naming the column and both shapes.
    """
    for name, column in columns.items():
        if column is not None and column.shape != wanted:
            raise StructureError(
                f"{name} has shape {tuple(column.shape)}, but the network's output requires "
                f"{tuple(wanted)}; squeeze it, or add a dimension with .unsqueeze(-1)"
            )
