"""Proximal policy optimisation for several agents: IPPO and MAPPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from easydict import EasyDict

from dmiddleware.config import check_value
from dmiddleware.data.batch import Batch
from dmiddleware.policy.base.agents import AgentsPolicy, take_part
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.ppo import PPOPolicy

__all__ = ["IPPOPolicy", "MAPPOPolicy"]


@POLICY_REGISTRY.register("ippo_command")
@POLICY_REGISTRY.register("ippo")
class IPPOPolicy(AgentsPolicy, PPOPolicy):
    """Independent PPO (de Witt et al., 2020): each agent learns by PPO, with shared parameters.

    Source: de Witt et al., "Is Independent Learning All You Need in the StarCraft Multi-Agent
    Challenge?" (2020). Every agent's actor and critic see its own observation and its number. Each
    agent has its own probability ratios (PPO, equation 7), rewards, advantages and values, so all
    columns of :class:`PPOPolicy` have one more dimension, ``[B, A]``, and a minibatch of B rows has
    ``B * A`` samples. Rows of agents that do not take part have no weight in the losses.

    Options are those of :class:`PPOPolicy`, without ``reward_norm``; use ``value_norm``. Actions
    are Discrete or a Box, the same for all agents.

    With several ranks, each normalises advantages over its own minibatches.
    """

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Reject invalid combinations."""
        super().check_config(cfg)
        check_value(
            not cfg.reward_norm,
            "reward_norm",
            cfg.reward_norm,
            "False with several agents; use value_norm",
        )

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "agent_actor_critic", ["dmiddleware.model"]

    def _row_weight(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Return ``[B, A]``: 0 for agents that do not take part, and the same for all others."""
        present = take_part(batch["obs"]).float()
        weight: torch.Tensor = present / present.mean().clamp_min(1.0 / present.numel())
        return weight

    def _n_learned_rows(self, batch: Batch | Mapping[str, Any]) -> int:
        return int(take_part(batch["obs"]).sum())

    def _standardised(self, adv: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return advantages with mean 0 and standard deviation 1 over the agents that take part."""
        assert weight is not None
        centred = adv - (adv * weight).mean()
        return centred / ((centred.square() * weight).mean().sqrt() + 1e-8)


@POLICY_REGISTRY.register("mappo_command")
@POLICY_REGISTRY.register("mappo")
class MAPPOPolicy(IPPOPolicy):
    """Multi-agent PPO (Yu et al., 2022): :class:`IPPOPolicy` with a centralised critic.

    Source: Yu et al., "The Surprising Effectiveness of PPO in Cooperative Multi-Agent Games"
    (2022), section 3. The critic sees the state and the agent's own observation (section 5.2,
    "agent-specific" state). Without a state, it sees all agents' observations. Actors see their own
    observation, so acting needs no state. ``value_norm`` is section 5.1, few epochs (5 to 15) and
    large minibatches are sections 5.3 and 5.5.

    Differences from the paper: agents have no memory; the value loss is the squared error instead
    of Huber's, and is not clipped by default; ``value_norm`` is off by default.
    """

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "centralised_actor_critic", ["dmiddleware.model"]
