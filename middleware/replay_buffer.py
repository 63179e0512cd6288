"""Replay buffers in a chain: push collected data and set its priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from dmiddleware.data import Batch, ReplayBuffer, as_tree
from dmiddleware.errors import StructureError
from dmiddleware.pipeline import Middleware, middleware
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.replay import check_buffer, push_rows
from middleware.support.rows import rows_of

__all__ = ["data_pusher", "priority_calculator"]


def data_pusher(
    buffer: ReplayBuffer, *, what: Literal["trajectories", "episodes"] = "trajectories"
) -> Middleware[OnlineRLContext]:
    """Push collected data into a buffer.

    A column ``priority`` (see :func:`~middleware.priority_calculator`) sets the priorities of the
    new rows and is not stored.

    Args:
        buffer: a :class:`~dmiddleware.data.TensorBuffer`, or another
            :class:`~dmiddleware.data.ReplayBuffer`.
        what: push ``"trajectories"`` or ``"episodes"``, one episode after the other.

    Reads:
        ctx.trajectories, or ctx.episodes: the data collected in this step; None if an exchange
        pauses collecting to keep its pace.

    Raises:
        ConfigError: if ``buffer`` is not a buffer.
        ValueError: if ``what`` is neither.
        StructureError: from the buffer, if a batch differs in structure from the first one.
    """
    check_buffer(buffer)
    if what not in ("trajectories", "episodes"):
        raise ValueError(f"what must be 'trajectories' or 'episodes', got {what!r}")

    @middleware(roles=(Role.LEARNER,), reads=(what,))
    def data_pusher(ctx: OnlineRLContext) -> None:
        collected = getattr(ctx, what)
        if collected is None or (isinstance(collected, list) and not collected):
            return
        if what == "trajectories":
            push_rows(buffer, rows_of(ctx.trajectories))
            return
        for episode in ctx.episodes:
            push_rows(buffer, rows_of(episode, name="ctx.episodes"))

    data_pusher.fills = (buffer,)  # type: ignore[attr-defined]
    data_pusher.settings = {"what": what}  # type: ignore[attr-defined]
    data_pusher.snapshot_parts = {"buffer": buffer}  # type: ignore[attr-defined]
    return data_pusher


def priority_calculator(
    priority_fn: Callable[[Batch], torch.Tensor],
) -> Middleware[OnlineRLContext]:
    """Add a column ``priority`` to the collected transitions, their first priorities in the buffer.

    Args:
        priority_fn: takes the trajectories ``[T, E, …]`` and returns their priorities ``[T, E]``,
            positive.

    Reads:
        ctx.trajectories: the transitions collected in this step.

    Writes:
        ctx.trajectories: with the column ``priority`` float32.

    Raises:
        StructureError: if the priorities have another shape than the rows.
    """

    @middleware(roles=(Role.COLLECTOR,), reads=("trajectories",), writes=("trajectories",))
    def priority_calculator(ctx: OnlineRLContext) -> None:
        rows = rows_of(ctx.trajectories)
        with torch.no_grad():
            priority = priority_fn(rows)
        if priority.shape != rows["done"].shape:
            raise StructureError(
                f"priority_fn returned priorities of shape {tuple(priority.shape)} for rows of "
                f"shape {tuple(rows['done'].shape)}; return one number per row"
            )
        ctx.trajectories = as_tree({**dict(rows.items()), "priority": priority.float()})

    return priority_calculator
