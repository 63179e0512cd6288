"""Buffer middleware: wraps a buffer's push, sample, update, delete and clear.

Add one to a :class:`DequeBuffer` with ``buffer.use``.
"""

# The lower-case class names are the ones that DI-engine's users know.
# ruff: noqa: N801

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from dmiddleware.classic.arguments import check_count, check_flag, check_number
from dmiddleware.classic.deque_buffer import BufferedData, DequeBuffer
from dmiddleware.data.samplers import Ints, PrioritySampler
from dmiddleware.schedule import Schedule
from dmiddleware.tree import Batch, map_leaves

__all__ = [
    "ActionMiddleware",
    "PriorityExperienceReplay",
    "check_priority",
    "clone_object",
    "staleness_check",
    "use_time_check",
    "group_sample",
    "padding",
    "sample_range_view",
]

Chain: TypeAlias = Callable[..., Any]
"""The rest of the buffer middleware, and at last the action itself."""


class ActionMiddleware:
    """The base of buffer middleware with one method for each action that it wraps.

    A method ``push``, ``sample``, ``update``, ``delete`` or ``clear`` takes the chain and the
    action's arguments; actions without a method run unchanged.
    """

    def __init__(self, buffer: DequeBuffer | None = None) -> None:
        if buffer is not None and not isinstance(buffer, DequeBuffer):
            raise TypeError(f"{type(self).__name__} needs a DequeBuffer, got {buffer!r:.100}")
        self._buffer = buffer

    def __call__(self, action: str, chain: Chain, *args: Any, **kwargs: Any) -> Any:
        """Run this middleware's part of an action."""
        method = getattr(self, action, None)
        return chain(*args, **kwargs) if method is None else method(chain, *args, **kwargs)

    def attach(self, buffer: DequeBuffer) -> None:
        """Belong to a buffer.

        Raises:
            ValueError: if the buffer middleware was made for another buffer that is not a view of
                the same items.
        """
        if self._buffer is not None and not self._buffer.shares_items(buffer):
            name = type(self).__name__
            raise ValueError(f"this {name} was made for another buffer; make one for each")
        self._buffer = buffer

    @property
    def _attached(self) -> DequeBuffer:
        if self._buffer is None:
            raise ValueError(
                f"this {type(self).__name__} has no buffer yet; pass it to buffer.use(...)"
            )
        return self._buffer


