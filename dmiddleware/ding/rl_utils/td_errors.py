"""Temporal-difference errors, with DI-engine's names, tuples and arguments.

Each takes a tuple of columns: ``q`` is ``[B, N]`` (or ``[B, A, N]`` for ``A`` agents or branches),
actions ``[B]``, rewards ``[B]`` or, of n steps, ``[n, B]``, ``done`` and ``weight`` (or None)
``[B]``. ``criterion`` gives the loss of each row, by default the squared error. The target has no
gradient. Most return the weighted mean and the losses of the rows, ``[B]``.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from dmiddleware.ding.rl_utils.returns import (
    alive,
    as_like,
    nstep_return,
    nstep_return_data,
    value_inv_transform,
    value_transform,
    view_similar,
)
from dmiddleware.rl import soft_value, taken_rows

__all__ = [
    "bdq_nstep_td_error",
    "dqfd_nstep_td_data",
    "dqfd_nstep_td_error",
    "dqfd_nstep_td_error_with_rescale",
    "m_q_1step_td_data",
    "m_q_1step_td_error",
    "q_1step_td_data",
    "q_1step_td_error",
    "q_nstep_sql_td_error",
    "q_nstep_td_data",
    "q_nstep_td_error",
    "q_nstep_td_error_with_rescale",
    "q_v_1step_td_data",
    "q_v_1step_td_error",
    "shape_fn_qntd",
    "shape_fn_qntd_rescale",
    "shape_fn_td_lambda",
    "v_1step_td_data",
    "v_1step_td_error",
    "v_nstep_td_data",
    "v_nstep_td_error",
]

Losses: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The weighted mean, and the losses of the rows ``[B]``."""

Rescaling: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_SQUARED: Final = nn.MSELoss(reduction="none")

q_1step_td_data = namedtuple("q_1step_td_data", "q next_q act next_act reward done weight")
m_q_1step_td_data = namedtuple("m_q_1step_td_data", "q target_q next_q act reward done weight")
q_v_1step_td_data = namedtuple("q_v_1step_td_data", "q v act reward done weight")
v_1step_td_data = namedtuple("v_1step_td_data", "v next_v reward done weight")
v_nstep_td_data = namedtuple("v_nstep_td_data", "v next_n_v reward done weight value_gamma")
q_nstep_td_data = namedtuple(
    "q_nstep_td_data", "q next_n_q action next_n_action reward done weight"
)
dqfd_nstep_td_data = namedtuple(
    "dqfd_nstep_td_data",
    "q next_n_q action next_n_action reward done done_one_step weight "
    "new_n_q_one_step next_n_action_one_step is_expert",
)


def _compare(estimate: torch.Tensor, target: torch.Tensor, weight: Any, criterion: Any) -> Losses:
    losses = criterion(estimate, target.detach())
    return _weighted(losses, weight).mean(), losses


def _weighted(losses: torch.Tensor, weight: Any) -> torch.Tensor:
    if weight is None:
        return losses
    return losses * view_similar(as_like(weight, losses), losses)


def _target(
    value: torch.Tensor,
    reward: torch.Tensor,
    done: Any,
    gamma: Any,
    nstep: int,
    value_gamma: Any,
    cum_reward: bool = False,
) -> torch.Tensor:
    """Return ``[B, …]``: discounted rewards, or their sum if it is given, and the next value."""
    if not cum_reward:
        return nstep_return(nstep_return_data(reward, value, done), gamma, nstep, value_gamma)
    discount = as_like(gamma**nstep if value_gamma is None else value_gamma, value)
    bootstrap = view_similar(discount, value) * value * alive(done, value)
    return view_similar(reward, value) + bootstrap


