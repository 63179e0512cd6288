"""Transitions as dictionaries, the form of the classic collectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dmiddleware.data import index_rows, lead_shape
from dmiddleware.data.batch import Batch

__all__ = ["split_rows", "to_tensor_transitions"]


def to_tensor_transitions(
    data: Sequence[Mapping[str, Any]], shallow_copy_next_obs: bool = True
) -> list[dict[str, Any]]:
    """Turn consecutive transitions of one env into tensors.

    Args:
        data: transitions, oldest first; values are numbers, arrays, tensors, or nested dicts or
            tuples of them. Other values stay as they are.
        shallow_copy_next_obs: use the following transition's ``obs`` object as ``next_obs``, which
            saves memory. The last transition, and the last of each episode, keep their own.

    Returns:
        New dictionaries; floats become float32, integers int64, and arrays of float64 float32.
    """
    rows = [
        {
            key: _to_tensor(value)
            for key, value in transition.items()
            if not (key == "next_obs" and shallow_copy_next_obs)
        }
        for transition in data
    ]
    if shallow_copy_next_obs:
        for position, row in enumerate(rows):
            if "next_obs" not in data[position]:
                continue
            is_last = position == len(rows) - 1 or bool(row.get("done", False))
            row["next_obs"] = (
                _to_tensor(data[position]["next_obs"]) if is_last else rows[position + 1]["obs"]
            )
    return rows


def split_rows(batch: Batch) -> list[dict[str, Any]]:
    """Turn a batch ``[N, …]`` into ``N`` dictionaries; tensors share the batch's memory."""
    columns = {str(key): _unbind(batch[key]) for key in batch}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _unbind(column: Any) -> Sequence[Any]:
    if isinstance(column, torch.Tensor):
        return column.unbind(0)
    length = lead_shape(column)[0]
    return [index_rows(column, position) for position in range(length)]


def _to_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor | Batch):
        return value
    if isinstance(value, Mapping):
        return {key: _to_tensor(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_to_tensor(item) for item in value)
    if isinstance(value, float | np.floating):
        return torch.tensor(value, dtype=torch.float32)
    if isinstance(value, np.ndarray):
        tensor = torch.from_numpy(value)
        return tensor.float() if tensor.dtype == torch.float64 else tensor
    if isinstance(value, bool | np.bool_):
        return torch.tensor(bool(value))
    if isinstance(value, int | np.integer):
        return torch.tensor(int(value))
    return value
