"""Where the memory of a buffer's columns comes from."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Allocate", "in_memory", "mapped_to"]

Array: TypeAlias = npt.NDArray[Any]

Allocate: TypeAlias = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]
"""Returns an array of zeros for the name of a column, a shape and a dtype."""


def in_memory(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Allocate ordinary memory, which the system provides when rows are first written."""
    return np.zeros(shape, dtype)


def mapped_to(folder: Path) -> Allocate:
    """Return a function that allocates memory-mapped files in a folder, which is created.

    The files have no names, so the system removes them with their arrays, also if it kills the
    process. The function raises an OSError if the disk is too full.
    """

    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        folder.mkdir(parents=True, exist_ok=True)
        n_bytes = max(1, int(np.prod(shape, dtype=object)) * dtype.itemsize)
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                # Now, because writing to a mapped page on a full disk kills the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, n_bytes)
                else:
                    file.truncate(n_bytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"not enough space in {folder} for column {name!r}, which needs "
                    f"{n_bytes / 2**20:,.1f} MiB ({error.strerror}); free space, or use fewer rows",
                ) from error
            return np.memmap(file, dtype=dtype, mode="r+", shape=shape).view(np.ndarray)

    return allocate
