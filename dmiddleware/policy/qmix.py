"""Value decomposition: VDN and QMIX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, Unpack

import gymnasium as gym
import torch
from torch import nn

from dmiddleware.model.spaces import HasSpaces
from dmiddleware.policy.base.agents import AgentsPolicy
from dmiddleware.policy.base.parts import Part
from dmiddleware.policy.base.q_learning import QLearningOptions, QLearningPolicy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import weighted_mean

__all__ = ["QMIXPolicy", "VDNPolicy"]


@POLICY_REGISTRY.register("vdn_command")
@POLICY_REGISTRY.register("vdn")
class VDNPolicy(AgentsPolicy, QLearningPolicy):
    """Value-decomposition networks (Sunehag et al., 2017), for cooperating agents.

    The value of a joint action is the sum of the agents' own values (equation 1), so each agent can
    act greedily by itself. The sum learns from the reward of the team, which is the mean of the
    agents' rewards: the squared error of Q-learning (QMIX, equations 6 and 7). Agents that do not
    take part have the value 0.

    Differences from the paper: agents have no memory, and the double target of van Hasselt et al.
    (2016) is the default, as in the QMIX authors' code; ``learn.double=False`` turns it off.

    Learns from the columns of :class:`DQNPolicy`, with observations of several agents, ``action``
    ``[B, A]`` int64 and ``reward`` ``[B, A]``. Masks are the key ``action_mask`` of observations.
    n-step returns come from the buffer. Collecting takes the keyword ``eps``.
    """

    @classmethod
    def for_env(  # type: ignore[override]  # only the options of this algorithm
        cls,
        env: HasSpaces,
        *,
        model: nn.Module | Mapping[str, Any] | None = None,
        enable_field: Iterable[str] | None = None,
        **options: Unpack[QLearningOptions],
    ) -> Self:
        """Build the policy for an environment, as :meth:`Policy.for_env` describes.

        :doc:`/reference/configuration` lists the options.
        """
        return super().for_env(env, model=model, enable_field=enable_field, **options)

    @classmethod
    def _model_options_of(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> dict[str, Any]:
        shapes = super()._model_options_of(observation_space, action_space)
        del shapes["action_space"]  # the network has discrete actions
        return shapes

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "vdn_network", ["dmiddleware.model"]

    def _make_parts(self) -> dict[str, Part]:
        parts = super()._make_parts()
        agent = getattr(self._model, "agent", None)
        if agent is not None:
            # Collectors need no mixing network.
            parts["q"].acts = False
            parts["agent"] = Part(agent, acts=True)
        return parts

    def _values_of(self, output: Any, rows: Sequence[int | str]) -> torch.Tensor:
        # One more dimension, that of the agents.
        return super()._values_of(output, rows if len(rows) == 2 else (*rows, "n_agent"))

    def _of_actions(self, output: dict[str, torch.Tensor], action: torch.Tensor) -> torch.Tensor:
        """Return ``[B, A]``, the values of each agent's action."""
        return output["logit"].gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def _loss(
        self,
        batch: Mapping[str, Any],
        action: torch.Tensor,
        output: dict[str, torch.Tensor],
        following: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        part = self._parts["q"]
        value = part.target.mix(following, batch["next_obs"])
        target = self._td_target({**batch, "reward": batch["reward"].mean(-1)}, value)
        error = part.module.mix(self._of_actions(output, action), batch["obs"]) - target
        loss = weighted_mean(error.square(), batch.get("weight"))
        error, mean_target = error.detach(), target.mean()
        logged = {"q_value": mean_target + error.mean(), "target_q_value": mean_target}
        return loss, error.abs(), logged


@POLICY_REGISTRY.register("qmix_command")
@POLICY_REGISTRY.register("qmix")
class QMIXPolicy(VDNPolicy):
    """QMIX (Rashid et al., "Monotonic Value Function Factorisation", 2018), for cooperating agents.

    As :class:`VDNPolicy`, but a mixing network, whose weights depend on the state, makes the team's
    value of the agents' values. It is monotonic in each of them (equation 5), so each agent can
    still act greedily by itself, and the team's value can depend on who does what where.

    Differences from the paper: agents have no memory, and the optimiser is Adam instead of
    RMSprop.
    """

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "qmix_network", ["dmiddleware.model"]
