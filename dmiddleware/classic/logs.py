"""Logs of workers and buffers: a TensorBoard writer created on first use, and plain-text tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, Protocol, Self, runtime_checkable

from dmiddleware.best_effort import BestEffort
from dmiddleware.classic.config import Option, switch
from dmiddleware.errors import ConfigError
from dmiddleware.tensorboard import TensorboardWriter

__all__ = ["LOG_TO_FILE", "LazyWriter", "TextLog", "log_folder", "output_folder", "table"]

LOG_TO_FILE: Final = Option(True, switch, "whether to write the text log to a file, on rank 0")
"""The option of workers and buffers."""

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


class TextLog(logging.Logger):
    """A worker's text log: a file, and the handlers of the program.

    The file has everything from level INFO on. It is open only while a line is written, so there is
    nothing to close. Lines that cannot be written are left out, with a warning. The program's
    handlers get what their logger's level admits.

    Args:
        name: the logger of the program whose handlers see the log.
        file: the file, created with the first line; None writes none.
    """

    def __init__(self, name: str, file: Path | None) -> None:
        super().__init__(name)
        self._above = logging.getLogger(name)
        self._file = file
        self._best_effort = BestEffort(f"write the text log {file}")
        self._format = logging.Formatter("%(asctime)s %(levelname)s %(message)s")

    @classmethod
    def of_worker(
        cls, module: str, exp_name: str | PathLike[str], instance_name: str, *, to_file: bool = True
    ) -> Self:
        """Return the log of a worker, ``<exp_name>/log/<instance>/<instance>_logger.txt``.

        Args:
            module: the worker's module.
            exp_name: the output folder.
            instance_name: the worker's name.
            to_file: whether to write the file.
        """
        file = log_folder(exp_name, instance_name) / f"{instance_name}_logger.txt"
        return cls(f"{module}.{instance_name}", file if to_file else None)

    def get_tabulate_vars_hor(self, variables: Mapping[str, float | int | str]) -> str:
        """Return names and values as a table, names above values."""
        return table(variables)

    def get_tabulate_vars(self, variables: Mapping[str, float | int | str]) -> str:
        """Return names and values as a table, one pair per line."""
        return "\n".join(f"{name}  {_text(value)}" for name, value in variables.items())

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 (the name in logging)
        """Return whether a message of this level goes anywhere."""
        return (self._file is not None and level >= logging.INFO) or self._above.isEnabledFor(level)

    def callHandlers(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name in logging)
        """Write a message to the file and pass it to the program's handlers."""
        if self._file is not None and record.levelno >= logging.INFO:
            with self._best_effort:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(f"{self._format.format(record)}\n")
        if self._above.isEnabledFor(record.levelno):
            self._above.callHandlers(record)


def output_folder(exp_name: str | PathLike[str]) -> Path:
    """Return a worker's output folder.

    Raises:
        ConfigError: if ``exp_name`` is not a path.
    """
    if not isinstance(exp_name, str | PathLike):
        raise ConfigError(f"exp_name must be the path of a folder, got {exp_name!r:.100}")
    return Path(exp_name)


def log_folder(exp_name: str | PathLike[str], instance_name: str) -> Path:
    """Return the folder for the logs of a worker.

    Raises:
        ConfigError: if ``exp_name`` is not a path.
    """
    return output_folder(exp_name) / "log" / instance_name


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
