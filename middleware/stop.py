"""When a run has done enough."""

from __future__ import annotations

import math
from typing import Any

from dmiddleware.pipeline import Context, Middleware, Role, Task, middleware

__all__ = ["termination_checker"]


def termination_checker(
    *,
    max_env_step: float = math.inf,
    max_train_iter: float = math.inf,
    max_train_epoch: float = math.inf,
    max_time_s: float = math.inf,
) -> Middleware[Context]:
    """Stop the task at the end of the step in which a limit is reached.

    Of several processes the learner decides, since it is the one that knows all counters exactly.

    Args:
        max_env_step: environment steps, summed over all collectors.
        max_train_iter: updates of the policy.
        max_train_epoch: passes over the data set (offline).
        max_time_s: seconds since the first step, by the task's clock.

    Reads:
        ctx.env_step, ctx.train_iter, ctx.train_epoch: those that have a limit.

    Raises:
        ValueError: if no limit is given, or one is not positive.
    """
    limits = {
        "env_step": max_env_step,
        "train_iter": max_train_iter,
        "train_epoch": max_train_epoch,
    }
    counted = {name: limit for name, limit in limits.items() if limit != math.inf}
    if not counted and max_time_s == math.inf:
        raise ValueError("termination_checker needs at least one limit, for example max_env_step")
    for name, limit in {**counted, "time_s": max_time_s}.items():
        if not limit > 0:
            raise ValueError(f"max_{name} must be positive, got {limit}")
    begin: float | None = None

    def check_counters(task: Task[Any]) -> None:
        # At the set-up too: a run that is resumed may have reached its limit, or a higher one now.
        for name, limit in counted.items():
            value = getattr(task.ctx, name)
            if value >= limit:
                task.stop(f"{name} reached {value:,} (max_{name} is {limit:,})", final=False)

    @middleware(roles=(Role.LEARNER,), reads=tuple(counted), setup=check_counters)
    def termination_checker(ctx: Context) -> None:
        nonlocal begin
        now = ctx.task.clock.now()
        begin = now if begin is None else begin
        check_counters(ctx.task)
        if now - begin >= max_time_s:
            ctx.task.stop(
                f"{now - begin:.1f} s have passed (max_time_s is {max_time_s:g})", final=False
            )

    return termination_checker
