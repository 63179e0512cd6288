"""Which row is which step of which episode: access to any later row of an episode at once."""

from __future__ import annotations

import numpy as np

from dmiddleware.data.ring.row_links import NONE, FreeNumbers, Pushed
from dmiddleware.data.samplers import Ints

__all__ = ["EpisodeTable", "SequenceStarts"]

_SMALLEST = 8


class EpisodeTable:
    """For every episode that the ring holds rows of, the indices of these rows, step by step.

    Steps count from the first row of an episode that the ring has received. The rows of an episode
    are a ring of their own inside one shared array: step ``s`` is at ``s % capacity``. An episode
    that outgrows its capacity moves to a place of twice the size.

    Args:
        size: capacity of the ring of rows.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # By slot: the number of the row's episode in this table, and its step.
        self._number = np.full(size, NONE)
        self._step = np.zeros(size, np.int64)
        self.clear()

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        per_row = (self._number, self._step, self._rows, self._begin, self._end)
        return sum(array.nbytes for array in (*per_row, self._place, self._capacity))

    def step(self, index: Ints) -> Ints:
        """Return the step of rows in their episode, from 0; any shape."""
        return self._step.take(index % self._size)

    def steps_left(self, index: Ints) -> Ints:
        """Return how many rows of its episode follow each row; any shape."""
        slots = index % self._size
        n_steps: Ints = self._end.take(self._number.take(slots)) - self._step.take(slots) - 1
        return n_steps

    def ahead(self, index: Ints, n_steps: Ints) -> Ints:
        """Return the rows that are ``n_steps <= steps_left`` later; the shapes are broadcast."""
        slots = index % self._size
        number = self._number.take(slots)
        step = self._step.take(slots) + n_steps
        return self._rows.take(self._position(number, step))

    def clear(self) -> None:
        """Remove all rows."""
        none = np.empty(0, np.int64)
        # By number: the first step held, the step after the last, place and capacity in _rows.
        self._begin: Ints = none
        self._end: Ints = none
        self._place: Ints = none
        self._capacity: Ints = none
        self._free_numbers = FreeNumbers()
        self._rows: Ints = none
        self._n_used = 0
        self._free_places: dict[int, FreeNumbers] = {}  # by capacity

    def push(self, first: int, successor: Ints, entered: Pushed) -> None:
        """Add rows.

        Args:
            first: index of the first of them.
            successor: the successor of each, -1 where there is none, int64 ``[n]``.
            entered: the links from rows of earlier pushes.
        """
        n = len(successor)
        number, step = np.full(n, NONE), np.zeros(n, np.int64)
        tail, head = entered.tail % self._size, entered.head - first
        number[head], step[head] = self._number[tail], self._step[tail] + 1
        if len(head) < n:  # otherwise every row continues one of an earlier push
            before = _predecessors(successor, first)
            new = np.flatnonzero((before == NONE) & (number == NONE))
            number[new] = self._take_numbers(len(new))
            root, distance = _roots(before)
            number, step = number[root], step[root] + distance
        self._write(np.arange(first, first + n), number, step)

    def drop(self, first: int, last: int) -> None:
        """Remove rows ``first … last - 1``, the oldest ones."""
        slots = np.arange(first, last) % self._size
        number = self._number.take(slots)
        self._begin[number] = self._step.take(slots) + 1  # of several rows, the last one counts
        emptied = number[self._begin[number] == self._end[number]]
        if len(emptied):
            emptied = np.unique(emptied)
            self._release(self._capacity[emptied], self._place[emptied])
            self._free_numbers.put(emptied)

    def load(self, index: Ints, step: Ints, successor: Ints) -> None:
        """Replace all rows.

        Args:
            index: all rows that are held, int64 ``[n]``, ascending.
            step: the step of each in its episode.
            successor: the successor of each, -1 where there is none.
        """
        self.clear()
        if not len(index):
            return
        root, _ = _roots(_predecessors(successor, int(index[0])))
        # The rows are in ascending order, so the first of each episode has its lowest step.
        _, oldest, number = np.unique(root, return_index=True, return_inverse=True)
        numbers = self._take_numbers(len(oldest))
        self._begin[numbers] = self._end[numbers] = step[oldest]
        self._write(index, numbers[number], step)

    def _write(self, index: Ints, number: Ints, step: Ints) -> None:
        slots = index % self._size
        self._number[slots], self._step[slots] = number, step
        end_before = self._end[number]
        self._end[number] = step + 1  # of several rows, the last one counts
        full = np.flatnonzero(self._end[number] - self._begin[number] > self._capacity[number])
        if len(full):
            outgrown, where = np.unique(number[full], return_index=True)
            self._enlarge(outgrown, end_before[full[where]])
        self._rows[self._position(number, step)] = index

    def _position(self, number: Ints, step: Ints) -> Ints:
        position: Ints = step & (self._capacity.take(number) - 1)  # a power of two
        position += self._place.take(number)
        return position

    def _enlarge(self, number: Ints, end: Ints) -> None:
        """Move episodes, whose steps before ``end`` are written, to where their rows fit."""
        begin, count = self._begin[number], end - self._begin[number]
        episode = np.repeat(np.arange(len(number)), count)
        step = begin[episode] + np.arange(len(episode)) - np.repeat(count.cumsum() - count, count)
        moved = self._rows.take(self._position(number[episode], step))
        old = self._capacity[number], self._place[number]
        bits = np.ceil(np.log2(self._end[number] - begin)).astype(np.int64)
        self._capacity[number] = np.maximum(_SMALLEST, np.left_shift(1, bits))
        self._place[number] = self._allocate(self._capacity[number])
        self._rows[self._position(number[episode], step)] = moved
        had_place = old[0] > 0
        self._release(old[0][had_place], old[1][had_place])

    def _allocate(self, capacity: Ints) -> Ints:
        place = np.empty_like(capacity)
        for size in np.unique(capacity).tolist():  # few: they are powers of two
            chosen = np.flatnonzero(capacity == size)
            free = self._free_places.setdefault(size, FreeNumbers())
            n_more = len(chosen) - len(free)
            if n_more > 0:
                free.put(self._n_used + size * np.arange(n_more))
                self._n_used += size * n_more
            place[chosen] = free.take(len(chosen))
        if self._n_used > len(self._rows):
            self._rows = _longer(self._rows, max(self._n_used, len(self._rows) * 5 // 4))
        return place

    def _release(self, capacity: Ints, place: Ints) -> None:
        for size in np.unique(capacity).tolist():
            self._free_places.setdefault(size, FreeNumbers()).put(place[capacity == size])

    def _take_numbers(self, n: int) -> Ints:
        n_more = n - len(self._free_numbers)
        if n_more > 0:
            old = len(self._begin)
            new = max(old + n_more, 2 * old, 16)
            self._free_numbers.put(np.arange(old, new)[::-1])  # the lowest are taken first
            self._begin, self._end = _longer(self._begin, new), _longer(self._end, new)
            self._place, self._capacity = _longer(self._place, new), _longer(self._capacity, new)
        numbers = self._free_numbers.take(n)
        self._begin[numbers] = self._end[numbers] = self._capacity[numbers] = 0
        return numbers


class SequenceStarts:
    """The rows at which sequences start, oldest first."""

    def __init__(self) -> None:
        self._index = np.empty(0, np.int64)
        self._begin = self._end = 0

    @property
    def index(self) -> Ints:
        """Their indices, int64 ``[n]``, ascending: a view."""
        return self._index[self._begin : self._end]

    @property
    def nbytes(self) -> int:
        """Memory, in bytes."""
        return self._index.nbytes

    def push(self, index: Ints) -> None:
        """Add rows that are younger than all others."""
        end = self._end + len(index)
        if end > len(self._index):
            present = self.index
            grown = np.empty(max(64, 2 * (len(present) + len(index))), np.int64)
            grown[: len(present)] = present
            self._index, self._begin, self._end = grown, 0, len(present)
            end = len(present) + len(index)
        self._index[self._end : end] = index
        self._end = end

    def drop_before(self, first: int) -> None:
        """Remove the rows before ``first``."""
        self._begin += int(self.index.searchsorted(first))

    def clear(self) -> None:
        """Remove all rows."""
        self._begin = self._end = 0


def _predecessors(successor: Ints, first: int) -> Ints:
    """Return the position of the predecessor of each row, -1 where there is none, int64 ``[n]``.

    Args:
        successor: index of the successor of each row, -1 where there is none, int64 ``[n]``.
        first: index of the first row.
    """
    before = np.full(len(successor), NONE)
    linked = np.flatnonzero(successor != NONE)
    before[successor[linked] - first] = linked
    return before


def _roots(before: Ints) -> tuple[Ints, Ints]:
    """Follow links backwards to their beginning, doubling the distance in each round.

    Args:
        before: position of the predecessor of each row, -1 where there is none, int64 ``[n]``.

    Returns:
        The position of the first row of each row's chain, and the distance to it.
    """
    root = np.where(before == NONE, np.arange(len(before)), before)
    distance = (before != NONE).astype(np.int64)
    while (further := distance[root]).any():
        distance += further
        root = root[root]
    return root, distance


def _longer(array: Ints, n: int) -> Ints:
    grown = np.zeros(n, np.int64)
    grown[: len(array)] = array
    return grown
