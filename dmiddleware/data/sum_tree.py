"""A sum tree: draws indices in proportion to their values, many at once."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge

from dmiddleware.settings import Count, checked

__all__ = ["SumTree"]

_WIDEST_TOP = 8192


class SumTree:
    """Values, their sums over blocks, the sums of those, and so on.

    Every node has ``fan_out`` children, so that one numpy operation handles one level for a whole
    batch; the top level is as wide as a cumulative sum is cheap. Sums are always recomputed from
    the children, never adjusted by differences, so rounding errors do not accumulate.

    Args:
        size: number of values, all zero at first.
        fan_out: children of a node.
    """

    def __init__(self, size: int, *, fan_out: int = 16) -> None:
        self.size: int = checked("size", size, Count)
        self.fan_out: int = checked("fan_out", fan_out, Annotated[Count, Ge(2)])
        # From the values up. Every level but the top is padded with zeros to whole blocks.
        self._levels: list[npt.NDArray[np.float64]] = []
        width = size
        while width > _WIDEST_TOP or not self._levels:
            n_blocks = -(-width // fan_out)
            self._levels.append(np.zeros(n_blocks * fan_out))
            width = n_blocks
        self._levels.append(np.zeros(width))
        # torch's cumulative sum is several times faster than numpy's, so it shares the memory.
        self._top = torch.from_numpy(self._levels[-1])
        self._ends = np.zeros(width + 1)
        self._ends_of_top = torch.from_numpy(self._ends)[1:]
        self._inner_ends = self._ends[1:-1]
        self._blocks = [level.reshape(-1, fan_out) for level in self._levels[:-1]]
        # A matrix product sums small blocks in half the time of reduce or cumsum.
        self._add_up = np.ones(fan_out)
        self._add_to_each = np.triu(np.ones((fan_out, fan_out)))
        # The last end is doubled, so it exceeds any remainder despite rounding.
        self._add_to_each[:, -1] = 2.0

    def __deepcopy__(self, memo: dict[int, Any]) -> SumTree:
        """Copy the values; the views between the levels are built again."""
        copied = SumTree(self.size, fan_out=self.fan_out)
        copied.fill(0, self.size, self.values)
        return copied

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """The values, float64 ``[size]``: a read-only view."""
        view = self._levels[0][: self.size]
        view.flags.writeable = False
        return view

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(np.add.reduce(self._levels[-1]))

    def set(self, index: npt.NDArray[np.int64], value: Any) -> None:
        """Set values; if an index appears twice, its last value counts.

        Args:
            index: int64 ``[n]``, in ``[0, size)``.
            value: one number, or float64 ``[n]``; not negative, finite.
        """
        self._levels[0][index] = value
        for blocks, sums in zip(self._blocks, self._levels[1:], strict=True):
            # A block with several indices is summed several times, which is faster than finding
            # the distinct blocks.
            index = index // self.fan_out
            sums[index] = blocks.take(index, axis=0).dot(self._add_up)

    def fill(self, start: int, stop: int, value: Any) -> None:
        """Set the values ``start … stop - 1``, to one number or to float64 ``[stop - start]``."""
        self._levels[0][start:stop] = value
        for blocks, sums in zip(self._blocks, self._levels[1:], strict=True):
            start, stop = start // self.fan_out, -(-stop // self.fan_out)
            sums[start:stop] = blocks[start:stop].dot(self._add_up)

    def find(
        self, part: npt.NDArray[np.float64], *, parts: int = 1
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], float]:
        """Find the indices at which the cumulative sum reaches given parts of the total.

        Args:
            part: float64 ``[n]``, in ``[0, parts)``; at least one.
            parts: number of parts that the total is split into.

        Returns:
            For each ``m = part * total / parts`` the index ``i`` with ``sum(values[:i]) <= m`` and
            ``m < sum(values[:i + 1])``, up to rounding, int64 ``[n]``; the value there, which is
            never zero, float64 ``[n]``; and the lowest of these values.

        Raises:
            ValueError: if all values are zero.
        """
        torch.cumsum(self._top, 0, out=self._ends_of_top)
        mass = part * (self._ends[-1] / parts)
        slots = self._inner_ends.searchsorted(mass, side="right")
        rest = mass - self._ends.take(slots)
        for depth in range(len(self._blocks) - 1, -1, -1):
            ends = self._blocks[depth].take(slots, axis=0).dot(self._add_to_each)
            child = (ends > rest[:, None]).argmax(1)
            if depth:
                before = ends[np.arange(len(child)), child - 1]
                rest -= np.where(child > 0, before, 0.0)
            slots *= self.fan_out
            slots += child
        value = self._levels[0].take(slots)
        lowest = np.minimum.reduce(value)
        if not lowest > 0.0:
            # Differently rounded sums led to a neighbor of the value.
            wrong = np.flatnonzero(value <= 0.0)
            slots[wrong] = self._find_by_adding_all(mass[wrong])
            value[wrong] = self._levels[0].take(slots[wrong])
            lowest = np.minimum.reduce(value)
        return slots, value, float(lowest)

    def _find_by_adding_all(self, mass: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        ends = self._levels[0].cumsum()
        if not ends[-1] > 0.0:
            raise ValueError("all values of the sum tree are zero, so none can be drawn")
        slots = ends.searchsorted(mass, side="right")
        # Both the first end above the mass and the first that equals the last belong to positive
        # values.
        last = np.int64(ends.searchsorted(ends[-1]))
        result: npt.NDArray[np.int64] = np.minimum(slots, last)
        return result
