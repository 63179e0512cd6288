"""A tape: a record of events in order, for tests to compare."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

__all__ = ["Tape"]


class Tape:
    """Records marks in order, from any thread.

    Example:
        >>> tape = Tape()
        >>> tape("collect")
        >>> tape("learn", 64)
        >>> list(tape)
        ['collect', ('learn', 64)]
    """

    def __init__(self) -> None:
        self._marks: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, *marks: Any) -> None:
        """Record a mark: the argument, or a tuple of several arguments."""
        with self._changed:
            self._marks.append(marks[0] if len(marks) == 1 else marks)
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        with self._changed:
            return iter(list(self._marks))

    def __len__(self) -> int:
        return len(self._marks)

    def __eq__(self, other: object) -> bool:
        """Compare with another tape or a list of marks."""
        if isinstance(other, Tape | list):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tape({list(self)!r})"

    def clear(self) -> None:
        """Remove all marks."""
        with self._changed:
            self._marks.clear()

    def wait_for(self, count: int, *, timeout_s: float = 30.0) -> None:
        """Block until there are ``count`` marks.

        Raises:
            AssertionError: if there are fewer after ``timeout_s`` of real time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._marks) >= count, timeout_s):
                raise AssertionError(f"expected {count} marks in {timeout_s:g} s, got {self!r}")

    def function(self, name: str) -> Callable[[Any], None]:
        """Return a middleware that records its name."""

        def record(ctx: Any) -> None:
            self(name)

        record.__name__ = name
        return record

    def generator(self, name: str) -> Callable[[Any], Generator[None, None, None]]:
        """Return a middleware that records its name, and ``"/name"`` on the way back.

        If an error passes through, it records ``"!name"`` instead.
        """

        def record(ctx: Any) -> Generator[None, None, None]:
            self(name)
            try:
                yield
            except BaseException:
                self(f"!{name}")
                raise
            self(f"/{name}")

        record.__name__ = name
        return record
