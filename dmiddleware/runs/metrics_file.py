"""The metrics file of a run: one JSON object a line."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from dmiddleware.best_effort import BestEffort
from dmiddleware.errors import RunFolderError

__all__ = [
    "METRICS_FILE",
    "MetricsFile",
    "MetricsRow",
    "MetricsRows",
    "parsed_row",
    "read_metrics",
    "read_rows",
]

MetricsRow: TypeAlias = dict[str, Any]
"""Numbers and None by name."""

METRICS_FILE: Final = "metrics.jsonl"
_NAMED_LINES: Final = 3

_log = logging.getLogger(__name__)


class MetricsFile:
    """Appends rows of metrics to a file, each at once, so that they survive the process.

    A row is a JSON object on a line of its own; numbers that are not finite become null. pandas
    reads the file with ``pandas.read_json(path, lines=True)``.

    A file that exists is continued. The state is a position in the file. Rows behind it, from a run
    that was killed, are replaced when the run continues from the state. Rows that cannot be
    written, because the disk is full for example, are a warning; they are written later, or kept in
    the state.

    Args:
        path: the file; its folder must exist.

    Attributes:
        on_row: functions that are called with each row that is appended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_row: list[Callable[[Mapping[str, float | None]], None]] = []
        before = _whole_lines(_read(path)) if path.is_file() else b""  # not of a device
        self._n_bytes, self._crc = len(before), zlib.crc32(before)
        self._unwritten: list[bytes] = []
        self._has_warned = False
        self._best_effort = BestEffort(f"write metrics to {path}")

    def append(self, row: Mapping[str, float | None]) -> None:
        """Write a row.

        Args:
            row: the values by name; counters, such as ``env_step``, are among them.
        """
        self._unwritten.append(json.dumps({k: _finite(v) for k, v in row.items()}).encode() + b"\n")
        with self._best_effort:
            self._write()
        for function in self.on_row:
            function(row)

    def rows(self) -> list[MetricsRow]:
        """Return all rows so far, without lines that are damaged, of which the first time warns."""
        data = _read(self.path, self._n_bytes) + b"".join(self._unwritten)
        rows, skipped = _parsed(data)
        if skipped and not self._has_warned:
            self._has_warned = True
            _log.warning("%s: %s", self.path, skipped)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last row, which the disk has then."""
        with self._best_effort:
            self._write(durable=True)
        return {
            "path": str(self.path.absolute()),
            "bytes": self._n_bytes,
            "crc32": self._crc,
            "unwritten": [line.decode() for line in self._unwritten],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state.

        In another folder, the rows up to there are copied. If the file is missing or was changed,
        the metrics begin here, with a warning.
        """
        self._n_bytes, self._crc = 0, 0
        self._unwritten = [line.encode() for line in state["unwritten"]]
        for path in (self.path, Path(state["path"])):
            data = _read(path, state["bytes"])
            if zlib.crc32(data) == state["crc32"]:
                if path == self.path:
                    self._n_bytes, self._crc = len(data), state["crc32"]
                else:
                    self._unwritten = [*data.splitlines(keepends=True), *self._unwritten]
                return
        _log.warning(
            "%s is missing or was changed, so the metrics begin where the run resumes", self.path
        )

    def _write(self, *, durable: bool = False) -> None:
        with self.path.open("a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) < self._n_bytes:  # somebody has cut it
                self._n_bytes = self._crc = 0
            # Behind this position is what another run wrote, or half of what had no room.
            file.truncate(self._n_bytes)
            data = b"".join(self._unwritten)
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._unwritten.clear()
            self._n_bytes += len(data)
            self._crc = zlib.crc32(data, self._crc)
            if durable:
                os.fsync(file.fileno())


class MetricsRows(NamedTuple):
    """The rows of a metrics file.

    Attributes:
        rows: the rows, with numbers and None as values.
        skipped: which lines were left out, because they are cut or damaged; empty: none.
    """

    rows: list[MetricsRow]
    skipped: str


def read_metrics(run: str | Path) -> list[MetricsRow]:
    """Return the rows of a run's metrics file.

    Lines that are cut or damaged are left out, with a warning.

    Args:
        run: the folder of the run.

    Raises:
        RunFolderError: if the folder has no such file, or it cannot be read.
    """
    rows, skipped = read_rows(Path(run) / METRICS_FILE)
    if skipped:
        _log.warning("%s", skipped)
    return rows


def read_rows(path: Path) -> MetricsRows:
    """Return the rows of a metrics file, and which lines were left out.

    Raises:
        RunFolderError: if it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunFolderError(
            f"{path.parent} has no metrics ({error.strerror}: {path.name}); name the folder of a "
            "run that has logged at least once"
        ) from error
    rows, skipped = _parsed(data)
    return MetricsRows(rows, skipped and f"{path}: {skipped}")


def parsed_row(line: bytes) -> MetricsRow | None:
    """Return the row on a line; None: the line is cut or damaged."""
    try:
        return {name: _finite(value) for name, value in json.loads(line).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # not JSON, not an object, or a value that is not a number


def _parsed(data: bytes) -> MetricsRows:
    rows: list[MetricsRow] = []
    damaged: list[int] = []
    for number, line in enumerate(data.splitlines(), 1):
        row = parsed_row(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            damaged.append(number)
    if not damaged:
        return MetricsRows(rows, "")
    numbers = ", ".join(map(str, damaged[:_NAMED_LINES])) + ", …" * (len(damaged) > _NAMED_LINES)
    lines, are = ("line", "is") if len(damaged) == 1 else (f"{len(damaged)} lines", "are")
    return MetricsRows(rows, f"skipped {lines} {numbers}, which {are} cut or damaged")


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _read(path: Path, n_bytes: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(n_bytes)
    except OSError:
        return b""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
