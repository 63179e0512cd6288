"""Policies that act for all agents of an environment."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import torch

from dmiddleware.data.batch import Nested, map_nested
from dmiddleware.env import agent_spaces
from dmiddleware.env.team import AGENT_MASK, AGENTS
from dmiddleware.errors import SpaceError
from dmiddleware.model import action_kind_of, team_shapes
from dmiddleware.policy.base.obs_norm import ObsNormPolicy
from dmiddleware.policy.base.policy import Policy

__all__ = ["AgentsPolicy", "take_part"]


class AgentsPolicy(ObsNormPolicy):
    """A policy for environments with several agents, which share the parameters of its networks.

    Observations are those of :mod:`dmiddleware.env.team`; outputs and rewards have one more
    dimension than those of a policy for a single agent, that of the agents: ``[E, A, …]``. The
    action codec is that of one agent. Derive from this class and from the class of the algorithm,
    in this order.

    Statistics of observations and returns leave out the agents that do not take part.
    """

    several_agents: ClassVar[bool] = True
    # Masks are in the observations.
    act_inputs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _model_options_of(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> dict[str, Any]:
        return team_shapes(observation_space, action_space)

    def observe_returns(self, ret: torch.Tensor, obs: Nested | None = None) -> None:
        """Take the returns ``[…, A]`` of a collected batch; see :meth:`Policy.observe_returns`."""
        super().observe_returns(ret if obs is None else ret[take_part(obs)], obs)

    def _count_observations(self, obs: Nested) -> None:
        if self._obs_normaliser is None:
            return
        present = take_part(obs)
        seen = map_nested(lambda leaf: leaf[present], obs[AGENTS])
        super()._count_observations({**{key: obs[key] for key in obs}, AGENTS: seen})

    def _lead_of(self, obs: Any, n_lead: int) -> torch.Size:
        return take_part(obs).shape

    def _allows(self, mask: torch.Tensor, action: Any) -> torch.Tensor:
        return mask.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def _check_spaces(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        one = agent_spaces(observation_space, action_space)
        if self.action_kinds and action_kind_of(one.action) not in self.action_kinds:
            raise SpaceError(
                f"{type(self).__name__} supports {', '.join(self.action_kinds)} actions, but each "
                f"agent takes {one.action}; use MAPPO, or wrap the environment"
            )
        if not self._model_action():
            # The model is tried, for which the codec has to know what its outputs mean.
            self._codec.adopt(one.action)
        Policy._check_spaces(self, observation_space, action_space)
        self._codec.adopt(one.action)


def take_part(obs: Nested) -> torch.Tensor:
    """Return ``[…, A]`` bool, whether an agent takes part."""
    present: torch.Tensor = obs[AGENT_MASK] != 0
    return present
