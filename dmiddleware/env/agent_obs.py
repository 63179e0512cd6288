"""What the agents of an env observe, apart from their action masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.env.team import ACTION_MASK

__all__ = [
    "bare",
    "flat",
    "flat_space",
    "has_mask",
    "infos_by_name",
    "mask_in",
    "without_mask",
    "zeros",
]


def mask_in(*sources: Any) -> npt.NDArray[Any] | None:
    """Return the action mask in the first dictionary that has one; None: there is none."""
    for source in sources:
        if isinstance(source, Mapping) and ACTION_MASK in source:
            return np.asarray(source[ACTION_MASK])
    return None


def has_mask(space: gym.Space[Any]) -> bool:
    """Return whether observations of this space have an action mask."""
    return isinstance(space, gym.spaces.Dict) and ACTION_MASK in space.spaces


def without_mask(space: gym.Space[Any]) -> gym.Space[Any]:
    """Return the space of what :func:`bare` returns."""
    if not isinstance(space, gym.spaces.Dict) or not has_mask(space):
        return space
    parts = {key: inner for key, inner in space.spaces.items() if key != ACTION_MASK}
    return next(iter(parts.values())) if len(parts) == 1 else gym.spaces.Dict(parts)


def bare(obs: Any) -> Any:
    """Return an observation without its mask; what is left alone is not in a dictionary."""
    if not isinstance(obs, Mapping) or ACTION_MASK not in obs:
        return obs
    parts = {key: item for key, item in obs.items() if key != ACTION_MASK}
    return next(iter(parts.values())) if len(parts) == 1 else parts


def zeros(space: gym.Space[Any]) -> Any:
    """Return what stands for the observation of an agent that does not take part."""
    if isinstance(space, gym.spaces.Dict):
        return {key: zeros(inner) for key, inner in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(zeros(inner) for inner in space.spaces)
    return np.zeros(space.shape or (), space.dtype)


def infos_by_name(infos: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the agents' infos by name, without action masks, which are in the observation."""
    by_name = {
        str(agent): {key: value for key, value in info.items() if key != ACTION_MASK}
        for agent, info in infos.items()
    }
    return {agent: info for agent, info in by_name.items() if info}


def flat(obs: Any) -> Any:
    """Return an observation whose arrays are vectors."""
    if isinstance(obs, Mapping):
        return {key: flat(item) for key, item in obs.items()}
    array = np.asarray(obs)
    return array.reshape(-1) if array.ndim > 1 else array


def flat_space(space: gym.Space[Any]) -> gym.Space[Any]:
    """Return the space of what :func:`flat` returns."""
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({key: flat_space(part) for key, part in space.spaces.items()})
    if isinstance(space, gym.spaces.Box) and len(space.shape) > 1:
        low, high = space.low.reshape(-1), space.high.reshape(-1)
        return gym.spaces.Box(low, high, dtype=space.dtype.type)
    return space
