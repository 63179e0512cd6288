"""Munchausen DQN."""

from __future__ import annotations

from typing import Any, Literal

import torch

from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.dqn import DQNPolicy, DQNSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Inputs
from dmiddleware.rl import mask_logit, soft_value, taken_rows
from dmiddleware.settings import Fraction, Positive
from dmiddleware.tree import Columns, Value

__all__ = ["MDQNPolicy", "MDQNSettings"]


class MDQNSettings(DQNSettings):
    """The settings of Munchausen DQN."""

    double: Literal[False] = False
    """A target is about all next actions, so nothing has to choose one."""
    n_step: Literal[1] = 1
    """A reward is increased by the policy's own step, so targets have a single step."""
    temperature: Positive = 0.03
    """τ, the temperature: the weight of the entropy."""
    munchausen_weight: Fraction = 0.9
    """α, the weight of the log-policy that is added to rewards."""
    munchausen_clip: Positive = 1.0
    """-l₀, the largest size of the scaled log-policy."""


@POLICY_REGISTRY.register("mdqn")
class MDQNPolicy(DQNPolicy):
    """Munchausen DQN (Vieillard et al., "Munchausen Reinforcement Learning", 2020).

    As :class:`DQNPolicy`, for the policy that takes action a with a probability in proportion to
    ``exp(Q(s, a) / τ)``, by the target network's values. The target is that of soft Q-learning
    (equation 1), and the reward is increased by ``α [τ log π(a | s)]``, clipped to ``[l₀, 0]``
    (equation 2, and "Munchausen-DQN" in section 2), which is 0 where the policy is sure of the
    action that was taken. As in the paper, acting is ε-greedy; evaluating is greedy.

    Differences from the paper: the loss is averaged over the batch, and the settings that do not
    concern the two terms are those of :class:`DQNPolicy`.
    """

    cfg: MDQNSettings
    reports = (*DQNPolicy.reports, "munchausen_bonus")

    def update(self, batch: Columns, **inputs: Inputs) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        bonus = self.munchausen_bonus(batch, inputs.get("target", {}))
        increased: dict[str, Any] = {**batch, "reward": batch["reward"] + bonus}
        return {**super().update(increased, **inputs), "munchausen_bonus": bonus.mean()}

    @torch.no_grad()
    def munchausen_bonus(self, batch: Columns, target: Inputs) -> torch.Tensor:
        """Return ``[B]``, what is added to the rewards: ``α max(τ log π(a | s), l₀)``."""
        cfg = self.cfg
        q = self._target_values(batch["obs"], batch.get("action_mask"), target)
        log_policy = taken_rows(q, self.codec.to_raw(batch["action"])) - soft_value(
            q, cfg.temperature
        )
        return cfg.munchausen_weight * log_policy.clamp(-cfg.munchausen_clip, 0.0)

    @torch.no_grad()
    def next_values(self, batch: Columns, target: Inputs, choice: Inputs) -> torch.Tensor:
        """Return ``[B]``, the target network's soft values of the next states."""
        q = self._target_values(batch["next_obs"], batch.get("next_action_mask"), target)
        return soft_value(q, self.cfg.temperature)

    def _target_values(self, obs: Value, mask: torch.Tensor | None, inputs: Inputs) -> torch.Tensor:
        output: dict[str, torch.Tensor] = self.q.target(obs, **inputs)
        return mask_logit(output["logit"], mask_of(obs, mask))
