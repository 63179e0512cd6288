"""Whether the kernel killed a process because memory ran out."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["OutOfMemoryKills"]

_LARGEST_LIMIT: Final = 1 << 60
"""Control groups of version 1 have such a limit if none was set."""


class OutOfMemoryKills:
    """Counts the processes that the kernel has killed because memory ran out.

    The control group of this process has a counter, and so has the host. Systems other than Linux
    have neither.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self._groups = root / "sys" / "fs" / "cgroup"
        self._group, self._host = self._read()

    def explain(self) -> str:
        """Say whether a process that SIGKILL has just ended probably ran out of memory.

        Each call compares the counters with those of the call before.
        """
        before, self._group, self._host = (self._group, self._host), *self._read()
        if _has_grown(before[0], self._group):
            limit = self._limit()
            of_limit = f" of {limit / 1e9:.1f} GB" if limit else ""
            return (
                f"out of memory: the kernel killed a process of this control group at its limit"
                f"{of_limit}; start fewer processes, make buffers smaller or raise the limit"
            )
        if _has_grown(before[1], self._host):
            return (
                "probably out of memory: the kernel killed a process of this host, whose memory "
                "was full; start fewer processes or make buffers smaller (dmesg names the process)"
            )
        if self._group is None and self._host is None:
            return "maybe out of memory: this system does not count such kills; see dmesg"
        return (
            "not for lack of memory, as far as the kernel's counters show; another process or user "
            "sent the signal"
        )

    def _read(self) -> tuple[int | None, int | None]:
        """Return the counters of the control group and of the host; None: not known."""
        counts = (
            _number(file, "oom_kill") for file in self._files("memory.events", "memory.oom_control")
        )
        group = next((count for count in counts if count is not None), None)
        return group, _number(self._proc / "vmstat", "oom_kill")

    def _limit(self) -> int:
        """Return the control group's limit in bytes; 0: none, or not known."""
        for file in self._files("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                limit = int(file.read_text())
                return limit if limit < _LARGEST_LIMIT else 0
        return 0

    def _files(self, second: str, first: str) -> Iterator[Path]:
        """Return where a file of this process's control group may be, in either version."""
        lines = []
        with contextlib.suppress(OSError):
            lines = (self._proc / "self" / "cgroup").read_text().splitlines()
        for line in lines:
            _, controllers, path = line.split(":", 2)
            inside = path.lstrip("/")
            if controllers == "":
                # In a container, the path may be that of the host.
                yield from (self._groups / inside / second, self._groups / second)
            elif "memory" in controllers.split(","):
                folder = self._groups / "memory"
                yield from (folder / inside / first, folder / first)


def _number(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError):
        if match := re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE):
            return int(match[1])
    return None


def _has_grown(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before
