"""Losses of distributional Q-learning, with DI-engine's names, tuples and arguments.

Rewards are ``[n, B]`` (of one step ``[B]``), actions, ``done`` and ``weight`` (or None) ``[B]``.
``value_gamma`` is the discount of the next distribution, if it is not ``gamma**nstep``. The n-step
functions return the weighted mean and the losses of the rows.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, Final

import torch

from dmiddleware.ding.rl_utils.returns import as_like, nstep_return, nstep_return_data
from dmiddleware.ding.rl_utils.td_errors import Losses
from dmiddleware.rl import categorical_target, quantile_huber_loss, taken_rows

__all__ = [
    "beta_function_map",
    "dist_1step_td_data",
    "dist_1step_td_error",
    "dist_nstep_td_data",
    "dist_nstep_td_error",
    "evaluate_quantile_at_action",
    "fqf_calculate_fraction_loss",
    "fqf_nstep_td_data",
    "fqf_nstep_td_error",
    "iqn_nstep_td_data",
    "iqn_nstep_td_error",
    "qrdqn_nstep_td_data",
    "qrdqn_nstep_td_error",
    "shape_fn_dntd",
]

dist_1step_td_data = namedtuple(
    "dist_1step_td_data", "dist next_dist act next_act reward done weight"
)
dist_nstep_td_data = namedtuple(
    "dist_nstep_td_data", "dist next_n_dist act next_n_act reward done weight"
)
qrdqn_nstep_td_data = namedtuple(
    "qrdqn_nstep_td_data", "q next_n_q action next_n_action reward done tau weight"
)
iqn_nstep_td_data = namedtuple(
    "iqn_nstep_td_data", "q next_n_q action next_n_action reward done replay_quantiles weight"
)
fqf_nstep_td_data = namedtuple(
    "fqf_nstep_td_data", "q next_n_q action next_n_action reward done quantiles_hats weight"
)


def dist_1step_td_error(
    data: Any, gamma: float, v_min: float, v_max: float, n_atom: int
) -> torch.Tensor:
    """Return the mean loss of :func:`dist_nstep_td_error` for one step."""
    one_step = dist_nstep_td_data(*data)._replace(reward=data.reward.unsqueeze(0))
    return dist_nstep_td_error(one_step, gamma, v_min, v_max, n_atom)[0]


def dist_nstep_td_error(
    data: Any,
    gamma: float,
    v_min: float,
    v_max: float,
    n_atom: int,
    nstep: int = 1,
    value_gamma: Any = None,
) -> Losses:
    """Return the cross-entropy of C51 (Bellemare et al., 2017, algorithm 1).

    Distributions are ``[B, N, n_atom]`` probabilities on ``n_atom`` returns from ``v_min`` to
    ``v_max``. With agents, they are ``[B, A, N, n_atom]``, the actions ``[B, A]``, and the losses
    ``[B * A]``.

    Raises:
        ValueError: if an action's probability is not positive.
    """
    prob = taken_rows(data.dist, data.act)
    if not bool((prob > 0.0).all()):
        raise ValueError("the probabilities of the actions taken must be positive; use a softmax")
    n_agents = prob[0].numel() // n_atom
    next_prob = taken_rows(data.next_n_dist, data.next_n_act).detach()
    zeros = torch.zeros_like(data.reward[0])
    reward = nstep_return(nstep_return_data(data.reward, zeros, None), gamma, nstep)
    discount = as_like(gamma**nstep if value_gamma is None else value_gamma, reward)
    target = categorical_target(
        next_prob.reshape(-1, n_atom),
        reward.repeat_interleave(n_agents),
        data.done.bool().repeat_interleave(n_agents),
        discount=discount.repeat_interleave(n_agents) if discount.dim() else discount,
        support=torch.linspace(v_min, v_max, n_atom, device=reward.device),
    )
    losses = -(target * prob.reshape(-1, n_atom).log()).sum(-1)
    weight = 1.0 if data.weight is None else as_like(data.weight, losses)
    if isinstance(weight, torch.Tensor) and weight.numel() > 1:
        weight = weight.reshape(-1).repeat_interleave(n_agents)
    return (losses * weight).mean(), losses


def qrdqn_nstep_td_error(
    data: Any, gamma: float, nstep: int = 1, value_gamma: Any = None
) -> Losses:
    """Return the loss of QR-DQN (Dabney et al., 2018, algorithm 1).

    ``q`` is ``[B, N, quantiles]``, and ``tau`` their fractions, ``[B, quantiles, 1]`` or a number.
    """
    quantiles = taken_rows(data.q, data.action)
    tau = as_like(data.tau, quantiles)
    tau = tau.squeeze(-1) if tau.dim() > 2 else tau
    return _quantile_loss(
        data,
        quantiles,
        taken_rows(data.next_n_q, data.next_n_action),
        tau.expand_as(quantiles),
        1.0,
        (gamma, nstep, value_gamma),
    )


def iqn_nstep_td_error(
    data: Any, gamma: float, nstep: int = 1, kappa: float = 1.0, value_gamma: Any = None
) -> Losses:
    """Return the loss of IQN (Dabney et al., "Implicit Quantile Networks", 2018, equation 3).

    ``q`` is ``[quantiles, B, N]``, and ``replay_quantiles`` their fractions, ``[quantiles, B, 1]``
    or flat.
    """
    quantiles = taken_rows(data.q.transpose(0, 1).transpose(1, 2), data.action)
    n_quantiles, n_rows = data.q.shape[:2]
    return _quantile_loss(
        data,
        quantiles,
        taken_rows(data.next_n_q.transpose(0, 1).transpose(1, 2), data.next_n_action),
        data.replay_quantiles.reshape(n_quantiles, n_rows).t(),
        kappa,
        (gamma, nstep, value_gamma),
    )


def fqf_nstep_td_error(
    data: Any, gamma: float, nstep: int = 1, kappa: float = 1.0, value_gamma: Any = None
) -> Losses:
    """Return the quantile loss of FQF (Yang et al., 2019, equation 10).

    ``q`` is ``[B, quantiles, N]``, and ``quantiles_hats`` their fractions, ``[B, quantiles]``.
    """
    return _quantile_loss(
        data,
        evaluate_quantile_at_action(data.q, data.action).squeeze(-1),
        evaluate_quantile_at_action(data.next_n_q, data.next_n_action).squeeze(-1),
        data.quantiles_hats,
        kappa,
        (gamma, nstep, value_gamma),
    )


def _quantile_loss(
    data: Any,
    quantiles: torch.Tensor,
    next_quantiles: torch.Tensor,
    tau: torch.Tensor,
    kappa: float,
    discount: tuple[float, int, Any],
) -> Losses:
    returns = nstep_return_data(data.reward.unsqueeze(-1), next_quantiles, data.done)
    target = nstep_return(returns, *discount).detach()
    losses = quantile_huber_loss(quantiles, target, tau=tau, kappa=kappa)
    return (losses if data.weight is None else losses * data.weight).mean(), losses


def evaluate_quantile_at_action(q_s: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return ``[B, quantiles, 1]``: the quantiles ``[B, quantiles, N]`` of the actions ``[B]``."""
    return taken_rows(q_s.transpose(1, 2), actions).unsqueeze(-1)


