"""Deep Q-learning."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import QLearningPolicy, QLearningSettings
from dmiddleware.rl import td_loss
from dmiddleware.tree import Columns

__all__ = ["DQNPolicy", "DQNSettings"]


class DQNSettings(QLearningSettings):
    """The settings of DQN."""

    loss: Literal["huber", "mse"] = "huber"
    """Loss function of the TD error."""


@POLICY_REGISTRY.register("dqn")
class DQNPolicy(QLearningPolicy):
    """Deep Q-learning (Mnih et al., "Human-level control through deep RL", Nature 2015).

    With the usual extensions:

    - the double target of van Hasselt et al., "Deep RL with Double Q-learning" (2016):
      ``double``;
    - the dueling network of Wang et al. (2016): ``model.dueling``;
    - noisy layers instead of ε-greedy actions (Fortunato et al., "Noisy Networks for Exploration",
      2018): ``model.noisy``. Evaluating is without noise;
    - n-step targets (Sutton and Barto, 2nd edition, chapter 7) of ``n_step`` steps, which the
      buffer computes: a batch's column ``discount`` multiplies the bootstrap values, and must
      consist of powers of ``discount`` up to ``n_step``;
    - prioritized replay (Schaul et al., 2016): a batch's column ``weight`` weights its errors, and
      the output has ``priority``, the absolute TD errors (also with ``priority=True``);
    - a target network that is copied every ``target_update_freq`` updates (Mnih,
      ``target_tau=1``), or tracks the online network (Lillicrap et al., "Continuous control with
      deep RL", 2016: ``target_update_freq=1, target_tau=0.005``): each update moves it by the
      fraction ``target_tau`` towards the online network.

    Learns from the columns ``obs``, ``action`` int64, ``reward``, ``next_obs``, ``terminated``.
    Actions that a mask forbids are neither taken nor bootstrapped from; the mask is the key
    ``action_mask`` of observations, or the columns ``action_mask`` and ``next_action_mask``.
    Collecting takes the keyword ``eps``, the probability of a random action, and returns ``action``
    and ``logit``, the action values.

    Example:
        >>> policy = DQNPolicy({"model": {"obs_shape": 4, "action_shape": 2}})
        >>> policy.collect_mode.forward(torch.zeros(8, 4), eps=0.1)["action"].shape
        torch.Size([8])
    """

    cfg: DQNSettings
    model_type: ClassVar[str] = "q_network"

    def loss(
        self,
        batch: Columns,
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        next_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; see :meth:`QLearningPolicy.loss`."""
        target = self.td_target(batch, next_value)
        loss, td_error = td_loss(
            output["logit"],
            action,
            target,
            weight=batch.get("weight"),
            criterion=self.cfg.loss,
        )
        mean_target = target.mean()
        error = td_error.abs()
        logged = {
            "q_value": mean_target - td_error.mean(),
            "target_q_value": mean_target,
            "td_error": error.mean(),
        }
        return loss, error, logged
