"""Envs by DI-engine's interface as envs of Gymnasium, which the managers here step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from dmiddleware.ding.envs.base import DingEnvWrapper, _in_float32
from dmiddleware.ding.envs.team_adapter import Team
from dmiddleware.ding.gym.core import OldEnv

__all__ = ["AsGymnasium"]

_TRUNCATED: Final = "TimeLimit.truncated"


class AsGymnasium(gymnasium.Env[Any, Any]):
    """An env of DI-engine, of gym or of Gymnasium by the rules of Gymnasium.

    Its actions are in [-1, 1] if they are continuous: those of DI-engine's policies are, and its
    envs scale them to their bounds themselves. Its observation space is what the env returns, where
    that differs from what it declares. Each reset gets a seed of its own, drawn from the first one.
    Several agents, whose observations have the key ``agent_state``, observe and earn what those of
    :mod:`dmiddleware.env.team` do.

    Args:
        make_env: makes the env.
    """

    def __init__(self, make_env: Callable[[], Any]) -> None:
        env = make_env()
        if isinstance(env, gymnasium.Env):
            env = OldEnv(env)
        self.env = env
        self._seeds: np.random.Generator | None = None
        first = env.reset()
        self._team = Team.of(first, _declared(env, "action_space"))
        if self._team is None:
            self.observation_space = _fitting(
                _in_float32(_declared(env, "observation_space")), first
            )
            self.action_space = _in_unit_bounds(_declared(env, "action_space"))
        else:
            self.observation_space, actions = self._team.spaces()
            self.action_space = _in_unit_bounds(actions)
        self._wants_scalars = isinstance(env, DingEnvWrapper | OldEnv)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the env by its own rules."""
        if seed is not None:
            self._seeds = np.random.default_rng(seed)
        if self._seeds is not None:
            self._seed_env(int(self._seeds.integers(2**31)))
        return self._observation(self.env.reset()), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env; a time limit does not make a terminal state."""
        if not self._wants_scalars and isinstance(action, int | np.integer):
            action = np.asarray([action], np.int64)
        obs, reward, done, info = self.env.step(action)
        info = dict(info)
        done, truncated = bool(done), bool(info.pop(_TRUNCATED, False)) and bool(done)
        if "eval_episode_return" in info:
            info["eval_episode_return"] = np.asarray(info["eval_episode_return"]).item()
        terminated = done and not truncated
        return self._observation(obs), self._reward(reward), terminated, truncated, info

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def render(self) -> Any:
        """Return what the env renders."""
        return self.env.render()

    def _observation(self, obs: Any) -> Any:
        obs = obs if self._team is None else self._team.observation(obs)
        return _as_in(self.observation_space, obs)

    def _reward(self, reward: Any) -> Any:
        if self._team is None:
            return float(np.asarray(reward).sum())
        return self._team.rewards(reward)

    def _seed_env(self, seed: int) -> None:
        try:
            self.env.seed(seed, dynamic_seed=False)
        except TypeError:  # an env of gym, or a wrapper of its
            self.env.seed(seed)


def _declared(env: Any, name: str) -> Any:
    return getattr(env, name, None)


def _fitting(declared: Any, first: Any) -> Any:
    """Return the space of observations such as the first one; the declared one if it fits."""
    if isinstance(first, Mapping):
        parts = declared.spaces if isinstance(declared, spaces.Dict) else {}
        return spaces.Dict(
            {name: _fitting(parts.get(name), value) for name, value in first.items()}
        )
    array = _as_array(first)
    fits = isinstance(declared, spaces.Box) and declared.shape == array.shape
    if fits and np.can_cast(array.dtype, declared.dtype, "same_kind"):
        return declared
    if array.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, array.shape, np.float32)
    is_counted = isinstance(declared, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)
    if is_counted and declared.shape == array.shape:
        return declared
    limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    return spaces.Box(low, high, array.shape, array.dtype.type)


def _in_unit_bounds(space: Any) -> Any:
    if isinstance(space, spaces.Box):
        return spaces.Box(-1.0, 1.0, space.shape, np.float32)
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _in_unit_bounds(part) for name, part in space.items()})
    return space


def _as_array(value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _as_in(space: Any, obs: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _as_in(part, obs[name]) for name, part in space.items()}
    return np.asarray(obs, space.dtype)
