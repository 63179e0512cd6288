"""Checks of options that several middleware share."""

from __future__ import annotations

__all__ = ["check_fraction", "check_positive"]


def check_positive(**options: float | None) -> None:
    """Refuse options that are not positive; None means that the option is off.

    Raises:
        ValueError: naming the option and its value.
    """
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def check_fraction(**options: float) -> None:
    """Refuse options outside ``[0, 1]``.

    Raises:
        ValueError: naming the option and its value.
    """
    for name, value in options.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
