"""The face of ``ding.data.buffer``: the deque buffer here, with DI-engine's details."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

from dmiddleware import classic
from dmiddleware.classic import (
    BufferedData,
    DequeBufferWrapper,
    clone_object,
    group_sample,
    padding,
    sample_range_view,
    use_time_check,
)
from dmiddleware.classic.buffer import Buffer
from dmiddleware.classic.deque_buffer import draws_as_usual
from dmiddleware.errors import NotEnoughData

__all__ = [
    "Buffer",
    "BufferedData",
    "DequeBuffer",
    "DequeBufferWrapper",
    "PriorityExperienceReplay",
    "clone_object",
    "group_sample",
    "padding",
    "sample_range_view",
    "staleness_check",
    "use_time_check",
]

REFUSED: Final[Mapping[str, str]] = {
    "apply_middleware": "derive from DequeBuffer, whose actions run its buffer middleware",
    "BufferIndex": "an item's index is a number that never changes",
}


class _Pushed(int):
    """An item's index, with the item's attributes."""

    item: BufferedData

    def __new__(cls, item: BufferedData) -> Self:
        index = super().__new__(cls, item.index or 0)
        index.item = item
        return index

    @property
    def index(self) -> int:
        return int(self)

    @property
    def data(self) -> Any:
        return self.item.data

    @property
    def meta(self) -> dict[str, Any]:
        return self.item.meta


class _Positions(dict[int, int]):
    def has(self, index: int) -> bool:
        return index in self


class DequeBuffer(classic.DequeBuffer):
    """A :class:`dmiddleware.classic.DequeBuffer` with DI-engine's details.

    ``push`` returns an index with ``index``, ``data`` and ``meta``, an item that is drawn twice is
    a copy the second time, and too few items with ``ignore_insufficient`` are none.

    Args:
        size: capacity in items.
        sliced: whether ``unroll_len`` items of a group begin at a multiple of ``unroll_len``, or
            are the group's last ones.
    """

    def __init__(self, size: int, sliced: bool = False) -> None:
        super().__init__(size)
        self.sliced = sliced
        self._meta_keys: tuple[str, ...] = ()

    @property
    def storage(self) -> list[BufferedData]:
        """The items themselves, oldest first."""
        return [self._item(int(index)) for index in self.drawable().every_index()]

    @property
    def indices(self) -> _Positions:
        """The position of each index."""
        return _Positions({int(x): i for i, x in enumerate(self.drawable().every_index())})

    @property
    def meta_index(self) -> dict[str, list[Any]]:
        """The items' values of the metadata whose keys were set here."""
        return {key: [item.meta.get(key) for item in self.storage] for key in self._meta_keys}

    @meta_index.setter
    def meta_index(self, index: Mapping[str, Any]) -> None:
        self._meta_keys = tuple(index)

    @draws_as_usual
    def sample(
        self,
        size: int | None = None,
        indices: Any = None,
        replace: bool = False,
        sample_range: slice | None = None,
        ignore_insufficient: bool = False,
        groupby: str | None = None,
        unroll_len: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Draw items; see :meth:`dmiddleware.classic.DequeBuffer.sample`."""
        options = {
            "size": size,
            "indices": indices,
            "replace": replace,
            "sample_range": sample_range,
            "ignore_insufficient": ignore_insufficient,
            "groupby": groupby,
            "unroll_len": unroll_len,
        }
        chosen = {key: value for key, value in options.items() if value not in (None, False)}
        return self._through("sample", self._sample, **chosen, **kwargs)

    def save_data(self, file_name: str | Path, *, allow_pickle: bool = True) -> None:
        """Write the items to a file."""
        super().save_data(file_name, allow_pickle=allow_pickle)

    def load_data(self, file_name: str | Path, *, allow_pickle: bool = True) -> None:
        """Read items from a file. It may run code: read only files that you trust."""
        super().load_data(file_name, allow_pickle=allow_pickle)

    def _push(self, data: Any, meta: Mapping[str, Any] | None = None) -> int:
        return _Pushed(self._item(super()._push(data, meta)))

    @draws_as_usual
    def _sample(
        self,
        size: int | None = None,
        indices: Any = None,
        replace: bool = False,
        sample_range: slice | None = None,
        ignore_insufficient: bool = False,
        groupby: str | None = None,
        unroll_len: int | None = None,
    ) -> Any:
        try:
            result = super()._sample(
                size=size,
                indices=indices or None,
                replace=replace,
                sample_range=sample_range,
                ignore_insufficient=ignore_insufficient,
                groupby=groupby,
                unroll_len=unroll_len,
            )
        except NotEnoughData as error:
            raise NotEnoughData(f"There are less than {size or len(indices)}: {error}") from error
        if size is not None and len(result) < size:
            return []
        return _independent(result)

    def _start_in_group(self, length: int, unroll_len: int) -> int:
        if not self.sliced:
            return super()._start_in_group(length, unroll_len)
        piece = int(self._generator.integers(length)) // unroll_len
        return min(piece * unroll_len, length - unroll_len)

    def _update(self, index: Any, data: Any = None, meta: Mapping[str, Any] | None = None) -> bool:
        return not isinstance(index, str) and super()._update(index, data, meta)


def _independent(result: list[Any]) -> list[Any]:
    drawn: set[int | None] = set()
    groups = [part if isinstance(part, list) else [part] for part in result]
    for item in [item for group in groups for item in group]:
        if item.index in drawn:
            item.data = copy.deepcopy(item.data)
        drawn.add(item.index)
    return result


class PriorityExperienceReplay(classic.PriorityExperienceReplay):
    """Draws items in proportion to their priorities; samples have ``meta['priority_idx']``."""

    @property
    def buffer_idx(self) -> dict[int, int]:
        """The place of each index."""
        size = self._attached.size
        return {int(index): int(index) % size for index in self._attached.drawable().every_index()}

    def sample(self, chain: Any, **options: Any) -> Any:
        """Draw by priority."""
        items = super().sample(chain, **options)
        for item in items:
            item.meta["priority_idx"] = item.index % self._attached.size
        return items


class staleness_check(classic.staleness_check):  # noqa: N801 (DI-engine's name)
    """Deletes items collected by too old a policy, before each sample."""

    def push(self, chain: Any, data: Any, **kwargs: Any) -> Any:
        """Check that the data state their iteration.

        Raises:
            AssertionError: if they do not.
        """
        assert "train_iter_data_collected" in (kwargs.get("meta") or {}), (
            "staleness_check needs items pushed with meta={'train_iter_data_collected': iteration}"
        )
        return super().push(chain, data, **kwargs)
