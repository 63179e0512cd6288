"""Random minibatches of a collected batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch

from dmiddleware.errors import StructureError
from dmiddleware.tree import Batch, as_tree, index_rows, lead_shape, leaves, map_leaves

__all__ = ["MinibatchUnit", "minibatches", "n_minibatches", "select_columns"]

MinibatchUnit: TypeAlias = Literal["rows", "lanes", "batch"]
"""What minibatches consist of: single rows, the whole columns ``[T, …]`` of envs, or all rows."""

_DIM: Final = {"rows": 0, "lanes": 1, "batch": 0}


def select_columns(batch: Batch, names: Collection[str]) -> Batch:
    """Return the columns that are named, without copying; names that a batch lacks are ignored."""
    text = _columns_of_text(batch)
    columns: dict[str, Any] = {name: column for name, column in batch.items() if name in names}
    return as_tree(
        {name: column for name, column in columns.items() if name not in text},
        lists={name: column for name, column in columns.items() if name in text},
    )


def n_minibatches(batch: Batch, size: int, *, unit: MinibatchUnit = "rows") -> int:
    """Return into how many minibatches of at least ``size`` rows a batch can be divided.

    Args:
        batch: ``[N, …]``, or, with lanes, ``[T, E, …]``.
        size: rows of a minibatch.
        unit: what minibatches consist of.

    Returns:
        At least 1, and at most the number of units.

    Raises:
        StructureError: if leading dimensions differ, or lanes are wanted of a batch ``[N, …]``.
    """
    shape = _lead(batch, unit)
    if unit == "batch":
        return 1
    if unit == "rows":
        return max(1, shape[0] // size)
    n_steps, n_lanes = shape
    lanes_each = -(-size // max(n_steps, 1))
    return max(1, n_lanes // lanes_each)


def minibatches(
    batch: Batch,
    n: int,
    *,
    unit: MinibatchUnit = "rows",
    generator: torch.Generator | None = None,
) -> Iterator[Batch]:
    """Divide a batch at random into ``n`` minibatches whose sizes differ by at most one unit.

    Every unit is in one minibatch. Minibatches are gathered on the batch's device, one at a time.

    Args:
        batch: ``[N, …]``, or, with lanes, ``[T, E, …]``.
        n: how many minibatches; :func:`n_minibatches` finds it.
        unit: ``"rows"``, or ``"lanes"`` for networks and targets that need whole sequences;
            ``"batch"`` yields the batch as it is.
        generator: source of the order, on the CPU or on the batch's device; None: torch's own.

    Yields:
        Batches ``[B, …]``, or, of lanes, time first: ``[T, B, …]``.

    Raises:
        StructureError: as of :func:`n_minibatches`.
    """
    if unit == "batch":
        yield batch
        return
    dim = _DIM[unit]
    n_units = _lead(batch, unit)[dim]
    if _columns_of_text(batch):
        if unit == "lanes":
            raise StructureError("columns of text have no lanes; leave them out of the batch")
        for part in torch.randperm(n_units, generator=generator).tensor_split(n):
            yield index_rows(batch, part)
        return
    device = next(iter(leaves(batch)))[1].device
    is_near = generator is not None and generator.device.type == device.type
    order = torch.randperm(n_units, generator=generator, device=device if is_near else "cpu")
    for part in order.to(device).tensor_split(n):
        # For images, seven times as fast as leaf[part].
        yield map_leaves(partial(torch.index_select, dim=dim, index=part), batch)


def _lead(batch: Batch, unit: MinibatchUnit) -> tuple[int, ...]:
    try:
        return lead_shape(
            select_columns(batch, set(batch.keys()) - _columns_of_text(batch)), _DIM[unit] + 1
        )
    except StructureError as error:
        if unit != "lanes":
            raise
        raise StructureError(
            f"minibatches of lanes need batches [T, E, …]: {error}; collect the same number of "
            "steps of every env, with n_sample a multiple of the number of envs"
        ) from None


def _columns_of_text(batch: Batch) -> set[str]:
    columns: dict[str, Any] = dict(batch.items())
    return {name for name, column in columns.items() if type(column) is list}
