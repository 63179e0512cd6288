"""Playing a saved policy in the env of its run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dmiddleware.env import EnvSettings, make_env_manager
from dmiddleware.errors import RunFolderError
from dmiddleware.policy import HasModes
from dmiddleware.rollout import evaluate_episodes
from dmiddleware.runs.record import settings_of

__all__ = ["env_of", "play", "run_of"]

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
    if not isinstance(env, Mapping) or not isinstance(env.get("id"), str):
        raise RunFolderError(
            f"{run}/config.yaml does not name an env by its id; play the policy in Python with "
            "load_policy, in an env that you make"
        )
    kwargs: Any = env.get("env_kwargs") or {}
    return EnvSettings(env["id"], env_num=1, env_kwargs=kwargs)


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
