"""Networks of several agents, each of which has a memory of its own; they share their parameters.

The agents are one more dimension of the network of a single agent, so states are ``[B, A, S]``.
Agents see their own previous action, and no previous reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import nn

from dmiddleware.model.action_mask import masked_logit
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.recurrent import RecurrentActorCritic, RecurrentQNetwork
from dmiddleware.model.spaces import ActionKind, ActionShape, ObsShape
from dmiddleware.model.team import AgentInput, QMIXNetwork, TeamNetwork
from dmiddleware.tree import Nested

__all__ = [
    "RecurrentAgentActorCritic",
    "RecurrentCentralizedActorCritic",
    "RecurrentQMIXNetwork",
]

_ACTOR: Final = "actor"
_CRITIC: Final = "critic"


class _Agents:
    """Base of networks whose agents have a memory each.

    Attributes:
        agent: the network of one agent, a :class:`RecurrentNetwork`.
        n_agent: number of agents, ``A``.
    """

    agent: Any
    n_agent: int

    @property
    def act_inputs(self) -> tuple[str, ...]:
        """The keyword arguments of the forward that come from the step before."""
        names: tuple[str, ...] = self.agent.act_inputs
        return names

    def initial_state(self, n: int) -> torch.Tensor:
        """Return the state at the start of ``n`` episodes: zeros ``[n, A, S]``, on the CPU."""
        return torch.zeros(n, self.n_agent, self.agent.core.state_size)


@MODEL_REGISTRY.register("recurrent_qmix_network")
class RecurrentQMIXNetwork(_Agents, QMIXNetwork):
    """A :class:`QMIXNetwork` whose agents have a memory each, as in the paper.

    Source: Rashid et al., "QMIX" (2018), figure 2c: an agent is a GRU between two layers, and sees
    its observation, its last action and its number.

    Args:
        obs_shape: as in :class:`QMIXNetwork`.
        action_shape: number of actions of one agent.
        n_agent: number of agents, ``A``.
        mixing_size: width of the mixing network's hidden layer.
        **options: the options of :class:`RecurrentQNetwork`, which gives the values of one agent's
            actions; by default, a GRU of width 64, not dueling. ``prev_reward`` is False.
    """

    options_of: ClassVar[type[nn.Module]] = RecurrentQNetwork
    """The part that takes further options."""

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        action_shape: int,
        *,
        n_agent: int,
        mixing_size: int = 32,
        **options: Any,
    ) -> None:
        of_agent = {"core": "gru", "hidden_size": 64, "dueling": False, "prev_reward": False}
        options = {**of_agent, "mixing_size": mixing_size, **options}
        super().__init__(obs_shape, action_shape, n_agent=n_agent, **options)

    def forward(  # type: ignore[override]  # it has a state
        self, obs: Nested, state: torch.Tensor, **inputs: Any
    ) -> dict[str, torch.Tensor]:
        """Return ``logit``, the agents' action values, forbidden ones the lowest, and ``state``.

        Args:
            obs: ``[T, B]``, or ``[B]`` of one step, with the keys of a team's observations.
            state: ``[B, A, S]``, before the first step.
            **inputs: those of :meth:`RecurrentNetwork.forward`, with ``prev_action`` of all agents.
        """
        output: dict[str, torch.Tensor] = self.agent(self.input(obs), state, **inputs)
        return {**output, "logit": masked_logit(output["logit"], obs)}


@MODEL_REGISTRY.register("recurrent_agent_actor_critic")
class RecurrentAgentActorCritic(_Agents, TeamNetwork):
    """An actor and a critic that share one memory of what an agent has seen.

    Args:
        obs_shape: a mapping with ``agents``, the shape of one agent's observation, and maybe
            ``state``.
        action_shape: of one agent.
        n_agent: number of agents, ``A``.
        action_space: the kind of one agent's actions, ``"discrete"`` or ``"continuous"``.
        critic_obs_shape: as in :class:`TeamNetwork`; the critic sees the memory too.
        **options: the other options of :class:`RecurrentActorCritic`, the network of one agent;
            ``prev_reward`` is False.
    """

    options_of: ClassVar[type[nn.Module]] = RecurrentActorCritic
    """The part that takes further options."""
    sees_state: ClassVar[bool] = False
    """Whether the critic sees the state."""

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        action_shape: ActionShape,
        *,
        n_agent: int,
        action_space: ActionKind = "discrete",
        critic_obs_shape: Mapping[str, ObsShape] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            obs_shape,
            action_shape,
            n_agent=n_agent,
            action_space=action_space,
            critic_obs_shape=critic_obs_shape,
        )
        options = {"prev_reward": False, **options, "action_space": action_space}
        self.actor_input = AgentInput(self.obs_shape, n_agent)
        self.critic_input: AgentInput | None = None
        if self.sees_state or critic_obs_shape is not None:
            self.critic_input = AgentInput(
                self.critic_obs_shape, n_agent, with_state=self.sees_state
            )
            options["critic_obs_shape"] = {_CRITIC: self.critic_input.shape}
        self.agent = RecurrentActorCritic({_ACTOR: self.actor_input.shape}, action_shape, **options)

    def forward(
        self, obs: Nested, state: torch.Tensor, *, acts_only: bool = False, **inputs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the agents' distributions and values, and their states.

        Args:
            obs: ``[T, B]``, or ``[B]`` of one step, with the keys of a team's observations.
            state: ``[B, A, S]``, before the first step.
            acts_only: as in :meth:`RecurrentNetwork.forward`; the critic's part may be missing.
            **inputs: those of :meth:`RecurrentNetwork.forward`, with ``prev_action`` of all agents.
        """
        parts = {_ACTOR: self.actor_input(obs)}
        if self.critic_input is not None and not acts_only:
            parts[_CRITIC] = self.critic_input(obs)
        output: dict[str, torch.Tensor] = self.agent(parts, state, acts_only=acts_only, **inputs)
        return output


@MODEL_REGISTRY.register("recurrent_centralized_actor_critic")
class RecurrentCentralizedActorCritic(RecurrentAgentActorCritic):
    """A :class:`RecurrentAgentActorCritic` whose critic sees the state, too.

    Acting does not need it. Without a state, the critic sees the observations of all agents.
    """

    sees_state: ClassVar[bool] = True
