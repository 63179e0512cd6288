"""The face of ``ding.data.storage``: files of a program's objects, and what writes them.

A file that has been pickled may run code when it is loaded: load only files that you trust.
"""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn

from dmiddleware.ding.utils.system import read_file, save_file

__all__ = [
    "FileModelLoader",
    "FileModelStorage",
    "FileStorage",
    "FileStorageLoader",
    "Storage",
]


class Storage(ABC):
    """A place of one object.

    Args:
        path: where it is.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def save(self, data: Any) -> None:
        """Write the object."""

    @abstractmethod
    def load(self) -> Any:
        """Read the object."""


class FileStorage(Storage):
    """A file of a pickled object."""

    def save(self, data: Any) -> None:
        """Write the object."""
        Path(self.path).write_bytes(pickle.dumps(data))

    def load(self) -> Any:
        """Read the object."""
        return pickle.loads(Path(self.path).read_bytes())


class FileModelStorage(Storage):
    """A file of a module's state."""

    def save(self, data: Any) -> None:
        """Write the state."""
        save_file(self.path, data)

    def load(self) -> Any:
        """Read the state."""
        return read_file(self.path)


class _Files:
    """Files of a folder that live for a few seconds, and threads that read and write them."""

    def __init__(self, dirname: str, ttl: float, n_threads: int) -> None:
        self._dirname = dirname
        self._ttl = ttl
        self._n_threads = n_threads
        self._files: list[tuple[float, str]] = []
        self._threads: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Start the threads; the first use does so, too."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._n_threads)

    def shutdown(self, timeout: float | None = None) -> None:
        """Wait for the threads and end them."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def _submit(self, work: Callable[[], None]) -> None:
        self.start()
        if self._threads is not None:
            self._threads.submit(work)

    def _new_path(self, suffix: str) -> str:
        Path(self._dirname).mkdir(parents=True, exist_ok=True)
        return str(Path(self._dirname, f"{uuid.uuid4().hex}{suffix}"))

    def _remove_later(self, path: str) -> None:
        entry = (time.time(), path)
        self._files.append(entry)

        def remove() -> None:
            Path(path).unlink(missing_ok=True)
            self._files.remove(entry)

        timer = threading.Timer(self._ttl, remove)
        timer.daemon = True
        timer.start()


class FileModelLoader(_Files):
    """Writes the state of a module to files, while the program continues.

    Args:
        model: the module.
        dirname: the folder.
        ttl: after how many seconds a file is removed.
    """

    def __init__(self, model: nn.Module, dirname: str, ttl: float = 20) -> None:
        super().__init__(dirname, ttl, 1)
        self._model = model

    def save(self, callback: Callable[[FileModelStorage], Any]) -> FileModelStorage:
        """Write the state as it is now, and call back when it is written."""
        state = {key: x.detach().cpu().clone() for key, x in self._model.state_dict().items()}
        storage = FileModelStorage(self._new_path(".pth.tar"))

        def write() -> None:
            storage.save(state)
            self._remove_later(storage.path)
            callback(storage)

        self._submit(write)
        return storage

    def load(self, storage: Storage) -> Any:
        """Read a state."""
        return storage.load()


class FileStorageLoader(_Files):
    """Writes objects to files, and reads them while the program continues.

    Args:
        dirname: the folder.
        ttl: after how many seconds a file is removed.
        worker_num: how many threads read.
    """

    def __init__(self, dirname: str, ttl: float = 20, worker_num: int = 3) -> None:
        super().__init__(dirname, ttl, worker_num)

    def save(self, obj: Any) -> FileStorage:
        """Write an object."""
        storage = FileStorage(self._new_path(".pkl"))
        storage.save(obj)
        self._remove_later(storage.path)
        return storage

    def load(self, storage: Storage, callback: Callable[[Any], Any]) -> None:
        """Read an object, and call back with it."""
        self._submit(lambda: callback(storage.load()))
