"""Value decomposition: VDN and QMIX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from dmiddleware.policy.component import Component
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import QLearningPolicy, QLearningSettings
from dmiddleware.rl import taken_rows, weighted_mean
from dmiddleware.tree import Columns, Nested

__all__ = [
    "QMIXPolicy",
    "QMIXSettings",
    "VDNPolicy",
    "VDNSettings",
    "components_of_team",
    "mixed_value",
]


class VDNSettings(QLearningSettings):
    """The settings of VDN."""


@POLICY_REGISTRY.register("vdn")
class VDNPolicy(QLearningPolicy):
    """Value-decomposition networks (Sunehag et al., 2017), for cooperating agents.

    The value of a joint action is the sum of the agents' own values (equation 1), so each agent can
    act greedily by itself. The sum learns from the reward of the team, which is the mean of the
    agents' rewards: the squared error of Q-learning (QMIX, equations 6 and 7). Agents that do not
    take part have the value 0.

    Differences from the paper: agents have no memory (:class:`RecurrentQMIXPolicy` is QMIX with
    one), and the double target of van Hasselt et al. (2016) is the default, as in the QMIX authors'
    code; ``double=False`` turns it off.

    Learns from the columns of :class:`DQNPolicy`, with observations of several agents, ``action``
    ``[B, A]`` int64 and ``reward`` ``[B, A]``. Masks are the key ``action_mask`` of observations.
    n-step returns come from the buffer. Collecting takes the keyword ``eps``.
    """

    cfg: VDNSettings
    model_type: ClassVar[str] = "vdn_network"

    several_agents: ClassVar[bool] = True
    act_inputs: tuple[str, ...] = ()  # masks are in the observations

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        return components_of_team(super().make_components(), self.model)

    def values_of(self, output: Any, rows: Sequence[int | str]) -> torch.Tensor:
        """Return the action values of a network's output."""
        # One more dimension, that of the agents.
        return super().values_of(output, rows if len(rows) == 2 else (*rows, "n_agent"))

    def loss(
        self,
        batch: Columns,
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        next_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss; see :meth:`QLearningPolicy.loss`."""
        value = mixed_value(self.q.target, next_value, batch["next_obs"])
        columns: dict[str, Any] = {**batch, "reward": batch["reward"].mean(-1)}
        target = self.td_target(columns, value)
        error = (
            mixed_value(self.q.module, taken_rows(output["logit"], action), batch["obs"]) - target
        )
        loss = weighted_mean(error.square(), batch.get("weight"))
        error, mean_target = error.detach(), target.mean()
        absolute = error.abs()
        logged = {
            "q_value": mean_target + error.mean(),
            "target_q_value": mean_target,
            "td_error": absolute.mean(),
        }
        return loss, absolute, logged


def components_of_team(
    components: dict[str, Component[Any]], model: nn.Module
) -> dict[str, Component[Any]]:
    """Return an algorithm's components so that only the agents' network acts.

    Collectors need no mixing network. A model without the attribute ``agent`` acts as a whole.
    """
    agent = getattr(model, "agent", None)
    if agent is None:
        return components
    for component in components.values():
        component.acts = False
    return {**components, "agent": Component(agent, acts=True)}


def mixed_value(network: Any, q: torch.Tensor, obs: Nested) -> torch.Tensor:
    """Return ``[…]``, the team's values that a network mixes of its agents' ``[…, A]``."""
    value: torch.Tensor = network.mix(q, obs)
    return value


class QMIXSettings(VDNSettings):
    """The settings of QMIX."""


@POLICY_REGISTRY.register("qmix")
class QMIXPolicy(VDNPolicy):
    """QMIX (Rashid et al., "Monotonic Value Function Factorisation", 2018), for cooperating agents.

    As :class:`VDNPolicy`, but a mixing network, whose weights depend on the state, makes the team's
    value of the agents' values. It is monotonic in each of them (equation 5), so each agent can
    still act greedily by itself, and the team's value can depend on who does what where.

    Differences from the paper: agents have no memory, which :class:`RecurrentQMIXPolicy` gives
    them, and the optimizer is Adam instead of RMSprop.
    """

    cfg: QMIXSettings
    model_type: ClassVar[str] = "qmix_network"
