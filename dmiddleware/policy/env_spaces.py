"""Which spaces of environments an algorithm supports, and the shapes of the network for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import gymnasium as gym

from dmiddleware.env import n_agent_of
from dmiddleware.env.team import ACTION_MASK, AGENT_MASK
from dmiddleware.errors import SpaceError, StructureError
from dmiddleware.model import action_kind_of, action_shape_of, obs_shape_of, team_shapes
from dmiddleware.tree import Batch

__all__ = [
    "check_action_kind",
    "check_number_of_agents",
    "check_observations",
    "network_shapes",
]


def network_shapes(
    observation_space: gym.Space[Any], action_space: gym.Space[Any], *, several_agents: bool
) -> dict[str, Any]:
    """Return the arguments of a network that follow from an environment's spaces."""
    if several_agents:
        return dict(team_shapes(observation_space, action_space))
    return {
        "obs_shape": obs_shape_of(observation_space),
        "action_shape": action_shape_of(action_space),
        "action_space": action_kind_of(action_space),
    }


def check_number_of_agents(
    observation_space: gym.Space[Any], *, several_agents: bool, user: str
) -> None:
    """Refuse an environment with several agents for an algorithm of a single one.

    Raises:
        SpaceError: naming algorithms for several agents.
    """
    n_agent = n_agent_of(observation_space)
    if n_agent is not None and not several_agents:
        raise SpaceError(
            f"{user} acts for a single agent, but the environment has {n_agent}; use "
            "MAPPO, IPPO, QMIX or VDN, or wrap the environment so that its reward is a number "
            "and its observations do not have the key agent_mask"
        )


def check_action_kind(
    space: gym.Space[Any], kinds: Collection[str], *, several_agents: bool, user: str
) -> None:
    """Refuse actions of another kind than an algorithm supports.

    Args:
        space: the actions of one agent.
        kinds: what the algorithm supports; empty: all.
        several_agents: whether it acts for several agents.
        user: its name, for the message.

    Raises:
        SpaceError: naming an algorithm that supports them.
    """
    if kinds and action_kind_of(space) not in kinds:
        whose = "each agent" if several_agents else "the environment"
        raise SpaceError(
            f"{user} supports {', '.join(kinds)} actions, but {whose} takes {space}; use "
            f"{'MAPPO' if several_agents else 'PPO'}, or wrap the environment"
        )


def check_observations(obs: Any, space: gym.Space[Any], *, name: str = "the observation") -> None:
    """Refuse recorded observations ``[…, *obs_shape]`` that are not of the policy's env.

    Raises:
        StructureError: with the part, its shape, and what it must be.
    """
    if isinstance(space, gym.spaces.Dict) and isinstance(obs, Batch | Mapping):
        for key, part in space.spaces.items():
            if key in obs:
                check_observations(obs[key], part, name=f"the part {key!r} of {name}")
            elif key not in (ACTION_MASK, AGENT_MASK):
                raise StructureError(
                    f"{name} has no part {key!r} in the data set, as that of the policy's env has; "
                    "build the policy for the env that the data set comes from"
                )
        return
    shape, item = getattr(obs, "shape", None), space.shape
    if shape is None or item is None or isinstance(space, gym.spaces.Tuple):
        return
    if tuple(shape)[max(0, len(shape) - len(item)) :] != tuple(item):
        raise StructureError(
            f"{name} has shape {tuple(shape)}, but must end in {tuple(item)}, as that of the "
            "policy's env does; build the policy for the env that the data set comes from, or "
            "reshape its observations"
        )
