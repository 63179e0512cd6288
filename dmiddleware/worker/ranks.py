"""Collective operations of workers over the ranks of a data-parallel run.

They do nothing without a ``torch.distributed`` process group, and fail after its timeout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dmiddleware.distributed import (
    collective,
    collective_device,
    rank_and_world_size,
    sum_over_ranks,
)

__all__ = ["broadcast_from_first", "mean_over_ranks", "rank_and_world_size", "sum_over_ranks"]

KEEP_PREFIX = "noreduce_"


def broadcast_from_first(value: Any) -> Any:
    """Return rank 0's value on every rank; the values of other ranks are ignored."""
    if rank_and_world_size()[1] == 1:
        return value
    box = [value]
    with collective():
        dist.broadcast_object_list(box, src=0, device=collective_device())
    return box[0]


def mean_over_ranks(data: Any) -> Any:
    """Average nested data over all ranks; every rank must call it with the same structure.

    All numbers are sent in one message. Keys that begin with ``noreduce_`` are not averaged.

    Args:
        data: a tensor, a number, or a dict or list of these; other values are returned unchanged.

    Returns:
        The same structure; tensors keep their dtype and device, numbers become floats.
    """
    world_size = rank_and_world_size()[1]
    if world_size == 1:
        return data
    numbers: list[float] = []
    _collect_numbers(data, numbers)
    mean = iter([total / world_size for total in sum_over_ranks(numbers)])
    return _replace(data, mean, world_size)


def _collect_numbers(data: Any, into: list[float]) -> None:
    if isinstance(data, dict):
        for key, value in data.items():
            if not _is_kept(key):
                _collect_numbers(value, into)
    elif isinstance(data, list):
        for value in data:
            _collect_numbers(value, into)
    elif _is_number(data):
        into.append(float(data))


def _replace(data: Any, mean: Any, world_size: int) -> Any:
    if isinstance(data, dict):
        return {
            key: value if _is_kept(key) else _replace(value, mean, world_size)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [_replace(value, mean, world_size) for value in data]
    if isinstance(data, torch.Tensor):
        total = data.detach().to(collective_device(), torch.float64)
        with collective():
            dist.all_reduce(total)
        return (total / world_size).to(data.device, data.dtype)
    return next(mean) if _is_number(data) else data


def _is_kept(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(KEEP_PREFIX)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)
