"""Envs of MiniGrid as dizoo makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import gymnasium as gym
import numpy as np

from dmiddleware.errors import ConfigError
from dmiddleware.worker.dizoo_wrappers import Env, as_float32, made, optional_module

__all__ = ["minigrid_env"]

_NOISY: Final = "MiniGrid-NoisyTV-v0"
_N_TILES: Final = 4
_OWN: Final = "MiniGrid-AKTDT"


def minigrid_env(options: Mapping[str, Any], is_train: bool, **kwargs: Any) -> Env:
    """Make an env of MiniGrid.

    Args:
        options: ``env_id``, ``max_step`` and ``flat_obs``.
        is_train: no effect.
        kwargs: arguments of the env.

    Raises:
        ConfigError: if MiniGrid is not installed or has no such env, or for a wrapper of dizoo.
    """
    for key in ("full_obs", "onehot_obs", "move_bonus"):
        if options[key]:
            raise ConfigError(f"env.{key} is a wrapper of dizoo only; leave it out")
    id = str(options["env_id"])
    if id.startswith(_OWN):
        raise ConfigError(f"env.env_id={id!r} is in the files of dizoo only; set another one")
    is_noisy = id == _NOISY
    env = made("MiniGrid-FourRooms-v0" if is_noisy else id, "minigrid", "minigrid", **kwargs)
    if is_noisy:
        env = _NoisyTiles(env)
    if options["flat_obs"]:
        wrappers = optional_module("minigrid.wrappers", "minigrid", id)
        env = as_float32(wrappers.FlatObsWrapper(env))
    return gym.wrappers.TimeLimit(env, int(options["max_step"]))


class _NoisyTiles(gym.Wrapper[Any, Any, Any, Any]):
    """Four rooms with four tiles whose colors look wrong, and which give small random rewards.

    The tiles are the same in all episodes. Moving forward to a tile, or against a wall on it, gives
    a reward between 0.05 and 0.1.

    Source: Burda et al. (2019), "Large-Scale Study of Curiosity-Driven Learning", section 4 ("the
    noisy-TV problem"), where the noise is a picture.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._tiles: set[tuple[int, int]] = set()

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        world: Any = self.unwrapped
        while len(self._tiles) < _N_TILES:
            x, y = world.np_random.integers(1, world.width - 1, 2)
            self._tiles.add((int(x), int(y)))
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        world: Any = self.unwrapped
        if action == world.actions.forward and tuple(world.agent_pos) in self._tiles:
            reward = float(world.np_random.uniform(0.05, 0.1))
        image = obs["image"].astype(np.float32)
        for tile in self._tiles:
            if world.in_view(*tile):
                image[world.relative_coords(*tile)][1] += 0.5
        return {**obs, "image": image}, reward, terminated, truncated, info
