"""Files that are either whole or not there, and tensors in them."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["checksum", "raw_bytes", "write_atomically", "write_safetensors"]

_DTYPE_NAMES = {
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
"""What the safetensors library accepts."""


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file so that, whatever happens, the old one or the new one is there, whole.

    Writes a temporary file beside it, flushes that to the disk, and renames it over ``path``.
    Missing folders are made. When writing fails, the temporary file is removed and the file that
    was there before is as it was.

    Args:
        path: the file.
        write: called with the open temporary file.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors to one .safetensors file, atomically and without a second copy in memory.

    ``safetensors.torch.save_file`` turns each tensor into a bytes object first, and hides the
    system's error code when the disk is full.

    Args:
        path: the file.
        tensors: by name; of any device and any strides.
        metadata: strings stored beside them.

    Raises:
        OSError: if the file cannot be written.
        TypeError: for a tensor of a type that the format lacks.
        ValueError: if there are too many tensors for the format.
    """
    # Wide types first, as the library does: so every tensor is aligned.
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
            f"{len(tensors)} tensors need a header of {len(text) / 1e6:.0f} MB, but readers take "
            f"{_LONGEST_HEADER / 1e6:.0f} MB; stack small tensors into fewer large ones"
        )

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(raw_bytes(tensors[name]).data)

    write_atomically(path, write)


def raw_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, row by row; shares memory with a contiguous one on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not len(flat):  # one made by numpy has no strides that torch would view as bytes
        return np.empty(0, np.uint8)
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def checksum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the CRC-32 over names, types, shapes and bytes, in the order of the names."""
    value = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        value = zlib.crc32(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode(), value)
        value = zlib.crc32(raw_bytes(tensor).data, value)
    return value


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    try:
        return _DTYPE_NAMES[tensor.dtype]
    except KeyError:
        raise TypeError(
            f"tensor {name!r} is of type {tensor.dtype}, which a .safetensors file cannot hold; "
            "convert it first"
        ) from None


def _flush_folder(folder: Path) -> None:
    """Make a rename outlast a power cut; where folders cannot be opened there is no such call."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
