"""What pushing, drawing and giving priorities back mean for either kind of buffer."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from dmiddleware.data import (
    Batch,
    DequeBuffer,
    TensorBuffer,
    as_tree,
    flatten_lead,
    index_rows,
    to_dict,
)
from dmiddleware.errors import ConfigError
from dmiddleware.policy import priorities_of_rows

__all__ = [
    "ReplayBuffer",
    "check_buffer",
    "check_start",
    "count_drawn",
    "draw",
    "give_back",
    "push_item",
    "push_rows",
]

ReplayBuffer: TypeAlias = TensorBuffer | DequeBuffer
"""A buffer of rows in columns, or of Python objects one by one."""


def check_buffer(buffer: object) -> None:
    """Refuse what is no buffer.

    Raises:
        ConfigError: with what was given.
    """
    if not isinstance(buffer, TensorBuffer | DequeBuffer):
        raise ConfigError(
            f"the buffer must be a TensorBuffer or a DequeBuffer, got {buffer!r:.100}"
        )


def check_start(buffer: ReplayBuffer, *, batch_size: int, learn_start: int | None) -> int:
    """Return how much the buffer must hold before the first batch is drawn.

    Raises:
        ValueError: if that is less than a batch, or more than the buffer ever holds.
    """
    start = batch_size if learn_start is None else learn_start
    if start < batch_size:
        raise ValueError(f"learn_start must be at least batch_size ({batch_size}), got {start}")
    if start > buffer.size:
        name = "batch_size" if learn_start is None else "learn_start"
        raise ValueError(
            f"{name} must be at most the buffer's size ({buffer.size}), or nothing is ever "
            f"learned; got {start}"
        )
    return start


def push_rows(buffer: ReplayBuffer, batch: Batch, *, train_iter: int) -> None:
    """Push the rows of a batch; a column ``priority`` is not stored, but gives their priorities.

    Into a :class:`DequeBuffer` each row goes by itself, as a dictionary, with ``train_iter`` in its
    notes.
    """
    priority = batch.get("priority")
    rows = batch
    if priority is not None:
        rows = as_tree({key: column for key, column in batch.items() if key != "priority"})
    if isinstance(buffer, DequeBuffer):
        if rows["done"].dim() == 2:
            rows = flatten_lead(rows, 2)
        for number in range(rows["done"].shape[0]):
            note = {} if priority is None else {"priority": float(priority.flatten()[number])}
            push_item(buffer, to_dict(index_rows(rows, number)), train_iter=train_iter, **note)
        return
    index = buffer.push(rows)
    if priority is not None:
        # Of more rows than fit, only the newest were stored.
        buffer.update_priority(np.asarray(index), priority.flatten()[-len(index) :])


def push_item(buffer: DequeBuffer, item: Any, *, train_iter: int, **meta: Any) -> None:
    """Push one object with the iteration of the policy that collected it, as its notes."""
    buffer.push(item, meta={"train_iter_data_collected": train_iter, **meta})


def draw(buffer: ReplayBuffer, n: int, *, train_iter: int | None = None) -> tuple[Any, Any]:
    """Draw data to learn from.

    Args:
        buffer: where it comes from.
        n: how much.
        train_iter: the learner's iteration, for buffers that limit staleness; None: not told.

    Returns:
        What a policy learns from: a batch ``[n, …]``, or a list of dictionaries. And the indices,
        for :func:`give_back`.
    """
    told: dict[str, Any] = {} if train_iter is None else {"train_iter_sample_data": train_iter}
    if isinstance(buffer, TensorBuffer):
        batch = buffer.sample(n, **told)
        return batch, batch["index"]
    items = buffer.sample(n, **told)
    samples = [
        {**item.data, "weight": float(item.meta["priority_IS"])}
        if "priority_IS" in item.meta
        else item.data
        for item in items
    ]
    return samples, [item.index for item in items]


def give_back(buffer: ReplayBuffer, index: Any, outputs: list[dict[str, Any]]) -> None:
    """Give the priorities that one forward returned, if any, back to the rows they belong to."""
    found = priorities_of_rows(outputs, len(index))
    for output in outputs:
        output.pop("priority", None)
    if found is None:
        return
    rows, priority = found
    if isinstance(buffer, TensorBuffer):
        buffer.update_priority(index if rows is None else index[rows], priority)
        return
    chosen = index if rows is None else [index[row] for row in rows.tolist()]
    for one, value in zip(chosen, torch.as_tensor(priority).tolist(), strict=True):
        buffer.update(one, meta={"priority": value})


def count_drawn(ctx: Any, n_rows: int) -> None:
    """Count rows that were drawn from a buffer to learn, if someone asked for it."""
    counted = getattr(ctx, "trained_env_step", None)
    if counted is not None:
        ctx.trained_env_step = counted + n_rows
