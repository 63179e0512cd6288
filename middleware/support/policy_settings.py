"""The settings that middleware read from a policy."""

from __future__ import annotations

from typing import Any, TypeVar

from dmiddleware.errors import ConfigError
from dmiddleware.policy import CollectMode, LearnMode
from dmiddleware.settings import Count, checked

__all__ = ["count_of", "needed", "setting_of"]

T = TypeVar("T")


def setting_of(mode: LearnMode | CollectMode, name: str) -> Any:
    """Return a setting of a policy; None if it has none of this name."""
    return getattr(mode.spec.settings, name, None)


def count_of(mode: LearnMode, name: str, *, user: str) -> int:
    """Return a positive integer among the settings of a policy.

    Raises:
        ConfigError: if the policy has none of this name, or it is something else.
    """
    count: int = checked(name, needed(setting_of(mode, name), name, user=user), Count)
    return count


def needed(value: T | None, name: str, *, user: str) -> T:
    """Return what a middleware needs from a policy.

    Args:
        value: the policy's; None: it has none.
        name: what it is called.
        user: the name of the middleware.

    Raises:
        ConfigError: if the policy has none.
    """
    if value is None:
        raise ConfigError(
            f"{user} reads {name} from the policy, which has none; declare it in the policy's "
            "settings, or use a policy that has it"
        )
    return value
