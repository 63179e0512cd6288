"""Fetching: batches for the trainer, from a buffer or from a data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmiddleware.pipeline import Middleware, Role, middleware
from middleware.checks import check_positive
from middleware.replay import ReplayBuffer, check_buffer, draw, give_back

__all__ = ["offpolicy_data_fetcher"]


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
            :class:`~dmiddleware.data.DequeBuffer`.

    Raises:
        ConfigError: if ``buffer`` is no buffer.
        ValueError: if ``batch_size`` is not positive, or ``learn_start`` less than it.
    """
    check_buffer(buffer)
    check_positive(batch_size=batch_size)
    start = batch_size if learn_start is None else learn_start
    if start < batch_size:
        raise ValueError(f"learn_start must be at least batch_size ({batch_size}), got {start}")

    @middleware(roles=(Role.LEARNER,), reads=("train_output",), writes=("train_data",))
    def offpolicy_data_fetcher(ctx: Any) -> Iterator[None]:
        if len(buffer) < start:
            return
        told = ctx.train_iter if tell_train_iter else None
        ctx.train_data, index = draw(buffer, batch_size, train_iter=told)
        yield
        outputs = ctx.train_output or []
        for output in outputs if isinstance(outputs, list) else [outputs]:
            give_back(buffer, index, output)

    return offpolicy_data_fetcher
