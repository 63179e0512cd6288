"""Atomic writing of files, and of tensors in the safetensors format."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

__all__ = [
    "DTYPE_NAMES",
    "checksum",
    "digest",
    "flush_folder",
    "open_safetensors",
    "raw_bytes",
    "remove_leftovers",
    "safetensors_pieces",
    "write_atomically",
    "write_safetensors",
]

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

_LONGEST_HEADER = 100_000_000
"""The longest header that the safetensors library accepts."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

_log = logging.getLogger(__name__)


def write_atomically(
    path: Path, write: Callable[[BinaryIO], None], *, durable: bool = True
) -> None:
    """Write a file so that, whatever happens, either the old or the new one exists, complete.

    Writes a temporary file next to it, flushes that to the disk, and renames it to ``path``.
    Missing folders are created. If writing fails, the temporary file is removed and the old file is
    unchanged. Temporary files that a killed process left in the folder are removed.

    Args:
        path: the file.
        write: called with the open temporary file.
        durable: False neither flushes to the disk nor removes leftovers: faster, and readers still
            see whole files only, but a power cut may damage the newest ones.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if durable:
        remove_leftovers(path.parent)
    temporary, file = _open_temporary(path)
    try:
        with file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)  # while it is locked
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        flush_folder(path.parent)


def _open_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """Create a temporary file, locked: the lock shows others that its writer is alive."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        file = temporary.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # removed by another writer before it was locked


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files in a folder whose writers are gone."""
    with os.scandir(folder) as entries:
        temporaries = [Path(entry.path) for entry in entries if _TEMPORARY.fullmatch(entry.name)]
    for temporary in temporaries:
        with suppress(OSError), temporary.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer is alive
            temporary.unlink()
            _log.warning("removed %s, left by a process that was killed", temporary)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    *,
    durable: bool = True,
) -> None:
    """Write tensors to one .safetensors file, atomically and without a second copy in memory.

    ``safetensors.torch.save_file`` turns each tensor into a bytes object first, and hides the
    system's error code when the disk is full.

    Args:
        path: the file.
        tensors: by name; on any device, with any strides.
        metadata: strings stored with them.
        durable: as for :func:`write_atomically`.

    Raises:
        OSError: if the file cannot be written.
        TypeError: for a tensor of a dtype that the format does not have.
        ValueError: if there are too many tensors for the format.
    """
    pieces = safetensors_pieces(tensors, metadata)
    write_atomically(path, lambda file: file.writelines(pieces), durable=durable)


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a .safetensors file; its tensors are mapped.

    The safetensors library takes no path that is not Unicode, which folders can have on Linux.

    Raises:
        OSError: if the file cannot be read.
        SafetensorError: if it is not complete.
    """
    with path.open("rb") as file:
        try:
            name = str(path)
            name.encode()
        except UnicodeEncodeError:
            name = f"/proc/self/fd/{file.fileno()}"
        with safe_open(name, framework="pt", device="cpu") as opened:
            yield opened


def safetensors_pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Return the content of a .safetensors file, piece by piece; arguments as above.

    Raises:
        TypeError: for a tensor of a dtype that the format does not have.
        ValueError: if there are too many tensors for the format.
    """
    # Wide types first, as the library does: every tensor is then aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise ValueError(
            f"{len(tensors)} tensors need a header of {len(text) / 1e6:.0f} MB, but readers accept "
            f"at most {_LONGEST_HEADER / 1e6:.0f} MB; stack small tensors into fewer large ones"
        )
    contents = (raw_bytes(tensors[name]).data for name in order)
    return itertools.chain((len(text).to_bytes(8, "little"), text), contents)


def raw_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, row by row; a contiguous one on the CPU shares its memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not len(flat):  # torch refuses to view an empty one from numpy as bytes
        return np.empty(0, np.uint8)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the CRC-32 over names, types, shapes and bytes, in the order of the names."""
    value = 0
    for piece in _content(tensors):
        value = zlib.crc32(piece, value)
    return value


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a name that only equal tensors of equal names have: the start of the SHA-256."""
    hashed = hashlib.sha256()
    for piece in _content(tensors):
        hashed.update(piece)
    return hashed.hexdigest()[:32]


def _content(tensors: Mapping[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    for name in sorted(tensors):
        tensor = tensors[name]
        yield f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
        yield raw_bytes(tensor).data


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    try:
        return DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise TypeError(
            f"tensor {name!r} has dtype {tensor.dtype}, which a .safetensors file cannot hold; "
            "convert it first"
        ) from None


def flush_folder(folder: Path) -> None:
    """Make a rename survive a power cut, on systems that can flush a folder."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
