"""Blocks of states: files that several checkpoints share, named by their content."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError

from dmiddleware.files.atomic_file import (
    digest,
    flush_folder,
    open_safetensors,
    raw_bytes,
    remove_leftovers,
    write_safetensors,
)
from dmiddleware.files.serialization import StateBlock, pack, unpack

__all__ = [
    "BLOCKS",
    "BlockFolder",
    "block_names",
    "blocks_of",
    "pack_tensors",
    "read_block",
    "read_tensors",
    "unpack_tensors",
]

BLOCKS: Final = "blocks"
"""The entry of a checkpoint's metadata that names its blocks."""
_REST: Final = "__rest__"
"""The entry of a file that holds everything but the tensors."""

_FORMAT: Final = {"format": "dmiddleware-block", "version": "1"}
_NAME: Final = re.compile(r"[\w.-]*\w/[0-9a-f]{32}\.safetensors")


class BlockFolder:
    """A folder for the blocks of states, such as the rows of a replay buffer.

    :func:`~dmiddleware.data.save_checkpoint` writes them there, instead of into the checkpoint.
    Those that are there already are not written again::

        blocks = BlockFolder(Path("buffer-blocks"))
        with buffer.live_state() as state:
            save_checkpoint("buffer-1.safetensors", state, blocks=blocks)
        ...
        with buffer.live_state() as state:  # writes the new rows
            save_checkpoint("buffer-2.safetensors", state, blocks=blocks)
        blocks.keep_only([Path("buffer-2.safetensors")])

    A file is named by its content, so it never changes.

    Args:
        path: the folder, in that of the checkpoints; it is created when it is needed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._names: dict[Hashable, str] = {}
        # Whose content was written, or compared, by this object.
        self._sound: set[str] = set()
        self._unflushed: list[str] = []

    def put(self, block: StateBlock) -> str:
        """Write a block, unless the folder has it; :meth:`flush` makes it durable.

        Returns:
            The name of its file.

        Raises:
            OSError: if it cannot be written.
            TypeError: if it holds a value that a checkpoint cannot hold.
        """
        file_name = None if block.key is None else self._names.get(block.key)
        if file_name is not None and (self.path / file_name).is_file():
            return file_name
        tensors = pack_tensors(block.content())
        name = f"{digest(tensors)}.safetensors"
        path = self.path / name
        if name not in self._sound or not path.is_file():
            if not _is_whole(path):
                write_safetensors(path, tensors, _FORMAT, durable=False)
            self._sound.add(name)
            self._unflushed.append(name)
        if block.key is not None:
            self._names[block.key] = name
        return name

    def flush(self) -> None:
        """Let the new blocks survive a power cut: all at once, because each flush takes its time.

        Raises:
            OSError: if they cannot be written.
        """
        for name in self._unflushed:
            with (self.path / name).open("rb") as file:
                os.fsync(file.fileno())
        if self._unflushed:
            remove_leftovers(self.path)
            flush_folder(self.path)
        self._unflushed.clear()

    def keep_only(self, checkpoints: Iterable[Path]) -> None:
        """Remove the blocks that none of these checkpoints needs, and the folder if none is left.

        Raises:
            OSError: if one cannot be removed.
        """
        files = [Path(name) for path in checkpoints for name in blocks_of(path)]
        names = {name.name for name in files if name.parent.name == self.path.name}
        self._sound &= names
        self._unflushed = [name for name in self._unflushed if name in names]
        self._names = {key: name for key, name in self._names.items() if name in names}
        for path in self.path.glob("*.safetensors"):
            if path.name not in names and _NAME.fullmatch(f"{self.path.name}/{path.name}"):
                path.unlink(missing_ok=True)
        if not names:
            with suppress(OSError):  # there is none, or it has other files
                self.path.rmdir()


def _is_whole(path: Path) -> bool:
    try:
        read_block(path, mapped_above=0)
    except ValueError:
        return False
    return True


def pack_tensors(
    state: Any, put_block: Callable[[StateBlock], int] | None = None
) -> dict[str, torch.Tensor]:
    """Return a state as tensors; the entry ``__rest__`` has everything that is none.

    Raises:
        TypeError: if the state holds a value that a checkpoint cannot hold.
    """
    rest, tensors = pack(state, reserved=(_REST, "__metadata__"), put_block=put_block)
    tensors[_REST] = torch.from_numpy(np.frombuffer(bytearray(rest), dtype=np.uint8))
    return tensors


def unpack_tensors(
    tensors: dict[str, torch.Tensor],
    map_location: torch.device | str = "cpu",
    blocks: Sequence[Any] = (),
) -> Any:
    """Return the state that :func:`pack_tensors` packed, given the contents of its blocks.

    Raises:
        KeyError, ValueError: if the tensors are not from there, or a block is missing.
    """
    rest = tensors.pop(_REST)
    moved = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    return unpack(raw_bytes(rest).tobytes(), moved, blocks)


def blocks_of(path: Path) -> list[str]:
    """Return the names of the blocks of a checkpoint, relative to its folder.

    Those of a file that is missing or damaged, which cannot be read anyway, are not known.
    """
    try:
        with open_safetensors(path) as file:
            return block_names(file.metadata() or {})
    except (FileNotFoundError, SafetensorError, ValueError):
        return []


def block_names(metadata: Mapping[str, str]) -> list[str]:
    """Return the names of the blocks of a checkpoint, given its metadata.

    Raises:
        ValueError: if they are not names of files in a folder beside it.
    """
    names = json.loads(metadata.get(BLOCKS, "[]"))
    if not isinstance(names, list) or not all(_NAME.fullmatch(str(name)) for name in names):
        raise ValueError("the names of its other files are not valid")
    return names


def read_block(
    path: Path, map_location: torch.device | str = "cpu", *, mapped_above: int | None
) -> Any:
    """Read the content of a block; the arguments are those of ``load_checkpoint``.

    If any tensor may be mapped, all of them are, because a state has many small blocks.

    Raises:
        ValueError: if the file is missing, is incomplete, or has changed.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        tensors, _ = read_tensors(path, None if mapped_above is None else 0)
        if path.name == f"{digest(tensors)}.safetensors":
            return unpack_tensors(tensors, map_location)
    except FileNotFoundError as error:
        raise ValueError(f"its part {name} is missing") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"its part {name} is damaged: {error}") from error
    raise ValueError(f"the content of its part {name} does not match the name")


def read_tensors(
    path: Path, mapped_above: int | None
) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    """Read the tensors and the metadata of a .safetensors file."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        # It is mapped, and would change with the file.
        keeps = mapped_above is not None and tensor.nbytes > mapped_above
        return tensor if keeps else tensor.clone()

    with open_safetensors(path) as file:
        tensors = {name: own(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}
