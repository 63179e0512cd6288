"""Checks of config values that several policies share."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from dmiddleware.config import check_value

__all__ = [
    "check_above",
    "check_at_least",
    "check_choice",
    "check_count",
    "check_fraction",
    "check_positive",
]


def check_fraction(path: str, value: Any) -> None:
    """Refuse what is no number in ``[0, 1]``.

    Raises:
        ConfigError: with the path and the value.
    """
    check_value(_is_real(value) and 0 <= value <= 1, path, value, "a number from 0 to 1")


def check_positive(path: str, value: Any, *, optional: bool = False) -> None:
    """Refuse what is no positive finite number; ``optional`` lets None pass.

    Raises:
        ConfigError: with the path and the value.
    """
    fits = (_is_real(value) and 0 < value < float("inf")) or (optional and value is None)
    check_value(fits, path, value, "a positive number" + (" or None" if optional else ""))


def check_count(path: str, value: Any, *, optional: bool = False) -> None:
    """Refuse what is no whole number of at least 1; ``optional`` lets None pass.

    Raises:
        ConfigError: with the path and the value.
    """
    whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    fits = (whole and not isinstance(value, bool) and value >= 1) or (optional and value is None)
    check_value(fits, path, value, "a whole number ≥ 1" + (" or None" if optional else ""))


def check_at_least(path: str, value: Any, least: float) -> None:
    """Refuse what is no finite number of at least ``least``.

    Raises:
        ConfigError: with the path and the value.
    """
    fits = _is_real(value) and least <= value < float("inf")
    check_value(fits, path, value, f"a number ≥ {least}")


def check_above(path: str, value: Any, bound: float) -> None:
    """Refuse what is neither None nor a finite number above ``bound``.

    Raises:
        ConfigError: with the path and the value.
    """
    fits = value is None or (_is_real(value) and bound < value < float("inf"))
    check_value(fits, path, value, f"a number above {bound} or None")


def check_choice(path: str, value: Any, choices: Iterable[Any]) -> None:
    """Refuse what is none of the choices.

    Raises:
        ConfigError: with the path, the value and the choices.
    """
    known = tuple(choices)
    check_value(value in known, path, value, "one of " + ", ".join(map(repr, known)))


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
