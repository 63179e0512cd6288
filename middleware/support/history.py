"""Histories of a run, whose states do not grow with the run."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dmiddleware.best_effort import BestEffort

__all__ = ["BinnedHistory", "History"]

_BINS: Final = 200

_log = logging.getLogger(__name__)


class History:
    """Values over steps. Its state is a position in a file to which rows are only appended.

    The file is written when the state is taken, and has one JSON object per line. Rows behind the
    position of a state, from a run that was killed, are replaced when the run continues from it.

    Args:
        path: the file.
        axis: the name of the steps in the file.
    """

    def __init__(self, path: Path, *, axis: str) -> None:
        self.rows: list[tuple[int, float]] = []
        self.axis = axis
        self._path = path
        self._n_written = self._n_bytes = self._crc = 0
        self._best_effort = BestEffort(f"write {path}, from which a resumed run reads its history")

    def add(self, at: int, value: float) -> None:
        """Add a value."""
        self.rows.append((at, value))

    def state_dict(self) -> dict[str, Any]:
        """Write the new rows to the file, and return the position behind them.

        If they cannot be written, they are in the state.
        """
        with self._best_effort:
            self._write()
        return {
            "path": str(self._path.absolute()),
            "bytes": self._n_bytes,
            "crc32": self._crc,
            "unwritten": [list(row) for row in self.rows[self._n_written :]],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read the rows up to the position of a state.

        If the file is missing or was changed, the history begins here, with a warning.
        """
        self.rows, self._n_written, self._n_bytes, self._crc = [], 0, 0, 0
        for path in (self._path, Path(state["path"])):
            data = _read(path, state["bytes"])
            if zlib.crc32(data) == state["crc32"]:
                self.rows = [_parse(line) for line in data.splitlines()]
                if path == self._path:
                    self._n_written, self._n_bytes = len(self.rows), len(data)
                    self._crc = state["crc32"]
                break
        else:
            _log.warning(
                "%s is missing or was changed, so the curve begins where the run resumes",
                self._path,
            )
        self.rows += [(int(at), float(value)) for at, value in state["unwritten"]]

    def _write(self) -> None:
        if self._n_written == len(self.rows):
            return
        with self._path.open("a+b", buffering=0) as file:
            if file.seek(0, os.SEEK_END) < self._n_bytes:  # somebody has cut it
                self._n_written = self._n_bytes = self._crc = 0
            # Behind this position is what another run wrote, or half of what had no room.
            file.truncate(self._n_bytes)
            data = b"".join(self._line(at, value) for at, value in self.rows[self._n_written :])
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        self._n_written = len(self.rows)
        self._n_bytes += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def _line(self, at: int, value: float) -> bytes:
        row = {self.axis: at, "return": value if math.isfinite(value) else None}
        return json.dumps(row).encode() + b"\n"


class BinnedHistory:
    """Mean, lowest and highest of values, in each of up to 200 equal parts of the steps.

    When there are more parts, two at a time become one. Values that are not finite are left out.
    """

    def __init__(self) -> None:
        self._width = 1
        self._start: int | None = None
        self._parts: list[list[float]] = []  # number, sum of steps, sum, lowest, highest, count

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, at: int, value: float) -> None:
        """Add a value; its step must not be before that of the last one."""
        if not math.isfinite(value):
            return
        if self._start is None:
            self._start = at
        self._merge([(at - self._start) // self._width, at, value, value, value, 1])
        if len(self._parts) > _BINS:
            self._width *= 2
            parts, self._parts = self._parts, []
            for number, *rest in parts:
                self._merge([number // 2, *rest])

    def table(self) -> npt.NDArray[np.float64]:
        """Return ``[4, n] float64``: mean step, mean, lowest and highest value of each part."""
        _, at, total, low, high, count = np.array(self._parts, dtype=np.float64).T
        return np.stack([at / count, total / count, low, high])

    def state_dict(self) -> dict[str, Any]:
        """Return the parts."""
        return {"width": self._width, "start": self._start, "parts": np.array(self._parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._width, self._start = state["width"], state["start"]
        self._parts = state["parts"].tolist()

    def _merge(self, part: list[float]) -> None:
        if not self._parts or self._parts[-1][0] < part[0]:
            self._parts.append(part)
            return
        last = self._parts[-1]
        _, at, total, low, high, count = part
        last[1:] = (
            last[1] + at,
            last[2] + total,
            min(last[3], low),
            max(last[4], high),
            last[5] + count,
        )


def _read(path: Path, n_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(n_bytes)
    except OSError:
        return b""


def _parse(line: bytes) -> tuple[int, float]:
    at, value = json.loads(line).values()
    return at, math.nan if value is None else value
