"""A counter that others may hold on to."""

from __future__ import annotations

__all__ = ["CountVar"]


class CountVar:
    """An integer that counts up; who holds it sees it change.

    Args:
        init_val: where to begin.
    """

    def __init__(self, init_val: int = 0) -> None:
        self._val = init_val

    @property
    def val(self) -> int:
        """The count."""
        return self._val

    def add(self, add_num: int) -> None:
        """Count on."""
        self._val += add_num

    def update(self, val: int) -> None:
        """Set the count."""
        self._val = val

    def __index__(self) -> int:
        return self._val

    def __repr__(self) -> str:
        return f"CountVar({self._val})"
