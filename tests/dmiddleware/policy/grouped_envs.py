"""Envs whose observations have parts that only a critic is to see."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from dmiddleware.env import AgentSpaces, team_spaces
from tests.dmiddleware.policy.every_policy import Toy

BOX = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
GROUPS: dict[str, Any] = {"actor": ["proprio"], "critic": ["proprio", "mass"]}
"""Groups that leave the part ``clock`` to nobody."""


def part(n: int) -> gym.spaces.Box:
    return gym.spaces.Box(-5.0, 5.0, (n,), np.float32)


class Parts(Toy):
    """Random observations with the parts ``clock``, ``mass`` and ``proprio``, for six steps.

    Args:
        action_space: of the env.
        names: the parts that observations have.
        masked: whether observations have an action mask, which allows all but the first action.
    """

    def __init__(
        self,
        action_space: gym.Space[Any] = BOX,
        names: tuple[str, ...] = ("clock", "mass", "proprio"),
        masked: bool = False,
    ) -> None:
        spaces: dict[str, gym.Space[Any]] = {"clock": part(1), "mass": part(2), "proprio": part(3)}
        chosen = {name: spaces[name] for name in names}
        if masked:
            chosen["action_mask"] = gym.spaces.MultiBinary(3)
        self.observation_space = gym.spaces.Dict(chosen)
        self.action_space = action_space

    def step(self, action: Any) -> Any:
        self._step += 1
        obs = self._obs()
        return obs, float(obs["proprio"][0]), self._step == 6, False, {}

    def _obs(self) -> dict[str, Any]:
        drawn = {
            name: self.np_random.normal(size=space.shape).astype(np.float32)
            for name, space in self.observation_space.spaces.items()
        }
        if "action_mask" in drawn:
            drawn["action_mask"] = np.array([0, 1, 1], np.int8)
        return drawn


class PartsTeam(Toy):
    """Two agents whose observations have the parts ``mass`` and ``proprio``, and a state."""

    def __init__(self, has_state: bool = True) -> None:
        spaces = AgentSpaces(
            2,
            observation=gym.spaces.Dict({"mass": part(2), "proprio": part(3)}),
            action=gym.spaces.Discrete(3),
            state=part(4) if has_state else None,
        )
        self.observation_space, self.action_space = team_spaces(spaces)

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._obs(), np.ones(2), self._step == 6, False, {}

    def _obs(self) -> dict[str, Any]:
        self.observation_space.seed(int(self.np_random.integers(1000)))
        return {**self.observation_space.sample(), "agent_mask": np.ones(2, np.int8)}
