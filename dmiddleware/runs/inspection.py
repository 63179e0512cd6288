"""What a checkpoint or a snapshot holds, as ``ditask inspect`` prints it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dmiddleware.data import load_checkpoint
from dmiddleware.runs.resuming import SNAPSHOTS
from dmiddleware.tree import Batch, items_of

__all__ = ["describe_checkpoint"]

_WIDTH: Final = 60
_HEAD: Final = 12
_FEW: Final = 3
"""So many items of a list have lines of their own; more of the same kind are folded."""


def describe_checkpoint(path: str | Path) -> str:
    """Return what a file holds: a line for each value with its path, arrays with dtype and shape.

    Above them, the file of a run has a summary: what it is, how far the run was, and what to do
    with it. Items of a long list that are of the same kind have one line, with ``*`` for their
    index and their number, such as the blocks of a large buffer.

    Args:
        path: a checkpoint or a snapshot. Large arrays are not read into memory, and no code of the
            file is run.

    Raises:
        CheckpointDamaged: if it is neither, is incomplete, or has changed.
        OSError: if it cannot be read.
    """
    path = Path(path)
    state = load_checkpoint(path, mapped_above=0)
    rows = list(_rows(state))
    arrays = [value for _, _, value in rows if isinstance(value, torch.Tensor | np.ndarray)]
    cells = list(_folded(rows))
    names, kinds = (max((len(cell[at]) for cell in cells), default=0) for at in (0, 1))
    title = (
        f"{path}: {len(arrays)} arrays of {sum(map(_numel, arrays)):,} numbers, "
        f"{_n_bytes(arrays):,} bytes; the file has {path.stat().st_size:,} bytes"
    )
    summary = [f"{name:<{_HEAD}}  {text}" for name, text in _summary(state, path) if text]
    return "\n".join(
        [
            *([*summary, ""] if summary else []),
            title,
            *(f"{name:<{names}}  {kind:<{kinds}}  {text}" for name, kind, text in cells),
        ]
    )


def _summary(state: Any, path: Path) -> Iterator[tuple[str, str]]:
    """Yield what the file of a run is, each part with its name; nothing of other files."""
    if not isinstance(state, Mapping):
        return
    match state:
        case {"policy": {"class": str(policy), **others}, "model": Mapping() as model}:
            parameters = [each for _, _, each in _rows(model) if isinstance(each, torch.Tensor)]
            yield "checkpoint", f"of {policy.rpartition('.')[2]}"
            yield "observations", _space(others.get("observation_space"))
            yield "actions", _space(others.get("action_space"))
            yield "network", f"{sum(map(_numel, parameters)):,} parameters"
            yield "updates", _count(state.get("last_iter"))
            yield "env steps", _count(state.get("last_step"))
            yield "evaluation", _figure(state.get("last_eval_value"))
            yield "to act", f"load_policy({str(path)!r})"
        case {"task": {"context": {"values": Mapping() as values}}, "parts": Mapping() as parts}:
            yield "snapshot", f"of a run, in step {_count(values.get('total_step'))} of its task"
            yield "env steps", _count(values.get("env_step"))
            yield "updates", _count(values.get("train_iter"))
            yield "evaluation", _figure(values.get("last_eval_value"))
            yield "holds", ", ".join(map(str, parts))
            # A learner of a named part saves to a folder of its own in that of the run.
            folders = (path.parent, path.parent.parent)
            for folder in [each for each in folders if each.resolve().name == SNAPSHOTS][:1]:
                yield "to continue", f"ditask resume {shlex.quote(str(folder.parent))}"


def _space(space: Any) -> str:
    """Return a space in a few words, such as ``Box [4] float32`` and ``Discrete(2)``."""
    match space:
        case {"type": "Discrete", "n": n}:
            return f"Discrete({n})"
        case {"type": str(kind), "shape": shape, "dtype": dtype}:
            return f"{kind} {shape} {dtype}"
        case {"type": str(kind)}:
            return kind
    return ""


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _figure(value: Any) -> str:
    is_finite = isinstance(value, int | float) and math.isfinite(value)
    return f"mean return {value:,.1f}" if is_finite else ""


def _rows(value: Any, name: str = "", folded: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield each value that holds no others, and each empty container.

    Yields:
        Its path, its path with ``*`` for the indexes of long lists, and the value.
    """
    if isinstance(value, Batch | Mapping) and value:
        for key, item in items_of(value):
            yield from _rows(item, _joined(name, key), _joined(folded, key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and _is_long(value):
        for index, item in enumerate(value):
            shown = index if len(value) <= _FEW else "*"
            yield from _rows(item, _joined(name, index), _joined(folded, shown))
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
    return any(isinstance(item, torch.Tensor | np.ndarray | Batch | Mapping) for item in value)


def _shown(value: Any) -> tuple[str, str]:
    if isinstance(value, torch.Tensor | np.ndarray):
        return str(value.dtype).removeprefix("torch."), str(list(value.shape))
    text = repr(value)
    return type(value).__name__, text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _numel(value: torch.Tensor | np.ndarray[Any, Any]) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else value.size


def _n_bytes(arrays: Iterable[torch.Tensor | np.ndarray[Any, Any]]) -> int:
    return sum(array.nbytes for array in arrays)
