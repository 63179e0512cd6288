"""Networks of several agents, which share their parameters.

An agent's network sees the agent's observation and its number, as a one-hot vector, so agents that
see the same can act differently. The dimension of the agents is one more leading dimension, so any
network of a single agent serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import nn

from dmiddleware.env.team import AGENT_MASK, AGENTS, STATE, agent_spaces
from dmiddleware.errors import SpaceError
from dmiddleware.model.action_mask import masked_logit
from dmiddleware.model.actor_critic import Actor
from dmiddleware.model.encoders import ConvLayers, convolutions_for, make_encoder
from dmiddleware.model.layers import MLP, Init, Norm, as_float, orthogonal_init
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.q_network import QNetwork
from dmiddleware.model.spaces import (
    ONE_HOT,
    ActionKind,
    ActionShape,
    ObsShape,
    action_kind_of,
    action_shape_of,
    array_shape,
    as_obs_shape,
    fits_shape,
    is_image,
    is_one_hot,
    is_pixels,
    obs_shape_of,
)
from dmiddleware.settings import Count, checked
from dmiddleware.tree import Nested

__all__ = [
    "AgentActorCritic",
    "AgentInput",
    "CentralQNetwork",
    "CentralizedActorCritic",
    "QMIXNetwork",
    "TeamNetwork",
    "VDNNetwork",
    "WQMIXNetwork",
    "team_shapes",
]


def team_shapes(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> dict[str, Any]:
    """Return the shapes of an environment with several agents, as a :class:`TeamNetwork` has them.

    Args:
        observation_space: that of one environment.
        action_space: that of one environment.

    Returns:
        ``obs_shape``, with the keys ``agents`` (of one agent) and, if there is one, ``state``;
        ``action_shape`` and ``action_space`` of one agent; ``n_agent``.

    Raises:
        SpaceError: if the environment has a single agent, or a space is not supported.
    """
    agent = agent_spaces(observation_space, action_space)
    state = {} if agent.state is None else {STATE: obs_shape_of(agent.state)}
    return {
        "obs_shape": {AGENTS: obs_shape_of(agent.observation), **state},
        "action_shape": action_shape_of(agent.action),
        "action_space": action_kind_of(agent.action),
        "n_agent": agent.n_agent,
    }


class TeamNetwork(Network):
    """A network for environments with several agents.

    Args:
        obs_shape: a mapping with ``agents``, the shape of one agent's observation, and maybe
            ``state``; see :mod:`dmiddleware.model.spaces`.
        action_shape: of one agent.
        n_agent: number of agents, ``A``.
        action_space: the kind of one agent's actions.
        critic_obs_shape: the shape of what a critic sees, such a mapping too, if it is not what the
            actor sees; None: ``obs_shape``.

    Attributes:
        n_agent: as given.

    Raises:
        SpaceError: if a shape is invalid.
        ConfigError: if ``n_agent`` is not positive.
    """

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        action_shape: ActionShape,
        *,
        n_agent: int,
        action_space: ActionKind = "discrete",
        critic_obs_shape: Mapping[str, ObsShape] | None = None,
    ) -> None:
        super().__init__(
            obs_shape, action_shape, action_space=action_space, critic_obs_shape=critic_obs_shape
        )
        keys = set(self.obs_shape) if isinstance(self.obs_shape, dict) else set()
        if AGENTS not in keys or keys - {AGENTS, STATE}:
            raise SpaceError(
                f"{type(self).__name__} needs an obs_shape with the key {AGENTS!r}, and maybe "
                f"{STATE!r}, got {obs_shape!r}; build the policy with for_env(env)"
            )
        self.n_agent: int = checked("n_agent", n_agent, Count)

    def check_spaces(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        """Reject spaces that this network was not built for; see :meth:`Network.check_spaces`."""
        shapes = team_shapes(observation_space, action_space)
        shapes["obs_shape"] = as_obs_shape(shapes["obs_shape"])
        built_for = {name: getattr(self, name) for name in shapes}
        same = {**shapes, "obs_shape": self.obs_shape}
        if not fits_shape(self.obs_shape, shapes["obs_shape"]) or same != built_for:
            raise SpaceError(
                f"{type(self).__name__} was built for {built_for}, but the environment has "
                f"{shapes}; build the policy with for_env(env)"
            )


class AgentInput(nn.Module):
    """What the network of an agent sees: the agent's observation and its number.

    Args:
        obs_shape: as in :class:`TeamNetwork`.
        n_agent: number of agents, ``A``.
        with_state: whether it also sees the state, or, without one, all agents' observations.

    Attributes:
        shape: the shape of what it returns: a vector where agents see arrays, else a mapping.

    Raises:
        SpaceError: if it is to see the state, and there is none.
    """

    number: torch.Tensor

    def __init__(
        self, obs_shape: Mapping[str, ObsShape], n_agent: int, *, with_state: bool = False
    ) -> None:
        super().__init__()
        shape = as_obs_shape(obs_shape[AGENTS])
        self._state = _State(obs_shape, n_agent) if with_state else None
        size = 0 if self._state is None else self._state.size
        self._pixels = not isinstance(shape, dict) and is_pixels(shape)
        self._joins = not (isinstance(shape, dict) or is_image(shape) or is_one_hot(shape))
        self.shape: ObsShape
        if self._joins:
            self.shape = (math.prod(array_shape(shape)) + n_agent + size,)
        else:
            state = {STATE: (size,)} if size else {}
            self.shape = {"obs": shape, "number": (ONE_HOT, n_agent), **state}
        number = torch.eye(n_agent) if self._joins else torch.arange(n_agent)
        self.register_buffer("number", number, persistent=False)

    def forward(self, obs: Nested) -> Any:
        """Return ``[…, A, *shape]``, a tensor or a dictionary.

        Args:
            obs: ``[…]``, with the keys of a team's observations.
        """
        lead = obs[AGENT_MASK].shape
        parts = {"obs": obs[AGENTS], "number": self.number.expand(*lead, *self.number.shape[1:])}
        if self._state is not None:
            state = self._state.of(obs)
            parts[STATE] = state.unsqueeze(-2).expand(*lead, state.shape[-1])
        if not self._joins:
            return parts
        parts["obs"] = as_float(parts["obs"], pixels=self._pixels).reshape(*lead, -1)
        return torch.cat(list(parts.values()), dim=-1)


@MODEL_REGISTRY.register("vdn_network")
class VDNNetwork(TeamNetwork):
    """The action values of each agent, whose sum is the value of the team.

    Source: Sunehag et al., "Value-Decomposition Networks For Cooperative Multi-Agent Learning"
    (2017), equation 1.

    Args:
        obs_shape: a mapping with ``agents``, the shape of one agent's observation.
        action_shape: number of actions of one agent.
        n_agent: number of agents, ``A``.
        **options: the options of :class:`QNetwork`, which gives the values of one agent's actions;
            its layers have no noise.
    """

    options_of: ClassVar[type[nn.Module]] = QNetwork
    """The part that takes further options."""

    def __init__(
        self, obs_shape: Mapping[str, ObsShape], action_shape: int, *, n_agent: int, **options: Any
    ) -> None:
        if options.get("noisy", False):
            raise ValueError(
                f"{type(self).__name__} has no noisy layers, got noisy=True; leave it out, and "
                "explore with ε-greedy actions"
            )
        super().__init__(obs_shape, action_shape, n_agent=n_agent)
        self.input = AgentInput(self.obs_shape, n_agent)
        self.agent = self.options_of(self.input.shape, action_shape, **options)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``{"logit": [… , A, n]}``, the agents' action values; forbidden get the lowest.

        Args:
            obs: ``[…]``, with the keys of a team's observations.
        """
        q: torch.Tensor = self.agent(self.input(obs))["logit"]
        return {"logit": masked_logit(q, obs)}

    def mix(self, q: torch.Tensor, obs: Nested) -> torch.Tensor:
        """Return the value of the team's joint action, ``[…]``.

        Args:
            q: ``[…, A]``, the values of the agents' actions; those of agents that do not take part
                do not count.
            obs: ``[…]``, the observations in which the actions were chosen.
        """
        return self._mixed(q.masked_fill(obs[AGENT_MASK] == 0, 0.0), obs)

    def _mixed(self, q: torch.Tensor, obs: Nested) -> torch.Tensor:
        return q.sum(-1)


