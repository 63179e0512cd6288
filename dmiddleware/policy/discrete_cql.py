"""Conservative Q-learning for discrete actions."""

from __future__ import annotations

from typing import ClassVar

import torch

from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.distributional_dqn import QuantilePolicy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import QLearningSettings
from dmiddleware.rl import mask_logit, taken_rows
from dmiddleware.settings import Positive
from dmiddleware.tree import Columns

__all__ = ["DiscreteCQLPolicy", "DiscreteCQLSettings"]


class DiscreteCQLSettings(QLearningSettings):
    """The settings of CQL for discrete actions."""

    cql_alpha: Positive = 1.0
    """The α of the paper: weight of the penalty."""


@POLICY_REGISTRY.register("discrete_cql")
class DiscreteCQLPolicy(QuantilePolicy):
    """CQL (Kumar et al., "Conservative Q-Learning for Offline Reinforcement Learning", 2020).

    :class:`QRDQNPolicy`, as in the paper's experiments on Atari, that also learns low values for
    all actions, and high values for those in the data (CQL(H), equation 4), so values of unknown
    actions are not overestimated. A value is the mean of its quantiles.

    Learns from the columns of :class:`DQNPolicy`, and needs no environment. Differences from the
    paper: ``double``, the default, chooses the target's action by the online network; and the
    quantile Huber loss stands in place of half the squared error, without a factor of its own.
    """

    cfg: DiscreteCQLSettings
    reports = (*QuantilePolicy.reports, "cql_gap")
    model_type: ClassVar[str] = "quantile_q_network"

    def loss(
        self,
        batch: Columns,
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        next_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; see :meth:`QLearningPolicy.loss`."""
        loss, error, logged = super().loss(batch, action, output, next_value)
        mask = mask_of(batch["obs"], batch.get("action_mask"))
        q = mask_logit(output["logit"], mask)
        gap = (q.logsumexp(-1) - taken_rows(q, action)).mean()
        return loss + self.cfg.cql_alpha * gap, error, {**logged, "cql_gap": gap.detach()}
