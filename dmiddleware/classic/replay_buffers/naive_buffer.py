"""Buffers that draw uniformly: NaiveReplayBuffer and ElasticReplayBuffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from easydict import EasyDict

from dmiddleware.classic.arguments import check_count
from dmiddleware.classic.config import Option, Range, check_value, positive
from dmiddleware.classic.deque_buffer import BufferedData
from dmiddleware.classic.replay_buffers.replay_buffer import IBuffer

__all__ = ["ElasticReplayBuffer", "NaiveReplayBuffer", "PeriodicBuffer"]


class PeriodicBuffer(IBuffer):
    """A buffer with the option ``periodic_thruput_seconds``."""

    config: ClassVar[dict[str, Any]] = {
        "periodic_thruput_seconds": Option(
            60, positive, "seconds between two logs of how many items came and went"
        ),
    }

    @property
    def _period_s(self) -> float:
        return float(self._cfg.periodic_thruput_seconds)


class NaiveReplayBuffer(PeriodicBuffer):
    """A first-in, first-out buffer of any objects, drawn uniformly."""

    def sample(
        self,
        size: int,
        cur_learner_iter: int,
        sample_range: slice | None = None,
        replace: bool = False,
    ) -> list[Any] | None:
        """Draw items.

        Args:
            size: number of items.
            cur_learner_iter: the learner's iteration; not used.
            sample_range: draw only from this part of the items by age: ``slice(-10, None)`` is the
                ten newest.
            replace: whether an item may be drawn twice.

        Returns:
            The items, as they were pushed; None, logged once a minute, if there are too few.
        """

        def draw() -> list[Any]:
            part = self._part(sample_range)
            items: list[BufferedData] = self._items.sample(size, replace=replace, sample_range=part)
            return [item.data for item in items]

        return self._draw(size, draw)

    def _part(self, sample_range: slice | None) -> slice | None:
        """Return the part of the items, by age, that can be drawn."""
        return sample_range


class ElasticReplayBuffer(NaiveReplayBuffer):
    """A :class:`NaiveReplayBuffer` that draws from its newest items; how many, is a schedule."""

    config: ClassVar[dict[str, Any]] = {
        "set_buffer_size": Option(
            None,
            Range("a function from the env step to a size", callable),
            "function that returns, for an env step, how many of the newest items can be drawn",
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drawn_size = self._size_at(0)

    @classmethod
    def check_config(cls, cfg: EasyDict) -> None:
        """Refuse a config without a schedule."""
        super().check_config(cfg)
        check_value(
            callable(cfg.set_buffer_size),
            "set_buffer_size",
            cfg.set_buffer_size,
            "a function that returns a size for an env step",
        )

    def update(self, envstep: int) -> None:
        """Set how many of the newest items can be drawn.

        Args:
            envstep: env steps collected so far.

        Raises:
            ValueError: if the schedule returns no positive integer.
        """
        with self._lock:
            self._drawn_size = self._size_at(envstep)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class, and how many of the items can be drawn."""
        with self._lock:
            return {**super().state_dict(), "drawn_size": self._drawn_size}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self._drawn_size = state["drawn_size"]

    def _size_at(self, envstep: int) -> int:
        schedule: Callable[[int], int] = self._cfg.set_buffer_size
        return check_count(f"set_buffer_size({envstep})", schedule(envstep))

    def _part(self, sample_range: slice | None) -> slice | None:
        newest = slice(-self._drawn_size, None)
        if sample_range is None:
            return newest
        part = range(self._items.count())[newest][sample_range]
        if part.step < 0:  # the stop of a descending slice may be before the first item
            part = part[::-1]
        return slice(part.start, part.stop, part.step)
