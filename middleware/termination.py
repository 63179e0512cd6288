"""Stopping a run at a limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dmiddleware.errors import ConfigError
from dmiddleware.pipeline import ChainView, Context, Task
from dmiddleware.settings import Count, Positive, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.roles import Role
from middleware.support.part_name import PartSettings

__all__ = ["TerminationChecker", "TerminationCheckerSettings", "limits_of"]


class TerminationCheckerSettings(PartSettings):
    """The options of :class:`TerminationChecker`."""

    max_env_step: Count | None = None
    """Env steps, summed over all collectors."""
    max_train_iter: Count | None = None
    """Updates of the policy."""
    max_train_epoch: Count | None = None
    """Passes over the dataset (offline)."""
    max_time_s: Positive | None = None
    """Seconds since the first step, by the task's clock. A resumed run continues to count."""


class TerminationChecker(BaseMiddleware[Context], TakesSettings[TerminationCheckerSettings]):
    """Stop the task at the end of the step in which a limit is reached.

    In a run of several processes the learner checks the limits, because only it knows the exact
    counters. The limits are also what :class:`~middleware.ProgressBar` shows. A run that is resumed
    at a limit stops before its first step.

    Without a name, it counts the sums over all named parts of the chain; with ``name="red"``, it
    counts in that part. Either ends the whole run.

    Args:
        settings: the options, each by keyword; see :class:`TerminationCheckerSettings`.

    Reads:
        ctx.env_step, ctx.train_iter, ctx.train_epoch: those that have a limit.

    Raises:
        ConfigError: if no limit is given, or one is not positive.
    """

    roles = (Role.LEARNER,)

    settings: TerminationCheckerSettings

    @takes_options(TerminationCheckerSettings)
    def __init__(self, settings: TerminationCheckerSettings) -> None:
        self.settings = settings
        limits: dict[str, float | None] = {
            "env_step": settings.max_env_step,
            "train_iter": settings.max_train_iter,
            "train_epoch": settings.max_train_epoch,
            "time_s": settings.max_time_s,
        }
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}
        if not self.limits:
            raise ConfigError("TerminationChecker needs at least one limit, such as max_env_step")
        self.reads = tuple(name for name in self.limits if name != "time_s")
        self._elapsed_before = 0.0
        self._started: float | None = None
        self._task: Task[Any] | None = None

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse a limit over all parts where some of them are counted in other processes."""
        task = chain.context.task
        for name in chain.parts if self.part_name is None and self.reads else ():
            if task.has_role(Role.LEARNER) and not task.part(name).has_role(Role.LEARNER):
                yield (
                    f"it limits {self.reads[0]} over all parts, but the part {name!r} learns in "
                    f"another process, which counts it; limit it there, with name={name!r}, or by "
                    "max_time_s"
                )

    def setup(self, task: Task[Any]) -> None:
        """Stop a task that starts at a limit, such as a finished run that is resumed."""
        self._task = task
        self._check(task.ctx)

    def __call__(self, ctx: Context) -> None:
        """Stop the task if a limit is reached."""
        if self._started is None:
            self._started = ctx.task.clock.now()
        self._check(ctx)

    def state_dict(self) -> dict[str, float]:
        """Return the seconds that have passed."""
        return {"elapsed_s": self._elapsed()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue to count seconds from a state; stop the task if that is enough."""
        self._elapsed_before = float(state["elapsed_s"])
        self._started = None
        if self._task is not None:
            self._check(self._task.ctx)

    def _elapsed(self) -> float:
        if self._started is None or self._task is None:
            return self._elapsed_before
        return self._elapsed_before + self._task.clock.now() - self._started

    def _check(self, ctx: Context) -> None:
        for name, limit in self.limits.items():
            if name == "time_s":
                elapsed = self._elapsed()
                if elapsed >= limit:
                    ctx.task.stop(
                        f"{elapsed:.1f} s have passed (max_time_s is {limit:g})", final=False
                    )
                continue
            # The pre-flight check has made sure that the field exists.
            value = getattr(ctx, name)
            if value >= limit:
                counter = name if self.part_name is None else f"{name} of {self.part_name}"
                ctx.task.stop(f"{counter} reached {value:,} (max_{name} is {limit:,})", final=False)


def limits_of(chain: ChainView) -> dict[str, float]:
    """Return the limits of a chain's termination checkers, by what they limit."""
    limits: dict[str, float] = {}
    for part in chain.middleware:
        if isinstance(part, TerminationChecker):
            limits |= part.limits
    return limits
