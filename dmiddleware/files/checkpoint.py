"""Checkpoints: a nested state in one .safetensors file.

The tensors are ordinary entries of the file, which any safetensors reader shows. The rest
(counters, strings, the nesting itself) is msgpack in the entry ``__rest__``. A CRC-32 over
everything detects damage. Loading never executes code from the file. Parts that rarely change, such
as the rows of a buffer, may be in files of their own; see :class:`BlockFolder`.
"""

from __future__ import annotations

import errno
import json
import pickle
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from dmiddleware.errors import CheckpointDamaged, CheckpointWriteError
from dmiddleware.files.atomic_file import checksum, safetensors_pieces, write_safetensors
from dmiddleware.files.serialization import StateBlock, pack
from dmiddleware.files.state_blocks import (
    BLOCKS,
    BlockFolder,
    block_names,
    pack_tensors,
    read_block,
    read_tensors,
    unpack_tensors,
)

__all__ = [
    "check_saveable",
    "convert_checkpoint",
    "load_any_checkpoint",
    "load_checkpoint",
    "pack_checkpoint",
    "save_checkpoint",
    "unpack_checkpoint",
]

_FORMAT = "dmiddleware-checkpoint"
_VERSION = "1"
_FREE_SPACE = "Free disk space or choose another folder"
_REMEDIES = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "Change the permissions of the folder or choose another one",
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Close files or raise their number (ulimit -n)"),
}


def save_checkpoint(path: str | Path, state: Any, *, blocks: BlockFolder | None = None) -> None:
    """Write a state to a file atomically.

    Args:
        path: the file, usually ``….safetensors``; its folder is created if needed, and an existing
            file is replaced.
        state: nested dictionaries, lists, tuples, sets, deques and batches of tensors, numpy arrays
            and scalars, numbers, strings, bytes, booleans and None, which all come back as the same
            type (``OrderedDict``, ``Counter`` and ``defaultdict`` included). Tensors may be on any
            device; they are detached. Tensors that share memory are written once each.
        blocks: where to write the parts of the state that rarely change, if it has such parts, as
            ``live_state`` of a buffer; it must be in the folder of the file. None: everything is
            written to the one file.

    Raises:
        CheckpointWriteError: if the file cannot be written, for example because the disk is full
            (see ``errno``). An existing file is unchanged, and no part of the new one remains,
            apart from blocks, which :meth:`BlockFolder.keep_only` removes.
        TypeError: if the state holds anything else, with its path in the state; the file is not
            written.
        ValueError: if the folder of the blocks is not in that of the file.
    """
    target = Path(path)
    if blocks is not None and blocks.path.parent != target.parent:
        raise ValueError(f"the blocks of {target} must be in {target.parent}, not in {blocks.path}")
    try:
        write_safetensors(target, *_packed(state, blocks))
    except OSError as error:
        raise CheckpointWriteError(
            error.errno or errno.EIO,
            f"the checkpoint could not be written ({error.strerror or error}); an existing file is "
            f"unchanged. {_REMEDIES.get(error.errno or 0, _FREE_SPACE)}, then save again",
            str(target),
        ) from error


