"""Plain-text tables for the workers' logs."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["table"]

_COLUMNS = 6


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
