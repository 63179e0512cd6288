"""Where workers log: a TensorBoard writer created on first use, and plain-text tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmiddleware.tensorboard import TensorboardWriter

__all__ = ["LazyWriter", "table"]

_COLUMNS = 6


class LazyWriter:
    """Holds a given ``SummaryWriter``, or makes one of its own when it is asked for.

    Args:
        writer: a writer, which stays its owner's to close, or None.
        folder: where an own writer writes.
    """

    def __init__(self, writer: Any, folder: Path) -> None:
        self._writer = writer
        self._folder = folder
        self._own = False

    def get(self) -> Any:
        """Return the writer."""
        if self._writer is None:
            self._writer = TensorboardWriter(self._folder)
            self._own = True
        return self._writer

    def close(self) -> None:
        """Close an own writer; it is made again if it is asked for again."""
        if self._own:
            writer, self._writer, self._own = self._writer, None, False
            writer.close()


def table(values: Mapping[str, float | int | str]) -> str:
    """Lay names and values out in lines of at most six columns, names above values.

    Example:
        >>> print(table({"loss": 0.25, "lr": 1e-4}))
        loss      lr
        0.25  0.0001
    """
    cells = [(name, _text(value)) for name, value in values.items()]
    lines: list[str] = []
    for start in range(0, len(cells), _COLUMNS):
        part = cells[start : start + _COLUMNS]
        widths = [max(len(name), len(value)) for name, value in part]
        for row in zip(*part, strict=True):
            padded = (text.rjust(width) for text, width in zip(row, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _text(value: float | int | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
