"""Measure the duration of steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from dmiddleware.pipeline import Context, Middleware, middleware

__all__ = ["epoch_timer"]

_log = logging.getLogger(__name__)


def epoch_timer(*, every_step: int = 100) -> Middleware[Context]:
    """Measure the duration of the part of a step that comes after this middleware.

    The mean over ``every_step`` steps goes to the text log, and is logged as ``time/step_s`` in the
    next step. :class:`~dmiddleware.pipeline.StepTimer` measures each middleware of the chain.

    Args:
        every_step: steps over which to average.

    Raises:
        ValueError: if ``every_step`` is not positive.
    """
    if every_step < 1:
        raise ValueError(f"every_step must be positive, got {every_step}")
    total_s = 0.0
    n_steps = 0
    mean_s: float | None = None

    @middleware()
    def epoch_timer(ctx: Context) -> Iterator[None]:
        nonlocal total_s, n_steps, mean_s
        if mean_s is not None:
            # One step late, because the loggers after this middleware have run already.
            ctx.log("time/step_s", mean_s)
            mean_s = None
        now = ctx.task.clock.now
        start = now()
        yield
        total_s += now() - start
        n_steps += 1
        if n_steps == every_step:
            mean_s = total_s / n_steps
            total_s, n_steps = 0.0, 0
            _log.info("%d steps took %.3f ms each", every_step, mean_s * 1e3)

    epoch_timer.settings = {"every_step": every_step}  # type: ignore[attr-defined]
    return epoch_timer
