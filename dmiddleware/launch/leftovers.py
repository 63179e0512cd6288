"""Find and end what processes leave behind: their children, and the folders of a killed launcher.

Every process that a launcher starts has a mark in its environment, which its children inherit, also
those that leave its session or lose their parent. Marks are read from ``/proc``; on systems without
it, nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "MARKS",
    "NO_MARK",
    "ProcessSearch",
    "end_processes",
    "is_mark",
    "marked_environment",
    "new_mark",
    "reap_orphans",
    "wait_until",
]

MARKS: Final = "DITASK_MARKS"
NO_MARK: Final = "0" * 24
"""Stands in the place of a mark, in a process that gets one later."""

_PROC: Final = Path("/proc")
_POLITE_S: Final = 1.0
_HELPERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
_POLL_S: Final = 0.02


def new_mark() -> str:
    """Return a mark that no other process has."""
    return secrets.token_hex(12)


def is_mark(text: str) -> bool:
    """Return whether the text is a mark, and not part of one, which others could have."""
    return re.fullmatch(r"[0-9a-f]{24}", text) is not None


def marked_environment(*marks: str) -> dict[str, str]:
    """Return this process's environment with the marks added to those that it has."""
    return {**os.environ, MARKS: " ".join([*os.environ.get(MARKS, "").split(), *marks])}


def end_processes(
    marks: Collection[str] = (),
    *,
    sessions: Collection[int] = (),
    below: Collection[int] = (),
    helpers: bool = True,
) -> int:
    """End processes and all their descendants, and wait until they have ended.

    They receive SIGTERM, and one second later SIGKILL.

    Args:
        marks: end the processes that have one of these marks.
        sessions: end the processes of these sessions.
        below: end the descendants of these processes.
        helpers: also end the helpers of Python's ``multiprocessing``, if they have not ended by
            themselves a second later. They free shared memory when the processes that they help
            have ended.

    Returns:
        The number of processes that were found, without helpers.
    """
    search = ProcessSearch(marks, sessions=sessions, below=below)

    def running() -> set[int]:
        return {pid for pid in search.running() if not _ends_by_itself(pid)}

    alive = running()
    for number in (signal.SIGTERM, signal.SIGKILL) if alive else ():
        _send(number, running())
        if wait_until(lambda: not running(), _POLITE_S):
            break
    if helpers and not wait_until(lambda: not search.running(), _POLITE_S):
        _send(signal.SIGKILL, search.running())
    return len(alive)


def reap_orphans(own: Collection[int]) -> None:
    """Reap the processes that have lost their parent and have ended.

    The system gives them to process 1, which is ``ditask`` in a container without an init process,
    or to an ancestor that adopts them. There they would stay as zombies, each with a process id.

    Args:
        own: the processes whose exit codes this process reads itself.
    """
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, options)) is not None and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


def _send(number: signal.Signals, pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    session: int
    started_at: str


class ProcessSearch:
    """Finds processes, and keeps finding those that have lost the link by which they were found."""

    def __init__(
        self,
        marks: Collection[str],
        *,
        sessions: Collection[int] = (),
        below: Collection[int] = (),
    ) -> None:
        self._marks = [mark.encode() for mark in marks]
        self._sessions = set(sessions)
        self._below = set(below)
        self._known: set[tuple[int, str]] = set()

    def running(self) -> set[int]:
        """Return the ids of the processes that still run, without this one."""
        processes = dict(_processes())
        pids = {
            pid
            for pid, process in processes.items()
            if (pid, process.started_at) in self._known or _has_mark(pid, self._marks)
        }
        self._sessions |= {pid for pid in pids if processes[pid].session == pid}
        pids |= {pid for pid, process in processes.items() if process.session in self._sessions}
        parents = pids | self._below
        while parents:
            parents = {
                pid for pid, candidate in processes.items() if candidate.parent in parents
            } - pids
            pids |= parents
        pids.discard(os.getpid())
        self._known = {(pid, processes[pid].started_at) for pid in pids}
        return pids


def _processes() -> Iterator[tuple[int, _Process]]:
    with contextlib.suppress(OSError):
        for folder in _PROC.iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    # The name of the program, in parentheses, may contain spaces.
                    _, _, rest = (folder / "stat").read_text("utf-8", "replace").rpartition(")")
                    state, parent, _, session, *fields = rest.split()
                    if state not in "ZX":
                        yield int(folder.name), _Process(int(parent), int(session), fields[15])


def _has_mark(pid: int, marks: Collection[bytes]) -> bool:
    if not marks:
        return False
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return any(mark in environment for mark in marks)


def _ends_by_itself(pid: int) -> bool:
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes()
        # A process that is just ending has no command line any more.
        return not command or any(name in command for name in _HELPERS)
    return True


def wait_until(done: Callable[[], bool], timeout_s: float, *, poll_s: float = _POLL_S) -> bool:
    """Wait until the condition holds or the time is up, and return its last value."""
    until = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(poll_s)
    return True
