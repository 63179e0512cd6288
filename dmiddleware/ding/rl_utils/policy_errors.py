"""Losses of policies, with DI-engine's names, tuples and arguments.

A policy's output is ``[B, N]`` logits or, for continuous actions, a mapping with ``mu`` and
``sigma``, ``[B, N]``. Weights are ``[B]`` or None.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributions import Categorical, Distribution, Independent, Normal, kl_divergence

from dmiddleware import rl
from dmiddleware.ding.rl_utils.returns import generalized_lambda_returns, upgo_returns

__all__ = [
    "a2c_data",
    "a2c_error",
    "a2c_error_continuous",
    "a2c_loss",
    "calculate_kl_div",
    "coma_data",
    "coma_error",
    "coma_loss",
    "compute_importance_weights",
    "happo_data",
    "happo_error",
    "happo_error_continuous",
    "happo_info",
    "happo_loss",
    "happo_policy_data",
    "happo_policy_error",
    "happo_policy_error_continuous",
    "happo_policy_loss",
    "happo_value_data",
    "happo_value_error",
    "ppg_data",
    "ppg_joint_error",
    "ppg_joint_loss",
    "ppo_data",
    "ppo_data_continuous",
    "ppo_error",
    "ppo_error_continuous",
    "ppo_info",
    "ppo_loss",
    "ppo_policy_data",
    "ppo_policy_data_continuous",
    "ppo_policy_error",
    "ppo_policy_error_continuous",
    "ppo_policy_loss",
    "ppo_value_data",
    "ppo_value_error",
    "shape_fn_ppo",
    "shape_fn_vtrace_discrete_action",
    "tb_cross_entropy",
    "upgo_loss",
    "vtrace_data",
    "vtrace_error_continuous_action",
    "vtrace_error_discrete_action",
    "vtrace_loss",
]

ppo_data = namedtuple(
    "ppo_data",
    "logit_new logit_old action value_new value_old adv return_ weight logit_pretrained",
)
ppo_data_continuous = namedtuple(
    "ppo_data_continuous",
    "mu_sigma_new mu_sigma_old action value_new value_old adv return_ weight logit_pretrained",
)
ppo_policy_data = namedtuple(
    "ppo_policy_data", "logit_new logit_old action adv weight logit_pretrained"
)
ppo_policy_data_continuous = namedtuple(
    "ppo_policy_data_continuous",
    "mu_sigma_new mu_sigma_old action adv weight logit_pretrained",
)
ppo_value_data = namedtuple("ppo_value_data", "value_new value_old return_ weight")
ppo_loss = namedtuple("ppo_loss", "policy_loss value_loss entropy_loss kl_div")
ppo_policy_loss = namedtuple("ppo_policy_loss", "policy_loss entropy_loss kl_div")
ppo_info = namedtuple("ppo_info", "approx_kl clipfrac")
happo_data = namedtuple(
    "happo_data", "logit_new logit_old action value_new value_old adv return_ weight factor"
)
happo_policy_data = namedtuple("happo_policy_data", "logit_new logit_old action adv weight factor")
happo_value_data = namedtuple("happo_value_data", "value_new value_old return_ weight")
happo_loss = namedtuple("happo_loss", "policy_loss value_loss entropy_loss")
happo_policy_loss = namedtuple("happo_policy_loss", "policy_loss entropy_loss")
happo_info = namedtuple("happo_info", "approx_kl clipfrac")
ppg_data = namedtuple(
    "ppg_data",
    "logit_new logit_old action value_new value_old return_ weight",
)
ppg_joint_loss = namedtuple("ppg_joint_loss", "auxiliary_loss behavioral_cloning_loss")
a2c_data = namedtuple("a2c_data", "logit action value adv return_ weight")
a2c_loss = namedtuple("a2c_loss", "policy_loss value_loss entropy_loss")
coma_data = namedtuple("coma_data", "logit action q_value target_q_value reward weight")
coma_loss = namedtuple("coma_loss", "policy_loss q_value_loss entropy_loss")
vtrace_data = namedtuple("vtrace_data", "target_output behaviour_output action value reward weight")
vtrace_loss = namedtuple("vtrace_loss", "policy_loss value_loss entropy_loss")


def _distribution(output: Any) -> Distribution:
    if not isinstance(output, Mapping):
        return Categorical(logits=output)
    columns = [output[key] for key in ("mu", "sigma")]
    mu, sigma = (x.unsqueeze(-1) if x.dim() == 1 else x for x in columns)
    return Independent(Normal(mu, sigma), 1)


def _weighted_mean(losses: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return (losses if weight is None else losses * weight).mean()


def _over_agents(column: torch.Tensor, adv: torch.Tensor) -> torch.Tensor:
    """Average what a policy of several agents or actions has of each row, ``[B, A]``."""
    return column if column.shape == adv.shape else column.mean(1)


def calculate_kl_div(log_ratio: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimate ``KL(new || pretrained)`` from ``log(new / pretrained)`` of the new one's actions.

    Source: Schulman, "Approximating KL Divergence" (2020), joschu.net/blog/kl-approx.

    Raises:
        ValueError: if ``kl_type`` is not one of the page's ``"k1"``, ``"k2"`` and ``"k3"``.
    """
    if kl_type == "k1":
        return log_ratio.mean()
    if kl_type == "k2":
        return log_ratio.square().mean() / 2
    if kl_type == "k3":
        return (torch.exp(-log_ratio) - 1 + log_ratio).mean()
    raise ValueError(f"kl_type must be 'k1', 'k2' or 'k3', got {kl_type!r}")


