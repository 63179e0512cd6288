"""What a checkpoint or a snapshot holds, as ``ditask inspect`` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.data import load_checkpoint
from dmiddleware.tree import Batch, items_of

__all__ = ["describe_checkpoint"]

_WIDTH: Final = 60
_FEW: Final = 3
"""So many items of a list have lines of their own; more of the same kind are folded."""


def describe_checkpoint(path: str | Path) -> str:
    """Return what a file holds: a line for each value with its path, arrays with dtype and shape.

    Items of a long list that are of the same kind have one line, with ``*`` for their index and
    their number, such as the blocks of a large buffer.

    Args:
        path: a checkpoint or a snapshot. Large arrays are not read into memory, and no code of the
            file is run.

    Raises:
        CheckpointDamaged: if it is neither, is incomplete, or has changed.
        OSError: if it cannot be read.
    """
    path = Path(path)
    rows = list(_rows(load_checkpoint(path, mapped_above=0)))
    arrays = [value for _, _, value in rows if isinstance(value, torch.Tensor | np.ndarray)]
    cells = list(_folded(rows))
    names, kinds = (max((len(cell[at]) for cell in cells), default=0) for at in (0, 1))
    title = (
        f"{path}: {len(arrays)} arrays of {sum(map(_numel, arrays)):,} numbers, "
        f"{_n_bytes(arrays):,} bytes; the file has {path.stat().st_size:,} bytes"
    )
    return "\n".join(
        [title, *(f"{name:<{names}}  {kind:<{kinds}}  {text}" for name, kind, text in cells)]
    )


def _rows(value: Any, name: str = "", folded: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield each value that holds no others, and each empty container.

    Yields:
        Its path, its path with ``*`` for the indexes of long lists, and the value.
    """
    if isinstance(value, Batch | Mapping) and value:
        for key, one in items_of(value):
            yield from _rows(one, _joined(name, key), _joined(folded, key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and _is_long(value):
        for index, one in enumerate(value):
            shown = index if len(value) <= _FEW else "*"
            yield from _rows(one, _joined(name, index), _joined(folded, shown))
    else:
        yield name, folded, value


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _folded(rows: Iterable[tuple[str, str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the kind and the text of each value, or of values of the same kind."""
    groups: dict[tuple[str, ...], list[tuple[str, Any]]] = {}
    for name, folded, value in rows:
        kind, text = _shown(value)
        is_array = isinstance(value, torch.Tensor | np.ndarray)
        groups.setdefault((folded, kind, text if is_array else ""), []).append((name, value))
    for (folded, kind, shape), group in groups.items():
        values = [value for _, value in group]
        first = _shown(values[0])[1]
        if len(group) <= _FEW:
            yield from ((name, *_shown(value)) for name, value in group)
        elif shape:
            yield folded, kind, f"{len(group)} x {shape}, {_n_bytes(values):,} bytes"
        elif len({_shown(value)[1] for value in values}) == 1:
            yield folded, kind, f"{len(group)} x {first}"
        else:
            yield folded, kind, f"{len(group)} values, the first {first}"


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


def _n_bytes(arrays: Iterable[torch.Tensor | np.ndarray[Any, Any]]) -> int:
    return sum(one.nbytes for one in arrays)
