"""Playing a saved policy in the env of its run."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dmiddleware.command_line import arguments_with
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.errors import ConfigError, RunFolderError
from dmiddleware.policy import HasModes
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.runs.record import settings_of

__all__ = ["env_of", "made_by", "play", "run_of"]

_MOST_ENVS: Final = 25


def run_of(path: Path) -> Path:
    """Return the folder of the run that a path belongs to: it, or the one of a checkpoint."""
    return path if path.is_dir() else path.resolve().parent.parent


def env_of(path: Path) -> EnvSettings:
    """Return the env of a run, as its ``config.yaml`` names it.

    Args:
        path: the run's folder, or a checkpoint in it.

    Raises:
        RunFolderError: if there is no ``config.yaml``, or it does not name an env by an id.
    """
    run = run_of(path)
    env = settings_of(run).get("env")
    # A function inside another one, such as a lambda, has a name that nobody can import.
    if not isinstance(env, Mapping) or not isinstance(env.get("id"), str) or "<" in env["id"]:
        raise RunFolderError(
            f"{run}/config.yaml does not name an env by its id; name one with --env, or play "
            "the policy in Python with load_policy, in an env that you make"
        )
    kwargs: Any = env.get("env_kwargs") or {}
    return EnvSettings(env["id"], env_num=1, env_kwargs=kwargs)


def made_by(function: str, path: Path) -> HasModes:
    """Return the policy that a function builds from the arguments that a run's program had.

    Args:
        function: its name, ``module:function``. Its parameters have types and defaults, and get the
            arguments of the same names in ``config.yaml``.
        path: the run's folder, or a checkpoint in it.

    Raises:
        ConfigError: if there is no such function, or it cannot take the arguments.
    """
    module, _, name = function.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{function} must name a function that builds the policy, module:function ({error})"
        ) from error
    saved: Any = settings_of(run_of(path)).get("arguments") or {}
    known = inspect.signature(make).parameters
    given = {one: value for one, value in saved.items() if one in known}
    made: HasModes = make(**arguments_with(make, given, at=f"{run_of(path)}/config.yaml"))
    return made


def play(
    policy: HasModes, env: EnvSettings, *, n_episode: int, seed: int | None = None
) -> list[float]:
    """Return the returns of episodes that a policy plays greedily.

    Args:
        policy: the policy.
        env: the env; at most 25 of it are stepped at once.
        n_episode: number of episodes.
        seed: seed of the envs; None: any.

    Raises:
        SpaceError: if the policy does not fit the env.
        RegistryError: if no env is registered under the id.
    """
    with make_env_manager(env, env_num=min(n_episode, _MOST_ENVS), seed=seed) as envs:
        return evaluate_episodes(policy, envs, n_episode).get_episode_return()