class PriorityExperienceReplay(ActionMiddleware):
    """Draws items in proportion to their priorities.

    On push, ``meta['priority']`` is the item's initial priority; without it, that is the highest
    priority given so far. ``buffer.update(index, meta={'priority': p})`` changes it. On sample,
    items are drawn in proportion to priority, with replacement; each has ``meta['priority']`` and,
    with ``IS_weight``, its importance weight in ``meta['priority_IS']``. Samples by ``indices`` are
    unchanged.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016.

    Args:
        buffer: the buffer, a :class:`~dmiddleware.classic.DequeBuffer`.
        IS_weight: whether to add importance weights.
        priority_power_factor: how strongly priorities count (α in the paper).
        IS_weight_power_factor: how much of the bias the weights correct at first (β in the paper).
        IS_weight_anneal_train_iter: number of samples over which β rises to 1; None keeps it.
        eps: added to every priority, so that every item can be drawn; positive.
    """

    def __init__(
        self,
        buffer: DequeBuffer,
        *,
        IS_weight: bool = True,  # noqa: N803  the established name
        priority_power_factor: float = 0.6,
        IS_weight_power_factor: float = 0.4,  # noqa: N803  the established name
        IS_weight_anneal_train_iter: int | None = 100_000,  # noqa: N803  the established name
        eps: float = 1e-6,
    ) -> None:
        super().__init__(buffer)
        self._weighted = check_flag("IS_weight", IS_weight)
        beta: float | Schedule = IS_weight_power_factor
        if IS_weight_anneal_train_iter is not None:
            beta = Schedule.linear(
                IS_weight_power_factor, 1.0, decay=IS_weight_anneal_train_iter, by="update"
            )
        self._sampler = PrioritySampler(alpha=priority_power_factor, beta=beta, eps=eps)
        self._sampler.attach(buffer.size)
        # What the sampler has not been given yet: priorities by index, and the new items.
        self._unset: dict[int, float] = {}
        self._first_new: int | None = None
        self._highest = self._sampler.highest
        self._lacks_priorities = True

    @property
    def lacks_priorities(self) -> bool:
        """Whether no priority was ever set, so that draws are uniform."""
        return self._lacks_priorities

    @property
    def beta(self) -> float:
        """The exponent of the weights at the next sample; annealing continues from a value set."""
        return self._sampler.beta

    @beta.setter
    def beta(self, beta: float) -> None:
        self._sampler.beta = beta

    def push(self, chain: Chain, data: Any, meta: Mapping[str, Any] | None = None) -> int:
        """Record the new item's priority."""
        meta = dict(meta) if meta else {}
        if "priority" in meta:
            self._lacks_priorities = False
        meta["priority"] = priority = check_priority(meta.get("priority", self._highest))
        index: int = chain(data, meta=meta)
        if self._first_new is None:
            self._first_new = index
        self._set(index, priority)
        if index - self._first_new + 1 == self._attached.size:
            self._give_to_sampler()
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
                "a buffer without this middleware"
            )
        rows = self._attached.drawable(sample_range)
        if not rows.count or size < 1:  # the buffer raises that there is not enough
            return chain(size=size, sample_range=sample_range, **kwargs)
        self._give_to_sampler()
        index, weights = self._sampler.draw(size, rows, self._attached.generator)
        items: list[BufferedData] = chain(indices=index.tolist(), **kwargs)
        if self._weighted and weights is not None:
            for item, weight in zip(items, weights.tolist(), strict=True):
                item.meta["priority_IS"] = weight
        return items

    def update(
        self, chain: Chain, index: int, data: Any = None, meta: Mapping[str, Any] | None = None
    ) -> bool:
        """Record a new priority, if ``meta`` has one."""
        if meta is None or meta.get("priority") is None:
            updated: bool = chain(index, data=data, meta=meta)
            return updated
        priority = check_priority(meta["priority"])
        self._lacks_priorities = False
        updated = chain(index, data=data, meta={**meta, "priority": priority})
        if updated:
            self._set(index, priority)
        return updated

    def delete(self, chain: Chain, indices: int | Iterable[int]) -> int:
        """Never draw deleted items again."""
        wanted = [indices] if isinstance(indices, int | np.integer) else list(indices)
        self._give_to_sampler()
        held = [index for index in wanted if index in self._attached]
        deleted: int = chain(wanted)
        if held:
            self._sampler.exclude(np.array(held))
        return deleted

    def clear(self, chain: Chain) -> None:
        """Forget all priorities."""
        self._give_to_sampler()
        chain()
        self._sampler.cleared()

    def state_dict(self) -> dict[str, Any]:
        """Return priorities and counters."""
        self._give_to_sampler()
        return self._sampler.state_dict(self._attached.drawable().every_index())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; the buffer's items are restored before."""
        self._unset, self._first_new, self._lacks_priorities = {}, None, False
        self._sampler.load_state_dict(state, self._attached.drawable().every_index())
        self._highest = self._sampler.highest

    def _set(self, index: int, priority: float) -> None:
        """Note a priority; the sampler gets all that were noted at once, which is faster."""
        self._unset[index] = priority
        if priority > self._highest:
            self._highest = priority

    def _give_to_sampler(self) -> None:
        if self._first_new is not None:
            self._sampler.pushed(self._first_new, max(self._unset) + 1 - self._first_new)
            self._first_new = None
        # Overwritten items count for the highest priority; the item that is now in a slot is later.
        self._sampler.update_priority(
            np.array(list(self._unset), np.int64), np.array(list(self._unset.values()), np.float64)
        )
        self._unset.clear()


