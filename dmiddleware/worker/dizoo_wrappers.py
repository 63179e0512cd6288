"""What the envs of dizoo are made with: wrappers, and packages that may not be installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np

from dmiddleware.errors import ConfigError

__all__ = [
    "DelayedReward",
    "DiscreteActions",
    "Env",
    "FireReset",
    "ScaledActions",
    "StackedPlanes",
    "as_float32",
    "encoded",
    "made",
    "no_such_env",
    "optional_module",
    "planes_first",
]

Env: TypeAlias = gym.Env[Any, Any]


def made(id: str, extra: str = "", package: str = "", **kwargs: Any) -> Env:
    """Make an env of Gymnasium, without its warning that there are newer versions.

    Raises:
        ConfigError: if its package is not installed, or has no such env.
    """
    if package:
        optional_module(package, extra, id)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gym.make(id, **kwargs)
    except gym.error.Error as error:
        raise ConfigError(f"Gymnasium cannot make {id}: {error}") from error


def optional_module(name: str, extra: str, id: str) -> Any:
    """Import a module of an optional package, without warnings.

    Args:
        name: the module.
        extra: the extra that has its package.
        id: the env that needs it.

    Raises:
        ConfigError: if the package is not installed.
    """
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{id} needs the package {package}; run: pip install 'dmiddleware[{extra}]'"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def no_such_env(kind: str, id: str, known: Iterable[str], key: str = "env_id") -> ConfigError:
    """Return the error for an env that a kind of envs does not have."""
    return ConfigError(f"env.{key}={id!r}: {kind} has no such env; it has {', '.join(known)}")


class ScaledActions(gym.ActionWrapper[Any, Any, Any]):
    """Takes actions in [-1, 1], clips them, and maps them to the bounds of the env."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        space = env.action_space
        assert isinstance(space, gym.spaces.Box)
        self._middle = (space.high + space.low) / 2
        self._half = (space.high - space.low) / 2
        self.action_space = gym.spaces.Box(-1.0, 1.0, space.shape, np.float32)

    def action(self, action: Any) -> Any:
        """Return the action of the env."""
        return (self._middle + self._half * np.clip(action, -1.0, 1.0)).astype(np.float32)


class DiscreteActions(gym.ActionWrapper[Any, Any, Any]):
    """Takes the number of one of ``n`` equally spaced actions of an env with one number each."""

    def __init__(self, env: Env, n: int) -> None:
        super().__init__(env)
        space = env.action_space
        assert isinstance(space, gym.spaces.Box)
        self._values = np.linspace(space.low, space.high, n, dtype=np.float32)
        self.action_space = gym.spaces.Discrete(n)

    def action(self, action: Any) -> Any:
        """Return the action of the env."""
        return self._values[int(action)]


class DelayedReward(gym.Wrapper[Any, Any, Any, Any]):
    """Gives the rewards of ``n_steps`` steps as one reward at the last of them."""

    def __init__(self, env: Env, n_steps: int) -> None:
        super().__init__(env)
        self._n_steps, self._elapsed, self._total = n_steps, 0, 0.0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._elapsed, self._total = 0, 0.0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take an action."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._elapsed += 1
        self._total += float(reward)
        is_due = self._elapsed % self._n_steps == 0 or terminated or truncated
        given = self._total if is_due else 0.0
        if is_due:
            self._total = 0.0
        return obs, given, terminated, truncated, info


class FireReset(gym.Wrapper[Any, Any, Any, Any]):
    """Begins each episode with the action FIRE, without which some games do not start."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode, and press FIRE."""
        obs, info = self.env.reset(**kwargs)
        obs, _, terminated, truncated, info = self.env.step(1)
        if terminated or truncated:
            obs, info = self.env.reset()
        return obs, info


class StackedPlanes(gym.Wrapper[Any, Any, Any, Any]):
    """Stacks the planes of the last observations, ``[n · C, H, W]``, the newest last."""

    def __init__(self, env: Env, n: int) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        self._n_planes, self._n = space.shape[0], n
        self.observation_space = gym.spaces.Box(
            np.tile(space.low, (n, 1, 1)), np.tile(space.high, (n, 1, 1)), dtype=space.dtype.type
        )
        self._stack: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode; its first observation is repeated."""
        obs, info = self.env.reset(**kwargs)
        self._stack = np.tile(obs, (self._n, 1, 1))
        return self._stack, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take an action."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._stack = np.concatenate([self._stack[self._n_planes :], obs])
        return self._stack, reward, terminated, truncated, info


def as_float32(env: Env) -> Env:
    """Return an env whose observations, a Box, are float32."""
    space = env.observation_space
    assert isinstance(space, gym.spaces.Box)
    if space.dtype == np.float32:
        return env
    box = gym.spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32))
    return gym.wrappers.TransformObservation(env, lambda obs: obs.astype(np.float32), box)


def encoded(env: Env, n: int, encode: Callable[[Any], tuple[int, ...]]) -> Env:
    """Return an env whose observations are ``n`` numbers: 1 where ``encode`` says, else 0."""

    def observe(obs: Any) -> Any:
        vector = np.zeros(n, np.float32)
        vector[list(encode(obs))] = 1
        return vector

    return gym.wrappers.TransformObservation(env, observe, gym.spaces.Box(0, 1, (n,), np.float32))


def planes_first(env: Env) -> Env:
    """Return an env whose images are ``[C, H, W]``."""
    space = env.observation_space
    assert isinstance(space, gym.spaces.Box)
    box = gym.spaces.Box(
        space.low.transpose(2, 0, 1), space.high.transpose(2, 0, 1), dtype=space.dtype.type
    )
    return gym.wrappers.TransformObservation(env, lambda obs: obs.transpose(2, 0, 1).copy(), box)
