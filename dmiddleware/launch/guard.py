"""A process that cleans up after a launcher that was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Sequence

from dmiddleware.errors import LaunchError
from dmiddleware.launch.leftovers import ProcessSearch, end_processes, wait_until
from dmiddleware.launch.owned_folder import OwnedFolder

__all__ = ["guard"]


@contextlib.contextmanager
def guard(mark: str, folders: Sequence[OwnedFolder], *, grace_s: float) -> Iterator[None]:
    """Guard a block of code with a process that cleans up if this process is killed.

    The guard waits until all processes with the mark have ended, for at most ``grace_s``. It then
    ends those that have not, and removes the folders, whose locks it holds until then. It is not
    a child of this process, and keeps none of its other files open.

    Args:
        mark: the mark of the processes.
        folders: the folders.
        grace_s: seconds that the processes have to end by themselves.

    Raises:
        LaunchError: if the system allows no further process.
    """
    read_end, write_end = os.pipe()
    try:
        first = os.fork()
    except OSError as error:
        os.close(read_end)
        os.close(write_end)
        raise LaunchError(
            f"cannot start a process ({error.strerror}); raise the limit on processes (ulimit -u, "
            "or that of the container), or end some"
        ) from error
    if first == 0:
        _become_guard(read_end, mark, folders, grace_s)
    os.close(read_end)
    os.waitpid(first, 0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the guard was killed
            os.write(write_end, b"done")
        os.close(write_end)


def _become_guard(read_end: int, mark: str, folders: Sequence[OwnedFolder], grace_s: float) -> None:
    """Turn this forked process into the guard; never returns."""
    try:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _close_all_except({read_end, *(folder.lock for folder in folders)})
        if os.read(read_end, 1):
            os._exit(0)
        search = ProcessSearch((mark,))
        wait_until(lambda: not search.running(), grace_s, poll_s=0.2)
        end_processes((mark,))
        for folder in folders:
            shutil.rmtree(folder.path, ignore_errors=True)
    finally:
        os._exit(0)


def _close_all_except(kept: Iterable[int]) -> None:
    first = 0
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
