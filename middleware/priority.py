"""Priorities of transitions before they were learned from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dmiddleware.data import Batch, as_tree
from dmiddleware.errors import StructureError
from dmiddleware.pipeline import Middleware, OnlineRLContext, Role, middleware

__all__ = ["priority_calculator"]


def priority_calculator(
    priority_fn: Callable[[Batch], torch.Tensor],
) -> Middleware[OnlineRLContext]:
    """Add a column ``priority`` to the collected transitions, with which they enter the buffer.

    Args:
        priority_fn: takes the trajectories ``[T, E, …]`` and returns their priorities ``[T, E]``,
            positive.

    Reads:
        ctx.trajectories: what was collected in this step.

    Writes:
        ctx.trajectories: with the column ``priority`` float32.

    Raises:
        StructureError: if the priorities have another shape than the rows.
    """

    @middleware(roles=(Role.COLLECTOR,), reads=("trajectories",), writes=("trajectories",))
    def priority_calculator(ctx: OnlineRLContext) -> None:
        rows = ctx.trajectories
        with torch.no_grad():
            priority = priority_fn(rows)
        if priority.shape != rows["done"].shape:
            raise StructureError(
                f"priority_fn returned priorities of shape {tuple(priority.shape)} for rows of "
                f"shape {tuple(rows['done'].shape)}; return one number a row"
            )
        ctx.trajectories = as_tree({**dict(rows.items()), "priority": priority.float()})

    return priority_calculator
