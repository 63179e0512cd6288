"""Start ditask in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tests.warm_process import WarmProcess

__all__ = ["DITASK", "node_processes", "start", "write_key"]

DITASK = [sys.executable, "-c", "from dmiddleware.launch.cli import ditask; ditask()"]


class _Ditask(WarmProcess):
    """A process that is killed if its ``with`` block fails, instead of being waited for."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.kill()
        super().__exit__(kind, error, traceback)


def start(
    folder: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start ditask; its output and errors can be read from ``stdout``.

    Args:
        folder: the working directory, and the folder for temporary files.
        options: command-line options.
        env: environment variables in addition to those of this process.
        within: a command that runs it, such as ``ip netns exec NAME``.
    """
    return _Ditask(
        [*within, *DITASK, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), **(env or {})},
    )


def node_processes(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes of the nodes that run the program, by their ids."""
    nodes = [
        one for one in psutil.Process(launcher.pid).children() if one.name().startswith("ditask ")
    ]
    return sorted(nodes, key=lambda one: int(one.name().rpartition(" ")[2]))


def write_key(file: Path, text: str = "0123456789" * 4) -> Path:
    """Write a key file that only this user can read."""
    file.touch(mode=0o600)
    file.write_text(text)
    return file
