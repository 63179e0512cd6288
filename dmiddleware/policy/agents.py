"""What a policy that acts for all agents of an environment has to know of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dmiddleware.env.team import AGENT_MASK, AGENTS
from dmiddleware.tree import Batch, Nested, index_rows

__all__ = ["agents_that_take_part", "present_agents", "present_observations", "weights_of_agents"]


def present_agents(obs: Nested) -> torch.Tensor:
    """Return ``[…, A]`` bool, whether an agent takes part."""
    present: torch.Tensor = obs[AGENT_MASK] != 0
    return present


def agents_that_take_part(obs: Nested | None) -> torch.Tensor | None:
    """Return ``[…, A]`` bool, whether an agent takes part; None: not of several agents."""
    has_agents = isinstance(obs, Mapping | Batch) and AGENT_MASK in obs
    return present_agents(obs) if has_agents else None


def present_observations(obs: Nested) -> Nested:
    """Return observations without those of the agents that do not take part."""
    present = present_agents(obs)
    observed = index_rows(obs[AGENTS], present)
    return {**{key: obs[key] for key in obs}, AGENTS: observed}


def weights_of_agents(obs: Nested) -> torch.Tensor:
    """Return ``[B, A]`` of mean 1: 0 for agents that do not take part, the same for the others."""
    present = present_agents(obs).float()
    weight: torch.Tensor = present / present.mean().clamp_min(1.0 / present.numel())
    return weight
