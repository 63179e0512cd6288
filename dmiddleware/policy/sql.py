"""Soft Q-learning."""

from __future__ import annotations

from typing import Any, Literal

import torch

from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.dqn import DQNPolicy, DQNSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Epsilon, Inputs
from dmiddleware.rl import mask_logit, soft_value
from dmiddleware.settings import Positive
from dmiddleware.tree import Columns

__all__ = ["SQLPolicy", "SQLSettings"]


class SQLSettings(DQNSettings):
    """The settings of soft Q-learning."""

    double: Literal[False] = False
    """A target is about all next actions, so nothing has to choose one."""
    eps: Epsilon = 0.0
    """ε of the uniformly random actions among those drawn by their values."""
    alpha: Positive = 0.1
    """α, the temperature: the weight of the entropy."""


@POLICY_REGISTRY.register("sql")
class SQLPolicy(DQNPolicy):
    """Soft Q-learning (Haarnoja et al., "RL with Deep Energy-Based Policies", 2017).

    As :class:`DQNPolicy`, for the sum of rewards and entropies, weighted by the temperature
    ``alpha``. The target's value of a state is soft (equation 4, where the integral is a sum over
    the allowed actions), and collecting draws actions from the policy that has this value
    (equation 5): action a with a probability in proportion to ``exp(Q(s, a) / α)``. Evaluating
    takes the action of the highest value.

    Differences from the paper: actions are discrete, so the policy needs no network that samples;
    and with ``n_step`` above 1, the entropies of the steps in between do not count. With an ``eps``
    above 0, some actions are uniformly random, and a chain needs an ``EpsGreedyHandler``.
    """

    cfg: SQLSettings

    def setup(self) -> None:
        """Note that the policy explores by itself, unless it also needs an ε."""
        super().setup()
        self.explores = self.explores or self.cfg.eps == 0.0

    @torch.no_grad()
    def next_values(self, batch: Columns, target: Inputs, choice: Inputs) -> torch.Tensor:
        """Return ``[B]``, the target network's soft values of the next states."""
        next_obs = batch["next_obs"]
        output: dict[str, torch.Tensor] = self.q.target(next_obs, **target)
        mask = mask_of(next_obs, batch.get("next_action_mask"))
        return soft_value(mask_logit(output["logit"], mask), self.cfg.alpha)

    def explored(
        self, logit: torch.Tensor, mask: torch.Tensor | None, eps: float
    ) -> dict[str, Any]:
        """Return ``action``, drawn by its value, and ``logit``; see :class:`QLearningPolicy`."""
        # The largest sum of logits and Gumbel noise is a draw from their softmax.
        logit = logit.to(self.draw_device)
        gumbel = -torch.empty_like(logit).exponential_(generator=self.generator).log()
        drawn = super().explored(logit + self.cfg.alpha * gumbel, mask, eps)
        return {**drawn, "logit": logit}
