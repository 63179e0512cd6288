"""Exploration: the probability of a random action while collecting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from dmiddleware.errors import ConfigError
from dmiddleware.foreign_names import checks_options
from dmiddleware.pipeline import ChainView
from dmiddleware.policy import CollectMode, DQNSettings, HasModes, as_collect_mode
from dmiddleware.rl import epsilon_schedule
from dmiddleware.schedule import Schedule, ScheduleCounter, ScheduleType
from dmiddleware.settings import plain_values
from middleware.base import BaseMiddleware
from middleware.collect import collectors_of
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.checks import policy_setting
from middleware.support.counters import RunCounters

__all__ = ["EpsGreedyHandler", "eps_greedy_handler"]


class EpsGreedyHandler(BaseMiddleware[OnlineRLContext]):
    """Set the probability of a random action, which a schedule lowers during the run.

    Args:
        policy: a policy (or its collect mode) whose ``eps`` has the values of all options
            that are left out. Without a policy, they are those of DQN: linear, from 1.0 to 0.05 in
            10,000 env steps.
        start: the probability at first.
        end: the probability in the long run.
        decay_steps: the length of the way from ``start`` to ``end``, in units of ``by``; if
            exponential, the length after which ``1 / e`` of the way is left.
        kind: the shape: ``"constant"``, ``"linear"``, ``"exponential"`` (or ``"exp"``),
            ``"cosine"`` or ``"piecewise"``; see :class:`~dmiddleware.rl.Schedule`.
        by: what it depends on: ``"env_step"``, ``"update"`` or ``"progress"``, the part of the
            chain's :class:`~middleware.TerminationChecker` limits that is reached.
        points: of a piecewise schedule, pairs of a count and the probability there.

    Reads:
        ctx.env_step: environment steps, summed over all collectors.
        ctx.train_iter: updates of the policy.

    Writes:
        ctx.collect_kwargs: the key ``eps``.

    Raises:
        ConfigError: if the policy has no ``eps``, a probability is outside ``[0, 1]`` or
            ``decay_steps`` is not positive.
    """

    roles = (Role.COLLECTOR,)
    reads = ("env_step", "train_iter")
    writes = ("collect_kwargs",)

    @checks_options
    def __init__(
        self,
        policy: HasModes | CollectMode | None = None,
        *,
        start: float | None = None,
        end: float | None = None,
        decay_steps: float | None = None,
        kind: ScheduleType | Literal["exp"] | None = None,
        by: ScheduleCounter | None = None,
        points: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        given: dict[str, Any] = {
            "start": start,
            "end": end,
            "decay": decay_steps,
            "type": kind,
            "by": by,
            "points": points,
        }
        given = {name: value for name, value in given.items() if value is not None}
        defaults: Mapping[str, Any] = _DEFAULTS
        if policy is not None:
            mode = as_collect_mode(policy, user="eps_greedy_handler")
            setting = policy_setting(mode, "eps")
            if setting is None:
                raise ConfigError(
                    "the policy has no setting eps; give the schedule instead: "
                    "eps_greedy_handler(start=1.0, end=0.05, decay_steps=10_000)"
                )
            defaults = plain_values(Schedule.of(setting))
        eps = {**defaults, **given}
        self._schedule = epsilon_schedule(eps)
        self._counters = RunCounters({"ε": self._schedule})
        self._assumed = {} if policy is not None else {k: eps[k] for k in eps if k not in given}
        self.policy_settings: dict[str, Any] = {"other.eps": plain_values(self._schedule)}
        self.settings = {
            "start": eps["start"],
            "end": eps["end"],
            "decay_steps": eps["decay"],
            "kind": eps["type"],
            "by": eps["by"],
            "points": eps["points"],
        }

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse a default that differs from the schedule of the policy that collects."""
        yield from self._counters.preflight(chain)
        for collector in collectors_of(chain):
            setting = policy_setting(collector.mode, "eps")
            known = {} if setting is None else plain_values(Schedule.of(setting))
            for name, value in self._assumed.items():
                if known.get(name, value) != value:
                    yield (
                        f"it uses the default {name}={value!r} for ε, but in the policy's eps it "
                        f"is {known[name]!r}; use the policy's schedule: eps_greedy_handler(policy)"
                    )

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Set and log the probability."""
        eps = self._schedule.at(self._counters.of(ctx))
        ctx.collect_kwargs["eps"] = eps
        ctx.log("collect/eps", eps)


_DEFAULTS: Final = plain_values(DQNSettings().eps)

eps_greedy_handler = EpsGreedyHandler
"""DI-engine's name of :class:`EpsGreedyHandler`."""
