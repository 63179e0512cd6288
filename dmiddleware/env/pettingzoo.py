"""PettingZoo's games as battle envs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.env.battle_manager import BattleEnv
from dmiddleware.errors import ConfigError

__all__ = ["PettingZooAdapter"]


class PettingZooAdapter(BattleEnv):
    """A PettingZoo env, turn-based (AEC) or parallel, as a :class:`BattleEnv`.

    Players are numbered in the order of ``env.possible_agents``. The episode ends when every agent
    is terminated or truncated; agents that leave earlier keep their last observation and do not
    move again.

    Args:
        env: a PettingZoo env, for example ``pettingzoo.make("aec", "classic/tictactoe-v3")``.
        flatten: turn arrays of observations into vectors. Networks take three-dimensional arrays
            for images, but the planes of most board games are too small for convolutions.

    Raises:
        ConfigError: if PettingZoo is not installed, or this is not one of its envs.
    """

    def __init__(self, env: Any, *, flatten: bool = False) -> None:
        try:
            from pettingzoo import AECEnv, ParallelEnv
        except ImportError as error:
            raise ConfigError(
                "PettingZooAdapter needs PettingZoo; run: pip install 'dmiddleware[pettingzoo]'"
            ) from error
        if not isinstance(env, AECEnv | ParallelEnv):
            raise ConfigError(
                f"PettingZooAdapter takes a PettingZoo env, got {env!r:.100}; make one with "
                'pettingzoo.make("aec", "classic/tictactoe-v3")'
            )
        self._env = env
        self._takes_turns = isinstance(env, AECEnv)
        self._flatten = flatten
        self._agents: list[Any] = list(env.possible_agents)
        self._obs: list[Any] = [None] * len(self._agents)
        self._infos: list[dict[str, Any]] = [{} for _ in self._agents]
        self.n_player = len(self._agents)
        self.observation_space = self._common_space("observation_space")
        self.action_space = self._common_space("action_space")
        if flatten and self.observation_space is not None:
            self.observation_space = _flat_space(self.observation_space)

    def reset(self, seed: int | None = None) -> list[Any]:
        """Start a new game; return one observation per player."""
        result = self._env.reset(seed=seed)
        if self._takes_turns:
            self._observe(self._agents)
            self._infos = [dict(self._env.infos[agent]) for agent in self._agents]
        else:
            self._adopt(*result)
        return list(self._obs)

    def step(
        self, actions: list[Any]
    ) -> tuple[list[Any], list[float], bool, bool, list[dict[str, Any]]]:
        """Play one move; see :meth:`BattleEnv.step`."""
        if self._takes_turns:
            rewards, terminated, truncated = self._take_turn(actions)
        else:
            rewards, terminated, truncated = self._move_together(actions)
        # Agents that left earlier are not among these.
        done = all(terminated[agent] or truncated[agent] for agent in terminated)
        is_terminal = done and any(terminated.values())
        if self._takes_turns and not done:
            self._remove_ended()
        return (
            list(self._obs),
            [float(rewards.get(agent, 0.0)) for agent in self._agents],
            is_terminal,
            done and not is_terminal,
            [dict(info) for info in self._infos],
        )

    def to_move(self) -> tuple[int, ...]:
        """Return the players whose actions the next step takes."""
        if self._takes_turns:
            return (self._agents.index(self._env.agent_selection),)
        return tuple(self._agents.index(agent) for agent in self._env.agents)

    def action_mask(self, player: int) -> npt.NDArray[Any] | None:
        """Return the mask in a player's observation or info; None: all actions are allowed."""
        for source in (self._obs[player], self._infos[player]):
            if isinstance(source, Mapping) and "action_mask" in source:
                return np.asarray(source["action_mask"])
        return None

    def close(self) -> None:
        """Close the env."""
        self._env.close()

    def _take_turn(
        self, actions: list[Any]
    ) -> tuple[dict[Any, float], dict[Any, bool], dict[Any, bool]]:
        env = self._env
        env.step(actions[self._agents.index(env.agent_selection)])
        alive = list(env.agents)
        self._observe(alive)
        for agent in alive:
            self._infos[self._agents.index(agent)] = dict(env.infos[agent])
        return dict(env.rewards), dict(env.terminations), dict(env.truncations)

    def _remove_ended(self) -> None:
        """Let ended agents leave, and observe again for the one that moves next."""
        env = self._env
        while env.terminations[env.agent_selection] or env.truncations[env.agent_selection]:
            env.step(None)
        self._observe([env.agent_selection])

    def _move_together(
        self, actions: list[Any]
    ) -> tuple[dict[Any, float], dict[Any, bool], dict[Any, bool]]:
        moves = {agent: actions[self._agents.index(agent)] for agent in self._env.agents}
        obs, rewards, terminated, truncated, infos = self._env.step(moves)
        self._adopt(obs, infos)
        return rewards, terminated, truncated

    def _observe(self, agents: list[Any]) -> None:
        for agent in agents:
            self._obs[self._agents.index(agent)] = self._plain(self._env.observe(agent))

    def _adopt(self, obs: Mapping[Any, Any], infos: Mapping[Any, Any]) -> None:
        for player, agent in enumerate(self._agents):
            if agent in obs:
                self._obs[player] = self._plain(obs[agent])
                self._infos[player] = dict(infos.get(agent, {}))

    def _plain(self, obs: Any) -> Any:
        if isinstance(obs, Mapping):
            return {str(key): self._plain(item) for key, item in obs.items()}
        # A copy, since games may write to theirs again.
        array = np.array(obs)
        return array.reshape(-1) if self._flatten and array.ndim > 1 else array

    def _common_space(self, name: str) -> gym.Space[Any] | None:
        first, *others = (getattr(self._env, name)(agent) for agent in self._agents)
        return first if all(other == first for other in others) else None


def _flat_space(space: gym.Space[Any]) -> gym.Space[Any]:
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({key: _flat_space(one) for key, one in space.spaces.items()})
    if isinstance(space, gym.spaces.Box) and len(space.shape) > 1:
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        return gym.spaces.Box(low, high, dtype=space.dtype.type)
    return space
