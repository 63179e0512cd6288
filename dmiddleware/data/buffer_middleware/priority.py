"""Prioritized replay for a DequeBuffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from dmiddleware.data.buffer import Buffer
from dmiddleware.data.buffer_middleware.base import ActionMiddleware, Chain
from dmiddleware.data.deque_buffer import BufferedData
from dmiddleware.data.samplers import PrioritySampler

__all__ = ["PriorityExperienceReplay"]


class PriorityExperienceReplay(ActionMiddleware):
    """Draws items in proportion to their priorities.

    On push, ``meta['priority']`` is an item's first priority; without it, that is the highest given
    so far. ``buffer.update(index, meta={'priority': p})`` changes it. On sample, items are drawn in
    proportion to priority, with replacement; each has ``meta['priority']`` and, if wanted, its
    importance weight in ``meta['priority_IS']``. Samples that name ``indices`` are left alone.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016.

    Args:
        buffer: the buffer, a :class:`~dmiddleware.data.DequeBuffer`.
        IS_weight: whether to add importance weights.
        priority_power_factor: how much priorities count (α of the paper).
        IS_weight_power_factor: how much of the bias the weights correct at first (β of the paper).
        IS_weight_anneal_train_iter: number of samples over which that rises to 1.
    """

    instead: ClassVar[str | None] = (
        "build the buffer with sampler=PrioritySampler(), which does the same much faster"
    )

    def __init__(
        self,
        buffer: Buffer,
        *,
        IS_weight: bool = True,  # noqa: N803  the established name
        priority_power_factor: float = 0.6,
        IS_weight_power_factor: float = 0.4,  # noqa: N803  the established name
        IS_weight_anneal_train_iter: int | None = 100_000,  # noqa: N803  the established name
    ) -> None:
        super().__init__(buffer)
        self._weighted = IS_weight
        self._sampler = PrioritySampler(
            alpha=priority_power_factor,
            beta=IS_weight_power_factor,
            beta_anneal_steps=IS_weight_anneal_train_iter,
        )
        self._sampler.attach(buffer.size)

    @property
    def beta(self) -> float:
        """The exponent of the weights at the next sample."""
        return self._sampler.beta

    def push(self, chain: Chain, data: Any, meta: Mapping[str, Any] | None = None) -> Any:
        """Note the new item's priority."""
        priority = (meta or {}).get("priority", self._sampler.highest)
        self._check(priority)
        index = chain(data, meta={**(meta or {}), "priority": priority})
        self._sampler.pushed(index, 1)
        self._set(index, priority)
        return index

    def sample(
        self,
        chain: Chain,
        *,
        size: int | None = None,
        indices: Any = None,
        groupby: str | None = None,
        sample_range: slice | None = None,
        **kwargs: Any,
    ) -> Any:
        """Draw by priority."""
        if indices is not None or size is None:
            return chain(
                size=size, indices=indices, groupby=groupby, sample_range=sample_range, **kwargs
            )
        if groupby is not None:
            raise ValueError(
                "PriorityExperienceReplay draws items, not groups; sample without groupby, or use "
                "a buffer without it"
            )
        rows = self.deque.drawable(sample_range)
        if not rows.count or size < 1:  # the buffer tells that there is not enough
            return chain(size=size, sample_range=sample_range, **kwargs)
        index, weights = self._sampler.draw(size, rows, self.buffer.generator)
        items: list[BufferedData] = chain(indices=index.tolist(), **kwargs)
        if self._weighted and weights is not None:
            for item, weight in zip(items, weights.tolist(), strict=True):
                item.meta["priority_IS"] = weight
        return items

    def update(
        self, chain: Chain, index: int, data: Any = None, meta: Mapping[str, Any] | None = None
    ) -> Any:
        """Note a new priority, if there is one in ``meta``."""
        priority = None if meta is None else meta.get("priority")
        if priority is not None:
            self._check(priority)
        updated = chain(index, data=data, meta=meta)
        if updated and priority is not None:
            self._set(index, priority)
        return updated

    def delete(self, chain: Chain, indices: int | Iterable[int]) -> Any:
        """Never draw deleted items again."""
        wanted = [indices] if isinstance(indices, int | np.integer) else list(indices)
        held = [index for index in wanted if index in self.deque]
        deleted = chain(wanted)
        if held:
            self._sampler.deleted(np.array(held))
        return deleted

    def clear(self, chain: Chain) -> None:
        """Forget all priorities."""
        chain()
        self._sampler.cleared()

    def state_dict(self) -> dict[str, Any]:
        """Return priorities and counters."""
        return self._sampler.state_dict(self.deque.drawable().every_index())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; the buffer has its items back by then."""
        self._sampler.load_state_dict(state, self.deque.drawable().every_index())

    def _set(self, index: int, priority: float) -> None:
        self._sampler.update_priority(np.array([index]), np.array([priority], np.float64))

    def _check(self, priority: Any) -> None:
        if not 0.0 <= float(priority) < np.inf:
            raise ValueError(f"a priority is finite and not negative, got {priority}")
