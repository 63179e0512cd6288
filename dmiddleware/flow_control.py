"""Back-pressure: a bounded queue, and the window of a sender in another process."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["FairQueue", "ItemId", "Window"]

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A bounded queue of items, in which taking an item acknowledges it.

    A producer in this process waits in :meth:`put` while the queue is full. A producer in another
    process waits too, if it keeps a :class:`Window`: what :meth:`put` gets as ``acknowledge`` is
    called when the item has been taken, and opens the window. So no queue holds more than its
    capacity, or than the windows of its senders.

    Items of one sender are taken in the order in which they were put. Senders take turns, so that
    nobody waits behind a sender of many items.

    Args:
        capacity: how many items may wait; None: no limit but that of the senders' windows.
        changed: guards the queue, and is notified of each change. Pass one to wait for other things
            as well. None: a new one.

    Raises:
        ValueError: if the capacity is less than 1.
    """

    def __init__(
        self, *, capacity: int | None = None, changed: threading.Condition | None = None
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._changed = threading.Condition() if changed is None else changed
        self._queues: dict[Hashable, deque[tuple[T, Callable[[], None] | None]]] = {}
        self._n_items = 0
        self._closed = False

    def __len__(self) -> int:
        return self._n_items

    def __contains__(self, item: object) -> bool:
        with self._changed:
            return any(item == queued for queue in self._queues.values() for queued, _ in queue)

    @property
    def closed(self) -> bool:
        """Whether it accepts nothing more."""
        return self._closed

    @property
    def first(self) -> T | None:
        """The item that :meth:`take` returns next, or None."""
        with self._changed:
            return next(iter(self._queues.values()))[0][0] if self._queues else None

    def put(
        self,
        item: T,
        *,
        sender: Hashable = None,
        acknowledge: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Add an item; while the queue is full, wait.

        Args:
            item: the item, which must not be None.
            sender: with whose items it keeps its order.
            acknowledge: called, without the lock, by the thread that has taken the item.
            timeout_s: the most seconds to wait; None means no limit.

        Returns:
            Whether the item was accepted. It is not if there was no room in time, or if the queue
            is closed.
        """
        with self._changed:
            if self._capacity is not None and self._n_items >= self._capacity:
                self._wait_for_room(self._capacity, timeout_s)
                if self._n_items >= self._capacity:
                    return False
            if self._closed:
                return False
            queue = self._queues.get(sender)
            if queue is None:
                queue = self._queues[sender] = deque()
            queue.append((item, acknowledge))
            self._n_items += 1
            self._changed.notify_all()
            return True

    def take(self, timeout_s: float | None = 0.0) -> T | None:
        """Remove the next item, acknowledge it, and return it.

        Args:
            timeout_s: the most seconds to wait for one; None means no limit.

        Returns:
            The item; None if there was none in time. A closed queue returns what is left, and then
            None at once.
        """
        with self._changed:
            if not self._queues and timeout_s != 0.0:
                self._changed.wait_for(lambda: self._closed or bool(self._queues), timeout_s)
            if not self._queues:
                return None
            sender, queue = next(iter(self._queues.items()))
            item, acknowledge = queue.popleft()
            if not queue:
                del self._queues[sender]
            elif len(self._queues) > 1:
                self._queues[sender] = self._queues.pop(sender)  # at the end: the next is next
            self._n_items -= 1
            self._changed.notify_all()
        if acknowledge is not None:
            acknowledge()
        return item

    def put_back(self, items: Sequence[T], *, sender: Hashable = None) -> None:
        """Put items that were taken before all others, whatever the capacity, and also when closed.

        Args:
            items: the items, in their order.
            sender: whose items they are.
        """
        with self._changed:
            queue = self._queues.pop(sender, deque())
            queue.extendleft((item, None) for item in reversed(items))
            self._queues = {sender: queue, **self._queues} if queue else self._queues
            self._n_items += len(items)
            self._changed.notify_all()

    def drain(self) -> list[T]:
        """Remove and return all items without acknowledging them."""
        with self._changed:
            items = [item for queue in self._queues.values() for item, _ in queue]
            self._queues.clear()
            self._n_items = 0
            self._changed.notify_all()
        return items

    def close(self) -> None:
        """Accept nothing more, and end all waits; may be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for_room(self, capacity: int, timeout_s: float | None) -> None:
        self._changed.wait_for(lambda: self._closed or self._n_items < capacity, timeout_s)


class ItemId(NamedTuple):
    """Identifies an item of a window.

    Attributes:
        token: the window's.
        number: counts the window's items, from 1.
    """

    token: str
    number: int


class Window:
    """How many items a sender may send to a queue in another process before they are taken.

    Each item travels with its id, and each acknowledgment with the id of the newest item that was
    taken. Pure: no lock, no sending.

    Args:
        size: how many items may be sent and not taken.

    Attributes:
        token: differs between all windows, also of processes that replace each other.
        sent: items that were sent.
        taken: those of them that were taken.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self._size = size
        self.token = secrets.token_hex(8)
        self.sent = 0
        self.taken = 0

    @property
    def has_room(self) -> bool:
        """Whether another item may be sent."""
        return self.sent - self.taken < self._size

    def send(self) -> ItemId:
        """Count one more item, and return its id."""
        self.sent += 1
        return ItemId(self.token, self.sent)

    def acknowledge(self, token: str, number: int) -> None:
        """Note that an item was taken, with all before it; those of other windows are ignored."""
        if token == self.token:
            self.taken = max(self.taken, min(number, self.sent))

    def forget(self) -> None:
        """Count all items as taken, because their receiver was replaced and does not have them."""
        self.taken = self.sent