def fqf_calculate_fraction_loss(
    q_tau_i: torch.Tensor, q_value: torch.Tensor, quantiles: torch.Tensor, actions: torch.Tensor
) -> torch.Tensor:
    """Return a loss whose gradient moves the fractions of FQF (Yang et al., 2019, proposition 1).

    The gradient is that of the 1-Wasserstein distance, also where quantiles are not in order.

    Args:
        q_tau_i: ``[B, n - 1, N]`` values at the inner fractions.
        q_value: ``[B, n, N]`` values at the middles between the fractions.
        quantiles: ``[B, n + 1]`` fractions from 0 to 1, with gradient.
        actions: ``[B]`` int64.
    """
    with torch.no_grad():
        inner = evaluate_quantile_at_action(q_tau_i, actions).squeeze(-1)
        middle = evaluate_quantile_at_action(q_value, actions).squeeze(-1)
        gradient = (inner - middle[:, :-1]).abs() - (inner - middle[:, 1:]).abs()
    return (gradient * quantiles[:, 1:-1]).sum(-1).mean()


def shape_fn_dntd(args: Any, kwargs: Any) -> list[int]:
    """Return ``[n, *shape of dist]`` of a call of :func:`dist_nstep_td_error`."""
    data = args[0] if args else kwargs["data"]
    return [data.reward.shape[0], *data.dist.shape]


def _cpw(x: Any, eta: float = 0.71) -> Any:
    return x**eta / (x**eta + (1 - x) ** eta) ** (1 / eta)


def _cvar(x: Any, eta: float = 0.71) -> Any:
    return x * eta


def _power(x: Any, eta: float = 0.0) -> Any:
    exponent = 1 / (1 + abs(eta))
    return x**exponent if eta >= 0 else 1 - (1 - x) ** exponent


beta_function_map: Final = {"uniform": lambda x: x, "CPW": _cpw, "CVaR": _cvar, "Pow": _power}
"""IQN's distortions of fractions, by attitude to risk (Dabney et al., 2018, section 4)."""
