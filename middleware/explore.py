"""Exploration: how often the collecting policy acts at random."""

from __future__ import annotations

from typing import Any, Literal

from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import Middleware, OnlineRLContext, Role, middleware
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.rl import EpsilonSchedule
from middleware.support.checks import policy_setting

__all__ = ["eps_greedy_handler"]


def eps_greedy_handler(
    policy: HasModes | CollectMode | None = None,
    *,
    start: float | None = None,
    end: float | None = None,
    decay_steps: int | None = None,
    kind: Literal["linear", "exponential"] | None = None,
) -> Middleware[OnlineRLContext]:
    """Set the probability of a random action, as a function of the environment steps so far.

    Args:
        policy: a policy (or its collect mode) whose ``other.eps`` has the values of all options
            that are left out. Without a policy, they are 1.0, 0.05, 10,000 and linear.
        start: the probability at step 0.
        end: the probability in the long run.
        decay_steps: environment steps from ``start`` to ``end`` (linear), or until ``1 / e`` of the
            difference is left (exponential).
        kind: the shape of the decay.

    Reads:
        ctx.env_step: environment steps, summed over all collectors.

    Writes:
        ctx.collect_kwargs: the key ``eps``.

    Raises:
        ConfigError: if the policy has no ``other.eps``.
        ValueError: if a probability is outside ``[0, 1]`` or ``decay_steps`` is not positive.
    """
    base: dict[str, Any] = {"start": 1.0, "end": 0.05, "decay": 10_000, "type": "linear"}
    if policy is not None:
        mode = as_collect_mode(policy, user="eps_greedy_handler")
        setting = policy_setting(mode, "other.eps")
        if setting is None:
            raise ConfigError(
                "the policy's config has no other.eps; give the schedule instead: "
                "eps_greedy_handler(start=1.0, end=0.05, decay_steps=10_000)"
            )
        base = dict(setting)
    given = {"start": start, "end": end, "decay": decay_steps, "type": kind}
    eps = {**base, **{name: value for name, value in given.items() if value is not None}}
    schedule = EpsilonSchedule(eps["start"], eps["end"], eps["decay"], eps["type"])

    @middleware(roles=(Role.COLLECTOR,), reads=("env_step",), writes=("collect_kwargs",))
    def eps_greedy_handler(ctx: OnlineRLContext) -> None:
        eps = schedule(ctx.env_step)
        ctx.collect_kwargs["eps"] = eps
        ctx.log("collect/eps", eps)

    eps_greedy_handler.policy_settings = {"other.eps": eps}  # type: ignore[attr-defined]
    return eps_greedy_handler
