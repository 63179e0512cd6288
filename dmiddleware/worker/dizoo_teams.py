"""Envs of dizoo with several agents, in the form of :mod:`dmiddleware.env.team`.

All agents get the reward of their team. As a state, dizoo gives either one vector or one for each
agent. The states of the agents are put in a row here, ``[A * S]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.env.team import (
    AGENT_MASK,
    AGENTS,
    STATE,
    AgentSpaces,
    team_spaces,
)
from dmiddleware.errors import ConfigError
from dmiddleware.worker.dizoo_wrappers import Env, ScaledActions, no_such_env, optional_module

__all__ = ["MujocoTeam", "SpreadTeam", "mujoco_team_env", "spread_env"]

Floats = npt.NDArray[np.float32]
StateKind = Literal["none", "team", "agents"]
Step = tuple[dict[str, Any], npt.NDArray[np.float64], bool, bool, dict[str, Any]]

_SIZE: Final = 0.15
_STEP_S: Final = 0.1
_DAMPING: Final = 0.25
_FORCE: Final = 5.0
_CONTACT_FORCE: Final = 100.0
_CONTACT_MARGIN: Final = 1e-3
"""The world's physics: the agents' radius, the seconds of a step, and what moves them."""

_MOVES: Final = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float64)


class SpreadTeam(gym.Env[dict[str, Any], Any]):
    """Agents that spread over as many landmarks without collisions.

    MPE2 has another version of this env: it moves agents before their speed changes, and does not
    count that each agent collides with itself.

    An agent sees its velocity and its position, and relative to it the landmarks' and the others'
    positions, and the others' messages, which are 0. Its reward is the sum over the landmarks of
    the distance to the nearest agent, negated, minus the number of agents that touch it, and the
    team gets the sum of its agents' rewards. Continuous actions, in [0, 1], are a force that does
    nothing, two along the first axis and two along the second one.

    Source: Lowe et al. (2017), "Multi-Agent Actor-Critic for Mixed Cooperative-Competitive
    Environments", section 5.1 ("cooperative navigation"); the physics is that of PettingZoo 1.22.

    Args:
        n_agent: number of agents, and of landmarks.
        max_cycles: steps of an episode.
        continuous: whether actions are continuous.
        state: ``"none"``, ``"team"``: all positions, velocities and messages, or ``"agents"``: for
            each agent, its observation and the state of the team.
    """

    def __init__(
        self, n_agent: int, *, max_cycles: int, continuous: bool, state: StateKind
    ) -> None:
        self._n_agent, self._max_cycles, self._state, self._n_steps = n_agent, max_cycles, state, 0
        self._continuous = continuous
        self._positions, self._landmarks = np.zeros((2, n_agent, 2))
        self._velocities = np.zeros((n_agent, 2))
        obs = self._observed()
        action = gym.spaces.Box(0.0, 1.0, (5,)) if continuous else gym.spaces.Discrete(5)
        seen = _unbounded(obs[STATE].shape) if STATE in obs else None
        self.observation_space, self.action_space = team_spaces(
            AgentSpaces(n_agent, _unbounded(obs[AGENTS].shape[1:]), action, seen)
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; agents and landmarks are anywhere in [-1, 1]."""
        super().reset(seed=seed)
        self._positions, self._landmarks = self.np_random.uniform(-1, 1, (2, self._n_agent, 2))
        self._velocities = np.zeros((self._n_agent, 2))
        self._n_steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> Step:
        """Let all agents move."""
        self._n_steps += 1
        if self._continuous:
            push = np.clip(action, 0.0, 1.0)
            forces = push[:, [1, 3]] - push[:, [2, 4]]
        else:
            forces = _MOVES[np.asarray(action)]
        forces = _FORCE * forces + self._contact_forces()
        self._velocities = (1 - _DAMPING) * self._velocities + _STEP_S * forces
        self._positions = self._positions + _STEP_S * self._velocities
        rewards = np.full(self._n_agent, self._reward())
        return self._observed(), rewards, False, self._n_steps >= self._max_cycles, {}

    def _contact_forces(self) -> npt.NDArray[np.float64]:
        away, distances = _between(self._positions, self._positions)
        np.fill_diagonal(distances, np.inf)
        depth = np.logaddexp(0, (2 * _SIZE - distances) / _CONTACT_MARGIN) * _CONTACT_MARGIN
        strength: npt.NDArray[np.float64] = _CONTACT_FORCE * depth / distances
        forces: npt.NDArray[np.float64] = (strength[..., None] * away).sum(1)
        return forces

    def _reward(self) -> float:
        _, to_landmarks = _between(self._landmarks, self._positions)
        _, to_agents = _between(self._positions, self._positions)
        n_touching = np.sum(to_agents < 2 * _SIZE)
        return -float(self._n_agent * to_landmarks.min(1).sum() + n_touching)

    def _observed(self) -> dict[str, Any]:
        n_agent = self._n_agent
        landmarks = _between(self._landmarks, self._positions)[0].swapaxes(0, 1)
        others = _between(self._positions, self._positions)[0].swapaxes(0, 1)
        others = others[~np.eye(n_agent, dtype=bool)].reshape(n_agent, -1)
        parts = (self._velocities, self._positions, landmarks.reshape(n_agent, -1), others)
        messages = np.zeros((n_agent, 2 * (n_agent - 1)))
        agents = np.concatenate([*parts, messages], axis=1).astype(np.float32)
        obs = {AGENTS: agents, AGENT_MASK: np.ones(n_agent, np.int8)}
        if self._state == "none":
            return obs
        places = agents[0, 2 : -2 * (n_agent - 1)]
        team = np.concatenate([places, agents[:, :2].ravel(), messages.ravel()]).astype(np.float32)
        if self._state == "team":
            return {**obs, STATE: team}
        each = np.concatenate([agents, np.tile(team, (n_agent, 1))], axis=1)
        return {**obs, STATE: each.reshape(-1)}


