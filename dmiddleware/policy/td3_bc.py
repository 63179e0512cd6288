"""TD3+BC."""

from __future__ import annotations

import torch

from dmiddleware.policy.ddpg import TD3Policy, TD3Settings
from dmiddleware.policy.obs_norm import DatasetNormSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.schedule import LearningRate
from dmiddleware.settings import Positive
from dmiddleware.tree import Columns

__all__ = ["TD3BCPolicy", "TD3BCSettings"]


class TD3BCSettings(DatasetNormSettings, TD3Settings):
    """The settings of TD3+BC."""

    learning_rate_critic: LearningRate = 3e-4
    learning_rate_actor: LearningRate = 3e-4
    bc_alpha: Positive = 2.5
    """The α of the paper: the weight of the values next to cloning."""


@POLICY_REGISTRY.register("td3_bc")
class TD3BCPolicy(TD3Policy):
    """TD3+BC (Fujimoto and Gu, "A Minimalist Approach to Offline Reinforcement Learning", 2021).

    :class:`TD3Policy` whose actor also stays close to the actions of the data set (equation 3). The
    values that it maximizes are divided by their mean size, so that ``bc_alpha`` has the same
    meaning for every reward (equation 5). Observations have mean 0 and standard deviation 1 over
    the data set (equation 4): call :meth:`observe` with them before learning.

    Learns from the columns of :class:`DDPGPolicy`, and needs no environment. Differences from the
    paper: the constant of the normalization is added to the variance, not to the standard
    deviation.
    """

    cfg: TD3BCSettings

    def actor_loss_of(self, batch: Columns, chosen: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the loss of the actor."""
        scale = self.cfg.bc_alpha / q.detach().abs().mean()
        cloning = (chosen - self.codec.to_raw(batch["action"])).square().mean()
        loss: torch.Tensor = cloning - scale * q.mean()
        return loss
