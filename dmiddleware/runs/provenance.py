"""What a run was computed with: the versions of the libraries, and the state of the code."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

__all__ = ["git_state", "versions"]

_LIBRARIES: Final = ("dmiddleware", "torch", "gymnasium", "numpy")
_GIT_S: Final = 5.0


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that shape a run."""
    by_name = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return by_name


@functools.cache
def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a folder's repository, and whether tracked files differ from it.

    Args:
        folder: the folder.

    Returns:
        ``{"commit": …, "dirty": …}``, as it was when this process first asked; None without git, or
        outside of a repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if not commit or changes is None:
        return None
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
