"""Threads, locks, ports, files and logs, with DI-engine's names."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import threading
from enum import Enum, unique
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from tensorboardX import SummaryWriter

from dmiddleware.classic.logs import TextLog
from dmiddleware.files.atomic_file import write_atomically
from dmiddleware.tensorboard import TensorboardWriter

__all__ = [
    "DistributedWriter",
    "LockContext",
    "LockContextType",
    "PropagatingThread",
    "WatchDog",
    "build_logger",
    "find_free_port",
    "pretty_print",
    "read_file",
    "save_file",
]


def find_free_port(host: str = "") -> int:
    """Return a port of this machine that no program listens on at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class PropagatingThread(threading.Thread):
    """A thread whose ``join`` returns what its target returned, or raises.

    Raises:
        RuntimeError: from ``join``, if the target raised; the error is its cause.
    """

    def run(self) -> None:
        """Call the target."""
        self.exc: BaseException | None = None
        self.ret: Any = None
        target, arguments, options = self._target, self._args, self._kwargs  # type: ignore[attr-defined]
        try:
            self.ret = target(*arguments, **options)
        except Exception as error:  # noqa: BLE001
            self.exc = error

    def join(self, timeout: float | None = None) -> Any:
        """Wait for the target's end."""
        super().join(timeout)
        if self.exc is not None:
            raise RuntimeError(f"the target of the thread {self.name} raised") from self.exc
        return self.ret


@unique
class LockContextType(Enum):
    """Whether threads or processes share a lock."""

    THREAD_LOCK = 1
    PROCESS_LOCK = 2


class LockContext:
    """A lock of threads or of processes."""

    def __init__(self, lock_type: LockContextType = LockContextType.THREAD_LOCK) -> None:
        is_threads = lock_type is LockContextType.THREAD_LOCK
        self.lock: Any = threading.Lock() if is_threads else multiprocessing.Lock()

    def acquire(self) -> None:
        """Wait for the lock and take it."""
        self.lock.acquire()

    def release(self) -> None:
        """Give the lock back."""
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class WatchDog:
    """Raises a TimeoutError in the main thread unless it is stopped in time."""

    def __init__(self, timeout: int = 1) -> None:
        self._timeout = timeout + 1

    def start(self) -> None:
        """Count from now on."""
        signal.signal(signal.SIGALRM, self._event)
        signal.alarm(self._timeout)

    def _event(self, *signal_and_frame: object) -> None:
        raise TimeoutError(f"the watched block did not end in {self._timeout} s")

    def stop(self) -> None:
        """Count no longer."""
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def save_file(path: str, data: object, fs_type: str | None = None, use_lock: bool = False) -> None:
    """Write an object with ``torch.save``, at once, so that readers need no lock."""
    _check_file_system(path, fs_type)
    write_atomically(Path(path), lambda file: torch.save(data, file), durable=False)


def read_file(path: str, fs_type: str | None = None, use_lock: bool = False) -> Any:
    """Read what :func:`save_file` wrote. It may run code: read only files that you trust."""
    _check_file_system(path, fs_type)
    return torch.load(path, map_location="cpu", weights_only=False)


def _check_file_system(path: str, fs_type: str | None) -> None:
    if fs_type not in (None, "normal") or path.lower().startswith("s3"):
        raise ValueError(
            f"{path} is on {fs_type or 's3'}, but only local files are read and written here; "
            "mount the store, or copy the file"
        )


class DistributedWriter(SummaryWriter):  # type: ignore[misc]
    """A TensorBoard writer that a process has one of."""

    root: Self | None = None

    @classmethod
    def get_instance(cls, *arguments: Any, **options: Any) -> Any:
        """Return the process's writer, or, with arguments, another one; the first one stays."""
        if not arguments and not options:
            return cls.root
        writer = cls(*arguments, **options)
        if cls.root is None:
            cls.root = writer
        return writer


def build_logger(
    path: str,
    name: str | None = None,
    need_tb: bool = True,
    need_text: bool = True,
    text_level: int | str = logging.INFO,
) -> tuple[TextLog | None, TensorboardWriter | None]:
    """Return a text log in ``<path>/<name>_logger.txt``, and a TensorBoard writer beside it.

    Args:
        path: the folder of both.
        name: the log's name; None: ``"default"``.
        need_tb: whether to return the writer.
        need_text: whether to return the log.
        text_level: not read; the file has everything from level INFO on.
    """
    name = name or "default"
    log = TextLog(f"{name}_logger", Path(path, f"{name}_logger.txt")) if need_text else None
    return log, TensorboardWriter(Path(path, f"{name}_tb_logger")) if need_tb else None


def pretty_print(result: dict[str, Any], direct_print: bool = True) -> str:
    """Return a dictionary as YAML, without the entries that are None, and maybe print it."""
    text = yaml.safe_dump({key: value for key, value in result.items() if value is not None})
    if direct_print:
        print(text)  # noqa: T201 (what it is for)
    return text
