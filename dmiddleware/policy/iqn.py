"""Implicit quantile networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self, Unpack, cast

import torch
from torch import nn

from dmiddleware.config import Option, count
from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.distributional_dqn import QuantilePolicy
from dmiddleware.policy.policy import MODES, Mode
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Forward, Inputs, QLearningOptions

__all__ = ["IQNOptions", "IQNPolicy"]


class IQNOptions(QLearningOptions, total=False):
    """The options of :meth:`IQNPolicy.for_env`."""

    n_tau: int
    n_tau_target: int


@POLICY_REGISTRY.register("iqn")
class IQNPolicy(QuantilePolicy):
    """IQN (Dabney et al., "Implicit Quantile Networks for Distributional RL", 2018).

    As :class:`DQNPolicy`, with a network that gives each action's return at any fraction of its
    distribution (:class:`~dmiddleware.model.ImplicitQuantileQNetwork`). An update compares the
    returns at N fractions with those of the target at N' others, all drawn uniformly, by the
    quantile Huber loss (equation 3). Acting takes the action with the highest mean over K fractions
    (equation 1). The priority is the absolute error of the mean, which the paper does not have.

    N is ``learn.n_tau``, N' is ``learn.n_tau_target``, and K is the model's ``n_quantiles``.

    Differences from the paper: ``learn.double`` chooses the target's action by the online network;
    without it, the target network chooses by the mean over the same N' fractions. Evaluating takes
    K evenly spaced fractions, so that it is deterministic.
    """

    config: ClassVar[dict[str, Any]] = {
        "learn": {
            "n_tau": Option(8, count, "N, the number of fractions of the online network"),
            "n_tau_target": Option(8, count, "N', the number of fractions of the target network"),
        }
    }

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        modes: Iterable[Mode] = MODES,
        **options: Unpack[IQNOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(
            env,
            model=model,
            modes=modes,
            **options,  # type: ignore[misc]  # the base class has fewer
        )

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "implicit_quantile_q_network", ["dmiddleware.model"]

    def draw_inputs(self, forward: Forward, n_rows: int, generator: torch.Generator) -> Inputs:
        """Return the random inputs of a forward; see :meth:`QLearningPolicy.draw_inputs`."""
        learn, model = self.cfg.learn, cast(Any, self.model)
        sizes: dict[str, int] = {"online": learn.n_tau, "target": learn.n_tau_target}
        shape = (n_rows, sizes.get(forward) or model.n_quantiles)
        tau = torch.rand(shape, generator=generator).to(self.device)
        return {**super().draw_inputs(forward, n_rows, generator), "tau": tau}
