"""DequeBufferWrapper: the buffer of DI-engine's newer configs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dmiddleware.classic.buffer_middleware import PriorityExperienceReplay, use_time_check
from dmiddleware.classic.config import Option, Range, at_least, count, fraction, positive, switch
from dmiddleware.classic.deque_buffer import BufferedData, DequeBuffer
from dmiddleware.classic.keywords import also_named
from dmiddleware.classic.replay_buffers.naive_buffer import PeriodicBuffer

__all__ = ["DequeBufferWrapper"]

_uses = Range("a number ≥ 1, or infinity", lambda value: value == math.inf or count.fits(value))


class DequeBufferWrapper(PeriodicBuffer):
    """A first-in, first-out buffer around a :class:`~dmiddleware.classic.DequeBuffer`.

    It draws uniformly or, with ``priority``, in proportion to priorities. Then each sample has
    ``replay_buffer_idx`` and, with ``priority_IS_weight``, its importance weight ``IS``.
    """

    config: ClassVar[dict[str, Any]] = {
        "max_use": Option(math.inf, _uses, "how often an item is drawn before it is removed"),
        "train_iter_per_log": Option(100, count, "training iterations between two logs"),
        "priority": Option(False, switch, "whether to draw in proportion to priorities"),
        "priority_IS_weight": Option(False, switch, "whether samples have importance weights"),
        "priority_power_factor": Option(0.6, at_least(0), "α, how strongly priorities count"),
        "IS_weight_power_factor": Option(
            0.4, fraction, "β, how much of the bias the weights correct at first"
        ),
        "IS_weight_anneal_train_iter": Option(100_000, count, "samples over which β rises to 1"),
        "priority_max_limit": Option(1000, positive, "largest priority"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cfg = self._cfg
        if math.isfinite(cfg.max_use):
            self._items.use(use_time_check(self._items, max_use=int(cfg.max_use)))
        if cfg.priority:
            self._items.use(
                PriorityExperienceReplay(
                    self._items,
                    IS_weight=cfg.priority_IS_weight,
                    priority_power_factor=cfg.priority_power_factor,
                    IS_weight_power_factor=cfg.IS_weight_power_factor,
                    IS_weight_anneal_train_iter=int(cfg.IS_weight_anneal_train_iter),
                )
            )
        self._drawn: list[int | None] = []
        self._next_log = 0

    @property
    def buffer(self) -> DequeBuffer:
        """The buffer inside."""
        return self._items

    def push(self, data: Any, cur_collector_envstep: int = -1) -> bool:
        """Append items; see :meth:`IBuffer.push`."""
        return super().push(data, cur_collector_envstep)

    def _push(self, items: list[Any], envstep: int) -> bool:
        if not self._cfg.priority:
            return super()._push(items, envstep)
        for item in items:
            has_priority = isinstance(item, Mapping) and item.get("priority") is not None
            meta = {"priority": self._limited(item["priority"])} if has_priority else None
            data = {k: v for k, v in item.items() if k != "priority"} if has_priority else item
            self._items.push(data, meta)
        self._pushed(len(items))
        return True

    @also_named(cur_learner_iter="train_iter")
    def sample(self, size: int, train_iter: int = 0) -> list[Any] | None:
        """Draw items.

        Args:
            size: number of items.
            train_iter: the learner's iteration, for logs.

        Returns:
            The items; None, logged once a minute, if there are too few. With ``priority``, an item
            may be drawn several times.
        """

        def draw() -> list[Any]:
            items: list[BufferedData] = self._items.sample(size)
            self._log_drawn(items, train_iter)
            self._drawn = [item.index for item in items]
            return [self._sample_of(item) for item in items]

        return self._draw(size, draw)

    def update(self, info: Mapping[str, Any]) -> None:
        """Set the priorities of sampled items; items that the buffer has dropped are skipped.

        Args:
            info: ``priority``, and ``replay_buffer_idx`` of the same items; without the latter,
                the items are those of the last sample, in their order.
        """
        if not self._cfg.priority or info.get("priority") is None:
            return
        with self._lock:
            indices = info.get("replay_buffer_idx", self._drawn)
            for index, priority in zip(indices, info["priority"], strict=True):
                self._items.update(int(index), meta={"priority": self._limited(priority)})

    def _limited(self, priority: Any) -> float:
        return min(float(priority), float(self._cfg.priority_max_limit))

    def _sample_of(self, item: BufferedData) -> Any:
        if not self._cfg.priority or not isinstance(item.data, Mapping):
            return item.data
        sample = {**item.data, "replay_buffer_idx": item.index}
        if self._cfg.priority_IS_weight:
            sample["IS"] = item.meta["priority_IS"]
        return sample

    def _log_drawn(self, items: Sequence[BufferedData], train_iter: int) -> None:
        if train_iter < self._next_log:
            return
        self._next_log = train_iter + int(self._cfg.train_iter_per_log)
        values: dict[str, float] = {"buffer_data_count": self._items.count()}
        for key in ("use_count", "priority"):
            found = [item.meta[key] for item in items if key in item.meta]
            if found:
                values |= {f"{key}_avg": float(np.mean(found)), f"{key}_max": float(np.max(found))}
        self._show(f"iteration {train_iter}", values, {"iter": train_iter})
