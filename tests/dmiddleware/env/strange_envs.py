"""Envs of all kinds: well-behaved, nested, and broken in various ways."""

import copy
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LIMIT = 4
"""The steps of an episode of some of the envs."""

BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)


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


class Odd(Walk):
    """A walk whose results are changed from the third step, or the second reset, on."""

    limit = 5

    def __init__(self, space=None, step=None, reset=None):
        super().__init__(goal=100, limit=self.limit)
        self.changed_step, self.changed_reset, self.n_resets = step, reset, 0
        if space is not None:
            self.observation_space = space

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        self.n_resets += 1
        changed = self.changed_reset is not None and self.n_resets >= 2
        return self.changed_reset(obs, info) if changed else (obs, info)

    def step(self, action):
        result = super().step(action)
        return result if self.changed_step is None or self.t < 3 else self.changed_step(*result)

    def _obs(self):
        space = self.observation_space
        return super()._obs() if space is Walk.observation_space else space.sample()


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


class Crowd(Walk):
    """Is joined by somebody in every step: by an object in a list."""

    class Someone:
        pass

    def reset(self, **kwargs):
        self.crowd = []
        return super().reset(**kwargs)

    def step(self, action):
        self.crowd.append(self.Someone())
        return super().step(action)


class Flagged(Walk):
    """Returns a given value as ``terminated`` or ``truncated`` in step ``at``."""

    def __init__(self, name, value, at=3):
        super().__init__()
        self.name, self.value, self.at = name, value, at

    def step(self, action):
        obs, reward, *_, info = super().step(action)
        flags = {"terminated": False, "truncated": False}
        if self.t == self.at:
            flags[self.name] = self.value
        return obs, reward, flags["terminated"], flags["truncated"], info


class Bad(gym.Env):
    """Returns other values from one step, or one reset, of its life on.

    Args:
        space: of the observations.
        obs: changes an observation; None: as it is.
        reward: the reward from then on.
        at: the step of an episode; 0 is the second reset.
        info: what the infos have from then on.
    """

    def __init__(self, space=BOX, obs=None, reward=1.0, at=3, info=None, n_action=3):
        self.observation_space = space
        self.action_space = spaces.Discrete(n_action) if n_action else spaces.Box(-1, 1, (2,))
        self.change, self.bad_reward, self.bad_at, self.bad_info = obs, reward, at, info
        self.n_resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.n_resets = 0, self.n_resets + 1
        return self.out(self.n_resets > 1 and self.bad_at == 0), {}

    def step(self, action):
        self.at += 1
        is_bad = self.at == self.bad_at
        reward = self.bad_reward if is_bad else 1.0
        info = self.bad_info or {} if is_bad else {}
        return self.out(is_bad), reward, False, self.at == LIMIT, info

    def out(self, is_bad):
        obs = self.observation_space.sample()
        return self.change(obs) if is_bad and self.change is not None else obs


class Refilling(gym.Env):
    """Returns the same arrays, dictionaries and lists every time, if it shares them.

    It also writes to the actions that it is given.
    """

    def __init__(self, *, shares=True, nested=True, continuous=False):
        self.shares, self.nested = shares, nested
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        pair = spaces.Tuple((spaces.MultiBinary(2), box))
        self.observation_space = spaces.Dict(own=box, pair=pair) if nested else box
        self.action_space = (
            spaces.Box(-1, 1, (2,), np.float32) if continuous else spaces.Discrete(3)
        )
        self.own, self.bits = np.zeros(2, np.float32), np.zeros(2, np.int8)
        self.obs = {"own": self.own, "pair": (self.bits, self.own)} if nested else self.own
        self.reward, self.flag = np.zeros(()), np.zeros((), np.bool_)
        self.mask, self.trace = np.ones(3, np.int8), []
        self.info = {"action_mask": self.mask, "final_observation": self.own, "trace": self.trace}
        self.info["deep"] = {"where": self.own, "list": [self.own]}
        if continuous:
            del self.info["action_mask"]
        self.n_filled = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        self.fill()
        return self.out(self.obs), self.out(self.info)

    def step(self, action):
        self.at += 1
        self.fill()
        if isinstance(action, np.ndarray):
            action *= 0
        self.flag[...] = False
        result = (self.obs, self.reward, self.flag, self.at == LIMIT, self.info)
        return tuple(map(self.out, result))

    def fill(self):
        self.n_filled += 1
        self.own[:] = self.n_filled
        self.bits[:] = self.n_filled % 2
        self.reward[...] = self.n_filled
        self.mask[:] = self.n_filled % 2, 1, (self.n_filled + 1) % 2
        self.trace.append(self.n_filled)
        self.info["n"] = self.n_filled
        self.info.pop("late", None)
        if self.at:
            self.info["late"] = np.array(self.n_filled)

    def out(self, value):
        return value if self.shares else copy.deepcopy(value)


def python_process(code, *args):
    """Start a Python program that sees these envs."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); {code}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True, bufsize=1
    )
