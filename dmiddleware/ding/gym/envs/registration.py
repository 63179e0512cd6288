"""Envs by their ids: those that a program registers, and Gymnasium's by the old rules."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import gymnasium

from dmiddleware.ding.gym.core import OldEnv
from dmiddleware.ding.gym.wrappers import TimeLimit

__all__ = ["make", "newest_id", "register", "registry", "spec"]

_log = logging.getLogger(__name__)


class OldSpec(NamedTuple):
    """How to make an env that a program has registered."""

    id: str
    entry_point: str | Callable[..., Any]
    max_episode_steps: int | None
    kwargs: dict[str, Any]


registry: Final[dict[str, OldSpec]] = {}
"""What programs have registered by :func:`register`."""


def register(
    id: str,
    entry_point: str | Callable[..., Any],
    max_episode_steps: int | None = None,
    kwargs: dict[str, Any] | None = None,
    **others: Any,
) -> None:
    """Register an env by the old rules."""
    registry[id] = OldSpec(id, entry_point, max_episode_steps, dict(kwargs or {}))


def make(id: str, **options: Any) -> Any:
    """Make an env by its id, with the old rules.

    An old version of an env of Gymnasium that no longer works is made in its newest version, with
    one line in the log.
    """
    if id in registry:
        return _make_registered(registry[id], options)
    name = newest_id(id)
    return OldEnv(gymnasium.make(name, **options))


@functools.cache
def newest_id(env_id: str) -> str:
    """Return the id that Gymnasium makes in place of an old one; the same if it works."""
    name, _, version = env_id.rpartition("-v")
    if not version.isdigit():
        return env_id
    _register_others(name)
    versions = [
        int(spec.id.rpartition("-v")[2])
        for spec in gymnasium.registry.values()
        if spec.id.rpartition("-v")[0] == name
    ]
    if not versions:
        return env_id
    newest = f"{name}-v{max(versions)}"
    works = f"{name}-v{version}" in gymnasium.registry and not _only_raises(env_id)
    if works or newest == env_id:
        return env_id
    _log.warning("%s is %s here: Gymnasium has no %s that works", env_id, newest, env_id)
    return newest


def _only_raises(env_id: str) -> bool:
    """Return whether an id is kept only to say that its env has moved."""
    return "_raise" in str(gymnasium.registry[env_id].entry_point)


def _register_others(name: str) -> None:
    """Import the packages that register envs in Gymnasium by themselves."""
    if any(spec.id.rpartition("-v")[0] == name for spec in gymnasium.registry.values()):
        return
    for package in ("ale_py", "minigrid", "gymnasium_robotics"):
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        if package == "ale_py":
            gymnasium.register_envs(module)


def _make_registered(spec: OldSpec, options: dict[str, Any]) -> Any:
    entry_point = spec.entry_point
    if isinstance(entry_point, str):
        module, _, name = entry_point.partition(":")
        entry_point = getattr(importlib.import_module(module), name)
    env = entry_point(**{**spec.kwargs, **options})
    return env if spec.max_episode_steps is None else TimeLimit(env, spec.max_episode_steps)


def spec(id: str) -> Any:
    """Return what is registered under an id."""
    return registry[id] if id in registry else gymnasium.spec(newest_id(id))
