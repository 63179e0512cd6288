"""Virtual environments for libraries that need other versions of what we need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["RivalMissing", "python_with", "version_of"]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / "build" / "rivals"
INSTALL_S = 1800.0


class RivalMissing(Exception):
    """A library cannot be installed; the message says why."""


def python_with(name: str) -> Path:
    """Return the interpreter of a library's environment, which is made if it is missing.

    Args:
        name: ``requirements-<name>.txt`` beside this file lists what is installed.

    Raises:
        RivalMissing: if that fails.
    """
    folder, wanted = ENVIRONMENTS / name, _requirements(name)
    python, installed = folder / "bin" / "python", folder / "requirements.txt"
    if installed.exists() and installed.read_text() == wanted.read_text():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {wanted.name} into {folder.relative_to(ROOT)} …", flush=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(wanted)])
    shutil.copy(wanted, installed)
    return python


def version_of(package: str, name: str) -> str:
    """Return the version of a package in the requirements of ``python_with(name)``."""
    pinned = re.search(rf"^{re.escape(package)}==(\S+)$", _requirements(name).read_text(), re.M)
    if pinned is None:
        raise ValueError(f"{_requirements(name)} does not pin {package}")
    return pinned[1]


def _requirements(name: str) -> Path:
    return Path(__file__).with_name(f"requirements-{name}.txt")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except (OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", None) or error).strip()
        raise RivalMissing(output.splitlines()[-1]) from error
