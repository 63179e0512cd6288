"""An env whose observations count episodes and steps; its processes do not import torch."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium as gym
import numpy as np


class CountingEnv(gym.Env):
    """Its observation is (index of the env, number of the episode, step in the episode).

    The reward of step t is t. Episodes have the given ``lengths``, over and over again; those with
    an even number terminate, the others are truncated. The env raises at each ``(episode, step)``
    in ``crashes``.
    """

    def __init__(self, index=0, lengths=(5,), crashes=()):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.index, self.lengths, self.crashes = index, lengths, set(crashes)
        self.episode, self.t = -1, 0

    def _obs(self):
        return np.array([self.index, self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        if (self.episode, self.t) in self.crashes:
            raise RuntimeError("a crash for the test")
        self.t += 1
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        ends = over and self.episode % 2 == 0
        return self._obs(), float(self.t), ends, over and not ends, {"action": int(action)}


class ExitsOnce(CountingEnv):
    """Its process exits in the third step, unless the file is there already."""

    def __init__(self, index, once):
        super().__init__(index, (9,))
        self.once = Path(once)

    def step(self, action):
        if self.t == 2 and not self.once.exists():
            self.once.touch()
            os._exit(1)
        return super().step(action)
