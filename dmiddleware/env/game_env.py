"""A game of teams as one environment: its agents may have different spaces, and take turns."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeGuard

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
from dmiddleware.env.batching import own_copy
from dmiddleware.env.env_access import InnerAttributes
from dmiddleware.env.team import ACTION_MASK, AGENT_MASK, AGENTS, STATE
from dmiddleware.errors import ConfigError, EnvProtocolError, SpaceError
from dmiddleware.registry import nearest

__all__ = ["FLAGS", "PRESENT", "GameEnv", "Teams", "agents_of_teams", "is_game_space"]

Teams: TypeAlias = Mapping[str, str | Sequence[str]]
"""The agents of each team: names, or patterns such as ``blue_*``."""

FLAGS: Final = "flags"
"""The key of what has just happened to the agents: ``[A, 3]``: whether a transition of theirs is
complete, and whether they have left terminated, or truncated."""

PRESENT: Final = "present"
"""The key of whether agents are still in the game, ``[N]``, where they take turns."""


class _Turn(NamedTuple):
    """What a game has answered, by agent.

    Attributes:
        obs: of those that act next, and of those that leave.
        rewards: since the last answer.
        ended: whether those that leave are terminated; False: truncated.
        acts: those that act next; none: the game is over.
        infos: of those in ``obs``.
    """

    obs: Mapping[Any, Any]
    rewards: Mapping[Any, Any]
    ended: Mapping[Any, bool]
    acts: Sequence[Any]
    infos: Mapping[Any, Any]


class GameEnv(InnerAttributes, gym.Env[dict[str, Any], dict[str, Any]]):
    """A game of teams as a Gymnasium env, which env managers step as any other.

    :class:`~dmiddleware.rollout.Game` divides what its env manager returns into teams. Agents of
    one team have the same spaces; those of two teams may differ. An observation is a dictionary:

    - ``agents``: by team, a tuple of the observations of its agents, without action masks; those of
      agents that neither act next nor have just left are 0, unless they wait for their turn in a
      team of several;
    - ``agent_mask``: ``[N] int8`` over the agents of all teams, 1 for those that act next;
    - ``present``: ``[N] int8``, 1 for those that are in the game, if agents take turns;
    - ``flags``: by team, ``[A, 3] int8``, see :data:`FLAGS`;
    - ``action_mask``: by team, ``[A, n] int8``, of the teams with masks, in observations or infos;
    - ``state``: ``env.state()``, if the env has a ``state_space``.

    An action has, by team, a tuple of the agents' actions; those of agents that do not act are
    ignored. The reward is ``[N] float64``.

    An agent's transition lasts from its action to its next one, or until it leaves, and has the sum
    of its rewards meanwhile. Rewards before an agent's first action belong to that action; those of
    an agent that never acts come when it leaves. An agent leaves where it is terminated or
    truncated, or not among the env's agents any more, which counts as terminated. The game ends
    when nobody is left. It is terminated if none of the last ones is truncated.

    Args:
        env: a PettingZoo env, parallel or turn-based (AEC), or an env with the methods of a
            parallel one: its spaces are dictionaries by agent (or functions of an agent), and so
            are what ``reset`` and ``step`` take and return. Without a list ``agents``, those take
            part that it returns observations of.
        teams: the agents of each team: names, or patterns such as ``"blue_*"``.
        flatten: turn arrays of observations into vectors.

    Attributes:
        teams: the agents of each team.
        takes_turns: whether one agent acts after the other.

    Raises:
        ConfigError: if this is no such env, or an agent is in no team or in two, or a name or
            pattern matches no agent, or agents of one team have different spaces.
        SpaceError: if agents have action masks, but their actions are not Discrete.
    """

    def __init__(self, env: Any, teams: Teams, *, flatten: bool = False) -> None:
        self._env = env
        self._flatten = flatten
        self.takes_turns = callable(getattr(env, "agent_iter", None))
        self._rules: _Rules = (_Turns if self.takes_turns else _AtOnce)(env)
        spaces = _spaces_by_agent(env)
        agents = list(getattr(env, "possible_agents", spaces))
        self.teams = agents_of_teams(teams, agents)
        self.metadata = dict(getattr(env, "metadata", {}))
        self.render_mode = getattr(env, "render_mode", None)
        common = {team: _common_spaces(team, names, spaces) for team, names in self.teams.items()}
        masked = self._masked_teams(common)
        plain = {team: without_mask(observation) for team, (observation, _) in common.items()}
        if flatten:
            plain = {team: flat_space(space) for team, space in plain.items()}
        parts: dict[str, gym.Space[Any]] = {
            AGENTS: gym.spaces.Dict(
                {
                    team: gym.spaces.Tuple([space] * len(self.teams[team]))
                    for team, space in plain.items()
                }
            ),
            AGENT_MASK: gym.spaces.MultiBinary(len(agents)),
            FLAGS: gym.spaces.Dict(
                {
                    team: gym.spaces.MultiBinary([len(names), 3])
                    for team, names in self.teams.items()
                }
            ),
        }
        if self.takes_turns:
            parts[PRESENT] = gym.spaces.MultiBinary(len(agents))
        state_space = getattr(env, "state_space", None)
        if state_space is not None:
            parts[STATE] = state_space
        if masked:
            parts[ACTION_MASK] = gym.spaces.Dict(
                {
                    team: gym.spaces.MultiBinary([len(self.teams[team]), n])
                    for team, n in masked.items()
                }
            )
        self.observation_space = gym.spaces.Dict(parts)
        self.action_space = gym.spaces.Dict(
            {
                team: gym.spaces.Tuple([action] * len(self.teams[team]))
                for team, (_, action) in common.items()
            }
        )
        # The order of the space, in which everything is read.
        self.teams = {team: self.teams[team] for team in self.action_space.spaces}
        self._numbers = {
            agent: number
            for number, agent in enumerate(a for names in self.teams.values() for a in names)
        }
        self._masked = masked
        self._state_dtype = None if state_space is None else state_space.dtype
        self._absent = {team: zeros(space) for team, space in plain.items()}
        self._acts: list[Any] = []
        # Those that have acted and wait for what follows, and what they have earned meanwhile.
        self._open: set[Any] = set()
        self._earned: dict[Any, float] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start a game; return the observation, and the infos by agent."""
        super().reset(seed=seed)
        self._forget()
        turn = self._rules.reset(seed, options)
        if not turn.acts:
            raise EnvProtocolError(f"{self._env} has reset, but no agent acts; correct the env")
        self._earn(turn)
        self._acts = list(turn.acts)
        return self._observed(turn), infos_by_name(turn.infos)

    def step(
        self, action: Mapping[str, Any]
    ) -> tuple[dict[str, Any], npt.NDArray[np.float64], bool, bool, dict[str, Any]]:
        """Let the agents act whose turn it is."""
        moves = {
            agent: move
            for team, names in self.teams.items()
            for agent, move in zip(names, action[team], strict=True)
        }
        turn = self._rules.step({agent: moves[agent] for agent in self._acts})
        self._earn(turn)
        self._open |= set(self._acts)
        self._acts = list(turn.acts)
        reward, is_cut = np.zeros(len(self._numbers)), False
        obs = self._observed(turn)
        flags = {agent: row for team in self.teams for agent, row in self._flag_rows(obs, team)}
        for agent in sorted({*self._open, *turn.ended}, key=self._numbers.__getitem__):
            leaves = agent in turn.ended or not turn.acts
            if leaves or agent in self._acts:
                is_terminated = turn.ended.get(agent, True)
                is_complete = agent in self._open
                flags[agent][:] = (
                    is_complete,
                    leaves and is_terminated,
                    leaves and not is_terminated,
                )
                is_cut |= leaves and not is_terminated
                reward[self._numbers[agent]] = self._earned.pop(agent, 0.0)
                self._open.discard(agent)
        over = not turn.acts
        return obs, reward, over and not is_cut, over and is_cut, infos_by_name(turn.infos)

    def render(self) -> Any:
        """Return an image of the env, if its render mode gives one."""
        return self._env.render()

    def close(self) -> None:
        """Close the env."""
        if callable(close := getattr(self._env, "close", None)):
            close()

    def _inner_env(self) -> Any:
        return self._env

    def _forget(self) -> None:
        self._acts = []
        self._open = set()
        self._earned = {}

    def _earn(self, turn: _Turn) -> None:
        for kind, by_agent in (("reward", turn.rewards), ("observation", turn.obs)):
            for agent in by_agent:
                if agent not in self._numbers:
                    raise EnvProtocolError(
                        f"{self._env} returned the {kind} of the agent {agent!r}, but its agents "
                        f"are {_names(self._numbers)}; list all that ever take part in "
                        "possible_agents"
                    )
        for agent, reward in turn.rewards.items():
            self._earned[agent] = self._earned.get(agent, 0.0) + float(reward)

    def _observed(self, turn: _Turn) -> dict[str, Any]:
        acts, present = set(turn.acts), set(self._env.agents if self.takes_turns else ())
        obs: dict[str, Any] = {AGENTS: {}, FLAGS: {}}
        for team, names in self.teams.items():
            views = dict(turn.obs)
            if len(names) > 1:
                # A team that acts as one learns from what all of them see.
                waiting = [agent for agent in names if agent in present and agent not in views]
                views |= {agent: self._view_of_waiting(agent) for agent in waiting}
            absent = self._absent[team]
            obs[AGENTS][team] = tuple(
                self._shown(views[agent]) if agent in views else absent for agent in names
            )
            obs[FLAGS][team] = np.zeros((len(names), 3), np.int8)
        obs[AGENT_MASK] = np.array([agent in acts for agent in self._numbers], np.int8)
        if self.takes_turns:
            obs[PRESENT] = np.array([agent in present for agent in self._numbers], np.int8)
        if self._state_dtype is not None:
            obs[STATE] = np.array(self._env.state(), self._state_dtype)
        if self._masked:
            obs[ACTION_MASK] = {team: self._masks(team, turn) for team in self._masked}
        return obs

    def _view_of_waiting(self, agent: Any) -> Any:
        try:
            view = self._env.observe(agent)
        except Exception as error:
            raise self._not_observed(agent, repr(error)) from error
        if view is None:
            raise self._not_observed(agent, "it returned None")
        return own_copy(view)

    def _not_observed(self, agent: Any, reason: str) -> EnvProtocolError:
        return EnvProtocolError(
            f"{self._env}.observe({agent!r}) failed while another agent acts: {reason}. A team of "
            "several agents that take turns sees what those observe that wait; correct the env, or "
            "give each agent a team of its own"
        )

    def _shown(self, obs: Any) -> Any:
        return flat(bare(obs)) if self._flatten else bare(obs)

    def _masks(self, team: str, turn: _Turn) -> npt.NDArray[np.int8]:
        names = self.teams[team]
        masks = np.ones((len(names), self._masked[team]), np.int8)
        for row, agent in enumerate(names):
            mask = mask_in(turn.obs.get(agent), turn.infos.get(agent))
            # Where nothing is allowed, as at the end of a game, nothing is forbidden.
            if mask is not None and mask.any():
                masks[row] = mask
        return masks

    def _flag_rows(self, obs: Mapping[str, Any], team: str) -> Iterable[tuple[Any, Any]]:
        return zip(self.teams[team], obs[FLAGS][team], strict=True)

    def _masked_teams(
        self, common: Mapping[str, tuple[gym.Space[Any], gym.Space[Any]]]
    ) -> dict[str, int]:
        """Return the number of actions of each team whose agents have action masks."""
        infos: Mapping[Any, Any] = {}
        if not all(has_mask(observation) for observation, _ in common.values()):
            infos = self._rules.reset(None, None).infos  # they may be there
            if self.takes_turns:
                infos = dict(self._env.infos)
        in_infos = any(ACTION_MASK in info for info in infos.values())
        masked = {}
        for team, (observation, action) in common.items():
            if isinstance(action, gym.spaces.Discrete):
                if in_infos or has_mask(observation):
                    masked[team] = int(action.n)
            elif has_mask(observation) or any(
                ACTION_MASK in infos.get(agent, ()) for agent in self.teams[team]
            ):
                raise SpaceError(
                    f"the agents of team {team!r} have action masks, but take {action}; masks are "
                    "for Discrete actions"
                )
        return masked


