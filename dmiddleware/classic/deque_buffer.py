"""DequeBuffer: a buffer of any Python objects, each with metadata."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from dmiddleware.classic.arguments import check_count
from dmiddleware.classic.buffer import Buffer
from dmiddleware.classic.keywords import also_named
from dmiddleware.classic.stored_rows import StoredRow
from dmiddleware.data.buffer_state import check_state
from dmiddleware.data.samplers import Eligible, Ints
from dmiddleware.errors import CheckpointMismatch, NotEnoughData
from dmiddleware.files.checkpoint import load_checkpoint, save_checkpoint
from dmiddleware.settings import takes_options

__all__ = ["BufferedData", "DequeBuffer"]

_log = logging.getLogger(__name__)


class BufferedData:
    """One item of a :class:`DequeBuffer`, as sampling returns it.

    Args:
        data: the object that was pushed, not a copy.
        index: its running number since the buffer was created; None for padding.
        meta: a copy of its metadata.

    Attributes:
        index: as given.
        meta: as given.
        stored: what the buffer holds: the data, or the row that stands for it.
    """

    __slots__ = ("index", "meta", "stored")

    def __init__(self, data: Any, index: int | None, meta: dict[str, Any] | None = None) -> None:
        self.stored = data
        self.index = index
        self.meta = {} if meta is None else meta

    @property
    def data(self) -> Any:
        """The object that was pushed, not a copy."""
        return self.stored.as_dict() if isinstance(self.stored, StoredRow) else self.stored

    @data.setter
    def data(self, data: Any) -> None:
        self.stored = data

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BufferedData):
            return NotImplemented
        return (self.data, self.index, self.meta) == (other.data, other.index, other.meta)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BufferedData({self.data!r}, {self.index!r}, {self.meta!r})"

    def __reduce__(self) -> Any:
        return BufferedData, (self.data, self.index, self.meta)


@dataclass(slots=True)
class _Span:
    """The indices of a buffer's items: from ``first`` to before ``total``."""

    first: int = 0
    total: int = 0


F = TypeVar("F", bound=Callable[..., Any])


def draws_as_usual(method: F) -> F:
    """Mark a method of sampling that draws what :class:`DequeBuffer` draws."""
    method.draws_as_usual = True  # type: ignore[attr-defined]
    return method


