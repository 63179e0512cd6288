"""Limits on the age and the use of what a buffer holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dmiddleware.data.buffer import Buffer, BufferMiddleware
from dmiddleware.data.buffer_middleware.base import ActionMiddleware, Chain
from dmiddleware.data.tensor_buffer import TensorBuffer

__all__ = ["staleness_check", "use_time_check"]


def staleness_check(buffer: Buffer, max_staleness: float = float("inf")) -> BufferMiddleware:
    """Delete what was collected by too old a policy, before each sample.

    Samples name the learner's iteration: ``buffer.sample(n, train_iter_sample_data=i)``. An item
    whose staleness (``i`` minus the iteration of the policy that collected it) is above the limit
    is deleted. In a DequeBuffer each item is pushed with ``meta['train_iter_data_collected']``, and
    samples have ``meta['staleness']`` too; in a TensorBuffer the column ``collect_iter`` tells it.

    Args:
        buffer: a buffer of either kind.
        max_staleness: the limit, in training iterations.
    """
    return _StalenessCheck(buffer, max_staleness)


def use_time_check(buffer: Buffer, max_use: float = float("inf")) -> BufferMiddleware:
    """Delete what has been sampled often enough, after each sample.

    In a DequeBuffer, ``meta['use_count']`` tells how often an item has been sampled.

    Args:
        buffer: a buffer of either kind.
        max_use: how often an item is sampled at most. Drawn several times in one batch it counts
            several times, and may so exceed the limit in its last batch.
    """
    return _UseTimeCheck(buffer, max_use)


class _StalenessCheck(ActionMiddleware):
    def __init__(self, buffer: Buffer, max_staleness: float) -> None:
        super().__init__(buffer)
        self._max_staleness = max_staleness

    @property
    def name(self) -> str:
        return "staleness_check"

    def push(self, chain: Chain, data: Any, **kwargs: Any) -> Any:
        meta = kwargs.get("meta") or {}
        if isinstance(self.buffer, TensorBuffer):
            if "collect_iter" not in data:
                raise ValueError(
                    "staleness_check needs the column collect_iter (the iteration of the policy "
                    "that collected each row), which the batch lacks"
                )
        elif "train_iter_data_collected" not in meta:
            raise ValueError(
                "staleness_check needs items pushed with meta={'train_iter_data_collected': <the "
                f"collecting policy's iteration>}}, got meta={meta}"
            )
        return chain(data, **kwargs)

    def sample(
        self, chain: Chain, *args: Any, train_iter_sample_data: int | None = None, **kwargs: Any
    ) -> Any:
        if train_iter_sample_data is None:
            raise ValueError(
                "staleness_check needs the learner's iteration: buffer.sample(n, "
                "train_iter_sample_data=<iteration>)"
            )
        if isinstance(self.buffer, TensorBuffer):
            self._delete_rows(self.buffer, train_iter_sample_data)
            return chain(*args, **kwargs)
        collected = {int(i.index or 0): i.meta["train_iter_data_collected"] for i in self.deque}
        oldest = train_iter_sample_data - self._max_staleness
        self.deque.delete([index for index, at in collected.items() if at < oldest])
        result = chain(*args, **kwargs)
        for item in _flat(result):
            item.meta["staleness"] = train_iter_sample_data - collected[item.index]
        return result

    def _delete_rows(self, buffer: TensorBuffer, now: int) -> None:
        index = buffer.index
        if len(index):
            collected = buffer.get(index, ["collect_iter"])["collect_iter"].numpy()
            buffer.delete(index[now - collected > self._max_staleness])


class _UseTimeCheck(ActionMiddleware):
    def __init__(self, buffer: Buffer, max_use: float) -> None:
        super().__init__(buffer)
        if max_use < 1:
            raise ValueError(f"max_use is at least 1, got {max_use}")
        self._max_use = max_use
        self._count = np.zeros(buffer.size, np.int64)

    @property
    def name(self) -> str:
        return "use_time_check"

    def push(self, chain: Chain, *args: Any, **kwargs: Any) -> Any:
        pushed = chain(*args, **kwargs)
        index = np.arange(pushed.start, pushed.stop) if isinstance(pushed, range) else pushed
        self._count[index % self.buffer.size] = 0
        return pushed

    def sample(self, chain: Chain, *args: Any, **kwargs: Any) -> Any:
        result = chain(*args, **kwargs)
        if isinstance(self.buffer, TensorBuffer):
            index = result["index"].numpy()
        else:
            index = np.array([item.index for item in _flat(result)], np.int64)
        slots = index % self.buffer.size
        np.add.at(self._count, slots, 1)
        used_up = np.unique(index[self._count[slots] >= self._max_use])
        if not isinstance(self.buffer, TensorBuffer):
            for item, count in zip(_flat(result), self._count[slots].tolist(), strict=True):
                item.meta["use_count"] = count
        if len(used_up):
            self._delete(used_up)
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count[...] = state["count"]

    def _delete(self, index: Any) -> None:
        buffer = self.buffer
        if isinstance(buffer, TensorBuffer):
            buffer.delete(index)
        else:
            self.deque.delete(index.tolist())


def _flat(result: Any) -> list[Any]:
    """Return the items of a sample of a DequeBuffer, also if it came in groups; no padding."""
    items = [x for part in result for x in (part if isinstance(part, list) else [part])]
    return [item for item in items if item.index is not None]
