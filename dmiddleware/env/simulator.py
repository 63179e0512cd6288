"""Simulators that step many worlds on a device, and have interfaces of their own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from dmiddleware.errors import ConfigError, EnvProtocolError

__all__ = ["Groups", "SimulatorEnv", "chosen_groups", "chosen_spaces"]

Groups: TypeAlias = str | tuple[str, ...] | None
"""Which entries of observations that are dictionaries to return; one name gives its tensor."""

_TIME_OUTS: Final = ("time_outs", "TimeLimit.truncated")


class SimulatorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector env of Gymnasium around a simulator that resets its worlds itself.

    Two interfaces are known, both with tensors ``[E, …]`` of all worlds:

    - that of Isaac Lab, mjlab and ManiSkill's ``ManiSkillVectorEnv``: ``reset()`` returns
      observations and extras, and ``step(actions)`` observations, rewards, terminated, truncated
      and extras;
    - that of rsl_rl's ``VecEnv``, which Genesis and legged_gym have: ``get_observations()``, and
      ``step(actions)``, which returns observations, rewards, dones and extras with ``time_outs``.

    Observations are a tensor, or a dictionary of tensors by group. A world that ends is reset in
    the same step. Of these simulators, ManiSkill returns its last observation; for the others,
    ``final_obs`` is the observation before it, one step too early, as rsl_rl bootstraps where an
    episode was cut.

    Args:
        simulator: the simulator, or a function that makes it.
        observation_space: of one world; None: ``single_observation_space`` of the simulator.
        action_space: likewise.
        groups: names of the groups of observations to return; one name gives its tensor. None: what
            the simulator returns.

    Raises:
        ConfigError: if the number of worlds or a space is not known, and for an env of ManiSkill
            that does not reset its worlds.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        simulator: Any,
        *,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        groups: Groups = None,
        **options: Any,
    ) -> None:
        self.simulator = simulator(**options) if callable(simulator) else simulator
        _check_resets(self.simulator)
        self.groups = groups
        self.num_envs = int(_needed(self._base, "num_envs"))
        self.single_observation_space = observation_space or chosen_spaces(
            _as_space(_needed(self._base, "single_observation_space")), groups
        )
        self.single_action_space = action_space or _as_space(
            _needed(self._base, "single_action_space")
        )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._last: Any = None

    @property
    def _base(self) -> Any:
        return getattr(self.simulator, "unwrapped", self.simulator)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every world; a seed reaches simulators that take one."""
        first = seed[0] if isinstance(seed, list | tuple) else seed
        if "seed" in inspect.signature(self.simulator.reset).parameters:
            obs, _ = self.simulator.reset(seed=first)
        else:
            self.simulator.reset()
            result = self.simulator.get_observations()
            obs = result[0] if isinstance(result, tuple) else result
        self._last = self._chosen(obs)
        return self._last, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all worlds."""
        result = self.simulator.step(actions)
        if len(result) == 5:
            obs, reward, terminated, truncated, extras = result
        elif len(result) == 4:
            obs, reward, done, extras = result
            done = done.bool()
            truncated = _time_outs(extras, done)
            terminated = done & ~truncated
        else:
            raise EnvProtocolError(
                f"the simulator's step returned {len(result)} values; SimulatorEnv knows those "
                "that return 5 (Isaac Lab, ManiSkill) or 4 (rsl_rl's VecEnv)"
            )
        before, self._last = self._last, self._chosen(obs)
        terminated, truncated = terminated.bool(), truncated.bool()
        final_obs = extras.get("final_observation")
        info = _columns(extras.get("final_info", extras), self.num_envs)
        info["final_obs"] = before if final_obs is None else self._chosen(final_obs)
        return self._last, reward, terminated, truncated & ~terminated, info

    def _chosen(self, obs: Any) -> Any:
        """Return a copy of the groups of observations, because simulators write to theirs."""
        return _copy(chosen_groups(obs, self.groups))

    def close_extras(self, **kwargs: Any) -> None:
        """Close the simulator, if it can be closed."""
        close = getattr(self.simulator, "close", None)
        if close is not None:
            close()


def chosen_spaces(space: spaces.Space[Any], groups: Groups) -> spaces.Space[Any]:
    """Return the space of what :func:`chosen_groups` returns."""
    if not isinstance(space, spaces.Dict) or groups is None:
        return space
    if isinstance(groups, str):
        return space[groups]
    return spaces.Dict({name: space[name] for name in groups})


def chosen_groups(obs: Any, groups: Groups) -> Any:
    """Return some groups of observations; those without names are returned as they are."""
    if not hasattr(obs, "keys") or groups is None:
        return obs
    if isinstance(groups, str):
        return obs[groups]
    return {name: obs[name] for name in groups}


def _copy(obs: Any) -> Any:
    """Return copies of tensors in nested dicts, also where another mapping had them."""
    if hasattr(obs, "keys"):
        return {str(name): _copy(obs[name]) for name in obs.keys()}  # noqa: SIM118
    return obs.clone()


def _as_space(space: Any) -> spaces.Space[Any]:
    """Return a space of Gymnasium for one of a simulator's, which has the same attributes."""
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _as_space(item) for name, item in space.spaces.items()})
    dtype = np.dtype(space.dtype).type
    return spaces.Box(space.low, space.high, tuple(space.shape), dtype)


def _check_resets(simulator: Any) -> None:
    """Refuse what ``gym.make`` returns for ManiSkill: it steps on after the end of an episode."""
    kinds = type(getattr(simulator, "unwrapped", simulator)).__mro__
    is_of_maniskill = any(kind.__module__.startswith("mani_skill.") for kind in kinds)
    if is_of_maniskill and not isinstance(simulator, gym.vector.VectorEnv):
        raise ConfigError(
            "envs of ManiSkill do not reset their worlds; wrap it: "
            "mani_skill.vector.wrappers.gymnasium.ManiSkillVectorEnv(env)"
        )


def _needed(simulator: Any, name: str) -> Any:
    value = getattr(simulator, name, None)
    if value is None:
        raise ConfigError(
            f"{type(simulator).__name__} has no {name}; pass observation_space= and action_space= "
            "of one world to SimulatorEnv, and a simulator with num_envs"
        )
    return value


def _time_outs(extras: Mapping[str, Any], done: Any) -> Any:
    for name in _TIME_OUTS:
        if name in extras:
            return extras[name].bool() & done
    return done & False


def _columns(extras: Mapping[str, Any], n_worlds: int) -> dict[str, Any]:
    """Return the tensors ``[E, …]`` of extras, which also have logs of other shapes."""
    return {
        name: value
        for name, value in extras.items()
        if getattr(value, "ndim", 0) > 0 and len(value) == n_worlds and name not in _TIME_OUTS
    }
