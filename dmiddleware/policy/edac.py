"""Ensemble-diversified actor-critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dmiddleware.errors import ConfigError
from dmiddleware.policy.obs_norm import DatasetNormSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.sac import SACPolicy, SACSettings
from dmiddleware.rl import ensemble_td_loss
from dmiddleware.settings import NonNegative
from dmiddleware.tree import Columns

__all__ = ["EDACPolicy", "EDACSettings"]


class EDACSettings(DatasetNormSettings, SACSettings):
    """The settings of EDAC."""

    obs_norm = False
    eta: NonNegative = 1.0
    """η, the weight of the similarity of the critics' gradients; 0 is SAC-N."""
    backup_entropy: bool = True
    """Whether targets contain the entropy."""


@POLICY_REGISTRY.register("edac")
class EDACPolicy(SACPolicy):
    """EDAC (An et al., "Uncertainty-Based Offline RL with Diversified Q-Ensemble", 2021).

    :class:`SACPolicy` with many critics: the smallest of their values is low where they disagree,
    which is where the data has no actions. With ``eta=0`` this is all, the paper's SAC-N. Fewer
    critics suffice if they disagree more, so with ``eta`` above 0 their loss also has the mean
    cosine similarity of their gradients with respect to the action, over all pairs (equation 4 and
    algorithm 1).

    As in the paper, networks have three layers of 256 units. It has 10 critics for most data sets,
    and 50 for Hopper's. Differences from the paper: see :class:`SACPolicy`.

    Learns from the columns of :class:`SACPolicy`, and needs no environment. With ``obs_norm``, call
    :meth:`observe` with the observations of the data set before learning.
    """

    cfg: EDACSettings
    reports: ClassVar[tuple[str, ...]] = (*SACPolicy.reports, "gradient_similarity")
    model_defaults: ClassVar[Mapping[str, Any]] = {
        "n_critics": 10,
        "actor_hidden_sizes": [256, 256, 256],
        "critic_hidden_sizes": [256, 256, 256],
    }

    def setup(self) -> None:
        """Count the critics.

        Raises:
            ConfigError: if there is only one, which has no others to differ from.
        """
        self.n_critics: int = getattr(self.submodule("critic"), "n_critics", 0)
        if self.cfg.eta > 0 and self.n_critics < 2:
            raise ConfigError(
                "EDAC needs at least two critics to compare, but the model's critic has "
                f"n_critics={self.n_critics}; set model.n_critics, for example to 10, give a "
                "critic of your own this attribute, or set eta=0"
            )

    def critic_loss_of(
        self, batch: Columns, next_action: torch.Tensor, *, bonus: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the critics."""
        eta = self.cfg.eta
        action: torch.Tensor = self.codec.to_raw(batch["action"])
        with torch.no_grad():
            next_q = self.critics(self.critic.target, batch["next_obs"], next_action).amin(0)
            target = self.td_target(batch, next_q + bonus if self.cfg.backup_entropy else next_q)
        if eta > 0:  # each critic has a copy of the action, to which its gradient belongs
            action = action.expand(self.n_critics, *action.shape).clone().requires_grad_()
        q = self.critics(self.critic.module, batch["obs"], action)
        loss, td_error = ensemble_td_loss(q, target, weight=batch.get("weight"))
        logged = {"q_value": q.mean(), "target_q_value": target.mean(), "td_error": td_error.mean()}
        if eta > 0:
            (gradient,) = torch.autograd.grad(q.sum(), action, create_graph=True)
            similarity = gradient_similarity(gradient)
            loss = loss + eta * similarity
            logged["gradient_similarity"] = similarity
        return loss, td_error, logged


def gradient_similarity(gradient: torch.Tensor) -> torch.Tensor:
    """Return how much critics agree on how a better action differs, ``-1`` to ``N``.

    That is the mean over rows of ``1 / (N - 1) * Σ cos(∇_a Q_i(s, a), ∇_a Q_j(s, a))`` over all
    ``i ≠ j``.

    Source: An et al. (2021), equation 4.

    Args:
        gradient: ``[N, B, A]``, of each critic's value with respect to the action.
    """
    length: torch.Tensor = gradient.norm(dim=-1, keepdim=True)
    direction = gradient / (length + 1e-10)
    pairs = direction.sum(0).square().sum(-1) - direction.square().sum((0, -1))
    similarity: torch.Tensor = pairs.mean() / (len(gradient) - 1)
    return similarity
