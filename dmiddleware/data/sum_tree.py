"""A sum tree: draws an index in proportion to its value, for many indices at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SumTree"]

_WIDEST_TOP = 8192


class SumTree:
    """Values and their sums over blocks, sums of those sums, and so on.

    Every node has ``fan_out`` children, so that one numpy operation handles one level for a whole
    batch; the top level is as wide as a cumulative sum over it is cheap. Sums are always added up
    anew from the children, never adjusted by differences, so rounding errors do not pile up.

    Args:
        size: number of values, all zero at first.
        fan_out: children of a node.
    """

    def __init__(self, size: int, *, fan_out: int = 32) -> None:
        if size < 1 or fan_out < 2:
            raise ValueError(
                f"a sum tree has at least 1 value and fan-out 2, got {size} and {fan_out}"
            )
        self.size = size
        self.fan_out = fan_out
        # From the values up. Every level but the top is padded to whole blocks, with zeros.
        self._levels: list[npt.NDArray[np.float64]] = []
        width = size
        while width > _WIDEST_TOP or not self._levels:
            n_blocks = -(-width // fan_out)
            self._levels.append(np.zeros(n_blocks * fan_out))
            width = n_blocks
        self._levels.append(np.zeros(width))
        self._blocks = [level.reshape(-1, fan_out) for level in self._levels[:-1]]

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """The values, float64 ``[size]``: a read-only view."""
        view = self._levels[0][: self.size]
        view.flags.writeable = False
        return view

    @property
    def total(self) -> float:
        """The sum of all values."""
        return float(self._levels[-1].sum())

    def set(self, index: npt.NDArray[np.int64], value: Any) -> None:
        """Set values; where an index appears twice, its last value holds.

        Args:
            index: int64 ``[n]``, in ``[0, size)``.
            value: one number, or float64 ``[n]``; not negative, finite.
        """
        self._levels[0][index] = value
        for blocks, sums in zip(self._blocks, self._levels[1:], strict=True):
            # A block that several indices share is added up several times, to the same sum: that
            # is faster than finding the distinct ones.
            index = index // self.fan_out
            sums[index] = blocks.take(index, axis=0).sum(1)

    def fill(self, start: int, stop: int, value: Any) -> None:
        """Set the values ``start … stop - 1``, to one number or to float64 ``[stop - start]``."""
        self._levels[0][start:stop] = value
        for blocks, sums in zip(self._blocks, self._levels[1:], strict=True):
            start, stop = start // self.fan_out, -(-stop // self.fan_out)
            sums[start:stop] = blocks[start:stop].sum(1)

    def find(self, mass: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Find the indices below which the values add up to ``mass``.

        Args:
            mass: float64 ``[n]``, in ``[0, total)``.

        Returns:
            For each ``m`` of ``mass`` the index ``i`` with ``sum(values[:i]) <= m`` and
            ``m < sum(values[:i + 1])``, up to rounding; the value at ``i`` is never zero.

        Raises:
            ValueError: if all values are zero.
        """
        top = self._levels[-1]
        ends = np.empty(len(top) + 1)
        ends[0] = 0.0
        np.cumsum(top, out=ends[1:])
        if not ends[-1] > 0.0:
            raise ValueError("all values of the sum tree are zero, there is nothing to find")
        found = ends.searchsorted(mass, side="right") - 1
        # Rounding may carry the mass past the last entry that is not zero.
        np.minimum(found, ends.searchsorted(ends[-1]) - 1, out=found)
        rest = mass - ends.take(found)
        for depth in range(len(self._blocks) - 1, -1, -1):
            inside = self._blocks[depth].take(found, axis=0).cumsum(1)
            np.minimum(rest, np.nextafter(inside[:, -1], 0.0), out=rest)
            # The first end beyond `rest` belongs to a child that is not zero, since the end
            # before it is not beyond.
            child = (inside > rest[:, None]).argmax(1)
            if depth:
                before = inside[np.arange(len(child)), child - 1]
                rest -= np.where(child > 0, before, 0.0)
            found = found * self.fan_out + child
        return found
