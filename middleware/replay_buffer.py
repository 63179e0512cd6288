"""Between the chain and a replay buffer: push, prioritize, draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from dmiddleware.data import Batch, DequeBuffer, as_tree
from dmiddleware.errors import StructureError
from dmiddleware.pipeline import (
    Middleware,
    OnlineRLContext,
    Role,
    middleware,
)
from middleware.support.checks import check_positive
from middleware.support.replay import (
    ReplayBuffer,
    check_buffer,
    check_start,
    count_drawn,
    draw,
    give_back,
    push_item,
    push_rows,
)

__all__ = ["data_pusher", "priority_calculator", "offpolicy_data_fetcher"]


def data_pusher(
    buffer: ReplayBuffer, *, what: Literal["trajectories", "episodes"] = "trajectories"
) -> Middleware[OnlineRLContext]:
    """Push what was collected into a buffer.

    If the rows have a column ``priority`` (see :func:`~middleware.priority_calculator`), it is not
    stored, but gives them their first priorities in the buffer.

    Args:
        buffer: a :class:`~dmiddleware.data.TensorBuffer`, which takes the rows as they are; or a
            :class:`~dmiddleware.data.DequeBuffer`, which takes each row as a dictionary, or each
            episode as a batch, with ``train_iter_data_collected`` in its notes.
        what: push ``"trajectories"`` or ``"episodes"``.

    Reads:
        ctx.trajectories, or ctx.episodes: what was collected in this step; None if an exchange
            took nothing in, to hold its pace.

    Raises:
        ConfigError: if ``buffer`` is no buffer.
        ValueError: if ``what`` is something else.
        StructureError: from the buffer, if a batch differs in structure from the first one.
    """
    check_buffer(buffer)
    if what not in ("trajectories", "episodes"):
        raise ValueError(f"what must be 'trajectories' or 'episodes', got {what!r}")

    @middleware(roles=(Role.LEARNER,), reads=(what,))
    def data_pusher(ctx: OnlineRLContext) -> None:
        if getattr(ctx, what) is None:
            return
        if what == "trajectories":
            push_rows(buffer, ctx.trajectories, train_iter=ctx.train_iter)
            return
        for episode in ctx.episodes:
            if isinstance(buffer, DequeBuffer):
                push_item(buffer, episode, train_iter=ctx.train_iter)
            else:
                push_rows(buffer, episode, train_iter=ctx.train_iter)

    return data_pusher


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


def offpolicy_data_fetcher(
    buffer: ReplayBuffer,
    *,
    batch_size: int,
    learn_start: int | None = None,
    tell_train_iter: bool = False,
) -> Middleware[Any]:
    """Draw a batch from a buffer; on the way back, give it the priorities that learning reported.

    Args:
        buffer: where batches come from.
        batch_size: rows in a batch.
        learn_start: rows that the buffer must hold before the first batch; at least, and by
            default, ``batch_size``. Until then ``ctx.train_data`` stays None and trainers do
            nothing.
        tell_train_iter: tell the buffer the iteration with each sample, as ``staleness_check``
            needs it.

    Reads:
        ctx.train_output: on the way back, for its ``priority``.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``; a list of samples if it comes from a
            :class:`~dmiddleware.data.DequeBuffer`. None while the buffer fills, or an exchange
            holds learning because it is ahead of its pace.
        ctx.trained_env_step: with the rows drawn, if someone counts them.

    Raises:
        ConfigError: if ``buffer`` is no buffer.
        ValueError: if ``batch_size`` is not positive, ``learn_start`` less than it, or more than
            the buffer ever holds.
    """
    check_buffer(buffer)
    check_positive(batch_size=batch_size)
    start = check_start(buffer, batch_size=batch_size, learn_start=learn_start)

    @middleware(roles=(Role.LEARNER,), reads=("train_output",), writes=("train_data",))
    def offpolicy_data_fetcher(ctx: Any) -> Iterator[None]:
        if len(buffer) < start or getattr(ctx, "learning_held", False):
            return
        count_drawn(ctx, batch_size)
        told = ctx.train_iter if tell_train_iter else None
        ctx.train_data, index = draw(buffer, batch_size, train_iter=told)
        yield
        outputs = ctx.train_output or []
        give_back(buffer, index, outputs if isinstance(outputs, list) else [outputs])

    return offpolicy_data_fetcher
