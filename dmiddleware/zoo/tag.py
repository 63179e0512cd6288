"""A game of two teams with different spaces: two catchers chase a runner."""

from __future__ import annotations

from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

__all__ = ["Tag"]

_MOVES: Final = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.float32)
_CATCHERS: Final = ("red_0", "red_1")
_RUNNER: Final = "blue_0"
_SPEED: Final = 0.1
_FASTER: Final = 1.2
_REACH: Final = 0.15
_MAX_STEPS: Final = 50

Arrays = dict[str, npt.NDArray[np.float32]]
Flags = dict[str, bool]


class Tag:
    """Two red catchers chase a blue runner on a square; it needs no PettingZoo.

    The catchers choose one of five moves (stay, or a step along an axis); the runner chooses a
    velocity, ``[2]`` from -1 to 1, and is a fifth faster. Both teams observe positions, ``[6]``
    from -1 to 1, their own first. The game ends when a catcher is closer than 0.15 to the runner,
    which is 10 for the catchers and -10 for the runner, or is truncated after 50 steps. In each
    step, a catcher loses its distance to the runner, and the runner earns that of the nearer one.
    """

    possible_agents = [*_CATCHERS, _RUNNER]

    def __init__(self) -> None:
        space = gym.spaces.Box(-1.0, 1.0, (6,))
        self.observation_space = dict.fromkeys(self.possible_agents, space)
        self.action_space: dict[str, gym.Space[Any]] = {
            **dict.fromkeys(_CATCHERS, gym.spaces.Discrete(len(_MOVES))),
            _RUNNER: gym.spaces.Box(-1.0, 1.0, (2,)),
        }
        self.agents: list[str] = []
        self._rng = np.random.default_rng()
        self._at: Arrays = {}
        self._n_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Arrays, dict[str, Any]]:
        """Start a game with random positions."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents, self._n_steps = [*self.possible_agents], 0
        self._at = {a: self._rng.uniform(-1, 1, 2).astype(np.float32) for a in self.agents}
        return self._observed(), {}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[Arrays, dict[str, float], Flags, Flags, dict[str, Any]]:
        """Move all."""
        self._n_steps += 1
        for agent, action in actions.items():
            is_runner = agent == _RUNNER
            move = _FASTER * np.clip(action, -1, 1) if is_runner else _MOVES[action]
            self._at[agent] = np.clip(self._at[agent] + _SPEED * move, -1, 1).astype(np.float32)
        runner = self._at[_RUNNER]
        distance = {a: float(np.linalg.norm(self._at[a] - runner)) for a in _CATCHERS}
        nearest = min(distance.values())
        caught, is_over = nearest < _REACH, self._n_steps == _MAX_STEPS
        prize = 10.0 if caught else 0.0
        rewards = {a: prize - distance[a] for a in _CATCHERS} | {_RUNNER: nearest - prize}
        terminated = dict.fromkeys(self.possible_agents, caught)
        truncated = dict.fromkeys(self.possible_agents, is_over and not caught)
        obs = self._observed()
        if caught or is_over:
            self.agents = []
        return obs, rewards, terminated, truncated, {}

    def _observed(self) -> Arrays:
        positions = [self._at[agent] for agent in self.possible_agents]
        # Each catcher sees itself first, and the runner last; the runner is the first of its own.
        return {
            agent: np.concatenate(
                [positions[number], *positions[:number], *positions[number + 1 :]]
            )
            for number, agent in enumerate(self.possible_agents)
        }