def _clipped_policy_error(
    data: Any, clip_ratio: float, dual_clip: float | None, factor: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[float, float]]:
    """Return the loss, the entropies, log-probabilities of the actions, and the estimates."""
    new, old = _distribution(data[0]), _distribution(data[1])
    log_prob, old_log_prob = new.log_prob(data.action), old.log_prob(data.action)
    log_ratio = log_prob - old_log_prob
    adv = data.adv * factor
    if log_ratio.shape != adv.shape:
        log_ratio = _over_agents(log_ratio.exp(), adv).log()
    weight = None if data.weight is None else data.weight.expand_as(adv)
    loss = rl.ppo_policy_loss(
        log_ratio,
        torch.zeros_like(log_ratio),
        adv,
        clip_ratio=clip_ratio,
        dual_clip=dual_clip,
        weight=weight,
    ).loss
    with torch.no_grad():
        clipped = ((log_ratio.exp() - 1.0).abs() > clip_ratio).float().mean()
        estimates = float((old_log_prob - log_prob).mean()), float(clipped)
    return loss, _over_agents(new.entropy(), adv), log_prob, estimates


def ppo_policy_error(
    data: Any,
    clip_ratio: float = 0.2,
    dual_clip: float | None = None,
    entropy_bonus: bool = True,
    kl_type: str = "k1",
) -> tuple[ppo_policy_loss, ppo_info]:
    """Return :func:`dmiddleware.rl.ppo_policy_loss`, the mean entropy, and a KL divergence.

    Args:
        data: a ``ppo_policy_data`` or ``ppo_policy_data_continuous``. With a further dimension of
            agents, which the advantages do not have, ratios and entropies are averaged over them.
            ``logit_pretrained`` is the output of a policy to stay close to, or None.
        clip_ratio: epsilon of the paper.
        dual_clip: the lower bound's factor for negative advantages, above 1; None: no bound.
        entropy_bonus: whether to compute the entropy; if not, it is 0.
        kl_type: see :func:`calculate_kl_div`.
    """
    loss, entropy, log_prob, estimates = _clipped_policy_error(data, clip_ratio, dual_clip)
    kl_div = torch.zeros_like(loss)
    if data.logit_pretrained is not None:
        pretrained = _distribution(data.logit_pretrained).log_prob(data.action)
        kl_div = calculate_kl_div(log_prob - pretrained, kl_type)
    entropy_loss = torch.zeros_like(loss)
    if entropy_bonus:
        entropy_loss = _weighted_mean(entropy, data.weight)
    return ppo_policy_loss(loss, entropy_loss, kl_div), ppo_info(*estimates)


def ppo_policy_error_continuous(
    data: Any, clip_ratio: float = 0.2, dual_clip: float | None = None, kl_type: str = "k1"
) -> tuple[ppo_policy_loss, ppo_info]:
    """Return :func:`ppo_policy_error` for continuous actions."""
    return ppo_policy_error(data, clip_ratio, dual_clip, kl_type=kl_type)


def ppo_value_error(
    data: Any, clip_ratio: float = 0.2, use_value_clip: bool = True
) -> torch.Tensor:
    """Return :func:`dmiddleware.rl.ppo_value_loss`, clipped or not."""
    clip_range = clip_ratio if use_value_clip else None
    return rl.ppo_value_loss(
        data.value_new,
        data.return_,
        old_value=data.value_old,
        clip_range=clip_range,
        weight=data.weight,
    )


