"""What mypy finds in a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["type_check"]

ROOT = Path(__file__).resolve().parents[1]


def type_check(source: str, folder: Path) -> list[str]:
    """Return the notes and errors of mypy in strict mode, without their places.

    Args:
        source: the program.
        folder: for its file.
    """
    program = folder / "program.py"
    program.write_text(source)
    # Those of `make check`, so that mypy need not read torch again.
    options = ["--config-file", "pyproject.toml", "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", "--strict", *options, str(program)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert not run.stderr, run.stderr
    return [line.partition(": ")[2] for line in run.stdout.splitlines() if program.name in line]
