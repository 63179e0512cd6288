"""Fully parameterized quantile functions."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from torch import nn

from dmiddleware.policy.component import Component, rmsprop
from dmiddleware.policy.distributional_dqn import QuantilePolicy
from dmiddleware.policy.network_outputs import named_outputs
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Inputs, QLearningSettings
from dmiddleware.rl import taken_rows
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import NonNegative
from dmiddleware.tree import Columns, Value

__all__ = ["FQFPolicy", "FQFSettings"]

_NOTHING: Final[Inputs] = {}


class FQFSettings(QLearningSettings):
    """The settings of FQF."""

    learning_rate_fraction: LearningRate = 2.5e-9
    """RMSprop's learning rate for the layer that proposes fractions."""
    entropy_weight: NonNegative = 0.0
    """Weight of the entropy of the proposed widths, which keeps them from collapsing."""


@POLICY_REGISTRY.register("fqf")
class FQFPolicy(QuantilePolicy):
    """FQF (Yang et al., "Fully Parameterized Quantile Function for Distributional RL", 2019).

    As :class:`IQNPolicy`, but the fractions are not drawn: a layer proposes them for each
    observation (:class:`~dmiddleware.model.FractionQuantileQNetwork`), and learns to propose those
    whose quantiles have the smallest Wasserstein distance from the distribution (proposition 1).
    The quantiles learn by the quantile Huber loss, at the same fractions as those of the target
    (algorithm 1). An action's value is the mean of its quantiles, weighted by the widths of their
    intervals; acting draws nothing.

    Differences from the paper: ``double`` chooses the target's action by the online network;
    without it, the target network chooses by the fractions of the observation before. The entropy
    of the widths can count, too (``entropy_weight``). The priority is the absolute error of the
    mean, which the paper does not have.
    """

    cfg: FQFSettings
    proposal: Component[nn.Module]
    reports = (*QuantilePolicy.reports, "fraction_entropy")
    model_type: ClassVar[str] = "fraction_quantile_q_network"

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        optimizer = rmsprop(self.cfg.learning_rate_fraction, decay=0.95, eps=1e-5)
        proposal = Component(self.submodule("proposal"), optimizer)
        return {**super().make_components(), "proposal": proposal}

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network without fractions; see :meth:`Policy.check_outputs`."""
        super().check_outputs(obs, **inputs)
        named_outputs(self.model(obs, with_edges=True), "tau", "fractions", "edges")

    def update(
        self,
        batch: Columns,
        *,
        online: Inputs = _NOTHING,
        target: Inputs = _NOTHING,
        choice: Inputs = _NOTHING,
    ) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        action = self.codec.to_raw(batch["action"])
        output: dict[str, torch.Tensor] = self.model(batch["obs"], with_edges=True, **online)
        self.values_of(output, action.shape)
        fractions = output["fractions"]

        same = {**target, "fractions": fractions.detach()}
        next_quantiles = self.next_values(batch, same, choice)
        loss, errors, logged = self.loss(batch, action, output, next_quantiles)
        norm = self.q.step(loss)

        # Proposition 1: how the distance changes with each inner fraction.
        quantiles = taken_rows(output["quantiles"].detach(), action)
        slope = 2 * taken_rows(output["edges"], action) - quantiles[:, 1:] - quantiles[:, :-1]
        widths = fractions.diff()
        entropy = -torch.xlogy(widths, widths).sum(-1).mean()
        fraction_loss = (slope * fractions[:, 1:-1]).sum(-1).mean()
        self.proposal.step(fraction_loss - self.cfg.entropy_weight * entropy)

        outcome = {"total_loss": loss.detach(), **logged, "fraction_entropy": entropy.detach()}
        if self.cfg.grad_clip_norm is not None:
            outcome["grad_norm"] = norm
        if "weight" in batch or self.cfg.priority:
            outcome["priority"] = errors
        return outcome

    def mean_of(self, quantiles: torch.Tensor, output: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return ``[B]``, the means, weighted by the widths; see :class:`QuantilePolicy`."""
        widths = output["fractions"].detach().diff()
        return (widths * quantiles).sum(-1)
