"""Fetching: batches for the trainer, from a buffer or from a data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dmiddleware.pipeline import Middleware, Role, middleware
from middleware.checks import check_positive
from middleware.learn import SamplingBuffer, return_priority

__all__ = ["offpolicy_data_fetcher"]


def offpolicy_data_fetcher(
    buffer: SamplingBuffer, *, batch_size: int, learn_start: int | None = None
) -> Middleware[Any]:
    """Draw a batch from a buffer; on the way back, give it the priorities that learning reported.

    Args:
        buffer: where batches come from.
        batch_size: rows in a batch.
        learn_start: rows that the buffer must hold before the first batch; at least, and by
            default, ``batch_size``. Until then ``ctx.train_data`` stays None and trainers do
            nothing.

    Reads:
        ctx.train_output: on the way back, for its ``priority``.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``.

    Raises:
        ValueError: if ``batch_size`` is not positive, or ``learn_start`` less than it.
    """
    check_positive(batch_size=batch_size)
    start = batch_size if learn_start is None else learn_start
    if start < batch_size:
        raise ValueError(f"learn_start must be at least batch_size ({batch_size}), got {start}")

    @middleware(roles=(Role.LEARNER,), reads=("train_output",), writes=("train_data",))
    def offpolicy_data_fetcher(ctx: Any) -> Iterator[None]:
        if buffer.count() < start:
            return
        batch = buffer.sample(batch_size)
        ctx.train_data = batch
        yield
        outputs = ctx.train_output or []
        for output in outputs if isinstance(outputs, list) else [outputs]:
            return_priority(buffer, batch, output)

    return offpolicy_data_fetcher
