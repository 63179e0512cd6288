"""Checks of constructor arguments."""

from __future__ import annotations

from typing import TypeVar

from dmiddleware.errors import ConfigError

__all__ = ["check_instance"]

T = TypeVar("T")


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
