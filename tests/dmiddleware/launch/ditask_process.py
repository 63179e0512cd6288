"""ditask as a process of its own, as tests start it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["DITASK", "start"]

DITASK = [sys.executable, "-c", "from dmiddleware.launch.cli import ditask; ditask()"]


def start(
    folder: Path, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start it in a folder, where it has its temporary files, too; what it says can be read.

    Args:
        folder: where its program lies.
        options: of the command line.
        env: variables beside those of this process.
    """
    return subprocess.Popen(
        [*DITASK, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), **(env or {})},
    )
