"""QMIX whose agents remember what they have seen."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from dmiddleware.policy.component import Component
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.qmix import components_of_team, mixed_value
from dmiddleware.policy.r2d2 import R2D2Policy, R2D2Settings
from dmiddleware.tree import Columns, Nested

__all__ = ["RecurrentQMIXPolicy", "RecurrentQMIXSettings"]


class RecurrentQMIXSettings(R2D2Settings):
    """The settings of QMIX with a memory."""

    discount = 0.99
    n_step = 1
    batch_size = 32
    """Sequences per update."""
    learning_rate = 1e-3
    adam_eps = 1e-8
    target_update_freq = 500
    value_rescaling = False


@POLICY_REGISTRY.register("qmix_recurrent")
class RecurrentQMIXPolicy(R2D2Policy):
    """QMIX with a memory of each agent, as it was published (Rashid et al., 2018).

    As :class:`QMIXPolicy`, but an agent's network is a GRU that also sees the agent's last action,
    that of a :class:`~dmiddleware.model.RecurrentQMIXNetwork`. It learns from sequences as
    :class:`R2D2Policy` does: from stored states ``[B, A, S]``, with burn-in, and the policy sums
    the rewards of ``n_step`` steps. The errors are those of the team's value, which the mixing
    network makes of the values of all agents' actions (equations 5 to 7), and its reward is the
    mean of the agents' rewards. Agents that do not take part have the value 0.

    Masks are the key ``action_mask`` of observations. Collecting takes the keyword ``eps``.

    Differences from the paper: the double target of van Hasselt et al. (2016) is the default, as in
    the authors' code, and the optimizer is Adam instead of RMSprop. Sequences may be shorter than
    episodes; they are whole episodes if ``unroll_len`` and ``stride`` are as long as these, and
    ``burn_in`` is 0.
    """

    cfg: RecurrentQMIXSettings
    q: Component[Any]  # a Recurrent network with the method mix
    model_type: ClassVar[str] = "recurrent_qmix_network"

    several_agents: ClassVar[bool] = True
    act_inputs: tuple[str, ...] = ("is_first", "prev_action")  # masks are in the observations

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        return components_of_team(super().make_components(), self.model)

    def update(self, batch: Columns, **drawn: Any) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        columns: dict[str, Any] = {**batch, "reward": batch["reward"].mean(-1)}
        return super().update(columns, **drawn)

    def values_of_actions(
        self, network: nn.Module, q: torch.Tensor, action: torch.Tensor, obs: Nested
    ) -> torch.Tensor:
        """Return the team's values ``[L, B]`` of actions ``[L, B, A]``; see :class:`R2D2Policy`."""
        return mixed_value(network, super().values_of_actions(network, q, action, obs), obs)
