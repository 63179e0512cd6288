"""How far a run is, for the schedules of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dmiddleware.pipeline import ChainView
from dmiddleware.rl import Counters, Schedule
from middleware.context import OnlineRLContext, RLContext
from middleware.termination import limits_of

__all__ = ["RunCounters"]


class RunCounters:
    """Reads the counters that schedules depend on from a context.

    The progress is the greatest part of a limit of the chain's TerminationChecker that has been
    reached, of the limits that count steps, updates or epochs.

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
        self._limits_of_whole: dict[str, float] = {}

    def bind(self, chain: ChainView) -> None:
        """Take the limits of the chain, and of the whole chain if it is a part."""
        self._limits = _counted_limits(chain)
        if chain.part is not None:
            self._limits_of_whole = _counted_limits(chain.of(None))

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse schedules by a counter that the chain does not have."""
        has_limits = bool(_counted_limits(chain) or _counted_limits(chain.of(None)))
        for name, schedule in self._schedules.items():
            if schedule.by == "env_step" and not isinstance(chain.context, OnlineRLContext):
                yield (
                    f"{name} is scheduled by env_step, which {type(chain.context).__name__} does "
                    "not count; schedule it by update or progress"
                )
            if schedule.by == "progress" and not has_limits:
                yield (
                    f"{name} is scheduled by progress, but nothing says how long the run is; add "
                    "TerminationChecker(max_env_step=...), or schedule it by env_step or update"
                )

    def of(self, ctx: RLContext) -> Counters:
        """Return the counters of a context."""
        progress = None
        if self._limits or self._limits_of_whole:
            reached = [getattr(ctx, name) / limit for name, limit in self._limits.items()]
            whole = self._limits_of_whole.items()
            reached += [getattr(ctx.whole, name) / limit for name, limit in whole]
            progress = min(max(reached), 1.0)
        env_step = ctx.env_step if isinstance(ctx, OnlineRLContext) else None
        return Counters(env_step, ctx.train_iter, progress)


def _counted_limits(chain: ChainView) -> dict[str, float]:
    """Return the limits of a chain that are counters of a context, by their names."""
    return {name: limit for name, limit in limits_of(chain).items() if name != "time_s"}
