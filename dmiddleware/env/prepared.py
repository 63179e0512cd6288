"""Envs whose observations no network takes as they are, with the usual preparation, by name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

import gymnasium as gym

from dmiddleware.env.atari import atari_preprocessing
from dmiddleware.env.factory import EnvSettings, make_env

__all__ = ["make_atari_env", "make_grid_env"]

_PREPARATION: Final = frozenset(
    one.name
    for one in inspect.signature(atari_preprocessing).parameters.values()
    if one.kind is one.KEYWORD_ONLY
)


def make_atari_env(game: str, **options: Any) -> gym.Env[Any, Any]:
    """Make an Atari game with the preprocessing of DQN.

    Args:
        game: the id, such as ``"ALE/Pong-v5"``.
        **options: those of :func:`~dmiddleware.env.atari_preprocessing`, such as ``screen_size``,
            and keyword arguments of the game, such as ``repeat_action_probability``.

    Raises:
        ConfigError: if the extra ``atari`` is not installed, or an option is not valid.
        RegistryError: if there is no such game.
    """
    preparation = {name: options.pop(name) for name in _PREPARATION & options.keys()}
    kwargs = {"frameskip": 1, "obs_type": "grayscale", **options}
    return atari_preprocessing(
        make_env(EnvSettings(game, env_num=1, env_kwargs=kwargs)), **preparation
    )


def make_grid_env(game: str, **options: Any) -> gym.Env[Any, Any]:
    """Make an env of MiniGrid that shows only the grid before the agent, as a vector.

    Args:
        game: the id, such as ``"MiniGrid-Empty-5x5-v0"``.
        **options: keyword arguments of the env.

    Raises:
        ConfigError: if the extra ``minigrid`` is not installed.
        RegistryError: if there is no such env.
    """
    env = make_env(EnvSettings(game, env_num=1, env_kwargs=options))
    wrappers: Any = importlib.import_module("minigrid.wrappers")  # an extra; make_env checked it
    return gym.wrappers.FlattenObservation(wrappers.ImgObsWrapper(env))