def ppo_error(
    data: Any,
    clip_ratio: float = 0.2,
    use_value_clip: bool = True,
    dual_clip: float | None = None,
    kl_type: str = "k1",
) -> tuple[ppo_loss, ppo_info]:
    """Return :func:`ppo_policy_error` and :func:`ppo_value_error` of a ``ppo_data``."""
    new, old, action, _, _, adv, _, weight, pretrained = data
    policy_data = ppo_policy_data(new, old, action, adv, weight, pretrained)
    policy, info = ppo_policy_error(policy_data, clip_ratio, dual_clip, kl_type=kl_type)
    value_loss = ppo_value_error(data, clip_ratio, use_value_clip)
    return ppo_loss(policy.policy_loss, value_loss, policy.entropy_loss, policy.kl_div), info


ppo_error_continuous = ppo_error


def shape_fn_ppo(args: Any, kwargs: Any) -> torch.Size:
    """Return the shape of the new logits of a call of :func:`ppo_error`."""
    shape: torch.Size = (args[0] if args else kwargs["data"]).logit_new.shape
    return shape


def happo_policy_error(
    data: Any, clip_ratio: float = 0.2, dual_clip: float | None = None
) -> tuple[happo_policy_loss, happo_info]:
    """Return PPO's policy loss of one agent after others (Kuba et al., 2022, equation 11).

    ``factor``, ``[B, 1]``, is the product of the ratios of the agents that were updated before; the
    advantages are multiplied by it.
    """
    factor = data.factor.squeeze(1)
    loss, entropy, _, estimates = _clipped_policy_error(data, clip_ratio, dual_clip, factor)
    return happo_policy_loss(loss, _weighted_mean(entropy, data.weight)), happo_info(*estimates)


happo_policy_error_continuous = happo_policy_error
happo_value_error = ppo_value_error


def happo_error(
    data: Any,
    clip_ratio: float = 0.2,
    use_value_clip: bool = True,
    dual_clip: float | None = None,
) -> tuple[happo_loss, happo_info]:
    """Return :func:`happo_policy_error` and :func:`ppo_value_error` of a ``happo_data``."""
    new, old, action, _, _, adv, _, weight, factor = data
    policy_data = happo_policy_data(new, old, action, adv, weight, factor)
    policy, info = happo_policy_error(policy_data, clip_ratio, dual_clip)
    value_loss = ppo_value_error(data, clip_ratio, use_value_clip)
    return happo_loss(policy.policy_loss, value_loss, policy.entropy_loss), info


def happo_error_continuous(
    data: Any,
    clip_ratio: float = 0.2,
    use_value_clip: bool = True,
    dual_clip: float | None = None,
) -> tuple[happo_loss, happo_info]:
    """Return :func:`happo_error` for continuous actions; its entropy is that of one dimension."""
    loss, info = happo_error(data, clip_ratio, use_value_clip, dual_clip)
    return loss._replace(entropy_loss=loss.entropy_loss / data.action.shape[-1]), info


def ppg_joint_error(
    data: Any, clip_ratio: float = 0.2, use_value_clip: bool = True
) -> ppg_joint_loss:
    """Return the losses of PPG's auxiliary phase (Cobbe et al., 2021, section 2.1).

    Returns:
        The value loss, and ``KL(old || new)`` of the two policies, averaged over the rows.
    """
    value_loss = ppo_value_error(data, clip_ratio, use_value_clip)
    old, new = Categorical(logits=data.logit_old), Categorical(logits=data.logit_new)
    return ppg_joint_loss(value_loss, kl_divergence(old, new).mean())


def a2c_error(data: Any) -> a2c_loss:
    """Return the policy gradient's loss, the squared error of the values, and the entropy."""
    policy = _distribution(data.logit)
    error = (data.return_ - data.value).square()
    return a2c_loss(
        -_weighted_mean(policy.log_prob(data.action) * data.adv, data.weight),
        _weighted_mean(error, data.weight),
        _weighted_mean(policy.entropy(), data.weight),
    )


a2c_error_continuous = a2c_error


def coma_error(data: Any, gamma: float, lambda_: float) -> coma_loss:
    """Return the losses of COMA (Foerster et al., 2018, equations 4 and 5).

    Args:
        data: a ``coma_data``: logits and values ``[T, B, A, N]``, actions ``[T, B, A]``, rewards
            ``[T, B]``.
        gamma: the discount.
        lambda_: lambda of the critic's returns.
    """
    logit, action, q_value, target_q_value, reward, weight = data
    q_taken = rl.taken_rows(q_value, action)
    target = rl.taken_rows(target_q_value, action).detach()
    reward = reward[:-1].unsqueeze(-1).expand_as(target[1:])
    error = (generalized_lambda_returns(target, reward, gamma, lambda_) - q_taken[:-1]).square()
    policy: Any = Categorical(logits=logit)
    baseline = (policy.probs * q_value).sum(-1)
    adv = (q_taken - baseline).detach()
    return coma_loss(
        -_weighted_mean(policy.log_prob(action) * adv, weight),
        _weighted_mean(error, None if weight is None else weight[:-1]),
        _weighted_mean(policy.entropy(), weight),
    )


