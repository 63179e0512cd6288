"""The warnings of a run, read as it prints them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

__all__ = ["WarningsTail"]

_WARNING: Final = re.compile(r"\[node \d+\] ((?:WARNING|ERROR|CRITICAL) .*|.*\b\w*Warning: .*)")
_FIGURE: Final = re.compile(r"\d+")


class WarningsTail:
    """Reads what a run prints, each time what was appended.

    Args:
        output: the file with its output; what it has already is not read.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._n_bytes = output.stat().st_size if output.exists() else 0
        self._seen: set[str] = set()

    def update(self) -> list[str]:
        """Return the new warnings, without those that differ from earlier ones only in figures."""
        try:
            with self._output.open("rb") as file:
                # Up to its size, because a device, such as /dev/full, never ends.
                n_new = os.fstat(file.fileno()).st_size - self._n_bytes
                file.seek(self._n_bytes)
                data = file.read(max(0, n_new))
        except OSError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._n_bytes += len(data)
        warnings = []
        for line in data.decode(errors="replace").splitlines():
            match = _WARNING.fullmatch(line)
            if match and (kind := _FIGURE.sub("", match[1])) not in self._seen:
                self._seen.add(kind)
                warnings.append(match[1])
        return warnings
