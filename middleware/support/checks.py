"""Checks of constructor arguments, and reading a policy's settings."""

from __future__ import annotations

from typing import Any, TypeVar

from dmiddleware.errors import ConfigError
from dmiddleware.policy import CollectMode, EvalMode, LearnMode

__all__ = [
    "as_float",
    "check_fraction",
    "check_instance",
    "check_positive",
    "policy_setting",
    "value_or_setting",
]

T = TypeVar("T")


def as_float(value: Any) -> float:
    """Return a number as a float, also if it is an array or a tensor with one element."""
    return float(value.item() if hasattr(value, "item") else value)


def check_positive(**options: float | None) -> None:
    """Reject options that are not positive; None (an option that is off) passes.

    Raises:
        TypeError: naming the option and its value, if it is not a number.
        ValueError: naming the option and its value.
    """
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number, got {value!r:.100}")
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def check_fraction(**options: float) -> None:
    """Reject options outside ``[0, 1]``.

    Raises:
        ValueError: naming the option and its value.
    """
    for name, value in options.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {value}")


def check_instance(value: object, kind: type[T], *, user: str, hint: str) -> T:
    """Return ``value`` if it is an instance of ``kind``.

    Args:
        value: the argument.
        kind: the class that it must have.
        user: the name of the middleware that takes it, for the message.
        hint: what to pass instead, for the message.

    Raises:
        ConfigError: if it is an instance of another class.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(f"{user} takes {article} {kind.__name__}, got {value!r:.100}; {hint}")
    return value


def policy_setting(mode: LearnMode | CollectMode | EvalMode, path: str) -> Any:
    """Return a policy's setting; None if it has none of that name, the last part of the path."""
    return getattr(mode.spec.settings, path.rpartition(".")[2], None)


def value_or_setting(
    value: int | None, mode: LearnMode | CollectMode, path: str, *, user: str, name: str
) -> int:
    """Return an option of a middleware, or the policy's setting if the option was omitted.

    Raises:
        ConfigError: if neither is given.
        ValueError: if the value is not positive.
    """
    if value is None:
        value = policy_setting(mode, path)
    if value is None:
        raise ConfigError(
            f"{user} needs {name}: pass {name}=..., or set {path} in the policy's config"
        )
    check_positive(**{name: value})
    return value