@MODEL_REGISTRY.register("qmix_network")
class QMIXNetwork(VDNNetwork):
    """The action values of each agent, and a monotonic mixture of them that depends on the state.

    Source: Rashid et al., "QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent
    Reinforcement Learning" (2018), section 4.1 and figure 2: hypernetworks map the state to the
    weights of a mixing network with one hidden layer, and the weights' absolute values keep the
    value of the team monotonic in that of each agent (equation 5).

    Args:
        obs_shape: a mapping with ``agents``, the shape of one agent's observation, and maybe
            ``state``; without it, the state is all agents' observations.
        action_shape: number of actions of one agent.
        n_agent: number of agents, ``A``.
        mixing_size: width of the mixing network's hidden layer.
        **options: the options of :class:`QNetwork`, which gives the values of one agent's actions.

    Raises:
        SpaceError: if a shape is invalid, or there is neither a state nor a vector for each agent.
        ValueError: if another option is.
    """

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        action_shape: int,
        *,
        n_agent: int,
        mixing_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(obs_shape, action_shape, n_agent=n_agent, **options)
        mixing_size = checked("mixing_size", mixing_size, Count)
        self._state = _State(self.obs_shape, n_agent)
        size = self._state.size
        self.weight = nn.Linear(size, n_agent * mixing_size)
        self.bias = nn.Linear(size, mixing_size)
        self.last_weight = nn.Linear(size, mixing_size)
        self.last_bias = nn.Sequential(
            nn.Linear(size, mixing_size), nn.ReLU(), nn.Linear(mixing_size, 1)
        )

    def _mixed(self, q: torch.Tensor, obs: Nested) -> torch.Tensor:
        state = self._state.of(obs)
        weight = self.weight(state).abs().unflatten(-1, (self.n_agent, -1))
        hidden = F.elu((q.unsqueeze(-1) * weight).sum(-2) + self.bias(state))
        mixed = (hidden * self.last_weight(state).abs()).sum(-1)
        value: torch.Tensor = mixed + self.last_bias(state).squeeze(-1)
        return value