class _Rules(Protocol):
    """The order in which agents act."""

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> _Turn: ...

    def step(self, moves: Mapping[Any, Any]) -> _Turn: ...


class _AtOnce:
    """All agents that take part act at the same time."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._present: list[Any] = []

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> _Turn:
        obs, infos = self._env.reset(seed=seed, options=options)
        self._present = self._now(obs)
        return _Turn(obs, {}, {}, self._acting(obs), _known(infos, obs))

    def step(self, moves: Mapping[Any, Any]) -> _Turn:
        obs, rewards, terminated, truncated, infos = self._env.step(dict(moves))
        ended = {}
        for agent in {**dict.fromkeys(self._present), **dict.fromkeys(obs)}:
            is_terminated, is_truncated = _flag(terminated, agent), _flag(truncated, agent)
            if is_terminated or is_truncated:
                ended[agent] = is_terminated
        now = [agent for agent in self._now(obs) if agent not in ended]
        ended = _with_vanished(ended, self._present, now)
        self._present = now
        return _Turn(obs, rewards, ended, self._acting(obs), _known(infos, obs))

    def _now(self, obs: Mapping[Any, Any]) -> list[Any]:
        return list(getattr(self._env, "agents", obs))

    def _acting(self, obs: Mapping[Any, Any]) -> list[Any]:
        acting = [agent for agent in self._present if agent in obs]
        if self._present and not acting:
            raise EnvProtocolError(
                f"{self._env} continues with {_names(self._present)}, but returned an observation "
                "of none of them; return those of the agents that act next"
            )
        return acting


class _Turns:
    """One agent acts after the other, in PettingZoo's agent environment cycle.

    Source: Terry et al., "PettingZoo: A Standard API for Multi-Agent Reinforcement Learning", 2021.
    """

    def __init__(self, env: Any) -> None:
        self._env = env

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> _Turn:
        self._env.reset(seed=seed, options=options)
        return self._next()

    def step(self, moves: Mapping[Any, Any]) -> _Turn:
        present = list(self._env.agents)
        self._env.step(moves[self._env.agent_selection])
        turn = self._next()
        return turn._replace(ended=_with_vanished(turn.ended, present, self._env.agents))

    def _next(self) -> _Turn:
        """Let those leave whose game is over, until an agent acts."""
        env, obs, rewards = self._env, dict[Any, Any](), dict[Any, float]()
        ended, infos = dict[Any, bool](), dict[Any, Any]()
        while env.agents:
            agent = env.agent_selection
            observation, reward, terminated, truncated, info = env.last()
            # Games may write to theirs again.
            obs[agent], infos[agent] = own_copy(observation), dict(info)
            rewards[agent] = rewards.get(agent, 0.0) + reward
            if not (terminated or truncated):
                return _Turn(obs, rewards, ended, [agent], infos)
            ended[agent] = bool(terminated)
            env.step(None)
        return _Turn(obs, rewards, ended, [], infos)


def is_game_space(space: gym.Space[Any]) -> TypeGuard[gym.spaces.Dict]:
    """Return whether this is the observation space of a :class:`GameEnv`."""
    return isinstance(space, gym.spaces.Dict) and FLAGS in space.spaces


def agents_of_teams(teams: Teams, agents: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Return the agents of each team, in the order of ``agents``.

    Args:
        teams: names of agents, or patterns, by team.
        agents: all agents of the env.

    Raises:
        ConfigError: if an agent is in no team or in two, a name or pattern matches no agent, or a
            team has none.
    """
    if not isinstance(teams, Mapping) or not teams:
        raise ConfigError(
            f'teams must be a dictionary such as {{"red": ["red_*"]}}, got {teams!r:.100}'
        )
    team_of: dict[Any, str] = {}
    for team, names in teams.items():
        patterns = [names] if isinstance(names, str) else names
        if not isinstance(team, str) or not isinstance(patterns, Sequence) or not patterns:
            raise ConfigError(
                f"team {team!r} has the agents {names!r:.100}; give a team's name, and a list of "
                f"at least one of {_names(agents)}"
            )
        for pattern in patterns:
            for agent in _matching(pattern, agents, team):
                if team_of.setdefault(agent, team) != team:
                    raise ConfigError(
                        f"the agent {agent!r} is in two teams, {team_of[agent]!r} and {team!r}; "
                        "each agent plays for one"
                    )
    if homeless := [agent for agent in agents if agent not in team_of]:
        raise ConfigError(
            f"no team has the agent{'s' * (len(homeless) > 1)} {_names(homeless)}; give each agent "
            "a team, which may be played by a function"
        )
    return {team: tuple(a for a in agents if team_of[a] == team) for team in teams}


