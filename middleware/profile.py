"""Measure the duration of steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from dmiddleware.pipeline import Context
from dmiddleware.settings import Count, Settings, TakesSettings, takes_options
from middleware.base import BaseMiddleware

__all__ = ["EpochTimer", "EpochTimerSettings"]

_log = logging.getLogger(__name__)


class EpochTimerSettings(Settings):
    """The options of :class:`EpochTimer`."""

    every_step: Count = 100
    """Steps over which to average."""


class EpochTimer(BaseMiddleware[Context], TakesSettings[EpochTimerSettings]):
    """Measure the duration of the part of a step that comes after this middleware.

    The mean over ``every_step`` steps goes to the text log, and is logged as ``time/step_s`` in the
    next step. :class:`~dmiddleware.pipeline.StepTimer` measures each middleware of the chain.

    Args:
        settings: the options, each by keyword; see :class:`EpochTimerSettings`.

    Raises:
        ConfigError: if an option is not valid.
    """

    settings: EpochTimerSettings

    @takes_options(EpochTimerSettings)
    def __init__(self, settings: EpochTimerSettings) -> None:
        self.settings = settings
        self._every = settings.every_step
        self._total_s = 0.0
        self._n_steps = 0
        self._mean_s: float | None = None

    def __call__(self, ctx: Context) -> Iterator[None]:
        """Measure the rest of the step."""
        if self._mean_s is not None:
            # One step late, because the loggers after this middleware have run already.
            ctx.log("time/step_s", self._mean_s)
            self._mean_s = None
        now = ctx.task.clock.now
        start = now()
        yield
        self._total_s += now() - start
        self._n_steps += 1
        if self._n_steps == self._every:
            self._mean_s = self._total_s / self._n_steps
            self._total_s, self._n_steps = 0.0, 0
            _log.info("%d steps took %.3f ms each", self._every, self._mean_s * 1e3)
