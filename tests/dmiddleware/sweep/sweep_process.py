"""Start ``ditask sweep`` in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["FOLDER", "MAIN", "start", "sweep"]

ROOT = Path(__file__).parents[3]
MAIN = "tests.dmiddleware.sweep.swept_program.main"
FOLDER = "sweeps/swept_program"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "dmiddleware.launch", "sweep", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
    )


def sweep(folder: Path, *words: str) -> tuple[int, str]:
    process = start(folder, *words)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output
