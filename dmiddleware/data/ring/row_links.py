"""Index structures of a row ring: episode links, and rows kept in a side table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dmiddleware.data.samplers import Ints
from dmiddleware.files.schema import Array, Leaf

__all__ = ["NONE", "EpisodeLinks", "FreeNumbers", "Pushed", "SideTable"]

Bools = npt.NDArray[np.bool_]

NONE = -1


class Pushed(NamedTuple):
    """The links that lead from rows of earlier pushes into a new one.

    Attributes:
        tail: index of rows from earlier pushes that now have a successor, int64 ``[k]``.
        head: the successor of each, a row of this push, int64 ``[k]``.
    """

    tail: Ints
    head: Ints


class EpisodeLinks:
    """The successor of every row: the next step of the same episode.

    Rows are identified by their index, which only grows; row ``i`` is stored in slot ``i % size``.
    Within a push of ``[T, E]`` rows, ``(t + 1, e)`` follows ``(t, e)`` if both have the same
    episode id and ``(t, e)`` does not end its episode. A row whose successor has not arrived yet is
    an open tail; the first row of its episode in a later push becomes its successor, if it
    continues the episode. A successor is always younger than its row and is overwritten later, so
    a link from a row that is held leads to a row that is held.

    Args:
        size: capacity of the ring.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._successor = np.full(size, NONE)
        self._tail_id = np.empty(0, np.int64)
        self._tail = np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        """Memory of the links, in bytes."""
        return self._successor.nbytes

    def of(self, index: Ints) -> Ints:
        """Return the successors of rows that are held, -1 where there is none (yet)."""
        return self._successor.take(index % self._size)

    def push(
        self,
        first: int,
        episode_id: Ints,
        done: Bools,
        *,
        oldest: int,
        continues: Callable[[Ints, Ints], Bools],
    ) -> Pushed:
        """Link new rows.

        Args:
            first: index of the first of them.
            episode_id: int64 ``[T, E]``; row ``(t, e)`` has the index ``first + t * E + e``.
            done: bool ``[T, E]``.
            oldest: index of the oldest row that the ring holds after this push.
            continues: for rows ``tail`` and ``head``, int64 ``[k]``, of one episode id: whether
                each head is the step after its tail. Where it is not, two sources use one id, and
                the rows are not linked.

        Returns:
            The links that lead into this push from before it.
        """
        n_steps, width = episode_id.shape
        index = np.arange(first, first + n_steps * width).reshape(n_steps, width)
        is_linked = (episode_id[1:] == episode_id[:-1]) & ~done[:-1]
        successor = np.full((n_steps, width), NONE)
        np.copyto(successor[:-1], index[1:], where=is_linked)
        self._drop_overwritten(oldest)
        if self._is_simple(episode_id, is_linked):
            entered = _only(continues(self._tail, index[0]), self._tail, index[0])
            is_open = ~done[-1]
            self._tail_id, self._tail = episode_id[-1][is_open], index[-1][is_open]
        else:
            entered = self._match(first, episode_id, done, index, is_linked, successor, continues)
        flat = index.reshape(-1)
        self._write(flat[flat >= oldest], successor.reshape(-1)[flat >= oldest])
        self._drop_overwritten(oldest)
        self._write(*entered)
        return entered

    def clear(self) -> None:
        """Remove all links."""
        self._tail_id = self._tail_id[:0]
        self._tail = self._tail[:0]

    def tails(self) -> dict[str, Any]:
        """Return the open tails, for :meth:`load_tails`."""
        return {"id": self._tail_id, "index": self._tail}

    def load_tails(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`tails` returned."""
        self._tail_id, self._tail = np.asarray(state["id"]), np.asarray(state["index"])

    def load(self, index: Ints, successor: Ints) -> None:
        """Restore the links of the rows of ``index``."""
        self._write(index, successor)

    def _is_simple(self, episode_id: Ints, is_linked: Bools) -> bool:
        """Return whether every env stays in the episode that it was in, all through the push."""
        return np.array_equal(self._tail_id, episode_id[0]) and bool(is_linked.all())

    def _match(
        self,
        first: int,
        episode_id: Ints,
        done: Bools,
        index: Ints,
        is_linked: Bools,
        successor: Ints,
        continues: Callable[[Ints, Ints], Bools],
    ) -> Pushed:
        """Join stretches of one episode, in order of time; fills in ``successor``."""
        is_head = np.ones(done.shape, np.bool_)
        is_head[1:] = ~is_linked
        is_tail = ~done
        is_tail[:-1] &= ~is_linked
        heads, tails = index[is_head], np.concatenate([self._tail, index[is_tail]])
        tail_id = np.concatenate([self._tail_id, episode_id[is_tail]])
        ids = np.concatenate([tail_id, episode_id[is_head]])
        rows = np.concatenate([tails, heads])
        kind = np.arange(len(rows)) >= len(tails)  # a stretch of one row: its head comes first
        order = np.lexsort((~kind, rows, ids))
        before, after = order[:-1], order[1:]
        joined = (ids[before] == ids[after]) & ~kind[before] & kind[after]
        still_open = np.ones(len(tails), np.bool_)
        still_open[before[joined]] = False
        tail, head = rows[before[joined]], rows[after[joined]]
        tail, head = _only(continues(tail, head), tail, head)
        inner = tail >= first
        successor.reshape(-1)[tail[inner] - first] = head[inner]
        self._tail_id, self._tail = tail_id[still_open], tails[still_open]
        self._recent_first(first)
        return Pushed(tail[~inner], head[~inner])

    def _recent_first(self, first: int) -> None:
        """Put the tails of the last push first, in their order: the next push may match them."""
        old = self._tail < first
        order = np.argsort(old, kind="stable")
        self._tail_id, self._tail = self._tail_id[order], self._tail[order]

    def _drop_overwritten(self, oldest: int) -> None:
        is_held = self._tail >= oldest
        if not is_held.all():
            self._tail_id, self._tail = self._tail_id[is_held], self._tail[is_held]

    def _write(self, index: Ints, successor: Ints) -> None:
        self._successor[index % self._size] = successor


def _only(mask: Bools, tail: Ints, head: Ints) -> Pushed:
    return Pushed(tail, head) if mask.all() else Pushed(tail[mask], head[mask])


class FreeNumbers:
    """Numbers that are free for use; those that were freed last are used first."""

    def __init__(self) -> None:
        self._numbers = np.empty(0, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        return self._numbers.nbytes

    def put(self, numbers: Ints) -> None:
        """Add numbers; takes time in proportion to these alone, on average."""
        end = self._count + len(numbers)
        if end > len(self._numbers):
            grown = np.empty(max(16, 2 * end), np.int64)
            grown[: self._count] = self._numbers[: self._count]
            self._numbers = grown
        self._numbers[self._count : end] = numbers
        self._count = end

    def take(self, n: int) -> Ints:
        """Remove and return ``n`` of the numbers; there must be as many."""
        end, self._count = self._count, self._count - n
        return self._numbers[self._count : end].copy()

    def clear(self) -> None:
        """Remove all numbers."""
        self._count = 0


class SideTable:
    """Leaves of the few slots that need them, in a table that grows as needed.

    Args:
        size: number of slots.
        kept: the leaves to keep.
    """

    def __init__(self, size: int, kept: Sequence[Leaf]) -> None:
        self.paths = [leaf.path for leaf in kept]
        self._position = np.full(size, NONE)
        self._arrays: dict[str, Array] = {
            leaf.path: np.zeros((0, *leaf.shape), leaf.dtype) for leaf in kept
        }
        self._free = FreeNumbers()

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        arrays = (self._position, *self._arrays.values())
        return self._free.nbytes + sum(array.nbytes for array in arrays)

    def __len__(self) -> int:
        return self._capacity - len(self._free)

    def put(self, slots: Ints, rows: Mapping[str, Array]) -> None:
        """Add rows for slots that have none yet."""
        if len(slots) > len(self._free):
            self._grow(len(slots) - len(self._free))
        position = self._free.take(len(slots))
        self._position[slots] = position
        for path, array in self._arrays.items():
            array[position] = rows[path]

    def get(self, path: str, slots: Ints) -> Array:
        """Copy the rows of slots, all of which have one."""
        rows: Array = self._arrays[path][self._position[slots]]
        return rows

    def free(self, slots: Ints) -> None:
        """Remove the rows of slots, some of which may have none."""
        position = self._position[slots]
        position = position[position != NONE]
        if len(position):
            self._position[slots] = NONE
            self._free.put(position)

    def overlay(self, path: str, slots: Ints, rows: Array) -> None:
        """Overwrite ``rows`` ``[*slots.shape, …]`` where slots have a row here."""
        position = self._position[slots]
        has = position != NONE
        rows[has] = self._arrays[path][position[has]]

    def clear(self) -> None:
        """Remove all rows; the memory stays allocated."""
        self._position[:] = NONE
        self._free.clear()
        self._free.put(np.arange(self._capacity))

    def state_dict(self, slots: Ints) -> dict[str, Any]:
        """Return the rows of these slots, with their positions in ``slots``."""
        position = np.flatnonzero(self._position[slots] != NONE)
        rows = {path: self.get(path, slots[position]) for path in self.paths}
        return {"position": position, "rows": rows}

    def load(self, state: Mapping[str, Any], slots: Ints) -> None:
        """Add the rows that :meth:`state_dict` returned for these slots, which have none yet."""
        rows = {path: np.asarray(array) for path, array in state["rows"].items()}
        self.put(slots[np.asarray(state["position"])], rows)

    @property
    def _capacity(self) -> int:
        return len(next(iter(self._arrays.values())))

    def _grow(self, n_more: int) -> None:
        old = self._capacity
        new = max(16, old + old // 4, old + n_more)
        for path, array in self._arrays.items():
            grown = np.zeros((new, *array.shape[1:]), array.dtype)
            grown[:old] = array
            self._arrays[path] = grown
        self._free.put(np.arange(old, new))
