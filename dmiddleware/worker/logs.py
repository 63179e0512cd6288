"""Where workers log: a TensorBoard writer created on first use, and plain-text tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dmiddleware.errors import ConfigError
from dmiddleware.tensorboard import TensorboardWriter

__all__ = ["LazyWriter", "output_folder", "table"]

_COLUMNS = 6


@runtime_checkable
class _Writer(Protocol):
    """The methods of a ``SummaryWriter`` (tensorboardX's or torch's) that workers call."""

    add_scalar: Callable[..., Any]
    close: Callable[..., Any]


class LazyWriter:
    """A ``SummaryWriter`` that was passed in, or one that is created on first use.

    Args:
        writer: a writer, to be closed by the caller; or None.
        folder: where a created writer writes.

    Raises:
        ConfigError: if ``writer`` is not a ``SummaryWriter``.
    """

    def __init__(self, writer: object, folder: Path) -> None:
        if writer is not None and not isinstance(writer, _Writer):
            raise ConfigError(
                f"tb_logger must be a tensorboardX SummaryWriter or None, got {writer!r:.100}; "
                "to choose the folder, pass exp_name"
            )
        self._writer: Any = writer
        self._folder = folder
        self._is_created = False

    def get(self) -> Any:
        """Return the writer."""
        if self._writer is None:
            self._writer = TensorboardWriter(self._folder)
            self._is_created = True
        return self._writer

    def close(self) -> None:
        """Close a created writer; the next :meth:`get` creates another one."""
        if self._is_created:
            created: TensorboardWriter = self._writer
            self._writer, self._is_created = None, False
            created.close()


def output_folder(exp_name: str | PathLike[str]) -> Path:
    """Return a worker's output folder.

    Raises:
        ConfigError: if ``exp_name`` is not a path.
    """
    if not isinstance(exp_name, str | PathLike):
        raise ConfigError(f"exp_name must be the path of a folder, got {exp_name!r:.100}")
    return Path(exp_name)


def table(values: Mapping[str, float | int | str]) -> str:
    """Format names and values in lines of at most six columns, names above values.

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