class DequeBuffer(Buffer, Dataset[BufferedData]):
    """A buffer of any Python objects that drops its oldest items when it is full.

    It handles items one by one, which suits whole episodes and irregular objects. For transitions
    of one structure, :class:`~dmiddleware.data.TensorBuffer` is many times faster.

    It is also a torch ``Dataset``: ``buffer[0]`` is its oldest item. A ``DataLoader`` stacks the
    objects that were pushed, unless it has a ``collate_fn``.

    Args:
        size: capacity in items.
        seed: seed of the buffer's random generator; None takes one from the system.
    """

    @takes_options
    def __init__(self, size: int, *, seed: int | None = None) -> None:
        super().__init__(size, seed)
        self._slots: list[BufferedData | None] = [None] * size
        self._deleted = _DeletedItems(size)
        self._groups = _Groups()
        self._span = _Span()

    def __len__(self) -> int:
        return self._span.total - self._span.first - len(self._deleted)

    def __getitem__(self, position: int) -> BufferedData:
        """Return an item by its position in the order of age, 0 being the oldest.

        Raises:
            IndexError: if there is no such item.
        """
        with self._lock:
            rows = self.drawable()
            try:
                offset = range(rows.count)[position]
            except IndexError:
                raise IndexError(
                    f"the buffer has {rows.count} items, and none at position {position}"
                ) from None
            return self._copy(
                int(rows.first + offset if rows.index is None else rows.index[offset])
            )

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int | np.integer) and self._find(int(index)) is not None

    def __iter__(self) -> Iterator[BufferedData]:
        """Iterate over a snapshot of the items, oldest first."""
        with self._lock:
            items = [self._copy(int(i)) for i in self.drawable().every_index()]
        return iter(items)

    def push(self, data: Any, meta: Mapping[str, Any] | None = None) -> int:
        """Append an item; a full buffer drops its oldest one.

        Args:
            data: any object; it is not copied (see ``clone_object``).
            meta: metadata by name.

        Returns:
            Its index, which never changes.

        Raises:
            TypeError: if ``meta`` is not a dictionary, or samples are grouped by a key whose value
                in it cannot be hashed; the buffer is unchanged.
        """
        index: int = self._through("push", self._push, data, meta=meta)
        return index

    @draws_as_usual
    def sample(
        self,
        size: int | None = None,
        indices: Sequence[int] | None = None,
        *,
        replace: bool = False,
        sample_range: slice | None = None,
        ignore_insufficient: bool = False,
        groupby: str | None = None,
        unroll_len: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Draw items, or fetch items by index.

        Args:
            size: number of items, or of groups.
            indices: fetch these items, in this order.
            replace: whether an item (or group) may be drawn twice.
            sample_range: draw only from this part of the items by age: ``slice(-10, None)`` is the
                ten newest.
            ignore_insufficient: if there are too few, return those and log a warning instead of
                raising.
            groupby: draw groups: all items with the same value of this key of ``meta``, oldest
                first. Items without the key belong to no group.
            unroll_len: return this many consecutive items of each group, from a random start;
                shorter groups are not drawn. Requires ``groupby``.
            kwargs: for buffer middleware.

        Returns:
            ``list[BufferedData]``, or, with ``groupby``, ``list[list[BufferedData]]``.

        Raises:
            NotEnoughData: if there are fewer than ``size`` items (or groups) to draw from, or an
                item of ``indices`` is no longer held.
            TypeError: if ``size`` is not an integer.
            ValueError: if the options contradict each other.
        """
        return self._through(
            "sample",
            self._sample,
            size=size,
            indices=indices,
            replace=replace,
            sample_range=sample_range,
            ignore_insufficient=ignore_insufficient,
            groupby=groupby,
            unroll_len=unroll_len,
            **kwargs,
        )

    def get(self, index: int) -> BufferedData:
        """Return one item by its index.

        Raises:
            IndexError: if it is not held.
        """
        with self._lock:
            if index not in self:
                raise IndexError(
                    f"the buffer does not hold item {index}; it was never pushed, or dropped"
                )
            return self._copy(index)

    def get_by_index(self, index: int) -> BufferedData:
        """Return one item by its index, as :meth:`get` does.

        Raises:
            IndexError: if it is not held.
        """
        return self.get(index)

    def view(self) -> Self:
        """Return a buffer with the same items, and buffer middleware that can differ.

        Both see all pushes, changes and deletions of either. The view begins with the buffer
        middleware of this buffer; later ones belong only to the buffer that they are added to.
        """
        with self._lock:
            view = copy.copy(self)
            view._middleware = list(self._middleware)
        return view

    def shares_items(self, buffer: DequeBuffer) -> bool:
        """Return whether one of the two is a view of the other, or both are views of a third."""
        return self._slots is buffer._slots

    def update(self, index: int, data: Any = None, meta: Mapping[str, Any] | None = None) -> bool:
        """Change an item.

        Args:
            index: its index.
            data: its new object; None keeps the old one.
            meta: metadata to set; other keys stay.

        Returns:
            Whether the item was held.

        Raises:
            TypeError: if ``index`` is not an integer, or as in :meth:`push`.
        """
        updated: bool = self._through("update", self._update, index, data=data, meta=meta)
        return updated

    def delete(self, indices: int | Iterable[int]) -> int:
        """Remove items.

        Args:
            indices: one or several; those not held are skipped.

        Returns:
            The number of items removed.
        """
        n_deleted: int = self._through("delete", self._delete, indices)
        return n_deleted

    def clear(self) -> None:
        """Remove all items; indices continue to count."""
        self._through("clear", self._clear)

    def drawable(self, sample_range: slice | None = None) -> Eligible:
        """Return the items that can be drawn: all of them, or a part by age."""
        first, total, count = self._span.first, self._span.total, len(self)
        index = self._deleted.present(first, total) if len(self._deleted) else None
        if sample_range is None:
            return Eligible(first, count, total, self._size, index=index)
        part = range(count)[sample_range]
        chosen: Ints = np.arange(part.start, part.stop, part.step)
        chosen = first + chosen if index is None else index[chosen]
        return Eligible(first, len(part), total, self._size, len(part) == count, chosen)

    def export_data(self) -> list[BufferedData]:
        """Return all items, oldest first."""
        return list(self)

    def import_data(self, items: Iterable[tuple[Any, Mapping[str, Any] | None]]) -> None:
        """Push pairs of data and meta; faster than pushing them one by one."""
        with self._lock:
            push = self._chain("push", self._push)
            for data, meta in items:
                push(data, meta=meta)

    def state_dict(self) -> dict[str, Any]:
        """Return items, order and generator.

        ``save_checkpoint`` can write it if it can write the items; for others, see
        :meth:`save_data`.
        """
        with self._lock:
            return {
                "size": self._size,
                "total": self._span.total,
                "items": [(item.index, item.data, item.meta) for item in self],
                **self._common_state(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatch: if the buffer has a different size or other buffer middleware.
        """
        with self._lock:
            check_state("DequeBuffer", state, ("size", "total", "items", "generator"))
            if state["size"] != self._size:
                raise CheckpointMismatch(
                    f"the state comes from a buffer with size={state['size']}, but this one has "
                    f"size={self._size}; build it with the same size"
                )
            self._restore(state["items"], state["total"])
            self._load_common_state(state)

    @also_named(file_name="path")
    def save_data(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        """Write the items to a file atomically.

        Args:
            path: the file; its folder is created if needed. As a keyword also ``file_name``.
            allow_pickle: whether to pickle objects that a checkpoint cannot hold (see
                ``save_checkpoint`` for those it can). Loading them runs code from the file.

        Raises:
            TypeError: if there is such an object and ``allow_pickle`` is False, with its path.
            CheckpointWriteError: if the file cannot be written.
        """
        with self._lock:
            state = {"items": [(item.data, item.meta) for item in self]}
        try:
            save_checkpoint(path, state)
        except TypeError:
            if not allow_pickle:
                raise
            save_checkpoint(path, {"pickled": pickle.dumps(state)})

    @also_named(file_name="path")
    def load_data(self, path: str | Path, *, allow_pickle: bool = False) -> None:
        """Replace the items with those that :meth:`save_data` wrote; only the newest that fit.

        They are pushed one by one, through the buffer middleware, and get new indices.

        Args:
            path: the file.
            allow_pickle: whether to load pickled objects, which can run any code. Use it only for
                files that you trust.

        Raises:
            ValueError: if the file holds pickled objects and ``allow_pickle`` is False.
            FileNotFoundError: if the file does not exist.
            CheckpointDamaged: if the file is incomplete.
        """
        state = load_checkpoint(path)
        if "pickled" in state:
            if not allow_pickle:
                raise ValueError(
                    f"{path} holds pickled objects, and loading them can run any code; pass "
                    "allow_pickle=True if you trust the file"
                )
            state = pickle.loads(state["pickled"])
        with self._lock:
            self.clear()
            self.import_data(state["items"])

    def _push(self, data: Any, meta: Mapping[str, Any] | None = None) -> int:
        if meta is not None and not isinstance(meta, Mapping):
            raise TypeError(f"meta must be a dictionary or None, got {meta!r:.100}")
        index = self._span.total
        item = BufferedData(data, index, dict(meta) if meta else {})
        slot = index % self._size
        old = self._slots[slot]
        if self._groups.is_watching:
            self._groups.check(index, item.meta)
            if old is not None:
                self._groups.remove(old.index, old.meta)
            self._groups.add(index, item.meta)
        if index - self._size >= self._span.first:
            self._span.first = index - self._size + 1
        self._slots[slot] = item
        self._span.total += 1
        self._deleted.write(index, 1)
        return index

    @draws_as_usual
    def _sample(
        self,
        *,
        size: int | None = None,
        indices: Sequence[int] | None = None,
        replace: bool = False,
        sample_range: slice | None = None,
        ignore_insufficient: bool = False,
        groupby: str | None = None,
        unroll_len: int | None = None,
    ) -> Any:
        size = _checked_size(size, indices, groupby, unroll_len)
        rows = self.drawable(sample_range)
        result: list[Any]
        if indices is not None:
            allowed = None if sample_range is None else set(rows.every_index().tolist())
            result = [
                self._copy(i) for i in indices if i in self and (allowed is None or i in allowed)
            ]
        elif groupby is not None:
            result = self._sample_groups(size, groupby, replace, unroll_len, rows)
        else:
            result = [self._copy(i) for i in self._draw(rows, size, replace)]
        if len(result) < size:
            message = (
                f"asked for {size} {'groups' if groupby else 'items'}, but only {len(result)} can "
                "be drawn; push more before sampling, or sample fewer"
            )
            if not ignore_insufficient:
                raise NotEnoughData(message)
            _log.warning(message)
        return result

    def drawn_to_read(self, n: int) -> list[BufferedData] | None:
        """Draw the items that ``sample(n)`` would draw, for someone who does not change them.

        Returns:
            The items themselves, instead of copies; None if a sample may be something else: a
            buffer middleware or a method of a subclass sees it, or there are too few items.
        """
        methods: list[Any] = [type(self).sample, type(self)._sample]
        is_usual = all(getattr(method, "draws_as_usual", False) for method in methods)
        if not is_usual or self._middleware:
            return None
        with self._lock:
            rows = self.drawable(None)
            if n > rows.count:
                return None
            slots, size = self._slots, self._size
            items: list[Any] = [slots[at % size] for at in self._draw(rows, n, replace=False)]
            return items

    def _draw(self, rows: Eligible, size: int, replace: bool) -> list[int]:
        """Draw the indices of items."""
        chosen = self._choose(rows.count, size, replace)
        index = rows.first + chosen if rows.index is None else rows.index[chosen]
        indices: list[int] = index.tolist()
        return indices

    def _sample_groups(
        self,
        size: int,
        groupby: str,
        replace: bool,
        unroll_len: int | None,
        rows: Eligible,
    ) -> list[list[BufferedData]]:
        if rows.is_all:
            self._groups.watch(groupby, (self._item(int(i)) for i in rows.every_index()))
            groups = self._groups.of(groupby)
        else:
            part = _Groups()
            part.watch(groupby, (self._item(int(i)) for i in rows.every_index()))
            groups = part.of(groupby)
        long_enough = [group for group in groups if len(group) >= (unroll_len or 1)]
        drawn = [list(long_enough[k]) for k in self._choose(len(long_enough), size, replace)]
        if unroll_len is not None:
            starts = [self._start_in_group(len(group), unroll_len) for group in drawn]
            drawn = [g[s : s + unroll_len] for g, s in zip(drawn, starts, strict=True)]
        return [[self._copy(i) for i in group] for group in drawn]

    def _start_in_group(self, length: int, unroll_len: int) -> int:
        """Return where the items that are taken from a group begin."""
        return int(self._generator.integers(length - unroll_len + 1))

    def _choose(self, count: int, size: int, replace: bool) -> Ints:
        if count and replace:
            return self._generator.integers(count, size=size)
        chosen: Ints = self._generator.choice(count, min(size, count), replace=False)
        return chosen

    def _update(self, index: int, data: Any = None, meta: Mapping[str, Any] | None = None) -> bool:
        if isinstance(index, bool) or not isinstance(index, int | np.integer):
            raise TypeError(
                f"index must be an integer, got {index!r:.100}; update several items one by one"
            )
        item = self._find(int(index))
        if item is None:
            return False
        is_regrouped = bool(meta) and self._groups.is_watching
        if is_regrouped:
            self._groups.check(index, meta or {})
            self._groups.remove(index, item.meta)
        if data is not None:
            item.data = data
        item.meta.update(meta or {})
        if is_regrouped:
            self._groups.add(index, item.meta, in_between=True)
        return True

    def _delete(self, indices: int | Iterable[int]) -> int:
        wanted = [indices] if isinstance(indices, int | np.integer) else list(indices)
        gone = sorted({int(index) for index in wanted if index in self})
        for index in gone:
            self._groups.remove(index, self._item(index).meta)
            self._slots[index % self._size] = None
        if gone:
            self._deleted.delete(np.array(gone))
            oldest = self._deleted.oldest_present(self._span.first, self._span.total)
            self._deleted.drop(self._span.first, oldest)
            self._span.first = oldest
        return len(gone)

    def _clear(self) -> None:
        self._slots[:] = [None] * self._size
        self._deleted.clear()
        self._groups.clear()
        self._span.first = self._span.total

    def _restore(self, items: Sequence[tuple[int, Any, Mapping[str, Any]]], total: int) -> None:
        self._clear()
        self._span.first = items[0][0] if items else total
        self._span.total = total
        self._deleted.delete(
            np.setdiff1d(np.arange(self._span.first, total), [item[0] for item in items])
        )
        for index, data, meta in items:
            self._slots[index % self._size] = BufferedData(data, index, dict(meta))

    def _find(self, index: int) -> BufferedData | None:
        if not self._span.first <= index < self._span.total:
            return None
        return self._slots[index % self._size]

    def _item(self, index: int) -> BufferedData:
        item = self._find(index)
        assert item is not None  # callers look up what is held
        return item

    def _copy(self, index: int) -> BufferedData:
        item = self._slots[index % self._size]
        assert item is not None  # callers look up what is held
        return BufferedData(item.stored, item.index, item.meta.copy())


class _DeletedItems:
    """The slots of a ring whose item was deleted before it was overwritten.

    Args:
        size: number of slots.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._is_deleted = np.zeros(size, np.bool_)
        self._count = 0
        self._present: Ints | None = None

    def __len__(self) -> int:
        return self._count

    def at(self, index: Ints) -> npt.NDArray[np.bool_]:
        """Return which of these items (any shape) were deleted."""
        return self._is_deleted.take(index % self._size)

    def delete(self, index: Ints) -> None:
        """Mark items as deleted; all of them are held, and none occurs twice."""
        self._is_deleted[index % self._size] = True
        self._count += len(index)
        self._present = None

    def write(self, first: int, n: int) -> None:
        """Mark items ``first … first + n - 1`` as written."""
        self._present = None
        if not self._count:
            return
        self.drop(first, first + n)

    def drop(self, first: int, last: int) -> None:
        """Remove the marks of items ``first … last - 1``, which have left the ring."""
        slots = np.arange(first, last) % self._size
        self._count -= int(np.count_nonzero(self._is_deleted[slots]))
        self._is_deleted[slots] = False
        self._present = None

    def clear(self) -> None:
        """Remove all marks."""
        self._is_deleted[:] = False
        self._count = 0
        self._present = None

    def oldest_present(self, first: int, total: int) -> int:
        """Return the first item of ``first … total - 1`` that was not deleted; ``total`` if none.

        Takes time in proportion to the items before it.
        """
        n = 64
        while first < total:
            marks = self.at(np.arange(first, min(first + n, total)))
            if not marks.all():
                return first + int(marks.argmin())
            first, n = first + len(marks), 2 * n
        return total

    def present(self, first: int, total: int) -> Ints:
        """Return the items of ``first … total - 1`` that were not deleted, ascending."""
        if self._present is None:
            index = np.arange(first, total)
            self._present = index[~self.at(index)]
        return self._present


class _Groups:
    """The groups of every key that samples were grouped by, kept up to date with the items."""

    def __init__(self) -> None:
        # By key, then by value: the indices, ascending (dictionaries used as ordered sets).
        self._by_key: dict[str, dict[Hashable, dict[int, None]]] = {}

    @property
    def is_watching(self) -> bool:
        """Whether any key is watched."""
        return bool(self._by_key)

    def watch(self, key: str, items: Iterable[BufferedData]) -> None:
        """Start to keep the groups of a key, from the present items; has no effect the second time.

        Raises:
            TypeError: if an item cannot be grouped; the key is then not watched.
        """
        if key in self._by_key:
            return
        held = [(item.index, item.meta) for item in items if item.index is not None]
        for index, meta in held:
            _check_hashable(key, index, meta)
        self._by_key[key] = {}
        for index, meta in held:
            self._add(key, index, meta)

    def check(self, index: int, meta: Mapping[str, Any]) -> None:
        """Check an item before anything is changed for it.

        Raises:
            TypeError: if the value of a watched key cannot be hashed.
        """
        for key in self._by_key:
            _check_hashable(key, index, meta)

    def of(self, key: str) -> list[dict[int, None]]:
        """Return the groups of a watched key, each as its indices, ascending.

        The group of the oldest item comes first.
        """
        return sorted(self._by_key[key].values(), key=lambda group: next(iter(group)))

    def add(self, index: int, meta: Mapping[str, Any], *, in_between: bool = False) -> None:
        """Add an item: the newest one, or one in between."""
        for key, groups in self._by_key.items():
            self._add(key, index, meta)
            if in_between and key in meta:
                groups[meta[key]] = dict.fromkeys(sorted(groups[meta[key]]))

    def remove(self, index: int | None, meta: Mapping[str, Any]) -> None:
        """Remove an item."""
        for key, groups in self._by_key.items():
            if key in meta and index is not None:
                group = groups[meta[key]]
                del group[index]
                if not group:
                    del groups[meta[key]]

    def clear(self) -> None:
        """Remove all items, and watch no key."""
        self._by_key.clear()

    def _add(self, key: str, index: int, meta: Mapping[str, Any]) -> None:
        if key in meta:
            self._by_key[key].setdefault(meta[key], {})[index] = None


def _stack_items(items: list[BufferedData], *, collate_fn_map: Any = None) -> Any:
    """Stack the objects of several items, as torch's default collation stacks such objects."""
    return collate([item.data for item in items], collate_fn_map=collate_fn_map)


default_collate_fn_map[BufferedData] = _stack_items


def _check_hashable(key: str, index: int, meta: Mapping[str, Any]) -> None:
    try:
        hash(meta.get(key))
    except TypeError:
        raise TypeError(
            f"samples are grouped by meta[{key!r}], but its value for item {index} is a "
            f"{type(meta[key]).__name__}, which cannot be hashed; use a number, a string or a "
            "tuple of them"
        ) from None


def _checked_size(
    size: int | None, indices: Sequence[int] | None, groupby: str | None, unroll_len: int | None
) -> int:
    if size is not None:
        check_count("size", size, at_least=0)
    if unroll_len is not None:
        check_count("unroll_len", unroll_len)
    if size is None and indices is None:
        raise ValueError("sample needs a size or the indices of items")
    if size is not None and indices is not None and size != len(indices):
        raise ValueError(
            f"size is {size}, but there are {len(indices)} indices; pass only one of them"
        )
    if indices is not None and groupby is not None:
        raise ValueError("indices selects items and groupby draws groups; pass only one of them")
    if unroll_len is not None and groupby is None:
        raise ValueError("unroll_len needs groupby: it cuts a sequence out of each group")
    if size is not None:
        return size
    assert indices is not None  # one of the two is given
    return len(indices)
