"""Several agents in DI-engine's form, as :mod:`dmiddleware.env.team` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.env.team import ACTION_MASK, AGENT_MASK, AGENTS, STATE, AgentSpaces, team_spaces
from dmiddleware.errors import SpaceError

__all__ = ["Team"]

_AGENT_STATE: Final = "agent_state"
_GLOBAL_STATE: Final = "global_state"


class Team:
    """Turns what a DI-engine env of several agents returns into the form that it has here.

    Its observations are dictionaries with ``agent_state`` ``[A, …]`` and maybe ``global_state``,
    ``[S]`` or, with one for each agent, ``[A, S]``, and ``action_mask`` ``[A, n]``. The state here
    is the state of the team, so the states of the agents are put in a row, ``[A * S]``. Other keys
    are parts of these, which no algorithm here reads. The reward is the team's, which every agent
    gets, or one of each agent.

    Args:
        first: an observation.
        action: the space of one agent's action.
    """

    def __init__(self, first: Mapping[str, Any], action: spaces.Space[Any]) -> None:
        self._n_agent = len(first[_AGENT_STATE])
        self._action = action
        self._has_masks = isinstance(action, spaces.Discrete) and ACTION_MASK in first
        self._first = first

    @classmethod
    def of(cls, first: Any, action_space: Any) -> Team | None:
        """Return the team whose first observation this is; None for one agent.

        Args:
            first: an observation.
            action_space: a space for each agent, in a dictionary or a list, or one of all.

        Raises:
            SpaceError: if the agents' actions differ, or are of an unknown form.
        """
        if not isinstance(first, Mapping) or _AGENT_STATE not in first:
            return None
        return cls(first, _of_one(action_space, len(first[_AGENT_STATE])))

    def spaces(self) -> tuple[spaces.Dict, spaces.Space[Any]]:
        """Return the observation space and the action space."""
        obs = self.observation(self._first)
        state = _unbounded(obs[STATE]) if STATE in obs else None
        agent = AgentSpaces(self._n_agent, _unbounded(obs[AGENTS][0]), self._action, state)
        return team_spaces(agent, has_action_masks=self._has_masks)

    def observation(self, obs: Mapping[str, Any]) -> dict[str, Any]:
        """Return an observation with the keys that it has here."""
        parts = {
            AGENTS: np.asarray(obs[_AGENT_STATE], np.float32),
            AGENT_MASK: np.ones(self._n_agent, np.int8),
        }
        if _GLOBAL_STATE in obs:
            state = np.asarray(obs[_GLOBAL_STATE], np.float32)
            parts[STATE] = state.reshape(-1) if state.ndim == 2 else state
        if self._has_masks:
            masks = np.asarray(obs[ACTION_MASK]) != 0
            # An agent that may do nothing, as at the end of a game, may do anything.
            masks = np.where(masks.any(-1, keepdims=True), masks, True)
            parts[ACTION_MASK] = masks.astype(np.int8)
        return parts

    def rewards(self, reward: Any) -> npt.NDArray[np.float64]:
        """Return the agents' rewards ``[A]``."""
        values = np.asarray(reward, np.float64).reshape(-1)
        return np.array(np.broadcast_to(values, self._n_agent))


def _of_one(action_space: Any, n_agent: int) -> spaces.Space[Any]:
    """Return the action space of one agent."""
    match action_space:
        case spaces.Dict() | Mapping():
            each = list(action_space.values())
        case spaces.Tuple() | list() | tuple():
            each = list(action_space)
        case spaces.MultiDiscrete():
            each = [spaces.Discrete(int(n)) for n in action_space.nvec.reshape(-1)]
        case spaces.Box() if len(action_space.shape) > 1:
            bounds = zip(action_space.low, action_space.high, strict=True)
            each = [spaces.Box(low, high, dtype=action_space.dtype.type) for low, high in bounds]
        case _:
            each = [action_space] * n_agent
    if len(each) != n_agent or any(another != each[0] for another in each):
        raise SpaceError(
            f"an env with {n_agent} agents needs the same action space for each of them, got "
            f"{action_space}; pad the actions and mask those that an agent does not have"
        )
    space: spaces.Space[Any] = each[0]
    return space


def _unbounded(array: npt.NDArray[Any]) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, array.shape, np.float32)
