"""Envs whose observations no network takes as they are, with the usual preparation, by name."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import gymnasium as gym

from dmiddleware.env.atari import atari_preprocessing
from dmiddleware.env.factory import EnvSettings, make_env
from dmiddleware.errors import ConfigError

__all__ = ["make_atari_env", "make_grid_env", "prepared_options"]

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
    made = make_env(EnvSettings(game, env_num=1, env_kwargs=options))
    wrappers: Any = importlib.import_module("minigrid.wrappers")  # an extra; make_env checked it
    return gym.wrappers.FlattenObservation(wrappers.ImgObsWrapper(made))


_MAKERS: Final[Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]]] = {
    "ALE/": (make_atari_env, {"life_loss": False, "clip_reward": False}),
    "MiniGrid-": (make_grid_env, {}),
    "BabyAI-": (make_grid_env, {}),
}
"""By the beginning of an id: what makes the env, and its arguments for evaluations only."""


def prepared_options(env_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options with which an env can be learned in.

    Args:
        env_id: the id of the env.

    Returns:
        Fields of :class:`EnvSettings`, and keyword arguments of envs to evaluate in.

    Raises:
        ConfigError: if the id is empty.
    """
    if not env_id:
        raise ConfigError("name an env, such as CartPole-v1")
    for beginning, (maker, to_evaluate) in _MAKERS.items():
        if env_id.startswith(beginning):
            name = f"dmiddleware.env:{maker.__name__}"
            return {"id": name, "env_kwargs": {"game": env_id}}, dict(to_evaluate)
    return {"id": env_id}, {}