def _between(
    to: npt.NDArray[np.float64], origin: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the vectors and the distances from each of ``origin`` to each of ``to``."""
    vectors = to[:, None] - origin[None]
    return vectors, np.sqrt(np.square(vectors).sum(-1))


_JOINTS: Final[Mapping[str, Mapping[str, str]]] = {
    "Ant": {
        "2x4": "hip1 ankle1 hip2 ankle2, hip3 ankle3 hip4 ankle4",
        "2x4d": "hip1 ankle1 hip3 ankle3, hip2 ankle2 hip4 ankle4",
        "4x2": "hip1 ankle1, hip2 ankle2, hip3 ankle3, hip4 ankle4",
    },
    "HalfCheetah": {
        "2x3": "bfoot bshin bthigh, ffoot fshin fthigh",
        "6x1": "bfoot, bshin, bthigh, ffoot, fshin, fthigh",
    },
    "Hopper": {"3x1": "thigh_joint, leg_joint, foot_joint"},
    "Walker2d": {
        "2x3": "foot_joint leg_joint thigh_joint, foot_left_joint leg_left_joint thigh_left_joint",
    },
}
"""The joints that each agent sees first, by the robot and dizoo's name of its division."""


_NEAR: Final = {"Ant": "qpos,qvel,cfrc_ext|qpos"}
"""What an agent sees of its joints and of others near them, where it is more than usual."""


class MujocoTeam(gym.Wrapper[dict[str, Any], Any, Any, Any]):
    """A robot of MuJoCo whose joints are divided among agents.

    As in dizoo, the agents' actions in a row are the action of the robot, whatever joints they
    see, and agents that see less than others get zeros at the end. The state of each agent is the
    observation of the robot.

    Source: Peng et al., "FACMAC" (NeurIPS 2021), section 5.1.

    Args:
        env: the robot's env.
        views: functions that return what an agent sees of the data of MuJoCo; None: each agent
            sees what the robot sees.
        n_agent: number of agents.
        has_agent_ids: whether each agent's state ends with the number of the agent, one-hot.
    """

    def __init__(
        self,
        env: Env,
        views: list[Callable[[Any], Any]] | None,
        *,
        n_agent: int,
        has_agent_ids: bool,
    ) -> None:
        super().__init__(env)
        self._views, self._n_agent, self._has_agent_ids = views, n_agent, has_agent_ids
        first = self._observed(env.reset()[0])
        space = env.action_space
        assert isinstance(space, gym.spaces.Box)
        low, high = (bound.reshape(n_agent, -1)[0] for bound in (space.low, space.high))
        self.observation_space, self.action_space = team_spaces(
            AgentSpaces(
                n_agent,
                _unbounded(first[AGENTS].shape[1:]),
                gym.spaces.Box(low, high, dtype=np.float32),
                _unbounded(first[STATE].shape),
            )
        )

    def reset(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode."""
        obs, info = self.env.reset(**kwargs)
        return self._observed(obs), info

    def step(self, action: Any) -> Step:
        """Let all agents act."""
        obs, reward, terminated, truncated, info = self.env.step(np.reshape(action, -1))
        rewards = np.full(self._n_agent, float(reward))
        return self._observed(obs), rewards, terminated, truncated, info

    def _observed(self, obs: Any) -> dict[str, Any]:
        states = np.tile(obs, (self._n_agent, 1)).astype(np.float32)
        data = self.unwrapped.data  # type: ignore[attr-defined]
        agents = states if self._views is None else _padded([view(data) for view in self._views])
        if self._has_agent_ids:
            states = np.concatenate([states, np.eye(self._n_agent, dtype=np.float32)], axis=1)
        return {
            AGENTS: agents.astype(np.float32),
            AGENT_MASK: np.ones(self._n_agent, np.int8),
            STATE: states.reshape(-1),
        }


def _padded(rows: list[Floats]) -> Floats:
    """Return rows of numbers in an array, zeros after the shorter ones."""
    width = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


def spread_env(options: Mapping[str, Any], is_train: bool, **kwargs: Any) -> Env:
    """Make ``simple_spread`` of the particle worlds.

    Args:
        options: ``env_id``, ``n_agent``, ``n_landmark``, ``max_cycles``, ``continuous_actions``,
            ``act_scale``, ``agent_obs_only``, ``agent_specific_global_state``.
        is_train: no effect.
        kwargs: no effect; it draws nothing.

    Raises:
        ConfigError: if dizoo has no such env.
    """
    id, n_agent = str(options["env_id"]), int(options["n_agent"])
    if id != "simple_spread_v2":
        raise no_such_env("petting_zoo", id, ("simple_spread_v2",))
    if n_agent < 2:
        raise ConfigError(f"env.n_agent must be at least 2, got {n_agent}")
    if options["n_landmark"] != n_agent:
        raise ConfigError(
            f"env.n_landmark must be env.n_agent={n_agent}, got {options['n_landmark']}: "
            "simple_spread has a landmark for each agent"
        )
    is_continuous = bool(options["continuous_actions"])
    state: StateKind = "agents" if options["agent_specific_global_state"] else "team"
    team = SpreadTeam(
        n_agent,
        max_cycles=int(options["max_cycles"]),
        continuous=is_continuous,
        state="none" if options["agent_obs_only"] else state,
    )
    return ScaledActions(team) if is_continuous and options["act_scale"] else team


def mujoco_team_env(
    make: Callable[..., Env], options: Mapping[str, Any], is_train: bool, **kwargs: Any
) -> Env:
    """Make a robot of MuJoCo with several agents.

    Args:
        make: makes the robot's env, from its name, its version and keyword arguments.
        options: ``scenario``, such as ``"Ant-v2"``; ``agent_conf``, how its joints are divided;
            ``agent_obsk``, how far away the joints are that an agent sees; ``k_categories``, what
            it sees of them; ``add_agent_id``; ``episode_limit``.
        is_train: no effect.
        kwargs: arguments of the robot's env.

    Raises:
        ConfigError: if Gymnasium-Robotics is not installed, dizoo has no such env, or for what all
            agents would see.
    """
    scenario, division = str(options["scenario"]), str(options["agent_conf"])
    robot, _, version = scenario.partition("-v")
    if robot not in _JOINTS:
        raise no_such_env("mujoco_multi", scenario, (f"{name}-v2" for name in _JOINTS), "scenario")
    if division not in _JOINTS[robot]:
        raise no_such_env(scenario, division, _JOINTS[robot], "agent_conf")
    if options["global_categories"]:
        raise ConfigError(
            "env.global_categories shows the robot's torso to all agents, which is not here; leave "
            "it out"
        )
    agents = [names.split() for names in _JOINTS[robot][division].split(", ")]
    n_near = options["agent_obsk"]
    views = None if n_near is None else _views(robot, agents, int(n_near), options["k_categories"])
    env = make(robot, version, max_episode_steps=int(options["episode_limit"]), **kwargs)
    return MujocoTeam(env, views, n_agent=len(agents), has_agent_ids=bool(options["add_agent_id"]))


def _views(
    robot: str, agents: list[list[str]], n_near: int, categories: str | None
) -> list[Callable[[Any], Any]]:
    """Return functions that give what each agent sees of the data of MuJoCo."""
    obsk = optional_module(
        "gymnasium_robotics.envs.multiagent_mujoco.obsk", "robotics", f"{robot} of several agents"
    )
    (joints,), edges, _ = obsk.get_parts_and_edges(robot, None)
    by_name = {joint.label: joint for joint in joints}
    parts = (categories or _NEAR.get(robot, "qpos,qvel|qpos")).split("|")
    seen = [parts[min(distance, len(parts) - 1)].split(",") for distance in range(n_near + 1)]
    near = [
        obsk.get_joints_at_kdist(tuple(by_name[name] for name in names), edges, n_near)
        for names in agents
    ]
    return [functools.partial(_seen, obsk.build_obs, joints, seen) for joints in near]


def _seen(build: Callable[..., Any], joints: Any, categories: list[list[str]], data: Any) -> Any:
    return build(data, joints, categories, [], ())


def _unbounded(shape: tuple[int, ...]) -> gym.spaces.Box:
    return gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
