"""Groups: which items of a DequeBuffer have the same value of a key of their meta."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol

__all__ = ["Groups"]


class _Item(Protocol):
    index: int | None
    meta: dict[str, Any]


class Groups:
    """Keeps the groups of those keys that have been asked for, up to date with the items."""

    def __init__(self) -> None:
        # By key, then by value: the indices, ascending (the dictionaries serve as ordered sets).
        self._by_key: dict[str, dict[Hashable, dict[int, None]]] = {}

    def watch(self, key: str, items: Iterable[_Item]) -> None:
        """Begin to keep the groups of a key, from the items that there are; once per key.

        Raises:
            TypeError: if an item cannot be grouped; the key is not watched then.
        """
        if key in self._by_key:
            return
        held = [(item.index, item.meta) for item in items if item.index is not None]
        for index, meta in held:
            _check(key, index, meta)
        self._by_key[key] = {}
        for index, meta in held:
            self._add(key, index, meta)

    def check(self, index: int, meta: Mapping[str, Any]) -> None:
        """Refuse an item before anything is changed for it.

        Raises:
            TypeError: if a value of a key that is watched cannot be hashed.
        """
        for key in self._by_key:
            _check(key, index, meta)

    def of(self, key: str) -> list[dict[int, None]]:
        """Return the groups of a key that is watched, each as its indices, ascending.

        The group of the oldest item comes first, whatever happened on the way.
        """
        return sorted(self._by_key[key].values(), key=lambda group: next(iter(group)))

    def add(self, index: int, meta: Mapping[str, Any], *, in_between: bool = False) -> None:
        """Note an item: the newest one, or one in between."""
        for key, groups in self._by_key.items():
            self._add(key, index, meta)
            if in_between and key in meta:
                groups[meta[key]] = dict.fromkeys(sorted(groups[meta[key]]))

    def remove(self, index: int | None, meta: Mapping[str, Any]) -> None:
        """Forget an item."""
        for key, groups in self._by_key.items():
            if key in meta and index is not None:
                group = groups[meta[key]]
                del group[index]
                if not group:
                    del groups[meta[key]]

    def clear(self) -> None:
        """Forget all items, and which keys are watched."""
        self._by_key.clear()

    def _add(self, key: str, index: int, meta: Mapping[str, Any]) -> None:
        if key in meta:
            self._by_key[key].setdefault(meta[key], {})[index] = None


def _check(key: str, index: int, meta: Mapping[str, Any]) -> None:
    try:
        hash(meta.get(key))
    except TypeError:
        raise TypeError(
            f"items are grouped by equal values of meta[{key!r}], but that of item {index} "
            f"cannot be hashed: it is a {type(meta[key]).__name__}; use a number, a string or "
            "a tuple of them"
        ) from None
