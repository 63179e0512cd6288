"""How far a run is, for the schedules of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dmiddleware.pipeline import ChainView
from dmiddleware.rl import Counters, Schedule
from middleware.context import OnlineRLContext, RLContext
from middleware.stop import limits_of

__all__ = ["RunCounters"]


class RunCounters:
    """Reads the counters that schedules depend on from a context.

    The progress is the greatest part of a limit of the chain's TerminationChecker that has been
    reached, of those that count steps, updates or epochs.

    Args:
        schedules: the schedules that need the counters, by the names of their settings.
        always: whether somebody reads the counters without a schedule.

    Attributes:
        needed: whether any of them depends on a counter, or somebody reads the counters anyway.
    """

    def __init__(self, schedules: Mapping[str, Schedule], *, always: bool = False) -> None:
        self._schedules = {
            name: schedule for name, schedule in schedules.items() if not schedule.is_constant
        }
        self.needed = always or bool(self._schedules)
        self._limits: dict[str, float] = {}

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Take the limits of the chain; refuse schedules by a counter that it does not have."""
        limits = limits_of(chain)
        self._limits = {name: limits[name] for name in limits if name != "time_s"}
        for name, schedule in self._schedules.items():
            if schedule.by == "env_step" and not isinstance(chain.context, OnlineRLContext):
                yield (
                    f"{name} is scheduled by env_step, which {type(chain.context).__name__} does "
                    "not count; schedule it by update or progress"
                )
            if schedule.by == "progress" and not self._limits:
                yield (
                    f"{name} is scheduled by progress, but nothing says how long the run is; add "
                    "TerminationChecker(max_env_step=...), or schedule it by env_step or update"
                )

    def of(self, ctx: RLContext) -> Counters:
        """Return the counters of a context."""
        progress = None
        if self._limits:
            parts = (getattr(ctx, name) / limit for name, limit in self._limits.items())
            progress = min(max(parts), 1.0)
        env_step = ctx.env_step if isinstance(ctx, OnlineRLContext) else None
        return Counters(env_step, ctx.train_iter, progress)
