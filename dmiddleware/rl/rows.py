"""A check that the columns of a loss have one number per row."""

from __future__ import annotations

import torch

from dmiddleware.errors import StructureError

__all__ = ["check_shape"]


def check_shape(wanted: torch.Size, **columns: torch.Tensor | None) -> None:
    """Reject columns that would be broadcast, combining every row with every other.

    Args:
        wanted: the shape that follows from the network's output.
        **columns: the columns by name; None is skipped.

    Raises:
        StructureError: naming the column and both shapes.
    """
    for name, column in columns.items():
        if column is not None and column.shape != wanted:
            raise StructureError(
                f"{name} has shape {tuple(column.shape)}, but the network's output requires "
                f"{tuple(wanted)}; squeeze it, or add a dimension with .unsqueeze(-1)"
            )
