"""DQN that learns distributions of returns: C51 and QR-DQN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, Unpack

import torch
from torch import nn

from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.q_learning import QLearningOptions, QLearningPolicy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import categorical_target, quantile_huber_loss, taken_rows

__all__ = ["C51Policy", "QRDQNPolicy"]


class _DistributionalPolicy(QLearningPolicy):
    """What both have in common."""

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


def _mean(losses: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return (losses if weight is None else losses * weight).mean()


@POLICY_REGISTRY.register("c51_command")
@POLICY_REGISTRY.register("c51")
class C51Policy(_DistributionalPolicy):
    """Categorical DQN (Bellemare et al., "A Distributional Perspective on RL", 2017).

    As :class:`DQNPolicy`, with a network that gives each action a distribution over the returns
    ``v_min`` to ``v_max`` (:class:`~dmiddleware.model.CategoricalQNetwork`). The loss is the
    cross-entropy to the projected distribution of the target (algorithm 1), which is also the
    priority, as in Rainbow (Hessel et al., 2018). ``learn.double`` chooses the target's action by
    the online network, which the paper does not.
    """

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "categorical_q_network", ["dmiddleware.model"]

    def _loss(
        self, batch: Mapping[str, Any], action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        support = self._parts["q"].target.support
        target = categorical_target(
            self._next_output(batch, "log_prob").exp(),
            batch["reward"],
            batch["terminated"],
            discount=batch.get("discount", self._cfg.discount_factor),
            support=support,
        )
        output = self._model(batch["obs"])
        losses = -(target * taken_rows(output["log_prob"], action)).sum(-1)
        value = output["logit"].detach().gather(-1, action[:, None])
        logged = {"q_value": value.mean(), "target_q_value": (target * support).sum(-1).mean()}
        return _mean(losses, batch.get("weight")), losses.detach(), logged


@POLICY_REGISTRY.register("qrdqn_command")
@POLICY_REGISTRY.register("qrdqn")
class QRDQNPolicy(_DistributionalPolicy):
    """QR-DQN (Dabney et al., "Distributional RL with Quantile Regression", 2018).

    As :class:`DQNPolicy`, with a network that gives quantiles of each action's return
    (:class:`~dmiddleware.model.QuantileQNetwork`). The loss is equation 10 for the target's
    quantiles (algorithm 1); the priority is the absolute error of the mean.
    """

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "quantile_q_network", ["dmiddleware.model"]

    def _loss(
        self, batch: Mapping[str, Any], action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        following = self._next_output(batch, "quantiles")
        discount = torch.zeros_like(batch["reward"]) + batch.get(
            "discount", self._cfg.discount_factor
        )
        discount = discount.masked_fill(batch["terminated"], 0.0)
        target = batch["reward"][:, None] + discount[:, None] * following
        quantiles = taken_rows(self._model(batch["obs"])["quantiles"], action)
        losses = quantile_huber_loss(quantiles, target)
        value, wanted = quantiles.detach().mean(-1), target.mean(-1)
        logged = {"q_value": value.mean(), "target_q_value": wanted.mean()}
        return _mean(losses, batch.get("weight")), (wanted - value).abs(), logged
