"""Advantage actor-critic."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from dmiddleware.policy.actor_critic import (
    PolicyGradientSettings,
    follow_policy_gradient,
    policy_gradient_component,
)
from dmiddleware.policy.advantage import AdvantagePolicy, AdvantageSettings
from dmiddleware.policy.component import Component
from dmiddleware.policy.network_outputs import value_output
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.tree import Columns

__all__ = ["A2CPolicy", "A2CSettings"]


class A2CSettings(PolicyGradientSettings, AdvantageSettings):
    """The settings of A2C."""

    batch_size = 40
    """Rows per update; set it to the rows of a collected batch."""
    gae_lambda = 1.0
    adv_norm = False
    """Whether to normalize advantages in each batch."""


@POLICY_REGISTRY.register("a2c")
class A2CPolicy(AdvantagePolicy):
    """Advantage actor-critic (Mnih et al., "Asynchronous Methods for Deep RL", 2016).

    This is the synchronous form: all environments make a few steps, and one update follows the
    policy gradient with the advantages of n-step returns (algorithm S3, with the entropy bonus of
    section 4). RMSprop has the paper's form and can be replaced by Adam.

    Differences from the paper: one synchronous learner replaces the asynchronous ones; losses are
    averaged over the rows, where the paper adds up gradients; the gradient is clipped; and
    ``gae_lambda`` below 1 mixes returns of several lengths (Schulman et al., 2016). With the
    default of 1, an advantage is the return up to the end of the collected rows minus the value, as
    in the paper. :class:`AdvantagePolicy` describes what can be normalized; by default, nothing is.

    One learn forward is one update. Learns from the columns ``obs``, ``action`` (``raw_action``
    where there is one), ``adv`` and ``ret``; the last two come from ``GAEEstimator``. All kinds of
    actions are supported; see :class:`ActionCodec`.
    """

    cfg: A2CSettings
    actor_critic: Component[nn.Module]

    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action", "adv", "ret")
    optional_columns: ClassVar[tuple[str, ...]] = ("raw_action",)

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the network."""
        return {
            **super().make_components(),
            "actor_critic": policy_gradient_component(self.model, self.cfg),
        }

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        output: dict[str, torch.Tensor] = self.model(batch["obs"])
        distribution = self.learned_distribution(output, batch)
        log_prob = distribution.log_prob(self.raw_action(batch))
        return follow_policy_gradient(
            self,
            self.actor_critic,
            distribution,
            log_prob,
            self.learned_advantage(batch),
            value_output(output, log_prob.shape),
            self.as_output(batch["ret"]),
        )
