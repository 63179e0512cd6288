"""The bit-flipping environment of hindsight experience replay.

Importing this module registers BitFlipping-v0; its id ``examples.bit_flipping:BitFlipping-v0``
imports it. ``mode="vector"`` steps all envs at once.
"""

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

BITS = npt.NDArray[np.int8]


def reached(achieved_goal: BITS, desired_goal: BITS, info: Any) -> npt.NDArray[np.bool_]:
    """Return ``[…]`` whether the bits ``[…, n_bits]`` equal the goal."""
    return (achieved_goal == desired_goal).all(-1)


def compute_reward(achieved_goal: BITS, desired_goal: BITS, info: Any) -> npt.NDArray[np.float32]:
    """Return 0 where the goal is reached, else -1."""
    return reached(achieved_goal, desired_goal, info).astype(np.float32) - 1


class BitFlippingVectorEnv(VectorEnv):
    """An action flips one of ``n_bits`` bits; the goal is a random pattern of them.

    Each step costs 1 until the bits equal the goal, which ends the episode; so do ``n_bits`` steps
    (Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017, section 3.1).
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs: int = 1, n_bits: int = 30) -> None:
        self.num_envs, self.n_bits = num_envs, n_bits
        bits = {
            name: spaces.MultiBinary(n_bits)
            for name in ("observation", "achieved_goal", "desired_goal")
        }
        self.single_observation_space = spaces.Dict(bits)
        self.single_action_space = spaces.Discrete(n_bits)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.bits = np.zeros((num_envs, n_bits), np.int8)
        self.goal = self.bits.copy()
        self.n_steps = np.zeros(num_envs, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, BITS], dict[str, Any]]:
        """Draw bits and goals; ``options["reset_mask"]`` chooses the envs."""
        super().reset(seed=seed)
        chosen = np.ones(self.num_envs, np.bool_) if not options else options["reset_mask"]
        drawn = self.np_random.integers(0, 2, (2, chosen.sum(), self.n_bits), np.int8)
        self.bits[chosen], self.goal[chosen] = drawn
        self.n_steps[chosen] = 0
        return self._observation(), {}

    def step(self, actions: npt.NDArray[np.int64]) -> tuple[Any, ...]:
        """Flip one bit of each env."""
        self.bits[np.arange(self.num_envs), actions] ^= 1
        self.n_steps += 1
        is_success = reached(self.bits, self.goal, {})
        truncated = ~is_success & (self.n_steps >= self.n_bits)
        reward = compute_reward(self.bits, self.goal, {})
        return self._observation(), reward, is_success, truncated, {"is_success": is_success}

    def _observation(self) -> dict[str, BITS]:
        return {
            "observation": self.bits.copy(),
            "achieved_goal": self.bits.copy(),
            "desired_goal": self.goal.copy(),
        }


class BitFlippingEnv(gym.Env):
    """One env of :class:`BitFlippingVectorEnv`, as pictures: the bits above the goal."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, n_bits: int = 30, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.one = BitFlippingVectorEnv(1, n_bits)
        self.observation_space = self.one.single_observation_space
        self.action_space = self.one.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, BITS], dict[str, Any]]:
        """Draw the bits and the goal."""
        super().reset(seed=seed)
        obs, info = self.one.reset(seed=seed)
        return {name: bits[0] for name, bits in obs.items()}, info

    def step(self, action: int) -> tuple[Any, ...]:
        """Flip one bit."""
        obs, *numbers, info = self.one.step(np.array([action]))
        first = {name: bits[0] for name, bits in obs.items()}
        reward, terminated, truncated = (number[0].item() for number in numbers)
        return first, reward, terminated, truncated, {"is_success": info["is_success"][0].item()}

    def render(self) -> npt.NDArray[np.uint8]:
        """Return a picture ``[32, 16 * n_bits, 3]``."""
        rows = np.concatenate([self.one.bits, self.one.goal]).astype(np.uint8) * 255
        return np.kron(rows, np.ones((16, 16), np.uint8))[..., None].repeat(3, -1)


gym.register(
    "BitFlipping-v0",
    entry_point=BitFlippingEnv,
    vector_entry_point=BitFlippingVectorEnv,
)
