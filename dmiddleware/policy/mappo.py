"""Proximal policy optimization for several agents: IPPO and MAPPO."""

from __future__ import annotations

from typing import ClassVar

from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.ppo import PPOPolicy, PPOSettings
from dmiddleware.policy.recurrent_ppo import RecurrentPPOPolicy, RecurrentPPOSettings

__all__ = [
    "IPPOPolicy",
    "MAPPOPolicy",
    "MAPPOSettings",
    "RecurrentIPPOPolicy",
    "RecurrentMAPPOPolicy",
    "RecurrentMAPPOSettings",
]


class MAPPOSettings(PPOSettings):
    """The settings of MAPPO and IPPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            not self.reward_norm, "reward_norm", "False with several agents; use value_norm"
        )


@POLICY_REGISTRY.register("ippo")
class IPPOPolicy(PPOPolicy):
    """Independent PPO (de Witt et al., 2020): each agent learns by PPO, with shared parameters.

    Source: de Witt et al., "Is Independent Learning All You Need in the StarCraft Multi-Agent
    Challenge?" (2020). Every agent's actor and critic see its own observation and its number. Each
    agent has its own probability ratios (PPO, equation 7), rewards, advantages and values, so all
    columns of :class:`PPOPolicy` have one more dimension, ``[B, A]``, and a minibatch of B rows has
    ``B * A`` samples. Rows of agents that do not take part have no weight in the losses.

    Options are those of :class:`PPOPolicy`, without ``reward_norm``; use ``value_norm``. Actions
    are Discrete or a Box, the same for all agents.
    """

    cfg: MAPPOSettings
    model_type: ClassVar[str] = "agent_actor_critic"

    several_agents: ClassVar[bool] = True
    act_inputs: tuple[str, ...] = ()  # masks are in the observations


@POLICY_REGISTRY.register("mappo")
class MAPPOPolicy(PPOPolicy):
    """Multi-agent PPO (Yu et al., 2022): :class:`IPPOPolicy` with a centralized critic.

    Source: Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games"
    (2022), section 3. The critic sees the state and the agent's own observation (section 5.2,
    "agent-specific" state). Without a state, it sees all agents' observations. Actors see their own
    observation, so acting needs no state. ``value_norm`` is section 5.1, few epochs (5 to 15) and
    large minibatches are sections 5.3 and 5.5.

    Differences from the paper: agents have no memory (:class:`RecurrentMAPPOPolicy` gives them
    one); the value loss is the squared error instead of Huber's, and is not clipped by default;
    ``value_norm`` is off by default.
    """

    cfg: MAPPOSettings
    model_type: ClassVar[str] = "centralized_actor_critic"

    several_agents: ClassVar[bool] = True
    act_inputs: tuple[str, ...] = ()  # masks are in the observations


class RecurrentMAPPOSettings(RecurrentPPOSettings, MAPPOSettings):
    """The settings of MAPPO and IPPO with memories."""

    value_norm: bool = True
    """Whether the critic learns returns normalized by running statistics. Without, large returns
    dominate the gradients of the memory, which the actor shares."""


@POLICY_REGISTRY.register("ippo_recurrent")
class RecurrentIPPOPolicy(RecurrentPPOPolicy):
    """:class:`IPPOPolicy` whose agents have a memory each, which their actor and critic share.

    As :class:`RecurrentPPOPolicy`, it learns from whole lanes of envs, ``[T, B, A, …]``. States are
    ``[B, A, S]``, zeros where the team's episode starts; an agent that joins later has seen zeros
    until then, and the actions that were drawn for it and ignored. Agents see their previous
    action, and no previous reward.

    The model is a :class:`~dmiddleware.model.RecurrentAgentActorCritic`.
    """

    cfg: RecurrentMAPPOSettings
    model_type: ClassVar[str] = "recurrent_agent_actor_critic"

    several_agents: ClassVar[bool] = True
    act_inputs: tuple[str, ...] = ("is_first", "prev_action")  # masks are in the observations


@POLICY_REGISTRY.register("mappo_recurrent")
class RecurrentMAPPOPolicy(RecurrentPPOPolicy):
    """:class:`MAPPOPolicy` whose agents have a memory each (Yu et al., 2022, appendix A).

    As :class:`RecurrentIPPOPolicy`, with a centralized critic: it sees the state, the agent's own
    observation, and the features of the agent's memory. Acting needs no state.

    Differences from the paper's recurrent MAPPO: actor and critic share an agent's memory, where
    the paper's have one each; lanes are not divided into chunks; the value loss is the squared
    error instead of Huber's, and is not clipped by default.

    The model is a :class:`~dmiddleware.model.RecurrentCentralizedActorCritic`.
    """

    cfg: RecurrentMAPPOSettings
    model_type: ClassVar[str] = "recurrent_centralized_actor_critic"

    several_agents: ClassVar[bool] = True
    act_inputs: tuple[str, ...] = ("is_first", "prev_action")  # masks are in the observations