def _matching(pattern: Any, agents: Sequence[Any], team: str) -> list[Any]:
    exact = [agent for agent in agents if pattern in (agent, str(agent))]
    matching = exact or [agent for agent in agents if fnmatch.fnmatchcase(str(agent), str(pattern))]
    if not matching:
        near = nearest(str(pattern), [str(agent) for agent in agents])
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(
            f"team {team!r} has {pattern!r}, which matches no agent; the agents are "
            f"{_names(agents)}{hint}"
        )
    return matching


def _spaces_by_agent(env: Any) -> dict[Any, tuple[gym.Space[Any], gym.Space[Any]]]:
    """Return the spaces of each agent.

    Raises:
        ConfigError: if the env does not have them.
    """
    pairs = []
    for name in ("observation_space", "action_space"):
        by_agent: Any = getattr(env, name, None)
        if hasattr(env, "possible_agents") and callable(by_agent):
            by_agent = {agent: by_agent(agent) for agent in env.possible_agents}
        elif isinstance(by_agent, gym.spaces.Dict):
            by_agent = by_agent.spaces
        if not isinstance(by_agent, Mapping) or not by_agent:
            raise ConfigError(
                f"{env!r:.100} is not a game of several agents: it needs possible_agents and "
                f"{name}(agent), as PettingZoo's envs have, or a dictionary {name} of spaces by "
                "agent"
            )
        pairs.append(by_agent)
    observation, action = pairs
    if set(observation) != set(action):
        raise ConfigError(
            f"{env!r:.100} has observation spaces of {_names(observation)}, but action spaces of "
            f"{_names(action)}"
        )
    return {agent: (observation[agent], action[agent]) for agent in observation}


