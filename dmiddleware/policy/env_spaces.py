"""Which spaces of environments an algorithm supports, and the shapes of the network for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import gymnasium as gym

from dmiddleware.env import n_agent_of
from dmiddleware.env.team import ACTION_MASK, AGENT_MASK
from dmiddleware.errors import SpaceError, StructureError
from dmiddleware.model import action_kind_of, action_shape_of, obs_shape_of, team_shapes
from dmiddleware.policy.obs_groups import ObsParts
from dmiddleware.tree import Batch

__all__ = ["check_action_kind", "check_number_of_agents", "check_observations", "network_shapes"]

_MASKS: Final = frozenset({ACTION_MASK, AGENT_MASK})
_REMEDY: Final = "build the policy for the env that the data come from, or record them in its env"


def network_shapes(
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    *,
    several_agents: bool,
    parts: ObsParts | None = None,
) -> dict[str, Any]:
    """Return the arguments of a network that follow from an environment's spaces.

    Args:
        observation_space: that of one environment.
        action_space: that of one environment.
        several_agents: whether the network acts for several agents.
        parts: what actor and critic see; None: everything.
    """
    if several_agents:
        shapes = team_shapes(observation_space, action_space)
    else:
        shapes = {
            "obs_shape": obs_shape_of(observation_space),
            "action_shape": action_shape_of(action_space),
            "action_space": action_kind_of(action_space),
        }
    return shapes if parts is None else {**shapes, **parts.shapes(shapes["obs_shape"])}


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


def check_observations(
    obs: Any,
    space: gym.Space[Any],
    *,
    name: str = "obs",
    lead: tuple[int, ...] | None = None,
) -> None:
    """Refuse observations whose parts and shapes do not fit a space.

    Args:
        obs: ``[…, *shape]``.
        space: the space of a single observation.
        name: the column, for the message.
        lead: the leading dimensions ``[…]``; None: not known.

    Raises:
        StructureError: with what they have and what the space has.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        if isinstance(obs, tuple):
            obs = {str(place): part for place, part in enumerate(obs)}
        has_names = isinstance(obs, Batch | Mapping)
        for key, part in _parts_of(space).items():
            if not has_names or key not in obs:
                has = f"has {', '.join(map(repr, obs))}" if has_names else "has no parts"
                raise StructureError(
                    f"{name} {has}, but must have {', '.join(map(repr, _parts_of(space)))}, as the "
                    f"observations of the policy's env; {_REMEDY}"
                )
            check_observations(obs[key], part, name=f"{name}.{key}", lead=lead)
        return
    item = space.shape
    if item is None or isinstance(obs, Batch | Mapping):
        return
    shape = tuple(obs.shape)
    n_rows = len(shape) - len(item)
    if n_rows < 1 or shape[n_rows:] != item or (lead and n_rows > len(lead) and item):
        raise StructureError(
            f"{name} has shape {shape}, but must be {(*(lead or shape[:1]), *item)}, as the "
            f"observations of the policy's env are; {_REMEDY}"
        )


def _parts_of(space: gym.spaces.Dict | gym.spaces.Tuple[Any]) -> Mapping[str, gym.Space[Any]]:
    if isinstance(space, gym.spaces.Tuple):
        return {str(place): part for place, part in enumerate(space.spaces)}
    return {str(key): part for key, part in space.spaces.items() if key not in _MASKS}
