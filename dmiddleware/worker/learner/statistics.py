"""What a learner counts and averages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

__all__ = ["CountVar", "MovingAverages"]


class MovingAverages:
    """Means of named values over the recent iterations.

    Args:
        names: the values to follow; others are ignored.
        window: how many recent values of each name count.
    """

    def __init__(self, names: Iterable[str], *, window: int) -> None:
        if window <= 0:
            raise ValueError(f"window must be positive, got {window}")
        self._values: dict[str, deque[float]] = {name: deque(maxlen=window) for name in names}

    def follow(self, name: str, *, window: int) -> None:
        """Follow one more value."""
        self._values.setdefault(name, deque(maxlen=window))

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are followed."""
        return tuple(self._values)

    def update(self, values: Mapping[str, float]) -> None:
        """Add one iteration's values; names that are not followed are ignored."""
        for name, value in values.items():
            history = self._values.get(name)
            if history is not None:
                history.append(value)

    def mean(self, name: str) -> float:
        """Return the mean of the recent values.

        Raises:
            KeyError: if the name is not followed.
            ValueError: if it had no value yet.
        """
        history = self._values[name]
        if not history:
            raise ValueError(f"{name!r} had no value yet, so it has no mean")
        return sum(history) / len(history)

    def latest(self, name: str) -> float:
        """Return the newest value.

        Raises:
            KeyError: if the name is not followed.
            ValueError: if it had no value yet.
        """
        history = self._values[name]
        if not history:
            raise ValueError(f"{name!r} had no value yet")
        return history[-1]

    def means(self) -> dict[str, float]:
        """Return the means of all names that had a value."""
        return {name: self.mean(name) for name, history in self._values.items() if history}


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
