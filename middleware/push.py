"""From the collector into the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from dmiddleware.data import Batch, as_tree
from dmiddleware.pipeline import Middleware, OnlineRLContext, Role, middleware

__all__ = ["data_pusher"]


class PushBuffer(Protocol):
    """What pushing needs of a buffer."""

    def push(self, batch: Batch) -> Sequence[int]:
        """Append the rows of a batch; return the indices of those that stay, the newest."""
        ...

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of rows."""
        ...


def data_pusher(
    buffer: PushBuffer, *, what: Literal["trajectories", "episodes"] = "trajectories"
) -> Middleware[OnlineRLContext]:
    """Push what was collected into a buffer.

    If the rows have a column ``priority`` (see :func:`~middleware.priority_calculator`), it is not
    stored, but gives them their first priorities in the buffer.

    Args:
        buffer: such as a :class:`~dmiddleware.data.TensorBuffer`.
        what: push ``"trajectories"`` as one batch, or ``"episodes"`` one by one.

    Reads:
        ctx.trajectories, or ctx.episodes: what was collected in this step.

    Raises:
        ValueError: if ``what`` is something else.
        StructureError: from the buffer, if a batch differs in structure from the first one.
    """
    if what not in ("trajectories", "episodes"):
        raise ValueError(f"what must be 'trajectories' or 'episodes', got {what!r}")

    @middleware(roles=(Role.LEARNER,), reads=(what,))
    def data_pusher(ctx: OnlineRLContext) -> None:
        for batch in ctx.episodes if what == "episodes" else (ctx.trajectories,):
            if "priority" in batch:
                _push_with_priority(buffer, batch)
            else:
                buffer.push(batch)

    return data_pusher


def _push_with_priority(buffer: PushBuffer, batch: Batch) -> None:
    columns = dict(batch.items())
    priority = columns.pop("priority").reshape(-1)
    index = buffer.push(as_tree(columns))
    buffer.update_priority(np.asarray(index), priority[len(priority) - len(index) :])
