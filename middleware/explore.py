"""Exploration: how the collecting policy deviates from the greedy one."""

from __future__ import annotations

from typing import Literal

from dmiddleware.pipeline import Middleware, OnlineRLContext, Role, middleware
from dmiddleware.rl import EpsilonSchedule

__all__ = ["eps_greedy_handler"]


def eps_greedy_handler(
    *,
    start: float = 1.0,
    end: float = 0.05,
    decay_steps: int = 10_000,
    kind: Literal["linear", "exponential"] = "linear",
) -> Middleware[OnlineRLContext]:
    """Tell the collecting policy how likely a random action is, by the environment steps so far.

    Args:
        start: the probability at step 0.
        end: the probability in the long run.
        decay_steps: environment steps from ``start`` to ``end`` (linear), or until ``1 / e`` of the
            way is left (exponential).
        kind: the shape of the decay.

    Reads:
        ctx.env_step: environment steps, summed over all collectors.

    Writes:
        ctx.collect_kwargs: the key ``eps``.

    Raises:
        ValueError: if a probability is outside ``[0, 1]`` or ``decay_steps`` is not positive.
    """
    schedule = EpsilonSchedule(start, end, decay_steps, kind)

    @middleware(roles=(Role.COLLECTOR,), reads=("env_step",), writes=("collect_kwargs",))
    def eps_greedy_handler(ctx: OnlineRLContext) -> None:
        eps = schedule(ctx.env_step)
        ctx.collect_kwargs["eps"] = eps
        ctx.log("collect/eps", eps)

    return eps_greedy_handler
