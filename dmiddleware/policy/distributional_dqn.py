"""DQN that learns distributions of returns: C51 and QR-DQN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, TypeAlias, Unpack

import torch
from torch import nn

from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.q_learning import QLearningOptions, QLearningPolicy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import categorical_target, quantile_huber_loss, taken_rows, weighted_mean

__all__ = ["C51Policy", "DistributionalPolicy", "QRDQNPolicy", "QuantilePolicy"]

Losses: TypeAlias = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class DistributionalPolicy(QLearningPolicy):
    """Q-learning of distributions of returns."""

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        enable_field: Iterable[str] | None = None,
        **options: Unpack[QLearningOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, enable_field=enable_field, **options)


@POLICY_REGISTRY.register("c51_command")
@POLICY_REGISTRY.register("c51")
class C51Policy(DistributionalPolicy):
    """Categorical DQN (Bellemare et al., "A Distributional Perspective on RL", 2017).

    As :class:`DQNPolicy`, with a network that gives each action a distribution over the returns
    ``v_min`` to ``v_max`` (:class:`~dmiddleware.model.CategoricalQNetwork`). The loss is the
    cross-entropy to the projected distribution of the target (algorithm 1); the priority is the
    Kullback-Leibler divergence from it, as in Rainbow (Hessel et al., 2018). ``learn.double``
    chooses the target's action by the online network, which the paper does not.
    """

    learned: ClassVar[str] = "log_prob"

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "categorical_q_network", ["dmiddleware.model"]

    def _loss(
        self,
        batch: Mapping[str, Any],
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        following: torch.Tensor,
    ) -> Losses:
        support = self._parts["q"].target.support
        target = categorical_target(
            following.exp(),
            batch["reward"],
            batch["terminated"],
            discount=batch.get("discount", self._cfg.discount_factor),
            support=support,
        )
        losses = -(target * taken_rows(output["log_prob"], action)).sum(-1)
        # What remains of the cross-entropy without the target's entropy, which nothing can change.
        divergence = losses.detach() + torch.xlogy(target, target).sum(-1)
        logged = {
            "q_value": taken_rows(output["logit"].detach(), action).mean(),
            "target_q_value": (target * support).sum(-1).mean(),
        }
        return weighted_mean(losses, batch.get("weight")), divergence.clamp_min(0.0), logged


class QuantilePolicy(DistributionalPolicy):
    """Q-learning of quantiles of returns; the priority is the absolute error of their mean."""

    learned: ClassVar[str] = "quantiles"

    def _loss(
        self,
        batch: Mapping[str, Any],
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        following: torch.Tensor,
    ) -> Losses:
        target = self._td_target(batch, following)
        quantiles = taken_rows(output["quantiles"], action)
        losses = quantile_huber_loss(quantiles, target, tau=output.get("tau"))
        value, wanted = quantiles.detach().mean(-1), target.mean(-1)
        logged = {"q_value": value.mean(), "target_q_value": wanted.mean()}
        return weighted_mean(losses, batch.get("weight")), (wanted - value).abs(), logged


@POLICY_REGISTRY.register("qrdqn_command")
@POLICY_REGISTRY.register("qrdqn")
class QRDQNPolicy(QuantilePolicy):
    """QR-DQN (Dabney et al., "Distributional RL with Quantile Regression", 2018).

    As :class:`DQNPolicy`, with a network that gives quantiles of each action's return
    (:class:`~dmiddleware.model.QuantileQNetwork`). The loss is equation 10 for the target's
    quantiles (algorithm 1); the priority is the absolute error of the mean. Difference from the
    paper: ``learn.double``, the default, chooses the target's action by the online network.
    """

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "quantile_q_network", ["dmiddleware.model"]
