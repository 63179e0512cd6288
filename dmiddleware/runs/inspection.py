"""What a checkpoint or a snapshot holds, as ``ditask inspect`` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.data import load_checkpoint
from dmiddleware.tree import Batch, items_of

__all__ = ["describe_checkpoint"]

_WIDTH: Final = 60


def describe_checkpoint(path: str | Path) -> str:
    """Return what a file holds: a line for each value with its path, arrays with dtype and shape.

    Args:
        path: a checkpoint or a snapshot. Large arrays are not read into memory, and no code of the
            file is run.

    Raises:
        CheckpointDamaged: if it is neither, is incomplete, or has changed.
        OSError: if it cannot be read.
    """
    path = Path(path)
    rows = list(_rows(load_checkpoint(path, mapped_above=0)))
    arrays = [value for _, value in rows if isinstance(value, torch.Tensor | np.ndarray)]
    cells = [(name, *_shown(value)) for name, value in rows]
    names, kinds = (max((len(cell[at]) for cell in cells), default=0) for at in (0, 1))
    numbers, size = sum(map(_numel, arrays)), path.stat().st_size
    title = f"{path}: {len(arrays)} arrays of {numbers:,} numbers, {size:,} bytes"
    return "\n".join(
        [title, *(f"{name:<{names}}  {kind:<{kinds}}  {text}" for name, kind, text in cells)]
    )


def _rows(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value that holds no others, and each empty container, with its path."""
    if isinstance(value, Batch | Mapping) and value:
        for key, one in items_of(value):
            yield from _rows(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and _is_long(value):
        for index, one in enumerate(value):
            yield from _rows(one, f"{name}.{index}")
    else:
        yield name, value


def _is_long(value: Sequence[Any]) -> bool:
    """Return whether a sequence holds more than a few plain values, which fit into one line."""
    return any(isinstance(one, torch.Tensor | np.ndarray | Batch | Mapping) for one in value)


def _shown(value: Any) -> tuple[str, str]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype).removeprefix("torch."), str(list(value.shape))
    text = repr(value)
    return type(value).__name__, text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _numel(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else value.size
