"""Samplers: which rows of a buffer the next batch is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Eligible", "Ints", "Sampler", "UniformSampler"]

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Eligible:
    """The rows that may be drawn, by index (a row's running number since the buffer began).

    Attributes:
        first: index of the oldest row.
        count: number of rows; they are ``first … first + count - 1`` unless ``index`` is given.
        size: capacity of the buffer; row ``i`` lies in slot ``i % size``.
        index: the rows one by one (int64 ``[count]``, ascending), where not all of them count.
    """

    first: int
    count: int
    size: int
    index: Ints | None = None


class Sampler(Protocol):
    """Draws rows, and is told what happens to them."""

    def attach(self, size: int) -> None:
        """Prepare for a buffer of ``size`` rows."""

    def draw(
        self, n: int, rows: Eligible, generator: np.random.Generator
    ) -> tuple[Ints, Floats | None]:
        """Draw ``n`` of the rows: their index, and their importance weights if there are any."""

    def pushed(self, first: int, n: int) -> None:
        """Rows ``first … first + n - 1`` were written."""

    def deleted(self, index: Ints) -> None:
        """These rows, all present until now, were taken out."""

    def cleared(self) -> None:
        """All rows were taken out."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later draws depend on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class UniformSampler:
    """Draws every row with the same probability.

    Args:
        replace: whether one row may appear twice in a batch. Without replacement, a draw takes
            somewhat longer.
    """

    def __init__(self, *, replace: bool = True) -> None:
        self.replace = replace

    def attach(self, size: int) -> None:
        """Do nothing: a uniform draw keeps no notes on rows."""

    def draw(
        self, n: int, rows: Eligible, generator: np.random.Generator
    ) -> tuple[Ints, Floats | None]:
        """Draw ``n`` rows.

        Returns:
            Their index, int64 ``[n]``, and None: uniform draws need no weights.
        """
        if self.replace:
            # A third of the time of generator.integers; the bias is below 2**-53 * count.
            index = (generator.random(n) * rows.count).astype(np.int64)
        else:
            index = generator.choice(rows.count, n, replace=False)
        if rows.index is not None:
            return rows.index[index], None
        if rows.first:
            index += rows.first
        return index, None

    def pushed(self, first: int, n: int) -> None:
        """Do nothing."""

    def deleted(self, index: Ints) -> None:
        """Do nothing."""

    def cleared(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the buffer's generator is all that draws depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""
