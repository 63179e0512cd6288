"""The lock on a run folder, which a task holds for as long as it trains in the folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from dmiddleware.errors import RunFolderError
from dmiddleware.files.atomic_file import write_atomically
from dmiddleware.pipeline import Task, current_node

__all__ = [
    "FolderLock",
    "Holder",
    "NoLock",
    "RunLock",
    "check_writable",
    "find_holder",
    "in_use",
    "unwritable",
]

RENEW_S: Final = 5.0
STALE_S: Final = 60.0
_LOCK_FILE: Final = ".lock"
_LOOK_S: Final = 0.5
_CHECK_S: Final = 0.2
_PROC: Final = Path("/proc")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The task that holds a lock, and its process.

    Attributes:
        host: the name of the host.
        system: identifies the running system of that host, and the numbering of its processes.
        pid: the process.
        started: when the process started, since its number may be used again.
        task: identifies the task in the process.
        name: the name of the task.
        since: when it took the lock, for people.
        run: the name of the run; empty: it has none.
    """

    host: str
    system: str
    pid: int
    started: str
    task: str
    name: str
    since: str
    run: str = ""

    @classmethod
    def of(cls, task: Task[Any]) -> Holder:
        """Return what identifies a task of this process."""
        node = current_node()
        return cls(
            host=socket.gethostname(),
            system=_system(),
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            task=f"{id(task.whole):x}",
            name=task.name,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            run="" if node is None else node.run_id,
        )

    @property
    def is_here(self) -> bool:
        """Whether this process can see the holder's, if it runs."""
        return (self.host, self.system) == (socket.gethostname(), _system())

    @property
    def is_this_process(self) -> bool:
        """Whether it is a task of this process."""
        is_mine = self.pid == os.getpid() and self.started == (_started(self.pid) or "")
        return self.is_here and is_mine

    def is_same(self, other: Holder) -> bool:
        """Return whether it is the same task of the same process."""
        return asdict(self) | {"since": ""} == asdict(other) | {"since": ""}

    def runs(self) -> bool:
        """Return whether the process still runs, for one that is here."""
        if _PROC.joinpath("self", "stat").exists():
            return _started(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def __str__(self) -> str:
        run = f"run {self.run}, " if self.run else ""
        return (
            f"{run}process {self.pid} on host {self.host} (task {self.name!r}, since {self.since})"
        )


class FolderLock:
    """A lock on a folder: a file with host and process, whose time is renewed.

    The task holds it until it is closed.

    The lock of a process that no longer runs on this host is taken over at once. A lock of another
    host is taken over when its time has not been renewed for a minute, by the clock of the file
    system. It needs no locks of the file system, which some network file systems lack.

    Another lock of the same task on the same folder changes nothing: the first one counts.

    Args:
        folder: made if it is missing.
        task: the task that trains in it.

    Raises:
        RunFolderError: if another task holds the lock, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, task: Task[Any]) -> None:
        self._folder = folder.absolute()  # the program may change its working directory
        self._file = self._folder / _LOCK_FILE
        self._me = Holder.of(task)
        self._content = json.dumps(asdict(self._me)).encode()
        self._task = weakref.ref(task)
        self._failure: str | None = None
        self._is_closed = False
        self._checked_at = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._renew_forever, name="run-folder", daemon=True)
        check_writable(folder)
        try:
            self._identity = _identity(folder)
            is_first = self._acquire()
        except RunFolderError:
            raise
        except OSError as error:
            raise unwritable(folder, error) from error
        if is_first:
            self._thread.start()
            task.at_step_end(self._check_step)
            task.at_close(self.close)

    def check(self) -> None:
        """Check that the folder is still there, and belongs to this task.

        Raises:
            RunFolderError: if it was deleted or moved, or another process has taken it over.
        """
        if not self._is_closed and self._failure is None:
            self._failure = self._find_failure()
        if self._failure is not None:
            raise RunFolderError(self._failure)

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._is_closed or os.getpid() != self._me.pid:
            return
        self._is_closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(RENEW_S)
        with contextlib.suppress(OSError):
            holder = _read(self._file)
            if holder is not None and holder.is_same(self._me):
                self._file.unlink()

    def _acquire(self) -> bool:
        """Take the lock; return False if this task has it already."""
        while True:
            if self._create():
                return True
            with contextlib.suppress(FileNotFoundError), self._file.open("rb") as file:
                holder = _parse(file.read())
                if holder is not None and holder.is_same(self._me):
                    return False
                self._wait_until_dead(holder)
                if self._replace(file.fileno()):
                    who = holder or "an unknown process"
                    _log.warning("took over %s from %s, which no longer runs", self._folder, who)
                    return True

    def _create(self) -> bool:
        try:
            with self._file.open("xb") as file:
                try:
                    file.write(self._content)
                    file.flush()
                except OSError:
                    self._file.unlink()
                    raise
        except FileExistsError:
            return False
        return True

    def _wait_until_dead(self, holder: Holder | None) -> None:
        """Return if the holder no longer runs.

        Raises:
            RunFolderError: if it does.
        """
        if holder is not None and holder.is_here:
            if holder.runs():
                raise RunFolderError(in_use(self._folder, holder))
            return
        # The clocks of two hosts differ, so only a change of the file's time shows that it is held.
        first = self._file.stat()
        left_s = STALE_S - (_time_of(self._folder) - first.st_mtime)
        who = holder or "an unknown process"
        if left_s > 0:
            _log.warning(
                "%s is locked by %s; waiting up to %.0f s for a sign that it still runs",
                self._folder,
                who,
                left_s,
            )
        end = time.monotonic() + left_s
        while time.monotonic() < end:
            time.sleep(min(_LOOK_S, max(end - time.monotonic(), 0.0)))
            with self._file.open("rb") as file:  # opening it asks the server of a network folder
                now = os.fstat(file.fileno())
                holder = _parse(file.read()) or holder
            task = self._task()
            if _key(now) != _key(first) or task is None or task.finish:
                raise RunFolderError(in_use(self._folder, holder))

    def _replace(self, descriptor: int) -> bool:
        """Replace the lock of a dead holder; return False if another process was faster."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        before, now = os.fstat(descriptor), self._file.stat()
        if (before.st_ino, before.st_dev) != (now.st_ino, now.st_dev):
            return False
        write_atomically(self._file, lambda file: file.writelines([self._content]), durable=False)
        return True

    def _renew_forever(self) -> None:
        while not self._wake.wait(RENEW_S):
            task = self._task()
            if task is None:  # it was never closed, and is gone
                self.close()
                return
            self._failure = self._failure or self._find_failure()
            if self._failure is not None:
                task.stop(self._failure, ok=False)
                return
            with contextlib.suppress(OSError):  # a network that is down may come back
                os.utime(self._file)

    def _find_failure(self) -> str | None:
        try:
            if _identity(self._folder) != self._identity:
                return self._gone()
            holder = _read(self._file)
            if holder is None or holder.is_same(self._me):
                return None
        except (FileNotFoundError, NotADirectoryError):
            with contextlib.suppress(OSError):
                if _identity(self._folder) == self._identity:
                    self._create()  # somebody has removed the file only
                    return None
            return self._gone()
        except OSError:
            return None
        return (
            f"the run folder {self._folder} was taken over by {holder}, because this process had "
            f"not renewed its lock for {STALE_S:.0f} s; end one of the two runs"
        )

    def _gone(self) -> str:
        return (
            f"the run folder {self._folder} was deleted or moved while the task trained in it, so "
            "nothing can be saved there any more; start the run again"
        )

    def _check_step(self) -> None:
        """Look from time to time, at the end of a step."""
        task = self._task()
        if task is None or self._is_closed:
            return
        task.at_step_end(self._check_step)
        now = time.monotonic()
        if self._failure is not None or now - self._checked_at > _CHECK_S:
            self._checked_at = now
            self.check()


class NoLock:
    """The lock of a process that writes none of the files that a folder has once."""

    def check(self) -> None:
        """Do nothing."""


RunLock: TypeAlias = FolderLock | NoLock
"""The lock that a middleware has on the folder of its run."""


def find_holder(folder: Path) -> Holder | None:
    """Return another process of this host that trains in a folder."""
    try:
        holder = _read(folder / _LOCK_FILE)
    except OSError:
        return None
    if holder is None or not holder.is_here or holder.is_this_process or not holder.runs():
        return None
    return holder


def in_use(folder: Path, holder: Holder | None) -> str:
    """Return the message for a task that finds a folder in use."""
    text = f"the run folder {folder} is in use: {holder or 'an unknown process'} trains in it"
    if holder is not None and holder.is_this_process:
        return (
            f"{text}, in this same process; close that task first (use it in a `with` block), or "
            "give this one a folder of its own with RunFolder.create('name')"
        )
    return (
        f"{text}; end that process or wait for its end, or give this run a folder of its own with "
        f"RunFolder.create('name'). If there is no such process, remove {folder / _LOCK_FILE}"
    )


def check_writable(folder: Path) -> None:
    """Make a folder if it is missing, and check that files can be written to it.

    Raises:
        RunFolderError: if not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _time_of(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(folder: Path, error: OSError) -> RunFolderError:
    """Return the error for a folder to which no file can be written."""
    return RunFolderError(
        f"no file can be written to {folder} ({error.strerror or error}), where this run keeps its "
        "files; change its permissions, free disk space, or choose another folder"
    )


def _time_of(folder: Path) -> float:
    """Return the present time by the clock of the folder's file system."""
    with tempfile.TemporaryFile(prefix=".time.", dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_ino


def _read(file: Path) -> Holder | None:
    return _parse(file.read_bytes())


def _parse(data: bytes) -> Holder | None:
    """Return the holder; None if the file is not complete."""
    try:
        return Holder(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _system() -> str:
    """Return what two processes that can see each other have in common."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append((_PROC / "sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str((_PROC / "self/ns/pid").readlink()))
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """Return when a process started; None if it does not run."""
    try:
        # The name of the program, in parentheses, may contain spaces.
        _, _, rest = (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")
    except OSError:
        return None
    state, *fields = rest.split()
    return None if state in "ZX" else fields[18]