def _at(q: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """Return the values of actions that may have a last dimension of 1."""
    return taken_rows(q, action if action.dim() < q.dim() else action.squeeze(-1))


def q_1step_td_error(data: Any, gamma: float, criterion: Any = _SQUARED) -> torch.Tensor:
    """Return the mean loss of Q-learning for given next actions."""
    q, next_q, act, next_act, reward, done, weight = data
    target = _target(_at(next_q, next_act), reward, done, gamma, 1, None, cum_reward=True)
    return _compare(_at(q, act), target, weight, criterion)[0]


def m_q_1step_td_error(
    data: Any, gamma: float, tau: float, alpha: float, criterion: Any = _SQUARED
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of Munchausen DQN (Vieillard et al., 2020, equations 1 and 2).

    Args:
        data: an ``m_q_1step_td_data``; ``target_q`` and ``next_q`` are the target network's values.
        gamma: the discount.
        tau: the temperature.
        alpha: the weight of the log-policy, which is clipped to [-1, 1].
        criterion: the loss of each row.

    Returns:
        The mean loss, the losses ``[B]``, the mean gap between the two best actions, and ``[B, 1]``
        where the log-policy was clipped.
    """
    q, target_q, next_q, act, reward, done, weight = data
    bonus = _at(target_q, act) - soft_value(target_q, tau)
    next_v = soft_value(next_q, tau)
    clipped = (bonus.abs() > 1.0).float().unsqueeze(-1)
    reward = reward + alpha * bonus.clamp(-1.0, 1.0)
    target = _target(next_v, reward, done, gamma, 1, None, cum_reward=True)
    loss, losses = _compare(_at(q, act), target, weight, criterion)
    best = target_q.detach().topk(2, -1).values
    return loss, losses, (best[:, 0] - best[:, 1]).mean(), clipped


def q_v_1step_td_error(data: Any, gamma: float, criterion: Any = _SQUARED) -> Losses:
    """Compare Q of the actions with the reward and the next V (SAC), both maybe ``[B, A]``."""
    q, v, act, reward, done, weight = data
    target = _target(v, reward, done, gamma, 1, None, cum_reward=True)
    return _compare(_at(q, act), target, weight, criterion)


def v_1step_td_error(data: Any, gamma: float, criterion: Any = _SQUARED) -> Losses:
    """Compare V with the reward and the next V; values may be ``[B, A]``, ``done`` None."""
    v, next_v, reward, done, weight = data
    target = _target(next_v, reward, done, gamma, 1, None, cum_reward=True)
    return _compare(v, target, weight, criterion)


def v_nstep_td_error(data: Any, gamma: float, nstep: int = 1, criterion: Any = _SQUARED) -> Losses:
    """Compare V with n rewards and the V after them."""
    v, next_n_v, reward, done, weight, value_gamma = data
    target = _target(next_n_v, reward, done, gamma, nstep, value_gamma)
    return _compare(v, target, weight, criterion)


def q_nstep_td_error(
    data: Any,
    gamma: Any,
    nstep: int = 1,
    cum_reward: bool = False,
    value_gamma: Any = None,
    criterion: Any = _SQUARED,
) -> Losses:
    """Compare Q with n rewards and the Q after them.

    Args:
        data: a ``q_nstep_td_data``.
        gamma: the discount, or a list of a discount for each row.
        nstep: the number of rewards.
        cum_reward: whether ``reward`` is the discounted sum already.
        value_gamma: the discount of the next value, a number or ``[B]``; None: ``gamma**nstep``.
        criterion: the loss of each row.
    """
    q, next_n_q, action, next_n_action, reward, done, weight = data
    value = _at(next_n_q, next_n_action)
    target = _target(value, reward, done, gamma, nstep, value_gamma, cum_reward)
    return _compare(_at(q, action), target, weight, criterion)


def bdq_nstep_td_error(
    data: Any,
    gamma: Any,
    nstep: int = 1,
    cum_reward: bool = False,
    value_gamma: Any = None,
    criterion: Any = _SQUARED,
) -> Losses:
    """Return :func:`q_nstep_td_error` of ``q`` ``[B, D, N]``, averaged over the ``D`` branches."""
    branches = data._replace(reward=data.reward.unsqueeze(-1), weight=None)
    losses = q_nstep_td_error(branches, gamma, nstep, cum_reward, value_gamma, criterion)[1]
    losses = losses.mean(-1)
    return _weighted(losses, data.weight).mean(), losses


def q_nstep_td_error_with_rescale(
    data: Any,
    gamma: Any,
    nstep: int = 1,
    value_gamma: Any = None,
    criterion: Any = _SQUARED,
    trans_fn: Rescaling = value_transform,
    inv_trans_fn: Rescaling = value_inv_transform,
) -> Losses:
    """Return :func:`q_nstep_td_error` for values on the scale of ``trans_fn`` (R2D2)."""
    q, next_n_q, action, next_n_action, reward, done, weight = data
    value = inv_trans_fn(_at(next_n_q, next_n_action))
    target = trans_fn(_target(value, reward, done, gamma, nstep, value_gamma))
    return _compare(_at(q, action), target, weight, criterion)


def q_nstep_sql_td_error(
    data: Any,
    gamma: float,
    alpha: float,
    nstep: int = 1,
    cum_reward: bool = False,
    value_gamma: Any = None,
    criterion: Any = _SQUARED,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of soft Q-learning (Haarnoja et al., 2017) and the soft values ``[B]``.

    ``alpha`` is the temperature; the rest is as in :func:`q_nstep_td_error`, but the next action is
    not used.
    """
    q, next_n_q, action, _, reward, done, weight = data
    soft = soft_value(next_n_q, alpha)
    target = _target(soft, reward, done, gamma, nstep, value_gamma, cum_reward)
    return *_compare(_at(q, action), target, weight, criterion), soft.detach().clone()


def dqfd_nstep_td_error(
    data: Any,
    gamma: float,
    lambda_n_step_td: float,
    lambda_supervised_loss: float,
    margin_function: float,
    lambda_one_step_td: float = 1.0,
    nstep: int = 1,
    cum_reward: bool = False,
    value_gamma: Any = None,
    criterion: Any = _SQUARED,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return the loss of DQfD (Hester et al., 2018, equations 2 and 4).

    Args:
        data: a ``dqfd_nstep_td_data``.
        gamma: the discount.
        lambda_n_step_td: the weight of the n-step loss.
        lambda_supervised_loss: the weight of the large-margin loss on an expert's actions.
        margin_function: by how much an expert's action should be better than all others.
        lambda_one_step_td: the weight of the one-step loss.
        nstep: the number of rewards.
        cum_reward: must be False, since the one-step loss needs the first reward.
        value_gamma: as in :func:`q_nstep_td_error`.
        criterion: the loss of each row.

    Returns:
        The mean loss, the priorities ``[B]``, and the means of the three parts.

    Raises:
        ValueError: for summed rewards.
    """
    return _dqfd(
        data,
        gamma,
        (lambda_n_step_td, lambda_one_step_td, lambda_supervised_loss),
        margin_function,
        nstep,
        cum_reward,
        value_gamma,
        criterion,
        (lambda value: value, lambda value: value),
    )


def dqfd_nstep_td_error_with_rescale(
    data: Any,
    gamma: float,
    lambda_n_step_td: float,
    lambda_supervised_loss: float,
    lambda_one_step_td: float,
    margin_function: float,
    nstep: int = 1,
    cum_reward: bool = False,
    value_gamma: Any = None,
    criterion: Any = _SQUARED,
    trans_fn: Rescaling = value_transform,
    inv_trans_fn: Rescaling = value_inv_transform,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return :func:`dqfd_nstep_td_error` for values on the scale of ``trans_fn`` (R2D3)."""
    return _dqfd(
        data,
        gamma,
        (lambda_n_step_td, lambda_one_step_td, lambda_supervised_loss),
        margin_function,
        nstep,
        cum_reward,
        value_gamma,
        criterion,
        (trans_fn, inv_trans_fn),
    )


def _dqfd(
    data: Any,
    gamma: float,
    shares: tuple[float, float, float],
    margin: float,
    nstep: int,
    cum_reward: bool,
    value_gamma: Any,
    criterion: Any,
    scale: tuple[Rescaling, Rescaling],
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    if cum_reward:
        raise ValueError("cum_reward=True leaves no first reward for DQfD's one-step loss")
    q_taken, (rescaled, unscaled) = _at(data.q, data.action), scale
    value = unscaled(_at(data.next_n_q, data.next_n_action))
    target = rescaled(_target(value, data.reward, data.done, gamma, nstep, value_gamma))
    value = unscaled(_at(data.new_n_q_one_step, data.next_n_action_one_step))
    near = rescaled(_target(value, data.reward[:1], data.done_one_step, gamma, 1, None))
    is_other = torch.ones_like(data.q).scatter(-1, data.action.unsqueeze(-1), 0.0)
    supervised = data.is_expert * ((data.q + margin * is_other).amax(-1) - q_taken)
    parts = (criterion(q_taken, target.detach()), criterion(q_taken, near.detach()), supervised)
    weighted = [share * part for share, part in zip(shares, parts, strict=True)]
    n_step, one_step, expert = parts
    return (
        _weighted(sum(weighted, torch.zeros_like(q_taken)), data.weight).mean(),
        sum((part.abs() for part in weighted), torch.zeros_like(q_taken)),
        (n_step.mean(), one_step.mean(), expert.mean()),
    )


def shape_fn_qntd(args: Any, kwargs: Any) -> list[int]:
    """Return ``[n, *shape of q]`` of a call of :func:`q_nstep_td_error`."""
    data = args[0] if args else kwargs["data"]
    return [data.reward.shape[0], *data.q.shape]


shape_fn_qntd_rescale = shape_fn_qntd


def shape_fn_td_lambda(args: Any, kwargs: Any) -> Any:
    """Return the shape of a call's rewards; of keyword arguments, as there, only ``T``."""
    return args[0].reward.shape if args else kwargs["data"].reward.shape[0]
