"""Replay buffers in a chain: push collected data, set priorities, draw batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch

from dmiddleware.data import Batch, DequeBuffer, as_tree
from dmiddleware.errors import NotEnoughData, StructureError
from dmiddleware.pipeline import Middleware, middleware
from middleware.context import OnlineRLContext, RLContext
from middleware.roles import Role
from middleware.support.checks import check_positive
from middleware.support.replay import (
    ReplayBuffer,
    SkippedDraws,
    check_buffer,
    check_start,
    count_drawn,
    counters_for,
    draw,
    note_progress,
    push_item,
    push_rows,
    rows_per_draw,
    update_priorities,
)
from middleware.support.rows import rows_of

__all__ = ["data_pusher", "offpolicy_data_fetcher", "priority_calculator"]


def data_pusher(
    buffer: ReplayBuffer, *, what: Literal["trajectories", "episodes"] = "trajectories"
) -> Middleware[OnlineRLContext]:
    """Push collected data into a buffer.

    A column ``priority`` (see :func:`~middleware.priority_calculator`) sets the priorities of the
    new rows and is not stored.

    Args:
        buffer: a :class:`~dmiddleware.data.TensorBuffer`, which stores the rows in columns, or a
            :class:`~dmiddleware.data.DequeBuffer`, which stores each row as a dictionary, or each
            episode as a batch, with ``train_iter_data_collected`` in its metadata.
        what: push ``"trajectories"`` or ``"episodes"``.

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
            push_rows(buffer, rows_of(ctx.trajectories), train_iter=ctx.train_iter)
            return
        for episode in ctx.episodes:
            if isinstance(buffer, DequeBuffer):
                push_item(buffer, episode, train_iter=ctx.train_iter)
            else:
                push_rows(buffer, rows_of(episode, name="ctx.episodes"), train_iter=ctx.train_iter)

    data_pusher.fills = (buffer,)  # type: ignore[attr-defined]
    data_pusher.settings = {"what": what}  # type: ignore[attr-defined]
    data_pusher.snapshot_parts = {"buffer": buffer}  # type: ignore[attr-defined]
    return data_pusher


def offpolicy_data_fetcher(
    buffer: ReplayBuffer,
    *,
    batch_size: int,
    learn_start: int | None = None,
    pass_train_iter: bool = False,
) -> Middleware[RLContext]:
    """Draw a batch from a buffer; on the way back, write the new priorities to the buffer.

    Args:
        buffer: where batches come from.
        batch_size: rows in a batch.
        learn_start: rows that the buffer must hold before the first batch; None: ``batch_size``.
            Until then ``ctx.train_data`` is None and trainers do nothing.
        pass_train_iter: pass the iteration to the buffer with each sample, as ``staleness_check``
            needs it.

    Reads:
        ctx.train_output: on the way back, for its ``priority``.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``, or a list of samples if the buffer is a
            :class:`~dmiddleware.data.DequeBuffer`. None while the buffer fills, while it has too
            few rows to sample, and while an exchange pauses learning to keep its pace.
        ctx.trained_env_step: with the rows drawn, if the context has it.

    Raises:
        ConfigError: if ``buffer`` is not a buffer.
        ValueError: if ``batch_size`` is not positive, ``learn_start`` is less than it, or more than
            the buffer's size.
    """
    check_buffer(buffer)
    check_positive(batch_size=batch_size)
    start = check_start(buffer, batch_size=batch_size, learn_start=learn_start)
    skipped = SkippedDraws()
    counters = counters_for(buffer, {})

    @middleware(roles=(Role.LEARNER,), reads=("train_output",), writes=("train_data",))
    def offpolicy_data_fetcher(ctx: RLContext) -> Iterator[None]:
        if len(buffer) < start or getattr(ctx, "learning_held", False):
            return
        if counters.needed:
            note_progress(buffer, counters.of(ctx))
        try:
            ctx.train_data, index = draw(
                buffer, batch_size, train_iter=ctx.train_iter if pass_train_iter else None
            )
        except NotEnoughData as error:
            skipped.add(ctx, error)
            return
        count_drawn(ctx, batch_size * rows_per_draw(buffer))
        yield
        output = ctx.train_output
        if output is not None:
            update_priorities(buffer, index, output if isinstance(output, list) else [output])

    offpolicy_data_fetcher.preflight = counters.preflight  # type: ignore[attr-defined]
    offpolicy_data_fetcher.draws_from = (buffer,)  # type: ignore[attr-defined]
    offpolicy_data_fetcher.snapshot_parts = {"buffer": buffer}  # type: ignore[attr-defined]
    offpolicy_data_fetcher.settings = {  # type: ignore[attr-defined]
        "batch_size": batch_size,
        "learn_start": start,
        "pass_train_iter": pass_train_iter,
        "buffer": buffer.settings,
    }
    offpolicy_data_fetcher.policy_settings = {  # type: ignore[attr-defined]
        "learn.batch_size": batch_size
    }
    return offpolicy_data_fetcher


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
