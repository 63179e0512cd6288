"""From the collector into the buffer."""

from __future__ import annotations

from typing import Literal

from dmiddleware.data import DequeBuffer
from dmiddleware.pipeline import Middleware, OnlineRLContext, Role, middleware
from middleware.support.replay import ReplayBuffer, check_buffer, push_item, push_rows

__all__ = ["data_pusher"]


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
