"""Folders for the sockets and the shared memory of one run, removed when the run ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dmiddleware.launch.leftovers import end_processes, is_mark

__all__ = ["OwnedFolder", "owned_folder"]

_PREFIX: Final = "ditask-"
_UNFINISHED: Final = "ditask-new-"
_UNFINISHED_S: Final = 60.0
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class OwnedFolder:
    """A folder of a launcher.

    Attributes:
        path: the folder.
        lock: descriptor of the file whose lock shows that the folder is in use.
    """

    path: Path
    lock: int


@contextlib.contextmanager
def owned_folder(parent: Path | None, *, mark: str) -> Iterator[OwnedFolder | None]:
    """Make a folder that only this user can enter, and remove it with its content at the end.

    Folders that killed runs left in ``parent`` are removed first, and their processes ended. A run
    holds a lock on its folder, which the system releases when the run dies.

    Args:
        parent: where to make the folder; None: make none.
        mark: the mark of the run's processes.

    Yields:
        The folder; None without a parent, or if it cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        folder = None
        if parent is not None:
            with contextlib.suppress(OSError):
                _sweep(parent)
                folder = _make(parent, mark, stack)
        yield folder


def _make(parent: Path, mark: str, stack: contextlib.ExitStack) -> OwnedFolder:
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
    stack.callback(shutil.rmtree, unfinished, ignore_errors=True)
    lock = os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    stack.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(lock, mark.encode())
    # Other runs look only for the final name, and by then the folder is locked.
    folder = parent / unfinished.name.replace(_UNFINISHED, _PREFIX, 1)
    unfinished.rename(folder)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return OwnedFolder(folder, lock)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if status.st_uid == os.geteuid() and folder.is_dir() and not folder.is_symlink():
                if folder.name.startswith(_UNFINISHED):
                    dead = time.time() - status.st_mtime > _UNFINISHED_S
                else:
                    dead = _is_unlocked(folder / _LOCK)
                    if dead and is_mark(mark := (folder / _LOCK).read_text()):
                        end_processes((mark,))
                if dead:
                    shutil.rmtree(folder, ignore_errors=True)


def _is_unlocked(file: Path) -> bool:
    lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