class CentralQNetwork(VDNNetwork):
    """The values of each agent's actions, and an unrestricted mixture of them and the state.

    Source: Rashid et al., "Weighted QMIX" (2020), section 5; the layers are those of the authors'
    code. It can represent any values of joint actions, but to find the best takes a search over
    all.

    Args:
        obs_shape: as in :class:`QMIXNetwork`.
        action_shape: number of actions of one agent.
        n_agent: number of agents, ``A``.
        central_size: width of each hidden layer of the mixture.
        **options: the options of :class:`QNetwork`, which gives the values of one agent's actions.
    """

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        action_shape: int,
        *,
        n_agent: int,
        central_size: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(obs_shape, action_shape, n_agent=n_agent, **options)
        width = checked("central_size", central_size, Count)
        self._state = _State(self.obs_shape, n_agent)
        size = self._state.size
        sizes = (width, width, width)
        self.mixture = MLP(n_agent + size, sizes, out_features=1, activation="relu")
        self.state_value = MLP(size, (width,), out_features=1, activation="relu")

    def _mixed(self, q: torch.Tensor, obs: Nested) -> torch.Tensor:
        state = self._state.of(obs)
        value: torch.Tensor = self.mixture(torch.cat([q, state], -1)) + self.state_value(state)
        return value.squeeze(-1)


