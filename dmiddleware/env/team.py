"""The spaces of environments with several agents, which all act at the same time.

Such an environment is a ``gymnasium.Env`` whose observations are dictionaries:

- ``agents``: the agents' observations, ``[A, …]``;
- ``agent_mask``: ``[A]``, not 0 where the agent takes part;
- ``state``: what a centralized critic or a mixing network may see, if there is such a thing;
- ``action_mask``: ``[A, n]``, not 0 where an agent's action is allowed, if there are masks.

Its actions are ``[A, …]``, and its reward is an array ``[A]``. All agents have the same spaces.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import gymnasium as gym
from gymnasium.vector.utils import batch_space

from dmiddleware.errors import SpaceError

__all__ = [
    "ACTION_MASK",
    "AGENTS",
    "AGENT_MASK",
    "STATE",
    "AgentSpaces",
    "agent_spaces",
    "n_agent_of",
    "reward_shape_of",
    "team_spaces",
]

AGENTS: Final = "agents"
AGENT_MASK: Final = "agent_mask"
STATE: Final = "state"
ACTION_MASK: Final = "action_mask"
"""The key of action masks, in observations and in infos."""


class AgentSpaces(NamedTuple):
    """What each agent of an environment sees and does.

    Attributes:
        n_agent: number of agents, ``A``.
        observation: the space of one agent's observation.
        action: the space of one agent's action.
        state: the space of the state; None: the environment has none.
    """

    n_agent: int
    observation: gym.Space[Any]
    action: gym.Space[Any]
    state: gym.Space[Any] | None


def team_spaces(
    spaces: AgentSpaces, *, has_action_masks: bool = False
) -> tuple[gym.spaces.Dict, gym.Space[Any]]:
    """Return the observation space and the action space of an environment with several agents.

    Args:
        spaces: those of one agent; actions are Discrete or a floating-point Box.
        has_action_masks: whether observations have the key ``action_mask``.

    Raises:
        SpaceError: if the action space is another, or masks are given for a Box.

    Example:
        >>> one = AgentSpaces(3, gym.spaces.Box(-1, 1, (5,)), gym.spaces.Discrete(4), None)
        >>> observation, action = team_spaces(one)
        >>> observation["agents"].shape, action
        ((3, 5), MultiDiscrete([4 4 4]))
    """
    is_discrete = isinstance(spaces.action, gym.spaces.Discrete)
    is_box = isinstance(spaces.action, gym.spaces.Box) and spaces.action.dtype.kind == "f"
    if not is_discrete and (has_action_masks or not is_box):
        raise SpaceError(
            f"agents take Discrete actions, or those of a floating-point Box without masks, but "
            f"these take {spaces.action}{' with masks' if has_action_masks else ''}; wrap the env"
        )
    n_agent = spaces.n_agent
    parts: dict[str, gym.Space[Any]] = {
        AGENTS: batch_space(spaces.observation, n_agent),
        AGENT_MASK: gym.spaces.MultiBinary(n_agent),
    }
    if spaces.state is not None:
        parts[STATE] = spaces.state
    if isinstance(spaces.action, gym.spaces.Discrete) and has_action_masks:
        parts[ACTION_MASK] = gym.spaces.MultiBinary([n_agent, int(spaces.action.n)])
    return gym.spaces.Dict(parts), batch_space(spaces.action, n_agent)


def n_agent_of(observation_space: gym.Space[Any] | None) -> int | None:
    """Return the number of agents; None for an environment with a single agent."""
    if not isinstance(observation_space, gym.spaces.Dict):
        return None
    mask = observation_space.spaces.get(AGENT_MASK)
    if not isinstance(mask, gym.spaces.MultiBinary) or AGENTS not in observation_space.spaces:
        return None
    return int(mask.shape[0])


def reward_shape_of(observation_space: gym.Space[Any] | None) -> tuple[int, ...]:
    """Return the shape of the reward of one step: ``()``, or ``(A,)`` for several agents."""
    n_agent = n_agent_of(observation_space)
    return () if n_agent is None else (n_agent,)


def agent_spaces(observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> AgentSpaces:
    """Return the spaces of one agent: the inverse of :func:`team_spaces`.

    Raises:
        SpaceError: if the environment has a single agent, or other spaces.
    """
    n_agent = n_agent_of(observation_space)
    if n_agent is None:
        raise SpaceError(
            "expected an environment with several agents, whose observations are dictionaries "
            f"with the keys {AGENTS!r} and {AGENT_MASK!r}, got {observation_space}; use DQN or "
            "PPO, or give make_env_manager a PettingZoo parallel env"
        )
    assert isinstance(observation_space, gym.spaces.Dict)
    parts = observation_space.spaces
    return AgentSpaces(n_agent, _one(parts[AGENTS]), _one(action_space), parts.get(STATE))


def _one(space: gym.Space[Any]) -> gym.Space[Any]:
    """Return the space of one item of a batch space."""
    match space:
        case gym.spaces.Box() if space.shape:
            return gym.spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)
        case gym.spaces.MultiDiscrete() if space.nvec.ndim == 1:
            return gym.spaces.Discrete(int(space.nvec[0]), start=int(space.start[0]))
        case gym.spaces.Dict():
            return gym.spaces.Dict({key: _one(inner) for key, inner in space.spaces.items()})
        case gym.spaces.Tuple():
            return gym.spaces.Tuple(tuple(_one(inner) for inner in space.spaces))
    raise SpaceError(
        f"{space} is not a space of several agents' observations or actions: give each agent a "
        "Box, Discrete, Dict or Tuple space"
    )
