"""The metrics of a run, read as they grow."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dmiddleware.runs.metrics_file import METRICS_FILE, parsed_row
from dmiddleware.runs.record import COUNTERS
from dmiddleware.runs.statistics import last_tenth

__all__ = ["MetricsTail"]

_COMPARED: Final = 256
"""Bytes before the position of which a change is noticed."""


class MetricsTail:
    """Reads the metrics file of a run, each time what was appended.

    Args:
        run: the folder of the run, which need not exist yet.
        metric: the metric to read.

    Attributes:
        values: the values of the metric so far.
        at: the newest counter, such as ``"12,800 env steps"``; empty: there is none.
        names: the names of all metrics so far.
        n_skipped: the number of lines that were left out, because they are cut or damaged.
    """

    def __init__(self, run: Path, metric: str) -> None:
        self.values: list[float] = []
        self.at = ""
        self.names = set[str]()
        self.n_skipped = 0
        self._path = run / METRICS_FILE
        self._metric = metric
        self._n_bytes = 0
        self._before = b""

    @property
    def score(self) -> float | None:
        """The mean of the last tenth of the values; None: there are none."""
        return last_tenth(self.values) if self.values else None

    def update(self) -> None:
        """Read what was appended; or all, if a run that resumes has replaced rows."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._n_bytes - len(self._before))
                data = file.read()
                if not data.startswith(self._before):
                    self._n_bytes, self._before, self.values, self.n_skipped = 0, b"", [], 0
                    file.seek(0)
                    data = file.read()
        except OSError:
            return
        data = data[: data.rfind(b"\n") + 1]
        new = data[len(self._before) :]
        self._n_bytes += len(new)
        self._before = data[-_COMPARED:]
        for line in filter(bytes.strip, new.splitlines()):
            row = parsed_row(line)
            if row is None:
                self.n_skipped += 1
                continue
            counts = (f"{row[name]:,} {word}" for name, word in COUNTERS.items() if name in row)
            self.names.update(row)
            if row.get(self._metric) is not None:
                self.values.append(row[self._metric])
            self.at = next(counts, self.at)