@MODEL_REGISTRY.register("wqmix_network")
class WQMIXNetwork(TeamNetwork):
    """A :class:`QMIXNetwork`, and a :class:`CentralQNetwork` of its own parameters.

    Source: Rashid et al., "Weighted QMIX: Expanding Monotonic Value Function Factorisation for Deep
    Multi-Agent Reinforcement Learning" (2020), section 5.

    Args:
        obs_shape: as in :class:`QMIXNetwork`.
        action_shape: number of actions of one agent.
        n_agent: number of agents, ``A``.
        mixing_size: width of the monotonic mixing network's hidden layer.
        central_size: width of each hidden layer of the unrestricted one.
        **options: the options of :class:`QNetwork`, which gives the values of one agent's actions,
            once for each of the two networks.

    Attributes:
        q: the monotonic values, by which agents act.
        central: the unrestricted ones.
    """

    options_of: ClassVar[type[nn.Module]] = QNetwork
    """The part that takes further options."""

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        action_shape: int,
        *,
        n_agent: int,
        mixing_size: int = 32,
        central_size: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(obs_shape, action_shape, n_agent=n_agent)
        options = {**options, "n_agent": n_agent}
        self.q = QMIXNetwork(obs_shape, action_shape, mixing_size=mixing_size, **options)
        self.central = CentralQNetwork(
            obs_shape, action_shape, central_size=central_size, **options
        )

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return what the monotonic network returns, by which agents act."""
        output: dict[str, torch.Tensor] = self.q(obs)
        return output


@MODEL_REGISTRY.register("agent_actor_critic")
class AgentActorCritic(TeamNetwork):
    """An actor and a critic that see one agent's observation, shared by all agents.

    Args:
        obs_shape: a mapping with ``agents``, the shape of one agent's observation, and maybe
            ``state``.
        action_shape: of one agent.
        n_agent: number of agents, ``A``.
        action_space: the kind of one agent's actions, ``"discrete"`` or ``"continuous"``.
        encoder_hidden_sizes: width of each linear layer of both encoders.
        conv_layers: see :class:`ImageEncoder`.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        init: ``"orthogonal"`` (the last layers with gains 0.01 and 1) or None (torch's own).
        log_std_init: logarithm of the first standard deviation of continuous actions.
        critic_obs_shape: as in :class:`TeamNetwork`.
    """

    sees_state: ClassVar[bool] = False
    """Whether the critic sees the state."""

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        action_shape: ActionShape,
        *,
        n_agent: int,
        action_space: ActionKind = "discrete",
        encoder_hidden_sizes: Sequence[int] = (64, 64),
        conv_layers: ConvLayers | None = None,
        activation: str = "tanh",
        norm: Norm = None,
        init: Init = "orthogonal",
        log_std_init: float = 0.0,
        critic_obs_shape: Mapping[str, ObsShape] | None = None,
    ) -> None:
        super().__init__(
            obs_shape,
            action_shape,
            n_agent=n_agent,
            action_space=action_space,
            critic_obs_shape=critic_obs_shape,
        )
        options: dict[str, Any] = {"activation": activation, "norm": norm, "init": init}
        self.actor_input = AgentInput(self.obs_shape, n_agent)
        self.critic_input = AgentInput(self.critic_obs_shape, n_agent, with_state=self.sees_state)
        actor_shape, critic_shape = self.actor_input.shape, self.critic_input.shape
        self.actor = Actor(
            actor_shape,
            action_shape,
            action_space=action_space,
            encoder_hidden_sizes=encoder_hidden_sizes,
            conv_layers=convolutions_for(actor_shape, conv_layers, beside=critic_shape),
            log_std_init=log_std_init,
            **options,
        )
        self.critic = make_encoder(
            critic_shape,
            encoder_hidden_sizes,
            conv_layers=convolutions_for(critic_shape, conv_layers, beside=actor_shape),
            **options,
        )
        self.value_head = nn.Linear(self.critic.out_features, 1)
        if init == "orthogonal":
            orthogonal_init(self.value_head, 1.0)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the agents' distributions and values.

        Args:
            obs: ``[…]``, with the keys of a team's observations.

        Returns:
            What :class:`Actor` returns, each ``[…, A, n]``, and ``value`` ``[…, A]``.
        """
        return {**self.compute_actor(obs), "value": self.compute_critic(obs)}

    def compute_actor(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the distributions alone, without the critic's work."""
        output: dict[str, torch.Tensor] = self.actor(self.actor_input(obs))
        return output

    def compute_critic(self, obs: Nested) -> torch.Tensor:
        """Return the values ``[…, A]`` alone, without the actor's work."""
        value: torch.Tensor = self.value_head(self.critic(self.critic_input(obs)))
        return value.squeeze(-1)


@MODEL_REGISTRY.register("centralized_actor_critic")
class CentralizedActorCritic(AgentActorCritic):
    """An :class:`AgentActorCritic` whose critic sees the state too; acting does not need it.

    Without a state, the critic sees the observations of all agents.
    """

    sees_state: ClassVar[bool] = True


class _State:
    """Reads the state of a team as a vector; without one, all agents' observations."""

    def __init__(self, obs_shape: Mapping[str, ObsShape], n_agent: int) -> None:
        self._key = STATE if STATE in obs_shape else AGENTS
        shape = as_obs_shape(obs_shape[self._key])
        if isinstance(shape, dict) or is_one_hot(shape):
            raise SpaceError(
                "a centralized critic or a mixing network needs a state that is a Box, but "
                f"observations are {dict(obs_shape)}; give the environment a state that is a vector"
            )
        self._pixels = is_pixels(shape)
        self.size = math.prod(array_shape(shape)) * (1 if self._key == STATE else n_agent)

    def of(self, obs: Nested) -> torch.Tensor:
        """Return the state ``[…, size]`` float32 of a team's observations ``[…]``."""
        state = as_float(obs[self._key], pixels=self._pixels)
        return state.reshape(*obs[AGENT_MASK].shape[:-1], -1)
