"""The settings that middleware read from a policy."""

from __future__ import annotations

from typing import Any

from dmiddleware.errors import ConfigError
from dmiddleware.policy import CollectMode, LearnMode
from dmiddleware.schedule import Schedule
from dmiddleware.settings import Count, checked

__all__ = ["batch_size_of", "burn_in_of", "epochs_of", "epsilon_of", "recomputes_advantage"]


def batch_size_of(mode: LearnMode, *, user: str) -> int:
    """Return the rows per update.

    Raises:
        ConfigError: if the policy has none.
    """
    return _count(mode, "batch_size", user=user)


def epochs_of(mode: LearnMode, *, user: str) -> int:
    """Return the passes over the data of each collection.

    Raises:
        ConfigError: if the policy has none.
    """
    return _count(mode, "epoch_per_collect", user=user)


def epsilon_of(mode: CollectMode, *, user: str) -> Schedule:
    """Return the schedule of ε, the probability of a random action.

    Raises:
        ConfigError: if the policy has none.
    """
    return Schedule.of(_given(mode, "eps", user=user))


def recomputes_advantage(mode: LearnMode) -> bool:
    """Return whether advantages are estimated again before each further epoch."""
    return bool(_setting(mode, "recompute_advantage"))


def burn_in_of(mode: LearnMode) -> int | None:
    """Return the rows at the start of a sequence that only warm up the recurrent state."""
    burn_in: int | None = _setting(mode, "burn_in")
    return burn_in


def _count(mode: LearnMode, name: str, *, user: str) -> int:
    count: int = checked(name, _given(mode, name, user=user), Count)
    return count


def _given(mode: LearnMode | CollectMode, name: str, *, user: str) -> Any:
    value = _setting(mode, name)
    if value is None:
        raise ConfigError(
            f"{user} reads {name} from the policy, which has none; declare it in the policy's "
            "settings, or use a policy that has it"
        )
    return value


def _setting(mode: LearnMode | CollectMode, name: str) -> Any:
    """Return a setting of a policy; None if it has none of this name."""
    return getattr(mode.spec.settings, name, None)
