"""An env whose only reward is at the end of a corridor that random actions do not reach."""

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Corridor(VectorEnv[Any, Any, Any]):
    """In each place one of two actions leads on, and the other back to the start.

    Random actions reach the end about once in ``2**length`` tries. An episode lasts at most
    ``2 * length`` steps.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs: int, length: int) -> None:
        self.num_envs, self.length = num_envs, length
        self.single_observation_space = spaces.Box(0.0, 1.0, (length + 1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.right_action = np.random.default_rng(0).integers(0, 2, length + 1)
        self.place = np.zeros(num_envs, np.int64)
        self.n_steps = np.zeros(num_envs, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        chosen = np.ones(self.num_envs, np.bool_) if not options else options["reset_mask"]
        self.place[chosen] = self.n_steps[chosen] = 0
        return self._observation(), {}

    def step(self, actions: npt.NDArray[np.int64]) -> tuple[Any, ...]:
        self.place = np.where(actions == self.right_action[self.place], self.place + 1, 0)
        self.n_steps += 1
        at_end = self.place == self.length
        truncated = ~at_end & (self.n_steps >= 2 * self.length)
        return self._observation(), at_end.astype(np.float32), at_end, truncated, {}

    def _observation(self) -> npt.NDArray[np.float32]:
        return np.eye(self.length + 1, dtype=np.float32)[self.place]
