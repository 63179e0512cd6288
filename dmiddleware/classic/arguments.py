"""Type checks of constructor and method arguments."""

from __future__ import annotations

import numpy as np

__all__ = ["check_count", "check_flag", "check_number"]


def check_count(name: str, value: object, *, at_least: int = 1) -> int:
    """Return an integer argument, checked.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is less than ``at_least``.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an integer, got {value!r:.100}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return int(value)


def check_number(name: str, value: object, *, low: float = 0.0, high: float = np.inf) -> float:
    """Return a number in ``[low, high]``, checked.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is outside the range, or NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, got {value!r:.100}")
    number = float(value)
    if not low <= number <= high:
        wanted = f"in [{low:g}, {high:g}]" if high < np.inf else f"at least {low:g}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return number


def check_flag(name: str, value: object) -> bool:
    """Return a boolean argument, checked.

    Raises:
        TypeError: if it is anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r:.100}")
    return value
