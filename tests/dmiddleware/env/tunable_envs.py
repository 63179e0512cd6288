"""Envs that a program changes while they run."""

import os
import signal
import threading

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode


class Tunable(gym.Env):
    """Episodes of ``limit`` steps; an observation is the level and the start that a reset gave.

    The start is the reset option ``start``, plus a random number if there is the option ``spread``.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, limit=3):
        self.limit, self.level, self.t, self.start = limit, 0.0, 0, 0.0
        self.calls = []
        self.seen = []
        self._guarded = 0

    @property
    def guarded(self):
        return self._guarded

    @guarded.setter
    def guarded(self, value):
        if value < 0:
            raise ValueError(f"{value} is too low")
        self._guarded = value

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        options = {} if options is None else options
        self.seen.append(options)
        self.t = 0
        self.start = options.get("start", -1.0)
        if "spread" in options:
            self.start += options["spread"] * self.np_random.random()
        return self._obs(), {}

    def step(self, action):
        if action == 1:
            self.fail()
        self.t += 1
        return self._obs(), float(self.level), self.t >= self.limit, False, {}

    def fail(self):
        raise RuntimeError("it is broken")

    def add(self, one, *, other=0):
        self.calls.append((one, other))
        return one + other + self.level

    def pid(self):
        return os.getpid()

    def kill_once(self, flag):
        """Kill this process, unless the file is there, which it makes."""
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.level

    def hang(self, flag):
        flag.touch()
        threading.Event().wait()

    def lock(self):
        return threading.Lock()

    def _obs(self):
        return np.array([self.level, self.start], np.float32)


class TakesOut(Tunable):
    """Takes the start out of its options."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=options)
        if options:
            options.clear()
        return result


class Layer(gym.Wrapper):
    """A wrapper with an attribute and a method of its own."""

    def __init__(self, env):
        super().__init__(env)
        self.scale = 1

    def scaled(self, value):
        return self.scale * value


def layered():
    return Layer(Tunable())


class Worlds(gym.vector.VectorEnv):
    """A simulator of two worlds with the same gravity, which it can call and set by itself."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self):
        self.num_envs, self.gravity, self.breaks = 2, 9.8, False
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, 2)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)

    def reset(self, *, seed=None, options=None):
        return self._obs(), {}

    def step(self, actions):
        if actions.any():
            raise RuntimeError("it is broken")
        ended = np.zeros(2, np.bool_)
        return self._obs(), np.zeros(2), ended, ended, {}

    def _obs(self):
        return np.full((2, 2), self.gravity, np.float32)
