"""An env with several agents, whose observations and rewards count."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from dmiddleware.env import AgentSpaces, team_spaces


class CountingTeam(gym.Env[dict[str, Any], Any]):
    """Agent ``i`` sees ``(i, t)`` and gets ``(i + 1) * t`` for step ``t``; the state is ``t``.

    Args:
        n_agent: number of agents.
        length: steps of an episode, after which it is truncated.
        leaves: the step after which an agent leaves, by agent.
        masked: whether an action is allowed only if it is the agent's number modulo 3.
        crashes: the episode and the step at which the env raises.
    """

    def __init__(
        self,
        n_agent: int = 3,
        length: int = 5,
        leaves: dict[int, int] | None = None,
        masked: bool = False,
        crashes: tuple[int, int] | None = None,
    ) -> None:
        spaces = AgentSpaces(
            n_agent,
            observation=gym.spaces.Box(0, 100, (2,)),
            action=gym.spaces.Discrete(3),
            state=gym.spaces.Box(0, 100, (1,)),
        )
        self.observation_space, self.action_space = team_spaces(spaces, has_action_masks=masked)
        self.n_agent, self.length, self.masked, self.crashes = n_agent, length, masked, crashes
        self.leaves = leaves or {}
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        if (self.episode, self.t) == self.crashes:
            raise RuntimeError("a crash for the test")
        before = self._present()
        self.t += 1
        reward = before * np.arange(1.0, self.n_agent + 1) * self.t
        return self._obs(), reward, False, self.t == self.length, {"sum": int(np.sum(action))}

    def _present(self) -> Any:
        agents = range(self.n_agent)
        return np.array([self.t < self.leaves.get(agent, self.t + 1) for agent in agents], np.int8)

    def _obs(self) -> dict[str, Any]:
        agents = np.arange(self.n_agent)
        obs = {
            "agents": np.stack([agents, np.full(self.n_agent, self.t)], -1).astype(np.float32),
            "agent_mask": self._present(),
            "state": np.array([self.t], np.float32),
        }
        if self.masked:
            obs["action_mask"] = np.eye(3, dtype=np.int8)[agents % 3]
        return obs
