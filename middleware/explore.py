"""Exploration: the probability of a random action while collecting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import ChainView, OnlineRLContext, Role
from dmiddleware.policy import CollectMode, HasModes, as_collect_mode
from dmiddleware.rl import EpsilonSchedule
from middleware.collect import collectors_of
from middleware.support.checks import policy_setting

__all__ = ["EpsGreedyHandler", "eps_greedy_handler"]


class EpsGreedyHandler:
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

    roles = (Role.COLLECTOR,)
    reads = ("env_step",)
    writes = ("collect_kwargs",)

    def __init__(
        self,
        policy: HasModes | CollectMode | None = None,
        *,
        start: float | None = None,
        end: float | None = None,
        decay_steps: int | None = None,
        kind: Literal["linear", "exponential", "exp"] | None = None,
    ) -> None:
        given = {"start": start, "end": end, "decay": decay_steps, "type": kind}
        given = {name: value for name, value in given.items() if value is not None}
        defaults: Mapping[str, Any] = _DEFAULTS
        if policy is not None:
            mode = as_collect_mode(policy, user="eps_greedy_handler")
            defaults = policy_setting(mode, "other.eps")
            if defaults is None:
                raise ConfigError(
                    "the policy's config has no other.eps; give the schedule instead: "
                    "eps_greedy_handler(start=1.0, end=0.05, decay_steps=10_000)"
                )
        eps = {**defaults, **given}
        self._schedule = EpsilonSchedule(eps["start"], eps["end"], eps["decay"], eps["type"])
        self._assumed = {} if policy is not None else {k: eps[k] for k in eps if k not in given}
        self.policy_settings: dict[str, Any] = {"other.eps": eps}
        self.settings = {
            "start": eps["start"],
            "end": eps["end"],
            "decay_steps": eps["decay"],
            "kind": eps["type"],
        }

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse a default that differs from the schedule of the policy that collects."""
        for collector in collectors_of(chain):
            setting = policy_setting(collector.mode, "other.eps") or {}
            for name, value in self._assumed.items():
                if setting.get(name, value) != value:
                    yield (
                        f"it uses the default {name}={value!r} for ε, but the policy's "
                        f"other.eps.{name} is {setting[name]!r}; use the policy's schedule: "
                        "eps_greedy_handler(policy)"
                    )

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Set and log the probability."""
        eps = self._schedule(ctx.env_step)
        ctx.collect_kwargs["eps"] = eps
        ctx.log("collect/eps", eps)


_DEFAULTS: Final = {"start": 1.0, "end": 0.05, "decay": 10_000, "type": "linear"}

eps_greedy_handler = EpsGreedyHandler
"""DI-engine's name of :class:`EpsGreedyHandler`."""
