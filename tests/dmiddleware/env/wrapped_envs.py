"""An env and wrappers whose effects are seen in observations and returns."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Corridor(gym.Env[Any, Any]):
    """Action 1 walks to the right, action 0 to the left; the right end pays 1."""

    def __init__(self, length: int = 3, goal: Any = None, extra: Any = None) -> None:
        self.observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.length, self.goal, self.extra = length, goal, extra
        self.at = self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.at = max(0, self.at + (1 if action == 1 else -1))
        self.t += 1
        arrived = self.at >= self.length
        return self._obs(), float(arrived), arrived, self.t >= 9, {}

    def _obs(self) -> Any:
        return np.array([self.at, self.length], np.float32)


class Mirror(gym.ActionWrapper[Any, Any, Any]):
    """Walk to the other side."""

    def action(self, action: Any) -> Any:
        return 1 - action


class Pay(gym.RewardWrapper[Any, Any]):
    """Multiply rewards, and add to them."""

    def __init__(self, env: Any, factor: float = 2.0, *, more: Any = 0) -> None:
        super().__init__(env)
        self.factor, self.added = factor, more

    def reward(self, reward: Any) -> float:
        return float(reward) * self.factor


def make_mirrored(**kwargs: Any) -> Any:
    """Make an env that is wrapped already."""
    return Mirror(Corridor(**kwargs))


class Maker:
    """Makes envs when it is called."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, **kwargs: Any) -> Corridor:
        return Corridor(self.length, **kwargs)


class Secretive(Maker):
    """Raises when anybody wants to know what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)
