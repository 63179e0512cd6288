"""Environments of any spaces, for other processes too: this module imports no torch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Drawn(gym.Env[Any, Any]):
    """Gives random observations of a space, and refuses actions that are not in its own."""

    def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._step = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space, f"{action!r} is not in {self.action_space}"
        self._step += 1
        return self.observation_space.sample(), 1.0, False, self._step == 6, {}


class Taking(gym.Env):
    """Takes the actions of a space, and raises where it is given anything else."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action not in self.action_space:
            raise AssertionError(f"{action!r} is not in {self.action_space}")
        self.t += 1
        return self.np_random.random(4, np.float32), 1.0, self.t == 5, False, {}