def _packed(
    state: Any, blocks: BlockFolder | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a checkpoint; writes its blocks."""
    names: list[str] = []
    put_block = None if blocks is None else partial(_put_block, blocks, names)
    tensors = pack_tensors(state, put_block)
    if blocks is not None:
        blocks.flush()
    metadata = {"format": _FORMAT, "version": _VERSION}
    if names:
        metadata[BLOCKS] = json.dumps(names)
    return tensors, {**metadata, "crc32": _checksum(tensors, metadata)}


def _put_block(blocks: BlockFolder, names: list[str], block: StateBlock) -> int:
    names.append(f"{blocks.path.name}/{blocks.put(block)}")
    return len(names) - 1


def _checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """Return the CRC-32 over the tensors and the names of the blocks, as text."""
    return f"{zlib.crc32(metadata.get(BLOCKS, '').encode(), checksum(tensors)):08x}"


def pack_checkpoint(state: Any) -> bytes:
    """Return the bytes of the file that :func:`save_checkpoint` would write.

    Raises:
        TypeError: as :func:`save_checkpoint` raises it.
    """
    return b"".join(safetensors_pieces(*_packed(state)))


def unpack_checkpoint(data: bytes) -> Any:
    """Return the state that :func:`pack_checkpoint` packed, on the CPU.

    Raises:
        CheckpointDamaged: if the bytes are not a checkpoint, are incomplete, or have changed.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        metadata = header["__metadata__"]
        if BLOCKS in metadata:
            raise ValueError("parts of it are in other files")
        tensors = load(data)
        _check("the data", tensors, metadata)
        return unpack_tensors(tensors)
    except CheckpointDamaged:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged("the data", str(error)) from error


def check_saveable(state: Any) -> None:
    """Check that :func:`save_checkpoint` accepts a state, without writing it.

    Raises:
        TypeError: as :func:`save_checkpoint` raises it.
    """
    pack(state)


def load_checkpoint(
    path: str | Path,
    map_location: torch.device | str = "cpu",
    *,
    mapped_above: int | None = None,
) -> Any:
    """Read the state that :func:`save_checkpoint` wrote.

    Args:
        path: the file.
        map_location: device for the tensors; numpy arrays come back as arrays.
        mapped_above: tensors of more bytes are mapped: they take no memory until they are used, and
            the file must not be changed in place as long as they exist. It may be replaced or
            removed. None maps no tensor.

    Returns:
        The state; its tensors are independent of the file, except for those that are mapped.
        Writing to one of these does not change the file.

    Raises:
        FileNotFoundError: if the file does not exist.
        CheckpointDamaged: if the file, or one with a part of it, is not a checkpoint, is
            incomplete, or has changed.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(errno.ENOENT, "checkpoint not found", str(source))
    if _is_from_torch(source):
        raise CheckpointDamaged(
            f"{source} was written by torch.save, not by save_checkpoint; convert it once with "
            f"dmiddleware.data.convert_checkpoint({str(source)!r}, 'converted.safetensors')"
        )
    try:
        tensors, metadata = read_tensors(source, mapped_above)
        _check(source, tensors, metadata)
        names = block_names(metadata)
        read = partial(read_block, map_location=map_location, mapped_above=mapped_above)
        blocks = {name: read(source.parent / name) for name in dict.fromkeys(names)}
        return unpack_tensors(tensors, map_location, [blocks[name] for name in names])
    except CheckpointDamaged:
        raise
    except (SafetensorError, KeyError, ValueError) as error:
        raise _damaged(source, str(error)) from error


def convert_checkpoint(source: str | Path, target: str | Path) -> None:
    """Convert a file of ``torch.save``, such as a ``.pth.tar``, into a checkpoint.

    The file is read with ``weights_only=True``, so it executes no code.

    Args:
        source: the file that ``torch.save`` wrote.
        target: the checkpoint to write.

    Raises:
        FileNotFoundError: if ``source`` does not exist.
        CheckpointDamaged: if it cannot be read, or holds objects other than tensors, numbers,
            strings and containers of them.
        CheckpointWriteError: if ``target`` cannot be written.
    """
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "checkpoint not found", str(path))
    save_checkpoint(target, _load_torch(path))


def load_any_checkpoint(path: str | Path) -> Any:
    """Read a checkpoint on the CPU, also one that ``torch.save`` wrote, without executing its code.

    Raises:
        FileNotFoundError: if the file does not exist.
        CheckpointDamaged: if it cannot be read; of ``torch.save``, also if it holds objects other
            than tensors, numbers, strings and containers of them.
    """
    source = Path(path)
    if source.is_file() and _is_from_torch(source):
        return _load_torch(source)
    return load_checkpoint(source)


def _load_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from error


def _is_from_torch(path: Path) -> bool:
    """Return whether a file starts like those of torch.save: a zip archive, or a pickle."""
    with path.open("rb") as file:
        head = file.read(4)
    # A safetensors file starts with a length, whose higher bytes are zero.
    return head[2:] != b"\0\0" and (head == b"PK\x03\x04" or head[:1] == b"\x80")


def _check(
    path: Path | str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    if metadata.get("format") != _FORMAT:
        raise _damaged(path, "it is a .safetensors file, but not a checkpoint of this project")
    if metadata.get("version") != _VERSION:
        raise _damaged(
            path,
            f"it has format version {metadata.get('version')}, but this version reads {_VERSION}",
        )
    if metadata["crc32"] != _checksum(tensors, metadata):
        raise _damaged(path, "the checksum does not match the content")


def _damaged(path: Path | str, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{path} is not a complete checkpoint: {why}; use an earlier one or write it again"
    )