def compute_importance_weights(
    target_output: Any,
    behaviour_output: Any,
    action: torch.Tensor,
    action_space_type: str = "discrete",
    requires_grad: bool = False,
) -> torch.Tensor:
    """Return the probabilities of actions under one policy over those under another.

    Args:
        target_output: the output of the policy that learns.
        behaviour_output: the output of the policy that acted.
        action: the actions.
        action_space_type: not read; the outputs say whether actions are continuous.
        requires_grad: whether the result has a gradient.
    """
    with torch.set_grad_enabled(requires_grad):
        log_prob = _distribution(target_output).log_prob(action)
        return (log_prob - _distribution(behaviour_output).log_prob(action)).exp()


def vtrace_error_discrete_action(
    data: Any,
    gamma: float = 0.99,
    lambda_: float = 0.95,
    rho_clip_ratio: float = 1.0,
    c_clip_ratio: float = 1.0,
    rho_pg_clip_ratio: float = 1.0,
) -> vtrace_loss:
    """Return the losses of IMPALA with the targets of :func:`dmiddleware.rl.vtrace`.

    Args:
        data: a ``vtrace_data``: outputs and actions of ``T`` steps, rewards ``[T, B]``, and values
            ``[T + 1, B]``. A value is 0 where an episode has ended.
        gamma: the discount.
        lambda_: lambda of remark 2.
        rho_clip_ratio: the bound of the ratios of the errors.
        c_clip_ratio: the bound of the ratios of the traces, at most ``rho_clip_ratio``.
        rho_pg_clip_ratio: the bound of the ratios of the advantages.
    """
    target, behavior, action, value, reward, weight = data
    policy: Any = _distribution(target)
    log_prob = policy.log_prob(action)
    nowhere = torch.zeros_like(reward, dtype=torch.bool)
    traced = rl.vtrace(
        reward,
        value[:-1].detach(),
        value[1:].detach(),
        nowhere,
        nowhere,
        log_prob=log_prob.detach(),
        old_log_prob=_distribution(behavior).log_prob(action),
        discount=gamma,
        trace_decay=lambda_,
        rho_clip=rho_clip_ratio,
        c_clip=c_clip_ratio,
        adv_rho_clip=rho_pg_clip_ratio,
    )
    return vtrace_loss(
        -_weighted_mean(log_prob * traced.adv, weight),
        _weighted_mean((value[:-1] - traced.value).square(), weight),
        _weighted_mean(policy.entropy(), weight),
    )


vtrace_error_continuous_action = vtrace_error_discrete_action


def shape_fn_vtrace_discrete_action(args: Any, kwargs: Any) -> torch.Size:
    """Return the shape of the policy's output in a call of the error with discrete actions."""
    shape: torch.Size = (args[0] if args else kwargs["data"]).target_output.shape
    return shape


def tb_cross_entropy(
    logit: torch.Tensor, label: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``[T, B]``: the log-probabilities of labels, summed over the parts of an action.

    Args:
        logit: ``[T, B, N]``, or ``[T, B, S, N]`` for actions of ``S`` parts.
        label: ``[T, B]`` or ``[T, B, S]``.
        mask: ``[T, B, S]``, 0 for parts that do not count.

    Raises:
        AssertionError: for labels with more dimensions.
    """
    assert label.dim() in (2, 3), f"labels must be [T, B] or [T, B, S], got {tuple(label.shape)}"
    losses = F.cross_entropy(logit.flatten(0, -2), label.flatten(), reduction="none")
    log_prob = -losses.view(label.shape)
    if label.dim() == 2:
        return log_prob
    return (log_prob if mask is None else log_prob * mask).sum(-1)


def upgo_loss(
    target_output: torch.Tensor,
    rhos: torch.Tensor,
    action: torch.Tensor,
    rewards: torch.Tensor,
    bootstrap_values: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the policy gradient's loss with the advantages of UPGO.

    Args:
        target_output: ``[T, B, N]`` or ``[T, B, S, N]`` logits.
        rhos: ``[T, B]`` importance ratios.
        action: ``[T, B]`` or ``[T, B, S]``.
        rewards: ``[T, B]``.
        bootstrap_values: ``[T + 1, B]`` values of steps 0 to T.
        mask: see :func:`tb_cross_entropy`.
    """
    with torch.no_grad():
        adv = rhos * (upgo_returns(rewards, bootstrap_values) - bootstrap_values[:-1])
    return -(adv * tb_cross_entropy(target_output, action, mask)).mean()
