"""PettingZoo's envs: as games of players, and as envs of several agents."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.env.agent_obs import (
    bare,
    flat,
    flat_space,
    has_mask,
    infos_by_name,
    mask_in,
    without_mask,
    zeros,
)
from dmiddleware.env.batching import make_collate, own_copy
from dmiddleware.env.env_access import InnerAttributes
from dmiddleware.env.games import BattleEnv
from dmiddleware.env.team import (
    ACTION_MASK,
    AGENT_MASK,
    AGENTS,
    STATE,
    AgentSpaces,
    team_spaces,
)
from dmiddleware.errors import ConfigError

__all__ = ["ParallelEnvAdapter", "PettingZooAdapter", "is_parallel_env"]


class PettingZooAdapter(InnerAttributes, BattleEnv):
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
        self.observation_space = _common_space(env, "observation_space")
        self.action_space = _common_space(env, "action_space")
        if flatten and self.observation_space is not None:
            self.observation_space = flat_space(self.observation_space)

    def _inner_env(self) -> Any:
        return self._env

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> list[Any]:
        """Start a new game; return one observation per player."""
        result = self._env.reset(seed=seed, options=options)
        if self._takes_turns:
            self._observe(self._agents)
            self._infos = [dict(self._env.infos[agent]) for agent in self._agents]
        else:
            self._take(*result)
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
        return mask_in(self._obs[player], self._infos[player])

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
        self._take(obs, infos)
        return rewards, *(_with_joining(flags, self._env) for flags in (terminated, truncated))

    def _observe(self, agents: list[Any]) -> None:
        for agent in agents:
            self._obs[self._agents.index(agent)] = self._kept(self._env.observe(agent))

    def _kept(self, obs: Any) -> Any:
        # A copy, since games may write to theirs again.
        return flat(own_copy(obs)) if self._flatten else own_copy(obs)

    def _take(self, obs: Mapping[Any, Any], infos: Mapping[Any, Any]) -> None:
        for player, agent in enumerate(self._agents):
            if agent in obs:
                self._obs[player] = self._kept(obs[agent])
                self._infos[player] = dict(infos.get(agent, {}))


class ParallelEnvAdapter(InnerAttributes, gym.Env[dict[str, Any], Any]):
    """A PettingZoo parallel env as a Gymnasium env of several agents.

    ``make_env_manager`` applies it to a function that makes a parallel env. Agents are numbered in
    the order of ``env.possible_agents``, and all have the same spaces. An observation is a
    dictionary:

    - ``agents``: the agents' observations, ``[A, …]``; those of agents that do not take part are 0;
    - ``agent_mask``: ``[A] int8``, 1 where the agent takes part. In the last observation of an
      episode, and where an agent has left, 0 means that nothing follows: its value is 0;
    - ``state``: ``env.state()``, if the env has a ``state_space``;
    - ``action_mask``: ``[A, n] int8``, if the env gives masks, in observations or infos.

    An action is an array ``[A, …]``; the entries of agents that do not take part are ignored. The
    reward is ``[A] float64``, 0 for agents that do not take part. The episode ends when every agent
    is terminated or truncated. It is terminated if none of them is truncated. An agent that leaves
    earlier counts as terminated. The info has the infos of the agents, by agent.

    Args:
        env: a PettingZoo parallel env, for example ``mpe2.simple_spread_v3.parallel_env()``.

    Raises:
        ConfigError: if this is not a parallel env, it has a single agent, or its agents have
            different spaces.
        SpaceError: if the agents' actions are not Discrete or a floating-point Box.

    Example:
        >>> import pettingzoo
        >>> env = ParallelEnvAdapter(pettingzoo.make("parallel", "classic/rps-v2"))
        >>> env.action_space
        MultiDiscrete([3 3])
        >>> _ = env.reset(seed=0)
        >>> env.step([0, 1])[1]
        array([-1.,  1.])
    """

    def __init__(self, env: Any) -> None:
        if not is_parallel_env(env):
            raise ConfigError(
                f"ParallelEnvAdapter takes a PettingZoo parallel env, got {env!r:.100}; make one "
                "with the function parallel_env() of its module, and install PettingZoo with: "
                "pip install 'dmiddleware[pettingzoo]'"
            )
        self._env = env
        self._agents: list[Any] = list(env.possible_agents)
        if len(self._agents) < 2:
            raise ConfigError(f"{env} has a single agent; make it a gymnasium.Env")
        self.metadata = dict(env.metadata)
        self.render_mode = getattr(env, "render_mode", None)
        observation, action = (
            self._own_space(f"{name}_space") for name in ("observation", "action")
        )
        self._has_masks = has_mask(observation) or self._has_masks_in_infos()
        observation = without_mask(observation)
        state = getattr(env, "state_space", None)
        spaces = AgentSpaces(len(self._agents), observation, action, state)
        self.observation_space, self.action_space = team_spaces(
            spaces, has_action_masks=self._has_masks
        )
        self._n_actions = int(action.n) if isinstance(action, gym.spaces.Discrete) else 0
        self._state_dtype = None if state is None else state.dtype
        self._collate = make_collate(observation)
        self._absent = zeros(observation)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; return the observation, and the infos by agent."""
        super().reset(seed=seed)
        obs, infos = self._env.reset(seed=seed, options=options)
        present = {agent: agent in obs for agent in self._agents}
        return self._joined(obs, infos, present), infos_by_name(infos)

    def step(
        self, action: Any
    ) -> tuple[dict[str, Any], npt.NDArray[np.float64], bool, bool, dict[str, Any]]:
        """Let all agents that take part act."""
        alive = set(self._env.agents)
        pairs = zip(self._agents, action, strict=True)
        moves = {agent: agent_action for agent, agent_action in pairs if agent in alive}
        obs, rewards, terminated, truncated, infos = self._env.step(moves)
        terminated = _with_joining(terminated, self._env)
        cut = {agent for agent, flag in truncated.items() if flag and not terminated.get(agent)}
        done = all(flag or agent in cut for agent, flag in terminated.items())
        alive = cut if done else set(self._env.agents)
        present = {agent: agent in alive for agent in self._agents}
        reward = np.array([float(rewards.get(agent, 0.0)) for agent in self._agents])
        joined = self._joined(obs, infos, present)
        return joined, reward, done and not cut, done and bool(cut), infos_by_name(infos)

    def render(self) -> Any:
        """Return an image of the env, if its render mode gives one."""
        return self._env.render()

    def close(self) -> None:
        """Close the env."""
        self._env.close()

    def _inner_env(self) -> Any:
        return self._env

    def _joined(
        self, obs: Mapping[Any, Any], infos: Mapping[Any, Any], present: Mapping[Any, bool]
    ) -> dict[str, Any]:
        rows = [bare(obs[agent]) if agent in obs else self._absent for agent in self._agents]
        joined = {
            AGENTS: self._collate(rows),
            AGENT_MASK: np.array(list(present.values()), np.int8),
        }
        if self._state_dtype is not None:
            joined[STATE] = np.array(self._env.state(), self._state_dtype)
        if self._has_masks:
            masks = np.ones((len(rows), self._n_actions), np.int8)
            for row, agent in enumerate(self._agents):
                mask = mask_in(obs.get(agent), infos.get(agent))
                # Where nothing is allowed, as at the end of a game, nothing is forbidden.
                if mask is not None and mask.any():
                    masks[row] = mask
            joined[ACTION_MASK] = masks
        return joined

    def _own_space(self, name: str) -> gym.Space[Any]:
        space = _common_space(self._env, name)
        if space is None:
            raise ConfigError(
                f"the agents of {self._env} have different spaces ({name}); give each kind a team, "
                'as in make_game(env, teams={"red": ["red_*"], "blue": ["blue_*"]}, env_num=8), or '
                "pad them, for example with SuperSuit's pad_observations_v0 and "
                "pad_action_space_v0"
            )
        return space

    def _has_masks_in_infos(self) -> bool:
        _, infos = self._env.reset()
        return any(ACTION_MASK in info for info in infos.values())


def is_parallel_env(env: object) -> bool:
    """Return whether this is a PettingZoo parallel env, without importing PettingZoo."""
    pettingzoo = sys.modules.get("pettingzoo")
    return pettingzoo is not None and isinstance(env, pettingzoo.ParallelEnv)


def _with_joining(flags: Mapping[Any, bool], env: Any) -> dict[Any, bool]:
    """Return flags by agent, also of those that join in this step, which envs may leave out."""
    return {**dict.fromkeys(env.agents, False), **flags}


def _common_space(env: Any, name: str) -> gym.Space[Any] | None:
    """Return the space that all agents have; None if they differ."""
    first, *others = (getattr(env, name)(agent) for agent in env.possible_agents)
    return first if all(space == first for space in others) else None