def _common_spaces(
    team: str,
    names: Sequence[Any],
    spaces: Mapping[Any, tuple[gym.Space[Any], gym.Space[Any]]],
) -> tuple[gym.Space[Any], gym.Space[Any]]:
    first, *others = names
    for agent in others:
        for space, expected in zip(spaces[agent], spaces[first], strict=True):
            if space != expected:
                raise ConfigError(
                    f"the agents {first!r} and {agent!r} of team {team!r} have different spaces, "
                    f"{expected} and {space}; put them into two teams"
                )
    return spaces[first]


def _flag(flags: Any, agent: Any) -> bool:
    """Return an agent's flag, in a dictionary by agent or one for all."""
    if isinstance(flags, Mapping):
        return bool(flags.get(agent, False))
    return bool(flags)


def _with_vanished(
    ended: Mapping[Any, bool], before: Iterable[Any], now: Sequence[Any]
) -> dict[Any, bool]:
    """Return whether those that leave are terminated, as those are that are not there any more."""
    return {agent: True for agent in before if agent not in now} | dict(ended)


def _known(infos: Mapping[Any, Any], obs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the infos that are dictionaries of agents with an observation."""
    return {agent: info for agent, info in infos.items() if agent in obs}


def _names(agents: Iterable[Any]) -> str:
    return ", ".join(map(repr, agents))
