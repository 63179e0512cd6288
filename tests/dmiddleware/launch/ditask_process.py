"""Start ditask in a separate process."""

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
    """Start it in a folder, which also has its temporary files; its output can be read.

    Args:
        folder: the folder of its program.
        options: the command line's options.
        env: variables in addition to those of this process.
    """
    return subprocess.Popen(
        [*DITASK, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), **(env or {})},
    )
