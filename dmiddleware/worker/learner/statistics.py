"""The iteration counter of a learner, and moving averages of its outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

__all__ = ["CountVar", "MovingAverages"]


class MovingAverages:
    """Means of named values over recent iterations.

    DI-engine's notation works too: ``monitor.loss = 0.5`` adds a value, ``monitor.avg["loss"]()``
    is the mean and ``monitor.val["loss"]()`` the newest value.

    Args:
        names: the values to average; others are ignored.
        window: number of recent values per name.
    """

    _values: dict[str, deque[float]]

    def __init__(self, names: Iterable[str], *, window: int) -> None:
        if window <= 0:
            raise ValueError(f"window must be positive, got {window}")
        self._values = {name: deque(maxlen=window) for name in names}

    def follow(self, name: str, *, window: int) -> None:
        """Average one more value."""
        self._values.setdefault(name, deque(maxlen=window))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_values":
            super().__setattr__(name, value)
        elif name in self._values:
            self._values[name].append(value)
        else:
            raise AttributeError(
                f"{name!r} is not averaged, so it cannot be set; the averaged values are "
                f"{', '.join(self._values)}"
            )

    @property
    def avg(self) -> dict[str, Callable[[], float]]:
        """Functions that return the means, by name."""
        return {name: partial(self.mean, name) for name in self._values}

    @property
    def val(self) -> dict[str, Callable[[], float]]:
        """Functions that return the newest values, by name."""
        return {name: partial(self.latest, name) for name in self._values}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the averaged values."""
        return tuple(self._values)

    def update(self, values: Mapping[str, float]) -> None:
        """Add one iteration's values; unknown names are ignored."""
        for name, value in values.items():
            history = self._values.get(name)
            if history is not None:
                history.append(value)

    def mean(self, name: str) -> float:
        """Return the mean of the recent values.

        Raises:
            KeyError: for an unknown name.
            ValueError: if it has no value yet.
        """
        history = self._values[name]
        if not history:
            raise ValueError(f"{name!r} has no value yet")
        return sum(history) / len(history)

    def latest(self, name: str) -> float:
        """Return the newest value.

        Raises:
            KeyError: for an unknown name.
            ValueError: if it has no value yet.
        """
        history = self._values[name]
        if not history:
            raise ValueError(f"{name!r} has no value yet")
        return history[-1]

    def means(self) -> dict[str, float]:
        """Return the means of all names that have a value."""
        return {name: self.mean(name) for name, history in self._values.items() if history}


class CountVar:
    """A mutable counter, which can be shared.

    Args:
        init_val: the first value.
    """

    def __init__(self, init_val: int = 0) -> None:
        self._val = init_val

    @property
    def val(self) -> int:
        """The count."""
        return self._val

    def add(self, add_num: int) -> None:
        """Add to the count."""
        self._val += add_num

    def update(self, val: int) -> None:
        """Set the count."""
        self._val = val

    def __index__(self) -> int:
        return self._val

    def __repr__(self) -> str:
        return f"CountVar({self._val})"
