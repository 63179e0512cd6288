"""Storage: where the memory of a buffer's columns comes from."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dmiddleware.data.batch import Batch, nest
from dmiddleware.errors import ConfigError

__all__ = [
    "FileStorage",
    "RamStorage",
    "SharedColumns",
    "SharedHandle",
    "SharedStorage",
    "Storage",
    "make_storage",
]

Array: TypeAlias = npt.NDArray[Any]

_log = logging.getLogger(__name__)

_attaching = threading.Lock()


class Storage(Protocol):
    """Allocates memory for columns and frees it."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros whose memory is reserved."""

    def close(self) -> None:
        """Free all memory; the arrays must not be used afterwards."""


def make_storage(where: str | Path) -> Storage:
    """Return the storage for an option: ``"ram"``, ``"shared"`` or the path of a folder."""
    if isinstance(where, Path):
        return FileStorage(where)
    if where == "ram":
        return RamStorage()
    if where == "shared":
        return SharedStorage()
    raise ValueError(
        "storage must be 'ram', 'shared' or a pathlib.Path (a folder for memory-mapped files), got "
        f"{where!r}; for a folder, write Path({str(where)!r})"
    )


class RamStorage:
    """Ordinary memory, which the system provides when rows are first written."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros."""
        return np.zeros(shape, dtype)

    def close(self) -> None:
        """Do nothing: the memory is freed with the arrays."""


class FileStorage:
    """Memory-mapped files, one per column: rows beyond the machine's memory.

    The files are scratch space of one buffer and are removed by :meth:`close`. Files that a killed
    program left are replaced, never read. To keep rows, save the buffer's ``state_dict`` or write a
    dataset.

    Args:
        folder: created if needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros in a new file.

        Raises:
            ConfigError: if another buffer, in any process, has the file.
            OSError: if the disk is too full.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{_file_name(name)}.column"
        n_bytes = _n_bytes(shape, dtype)
        # The mapping duplicates the descriptor, so the file is locked as long as it is mapped.
        with _create_locked(path) as file:
            self._files.append(path)
            _reserve(file.fileno(), n_bytes, f"column {name!r} in {path}")
            return np.memmap(file, dtype=dtype, mode="r+", shape=shape).view(np.ndarray)

    def close(self) -> None:
        """Remove the files; may be called twice."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()
        with suppress(OSError):  # it holds other files too
            self._folder.rmdir()


class SharedStorage:
    """Shared memory, one segment per column; other processes attach to it with a handle."""

    def __init__(self) -> None:
        self._segments: list[shared_memory.SharedMemory] = []
        self._columns: list[_SharedColumn] = []

    def allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros in a new segment.

        Raises:
            OSError: if there is not enough shared memory.
        """
        n_bytes = _n_bytes(shape, dtype)
        segment = shared_memory.SharedMemory(create=True, size=n_bytes)
        self._segments.append(segment)
        backing = Path("/dev/shm") / segment.name
        if backing.exists():
            # Linux grants more shared memory than it has, and kills processes that touch it.
            with backing.open("r+b") as file:
                _reserve(file.fileno(), n_bytes, f"column {name!r} in shared memory")
        self._columns.append(_SharedColumn(name, segment.name, shape, dtype.str))
        return np.ndarray(shape, dtype, buffer=segment.buf)

    def handle(self) -> SharedHandle:
        """Return the handle that another process attaches with; it can be pickled."""
        return SharedHandle(tuple(self._columns))

    def close(self) -> None:
        """Remove the segments; may be called twice."""
        for segment in self._segments:
            segment.close()
            segment.unlink()
        self._segments.clear()
        self._columns.clear()


@dataclass(frozen=True, slots=True)
class _SharedColumn:
    name: str
    segment: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SharedHandle:
    """Identifies the shared columns of a buffer; send it to another process and attach there.

    Attributes:
        columns: one entry per column.
    """

    columns: tuple[_SharedColumn, ...]

    @contextmanager
    def attach(self) -> Iterator[SharedColumns]:
        """Map the columns into this process until the end of the ``with`` block.

        Raises:
            FileNotFoundError: if the owner has closed its buffer.
            BufferError: at the end of the block, if tensors over the columns still exist.
        """
        segments: list[shared_memory.SharedMemory] = []
        shared = SharedColumns()
        try:
            for column in self.columns:
                segment = _attach(column.segment)
                segments.append(segment)
                array: Array = np.ndarray(column.shape, column.dtype, buffer=segment.buf)
                shared.arrays[column.name] = array
                del array
            yield shared
        finally:
            shared.arrays.clear()
            for segment in segments:
                segment.close()


class SharedColumns:
    """The columns of another process's buffer: all slots of its ring, ``[size, …]``, not copied.

    Rows that the owner pushes appear in them at once. A row that is being written cannot be
    distinguished from a complete one, so the processes must take turns.

    Attributes:
        arrays: by dotted path.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def take(self, index: npt.NDArray[np.int64], size: int) -> Batch:
        """Copy rows by their index.

        Args:
            index: int64, of any shape.
            size: capacity of the buffer.

        Returns:
            Fresh tensors ``[*index.shape, …]``.
        """
        slots = index % size
        return nest({path: array.take(slots, axis=0) for path, array in self.arrays.items()})


def _attach(name: str) -> shared_memory.SharedMemory:
    """Open a segment without making this process responsible for it.

    Python 3.11 and 3.12 have every process that opens a segment remove it at its end
    (https://github.com/python/cpython/issues/82300); 3.13 has ``track=False``.
    """
    with _attaching:  # two threads at once would restore each other's replacement
        register = resource_tracker.register
        resource_tracker.register = _register_nothing  # type: ignore[assignment]
        try:
            return shared_memory.SharedMemory(name)
        finally:
            resource_tracker.register = register


def _register_nothing(name: str, rtype: str) -> None:
    pass


def _create_locked(path: Path) -> BinaryIO:
    """Create a file and lock it; a file that a killed program left is replaced.

    Raises:
        ConfigError: if the file exists and is locked.
    """
    while True:
        _remove_leftover(path)
        try:
            file = path.open("x+b")
        except FileExistsError:
            continue  # another buffer was faster
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # taken for a leftover before it was locked


def _remove_leftover(path: Path) -> None:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another buffer keeps its columns in {path.parent}; give each buffer a folder of "
                "its own, or close the other one first"
            ) from None
        except OSError:  # a file system without locks
            pass
        _log.warning("replacing %s, left by an earlier buffer", path)
        path.unlink()


def _reserve(descriptor: int, n_bytes: int, what: str) -> None:
    """Reserve the space now: writing to a mapped page on a full disk kills the process."""
    fallocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    try:
        if fallocate is None:
            os.truncate(descriptor, n_bytes)
        else:
            fallocate(descriptor, 0, n_bytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"not enough space for {what}, which needs {n_bytes / 2**20:,.1f} MiB "
            f"({error.strerror}); free space, or use fewer rows or another storage",
        ) from error


def _n_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return max(1, int(np.prod(shape, dtype=object)) * dtype.itemsize)


def _file_name(name: str) -> str:
    """Return a leaf's path as a file name; unsafe characters become their code."""
    return re.sub(r"[^A-Za-z0-9_.-]", lambda match: f"%{ord(match[0]):x}", name)
