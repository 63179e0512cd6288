"""Playing a saved policy in the env of its run."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dmiddleware.command_line import arguments_with
from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.env.env_record import recorded_env
from dmiddleware.env.game_env import is_game_space
from dmiddleware.errors import ConfigError, RunFolderError
from dmiddleware.policy import HasModes
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.runs.record import part_of, settings_of, settings_of_part

__all__ = ["env_of", "importing_as", "made_by", "play", "run_of", "wrappers_of"]

_MOST_ENVS: Final = 25


def run_of(path: Path) -> Path:
    """Return the folder of the run that a path belongs to: it, or the one of a checkpoint."""
    if path.is_dir():
        return path
    folder = path.resolve().parent
    return folder.parent if part_of(path) is None else folder.parent.parent


def env_of(path: Path, wrappers: Sequence[str] = ()) -> EnvSettings:
    """Return the env in which a run was judged, with its wrappers, as its ``config.yaml`` has it.

    Args:
        path: the run's folder, or a checkpoint in it.
        wrappers: names of wrappers instead of those of the run; none: those of the run.

    Raises:
        RunFolderError: if there is no ``config.yaml``, it does not name an env by an id or by the
            name of a function, or a wrapper cannot be imported.
    """
    run = run_of(path)
    record = dict(_record_of(path))
    if wrappers:
        record["wrappers"] = list(wrappers)
    try:
        return recorded_env(record)
    except ConfigError as error:
        raise RunFolderError(
            f"{run}/config.yaml does not say how to build the env of the run: {error}; name one "
            "with --env, and its wrappers with --wrapper, or play the policy in Python with "
            "load_policy, in an env that you make"
        ) from error


def wrappers_of(path: Path) -> list[str] | None:
    """Return the names of the wrappers that a run's env had; None: it did not record them."""
    wrappers = _record_of(path).get("wrappers")
    return wrappers if isinstance(wrappers, list) else None


def _record_of(path: Path) -> Mapping[str, Any]:
    settings = settings_of_part(run_of(path), part_of(path))
    record = settings.get("eval_env") or settings.get("env")
    return record if isinstance(record, Mapping) else {}


@contextlib.contextmanager
def importing_as(path: Path) -> Iterator[None]:
    """Import modules from the folder that the program of a run imported them from."""
    launch = settings_of(run_of(path)).get("launch")
    package = launch.get("package") if isinstance(launch, Mapping) else None
    before = list(sys.path)
    if isinstance(package, str):
        sys.path.insert(0, str(Path(package).resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


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
    parameters = inspect.signature(make).parameters
    arguments = {option: value for option, value in saved.items() if option in parameters}
    mode: HasModes = make(**arguments_with(make, arguments, at=f"{run_of(path)}/config.yaml"))
    return mode


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
        ConfigError: if the env is a game of teams.
        SpaceError: if the policy does not fit the env.
        RegistryError: if no env is registered under the id.
    """
    with make_env_manager(env, env_num=min(n_episode, _MOST_ENVS), seed=seed) as envs:
        if is_game_space(envs.observation_space):
            raise ConfigError(
                "the env is a game of teams, which needs a player for each; play it in a program, "
                "with load_policy, against(make_game(…), team, {…}) and evaluate_episodes"
            )
        return evaluate_episodes(policy, envs, n_episode).get_episode_return()