class clone_object(ActionMiddleware):
    """Copies items on push and on sample, to protect what the buffer holds from changes.

    Without it, a DequeBuffer stores and returns the very objects that were pushed. Tensors are
    cloned without their gradient history; everything else is copied deeply.
    """

    def __init__(self) -> None:
        super().__init__()

    def push(self, chain: Chain, data: Any, meta: Mapping[str, Any] | None = None) -> Any:
        """Copy the item."""
        return chain(_clone(data), meta=_clone(meta))

    def update(
        self, chain: Chain, index: int, data: Any = None, meta: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy the new item."""
        return chain(index, data=_clone(data), meta=_clone(meta))

    def sample(self, chain: Chain, **kwargs: Any) -> Any:
        """Copy the items drawn."""
        return _clone(chain(**kwargs))


class staleness_check(ActionMiddleware):
    """Deletes items collected by too old a policy, before each sample.

    Samples state the learner's iteration: ``buffer.sample(n, train_iter_sample_data=i)``. An item's
    staleness is ``i`` minus the iteration of the policy that collected it; items above the limit
    are deleted. Push each item with ``meta['train_iter_data_collected']``; samples also have
    ``meta['staleness']``.

    Args:
        buffer: the buffer.
        max_staleness: the limit, in training iterations.
    """

    def __init__(self, buffer: DequeBuffer, max_staleness: float = float("inf")) -> None:
        super().__init__(buffer)
        self._max_staleness = check_number("max_staleness", max_staleness)
        # The iteration of the item in each slot; NaN where it is only in its meta.
        self._collected = np.full(buffer.size, np.nan)

    def push(self, chain: Chain, data: Any, **kwargs: Any) -> Any:
        """Check that the data states its iteration."""
        meta = kwargs.get("meta") or {}
        if "train_iter_data_collected" not in meta:
            raise ValueError(
                "staleness_check needs items pushed with meta={'train_iter_data_collected': <the "
                f"collecting policy's iteration>}}, got meta={meta}"
            )
        index: int = chain(data, **kwargs)
        self._collected[index % len(self._collected)] = meta["train_iter_data_collected"]
        return index

    def update(self, chain: Chain, index: Any, *args: Any, **kwargs: Any) -> Any:
        """Change items, perhaps their iterations too."""
        self._collected[index % len(self._collected)] = np.nan
        return chain(index, *args, **kwargs)

    def sample(
        self, chain: Chain, *args: Any, train_iter_sample_data: int | None = None, **kwargs: Any
    ) -> Any:
        """Delete stale items, then draw."""
        if train_iter_sample_data is None:
            raise ValueError(
                "staleness_check needs the learner's iteration: buffer.sample(n, "
                "train_iter_sample_data=<iteration>)"
            )
        self.delete_stale(train_iter_sample_data)
        result = chain(*args, **kwargs)
        for item in _items(result):
            collected = item.meta["train_iter_data_collected"]
            item.meta["staleness"] = train_iter_sample_data - collected
        return result

    def delete_stale(self, train_iter: int) -> int:
        """Delete the items that are too old at an iteration of the learner.

        Returns:
            Their number.
        """
        if not len(self._attached) or self._max_staleness == np.inf:
            return 0
        buffer = self._attached
        oldest = train_iter - self._max_staleness
        index = self._attached.drawable().every_index()
        collected = self._collected.take(index % buffer.size)
        for i in np.flatnonzero(np.isnan(collected)):
            collected[i] = self._attached.get(int(index[i])).meta["train_iter_data_collected"]
        self._collected[index % buffer.size] = collected
        return self._attached.delete(index[collected < oldest].tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the items have it all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read the iterations from the items again."""
        self._collected[:] = np.nan


class use_time_check(ActionMiddleware):
    """Deletes items that have been sampled often enough, after each sample.

    ``meta['use_count']`` counts how often an item has been sampled.

    Args:
        buffer: the buffer.
        max_use: how often an item is sampled at most. Repeated draws in one batch all count, so
            the last batch may exceed the limit.
    """

    def __init__(self, buffer: DequeBuffer, max_use: float = float("inf")) -> None:
        super().__init__(buffer)
        self._max_use = check_number("max_use", max_use, low=1)
        self._count = np.zeros(buffer.size, np.int64)

    def push(self, chain: Chain, *args: Any, **kwargs: Any) -> Any:
        """Start counting for new items."""
        index: int = chain(*args, **kwargs)
        self._count[index % self._attached.size] = 0
        return index

    def sample(self, chain: Chain, *args: Any, **kwargs: Any) -> Any:
        """Draw, then delete the items that have reached the limit."""
        result = chain(*args, **kwargs)
        items = _items(result)
        counts, used_up = self._count_uses(np.array([item.index for item in items], np.int64))
        for item, count in zip(items, counts.tolist(), strict=True):
            item.meta["use_count"] = count
        self._attached.delete(used_up.tolist())
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"count": self._count.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._count[...] = state["count"]

    def _count_uses(self, index: Ints) -> tuple[Ints, Ints]:
        """Return the new count of each index, and the indices that have reached the limit."""
        slots = index % self._attached.size
        np.add.at(self._count, slots, 1)
        counts = self._count[slots]
        return counts, np.unique(index[counts >= self._max_use])


class group_sample(ActionMiddleware):
    """Keeps only some items of each group that ``buffer.sample(n, groupby=…)`` returns.

    Args:
        size_in_group: number of items to keep; a smaller group is kept whole.
        ordered_in_group: keep consecutive items from a random start; if False, random ones.
        max_use_in_group: start where ``size_in_group`` items follow. If False, start anywhere: the
            last items are then as likely as the others, and some groups are shorter.
    """

    def __init__(
        self, size_in_group: int, *, ordered_in_group: bool = True, max_use_in_group: bool = True
    ) -> None:
        super().__init__()
        self._size = check_count("size_in_group", size_in_group)
        self._ordered = check_flag("ordered_in_group", ordered_in_group)
        self._max_use = check_flag("max_use_in_group", max_use_in_group)

    def sample(self, chain: Chain, *, groupby: str | None = None, **kwargs: Any) -> Any:
        """Draw groups and cut them."""
        if groupby is None:
            raise ValueError(
                "group_sample works on groups; sample with groupby=<a key of meta>, or use a "
                "buffer without this middleware"
            )
        groups = chain(groupby=groupby, **kwargs)
        return [self._keep(group) for group in groups]

    def _keep(self, group: list[BufferedData]) -> list[BufferedData]:
        generator = self._attached.generator
        if not self._ordered:
            chosen = generator.choice(len(group), min(self._size, len(group)), replace=False)
            return [group[i] for i in chosen]
        last_start = max(len(group) - self._size, 0) if self._max_use else len(group) - 1
        start = int(generator.integers(last_start + 1))
        return group[start : start + self._size]


class padding(ActionMiddleware):
    """Pads the groups of a sample to the size of the largest.

    Args:
        policy: ``"random"`` repeats random items of the same group, ``"none"`` adds
            ``BufferedData(None, None, {})``.
    """

    def __init__(self, policy: Literal["random", "none"] = "random") -> None:
        super().__init__()
        if policy not in ("random", "none"):
            raise ValueError(f"policy must be 'random' or 'none', got {policy!r}")
        self._policy = policy

    def sample(self, chain: Chain, **kwargs: Any) -> Any:
        """Draw groups and pad them."""
        groups = chain(**kwargs)
        if not groups or isinstance(groups[0], BufferedData):
            return groups
        longest = max(map(len, groups))
        return [group + self._filling(group, longest - len(group)) for group in groups]

    def _filling(self, group: list[BufferedData], n: int) -> list[BufferedData]:
        if self._policy == "none":
            return [BufferedData(None, None) for _ in range(n)]
        chosen = [group[i] for i in self._attached.generator.integers(len(group), size=n)]
        return [BufferedData(item.data, item.index, dict(item.meta)) for item in chosen]


class sample_range_view(ActionMiddleware):
    """Draws only from a part of the buffer by age: ``slice(start, end)``.

    ``sample_range_view(buffer, -1000)`` draws from the thousand newest. A ``sample_range`` given to
    ``sample`` applies within that part.

    Args:
        buffer: the buffer.
        start: position of the oldest item to draw, negative from the newest; None is the oldest.
        end: position after the newest item to draw; None includes the newest.
    """

    def __init__(
        self, buffer: DequeBuffer, start: int | None = None, end: int | None = None
    ) -> None:
        super().__init__(buffer)
        for name, position in (("start", start), ("end", end)):
            if position is not None and not isinstance(position, int):
                raise TypeError(f"{name} must be an integer or None, got {position!r:.100}")
        self._view = slice(start, end)

    def sample(
        self, chain: Chain, *args: Any, sample_range: slice | None = None, **kwargs: Any
    ) -> Any:
        """Draw from the part."""
        view = self._view
        if sample_range is not None:
            part = range(len(self._attached))[view][sample_range]
            view = slice(part.start, part.stop, part.step)
        return chain(*args, sample_range=view, **kwargs)


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Batch):
        return map_leaves(_clone, value)
    if isinstance(value, BufferedData):
        return BufferedData(_clone(value.data), value.index, _clone(value.meta))
    if type(value) is dict:
        return {key: _clone(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(_clone(item) for item in value)
    return copy.deepcopy(value)


def _items(result: Any) -> list[BufferedData]:
    """Return the items of a sample of a DequeBuffer, also of one in groups, without padding."""
    items = [x for part in result for x in (part if isinstance(part, list) else [part])]
    return [item for item in items if item.index is not None]


def check_priority(priority: object) -> float:
    """Return a priority as a float, checked; it may be a tensor or an array of no dimensions.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is negative, infinite or NaN.
    """
    if type(priority) is float and 0.0 <= priority < np.inf:
        return priority  # the usual case; buffers check every item
    if isinstance(priority, torch.Tensor | np.ndarray) and priority.ndim == 0:
        priority = priority.item()
    checked = check_number("priority", priority)
    if not np.isfinite(checked):
        raise ValueError(f"priority must be finite, got {checked}; look for NaN in the loss")
    return checked
