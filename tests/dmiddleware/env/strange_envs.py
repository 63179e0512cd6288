"""Envs of all kinds: well-behaved, nested, and broken in various ways."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env):
    """A random walk; the action is its drift.

    Ends by itself where the drift adds up to ``goal``, and is cut after ``limit`` steps.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, goal=4, limit=9, reward=0.25, info=False, render_mode=None):
        self.goal, self.limit, self.reward, self.with_info = goal, limit, reward, info
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.total = 0, 0
        return self._obs(), {"begun": True} if self.with_info else {}

    def step(self, action):
        self.t += 1
        self.total += int(action)
        info = {"t": self.t, "where": np.array([self.t, self.total])} if self.with_info else {}
        terminated = self.total >= self.goal
        return self._obs(), self.reward * self.t, terminated, self.t >= self.limit, info

    def render(self):
        return np.full((4, 6, 3), self.t, np.uint8)

    def _obs(self):
        return np.array([self.t, self.total, self.np_random.random()], np.float32)


class Nested(gym.Env):
    """Nested observations and actions, images among them."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (2, 4, 4), np.uint8),
            pair=spaces.Tuple((spaces.MultiBinary(3), spaces.MultiDiscrete([3, 4]))),
            mode=spaces.Discrete(5),
            where=spaces.Dict(x=spaces.Box(-1, 1, (2,), np.float64)),
        )
        self.action_space = spaces.Dict(
            move=spaces.Discrete(3),
            push=spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2))),
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        reward = float(action["move"]) + float(action["push"][0].sum())
        return self.observation_space.sample(), reward, False, self.t >= 4, {}


class Fragile(Walk):
    """A walk that fails.

    Args:
        how: "raise", "exit", "kill", "abort", "hang", "tell and hang", "interrupt".
        where: "make", "reset", "step".
        at: the step (of the episode) or the reset (of the env) in which it fails.
        once: a file that is made at the first failure; while it is there, nothing fails.
    """

    def __init__(self, how="raise", where="step", at=3, once=None, **kwargs):
        super().__init__(**kwargs)
        self.how, self.where, self.at, self.once = how, where, at, once
        self.n_resets = 0
        if where == "make":
            self.fail()

    def reset(self, *, seed=None, options=None):
        self.n_resets += 1
        if self.where == "reset" and self.n_resets >= self.at:
            self.fail()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.where == "step" and self.t + 1 == self.at:
            self.fail()
        return super().step(action)

    def fail(self):
        if self.once is not None:
            if Path(self.once).exists():
                return
            Path(self.once).touch()
        if self.how == "raise":
            raise RuntimeError("the motor burned out")
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "abort":
            os.abort()
        if self.how == "tell and hang":
            print("hanging", flush=True)
        if self.how == "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
        self.wait_forever()

    def wait_forever(self):
        threading.Event().wait()


class Parent(Walk):
    """Starts a process, as game server envs do, and never stops it."""

    def __init__(self, pid_file):
        super().__init__()
        code = "import threading; threading.Event().wait()"
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.DEVNULL)
        Path(pid_file).write_text(str(child.pid))


class SlowToReset(Walk):
    """Takes 2.5 s in every reset but the first."""

    def reset(self, *, seed=None, options=None):
        if hasattr(self, "t"):
            threading.Event().wait(2.5)
        return super().reset(seed=seed, options=options)


class FailsToClose(Walk):
    def close(self):
        raise OSError("the door is jammed")


class HangsInClose(Walk):
    def close(self):
        threading.Event().wait()


class OldApi(Walk):
    def step(self, action):
        return super().step(action)[:4]


class OldReset(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class WrongShape(Walk):
    def _obs(self):
        return np.zeros(2 if getattr(self, "t", 0) else 3, np.float32)


class NoReward(Walk):
    reward_value = None

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, self.reward_value, *rest


class NoSpaces(gym.Env):
    pass


class Graphic(Walk):
    observation_space = spaces.Graph(spaces.Box(0, 1, (2,)), None)


class WithSimulator(Walk):
    """Holds an object that cannot be saved."""

    def __init__(self):
        super().__init__()
        self.simulator = threading.Lock()


class FragileSimulator(Fragile):
    """Fails, and cannot be saved."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.simulator = threading.Lock()


class SavesItself(WithSimulator):
    def state_dict(self):
        return {"t": self.t, "total": self.total, "rng": self.np_random.bit_generator.state}

    def load_state_dict(self, state):
        self.t, self.total = state["t"], state["total"]
        self.np_random.bit_generator.state = state["rng"]


def python_process(code, *args):
    """Start a Python program that sees these envs."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); {code}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, bufsize=1
    )
