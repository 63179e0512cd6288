"""Implicit quantile networks."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch

from dmiddleware.policy.distributional_dqn import QuantilePolicy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Forward, Inputs, QLearningSettings
from dmiddleware.settings import Count

__all__ = ["IQNPolicy", "IQNSettings"]


class IQNSettings(QLearningSettings):
    """The settings of IQN."""

    n_tau: Count = 8
    """N, the number of fractions of the online network."""
    n_tau_target: Count = 8
    """N', the number of fractions of the target network."""


@POLICY_REGISTRY.register("iqn")
class IQNPolicy(QuantilePolicy):
    """IQN (Dabney et al., "Implicit Quantile Networks for Distributional RL", 2018).

    As :class:`DQNPolicy`, with a network that gives each action's return at any fraction of its
    distribution (:class:`~dmiddleware.model.ImplicitQuantileQNetwork`). An update compares the
    returns at N fractions with the target's returns at N' others, all drawn uniformly, by the
    quantile Huber loss (equation 3). Acting takes the action with the highest mean over K fractions
    (equation 1). The priority is the absolute error of the mean, which the paper does not have.

    N is ``n_tau``, N' is ``n_tau_target``, and K is the model's ``n_quantiles``.

    Differences from the paper: ``double`` chooses the target's action by the online network;
    without it, the target network chooses by the mean over the same N' fractions. Evaluating takes
    K evenly spaced fractions, so that it is deterministic.
    """

    cfg: IQNSettings
    model_type: ClassVar[str] = "implicit_quantile_q_network"

    def draw_inputs(self, forward: Forward, n_rows: int, generator: torch.Generator) -> Inputs:
        """Return the random inputs of a forward; see :meth:`QLearningPolicy.draw_inputs`."""
        cfg, model = self.cfg, cast(Any, self.model)
        sizes: dict[str, int] = {"online": cfg.n_tau, "target": cfg.n_tau_target}
        shape = (n_rows, sizes.get(forward) or model.n_quantiles)
        tau = torch.rand(shape, generator=generator, device=self.draw_device).to(self.device)
        return {**super().draw_inputs(forward, n_rows, generator), "tau": tau}
