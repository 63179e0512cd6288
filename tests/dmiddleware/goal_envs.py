"""A goal-conditioned env with continuous actions."""

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

Floats = npt.NDArray[np.float32]


def near(achieved: Floats, desired: Floats, info: Any) -> Floats:
    """Return 0 where both are near each other, else -1."""
    distance = np.linalg.norm(achieved - desired, axis=-1)
    return -(distance > 0.15).astype(np.float32)


class PointGoal(gym.Env[dict[str, Floats], Floats]):
    """A point in a square must be moved to a goal, and kept there until the time is over."""

    def __init__(self, n_steps: int = 20) -> None:
        box = spaces.Box(-1.0, 1.0, (2,), np.float32)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict({name: box for name in names})
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.n_steps, self.t = n_steps, 0
        self.at = self.goal = np.zeros(2, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32).copy()
        self.t = 0
        return self._observation(), {}

    def step(self, action: Floats) -> tuple[dict[str, Floats], float, bool, bool, dict[str, Any]]:
        self.at = np.clip(self.at + 0.2 * action, -1, 1).astype(np.float32)
        self.t += 1
        reward = float(near(self.at, self.goal, {}))
        info = {"is_success": reward == 0.0}
        return self._observation(), reward, False, self.t == self.n_steps, info

    def _observation(self) -> dict[str, Floats]:
        return {"observation": self.at, "achieved_goal": self.at, "desired_goal": self.goal}
