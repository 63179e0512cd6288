"""The ids of stored step data that a buffer refers to, and when they may be deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dmiddleware.classic.buffer_middleware import ActionMiddleware, Chain
from dmiddleware.classic.deque_buffer import BufferedData, DequeBuffer

__all__ = ["TrackedData", "data_id_of"]


class TrackedData(ActionMiddleware):
    """Tracks which step data a buffer refers to, and which of it may be deleted.

    The items are metadata with a ``data_id``. Each sample leases its items. Step data may be
    deleted once its items have left the buffer and all leases have ended, so nobody deletes what a
    learner still reads.

    Args:
        buffer: the buffer whose items refer to step data.
    """

    def __init__(self, buffer: DequeBuffer) -> None:
        super().__init__(buffer)
        self._id_of: dict[int, str] = {}
        self._held: Counter[str] = Counter()
        self._leases: Counter[str] = Counter()
        # An ordered set: what has left the buffer, and has not been taken yet.
        self._left: dict[str, None] = {}

    def push(self, chain: Chain, data: Any, meta: Mapping[str, Any] | None = None) -> int:
        """Note the id of the new item, and that the item it replaces has left."""
        data_id = data_id_of(data)
        index: int = chain(data, meta=meta)
        self._leave(index - self._attached.size)
        self._id_of[index] = data_id
        self._held[data_id] += 1
        self._left.pop(data_id, None)
        return index

    def sample(self, chain: Chain, **kwargs: Any) -> list[BufferedData]:
        """Lease the items drawn; an item drawn twice has two leases."""
        items: list[BufferedData] = chain(**kwargs)
        self._leases.update(data_id_of(item.data) for item in items)
        return items

    def delete(self, chain: Chain, indices: int | Iterable[int]) -> int:
        """Note that deleted items have left."""
        wanted = [indices] if isinstance(indices, int | np.integer) else list(indices)
        deleted: int = chain(wanted)
        for index in wanted:
            self._leave(int(index))
        return deleted

    def clear(self, chain: Chain) -> None:
        """Note that all items have left."""
        chain()
        for index in list(self._id_of):
            self._leave(index)

    def indices_of(self, data_ids: Iterable[str]) -> list[int]:
        """Return the indices of the items that refer to these ids."""
        wanted = set(data_ids)
        return [index for index, data_id in self._id_of.items() if data_id in wanted]

    def release(self, data_ids: Iterable[str]) -> None:
        """End one lease for each id; ids without a lease are skipped."""
        for data_id in data_ids:
            if data_id in self._leases:
                self._leases[data_id] -= 1
                if not self._leases[data_id]:
                    del self._leases[data_id]

    def release_all(self) -> None:
        """End all leases."""
        self._leases.clear()

    def take_deleted(self) -> list[str]:
        """Return the ids that have left and are not leased, each once, in the order they left."""
        taken = [data_id for data_id in self._left if data_id not in self._leases]
        for data_id in taken:
            del self._left[data_id]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return which ids are held, leased and to be deleted."""
        return {
            "id_of": dict(self._id_of),
            "leases": dict(self._leases),
            "left": list(self._left),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._id_of = dict(state["id_of"])
        self._held = Counter(self._id_of.values())
        self._leases = Counter(state["leases"])
        self._left = dict.fromkeys(state["left"])

    def _leave(self, index: int) -> None:
        data_id = self._id_of.pop(index, None)
        if data_id is None:
            return
        self._held[data_id] -= 1
        if not self._held[data_id]:
            del self._held[data_id]
            self._left[data_id] = None


def data_id_of(item: object) -> str:
    """Return the ``data_id`` of an item.

    Raises:
        TypeError: if the item is not metadata with a ``data_id``.
    """
    data_id = item.get("data_id") if isinstance(item, Mapping) else None
    if not isinstance(data_id, str):
        raise TypeError(
            "with enable_track_used_data, items must be dictionaries with a data_id (a string), "
            f"got {item!r:.100}; switch it off to store the data itself"
        )
    return data_id
