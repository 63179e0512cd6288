"""The settings that middleware read from a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.errors import ConfigError
from dmiddleware.policy import CollectMode, LearnMode
from dmiddleware.rl import Schedule, epsilon_schedule
from dmiddleware.settings import Count, checked

__all__ = ["batch_size_of", "burn_in_of", "epochs_of", "epsilon_of", "recomputes_advantage"]


def batch_size_of(mode: LearnMode, *, user: str) -> int:
    """Return the rows per update.

    Raises:
        ConfigError: if the policy has none.
    """
    return _count(mode, "learn.batch_size", user=user)


def epochs_of(mode: LearnMode, *, user: str) -> int:
    """Return the passes over the data of each collection.

    Raises:
        ConfigError: if the policy has none.
    """
    return _count(mode, "learn.epoch_per_collect", user=user)


def epsilon_of(mode: CollectMode, *, user: str) -> Schedule:
    """Return the schedule of ε, the probability of a random action.

    Raises:
        ConfigError: if the policy has none.
    """
    return epsilon_schedule(_given(mode, "other.eps", user=user))


def recomputes_advantage(mode: LearnMode) -> bool:
    """Return whether advantages are estimated again before each further epoch."""
    return bool(_setting(mode, "learn.recompute_advantage"))


def burn_in_of(mode: LearnMode) -> int | None:
    """Return the rows at the start of a sequence that only warm up the recurrent state."""
    burn_in: int | None = _setting(mode, "burn_in")
    return burn_in


def _count(mode: LearnMode, path: str, *, user: str) -> int:
    count: int = checked(path, _given(mode, path, user=user), Count)
    return count


def _given(mode: LearnMode | CollectMode, path: str, *, user: str) -> Any:
    value = _setting(mode, path)
    if value is None:
        raise ConfigError(
            f"{user} reads {path} from the policy, which has none; declare it in the policy's "
            "config, or use a policy that has it"
        )
    return value


def _setting(mode: LearnMode | CollectMode, path: str) -> Any:
    """Return the value of a dotted key of a policy's config; None if it has no such key."""
    value: Any = mode.spec.cfg
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value
