"""Logging: write what a run measures to tensorboard and the text log."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dmiddleware.pipeline import (
    Clock,
    SystemClock,
    Task,
)
from dmiddleware.policy import UpdateOutput
from dmiddleware.settings import Count, Settings, takes_settings
from dmiddleware.tensorboard import add_video
from middleware.base import BaseMiddleware
from middleware.context import RLContext
from middleware.run_folder import RunFolder, check_run_folder
from middleware.support.checks import as_float

__all__ = [
    "OfflineLogger",
    "OfflineLoggerSettings",
    "OnlineLogger",
    "OnlineLoggerSettings",
    "offline_logger",
    "online_logger",
]

_FPS = 20  # frames per second of films of evaluations

_log = logging.getLogger(__name__)


class _Logger(BaseMiddleware[RLContext]):
    """Base of both loggers: collects metrics in every step, and writes their means at intervals."""

    last_step = True
    lead_only = True
    axis: str
    """The field of the context over which metrics are drawn."""
    counters: tuple[str, ...]
    """The fields of the context whose growth per second is logged."""

    def __init__(self, run: RunFolder, *, every: int) -> None:
        self.reads = (self.axis, *self.counters)
        self._run = check_run_folder(run, user=type(self).__name__)
        self._every = every
        self._clock: Clock = SystemClock()
        self._sums: dict[str, list[float]] = {}
        self._others: dict[str, Any] = {}
        self._unread: list[UpdateOutput] = []
        self._counts: dict[str, int] = {}
        self._time = 0.0
        self._next = every
        self._last = 0

    def setup(self, task: Task[Any]) -> None:
        """Start to measure throughput.

        Raises:
            RunFolderError: if the folder is in use by another task, or cannot be written to.
        """
        self._run.lock(task)
        self._clock = task.clock
        self._start_interval(task.ctx)
        self._next = getattr(task.ctx, self.axis) + self._every

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Collect the metrics of the step on its way back; write them at intervals."""
        yield
        for name, value in ctx.logged.items():
            self._add(name, value)
        output = ctx.train_output
        if output is not None:
            for one in output if isinstance(output, list) else [output]:
                if isinstance(one, UpdateOutput):
                    # Reading it waits for the GPU.
                    self._unread.append(one)
                else:
                    self._add_output(one)
        self._last = getattr(ctx, self.axis)
        if ctx.eval_value is not None:
            self._write_evaluation(ctx)
        if self._last >= self._next:
            self._next = self._last + self._every
            self._log_rates(ctx)
            self._flush()

    def close(self) -> None:
        """Write the metrics since the last write."""
        if self._sums or self._unread:
            self._flush()

    def _add(self, name: str, value: float) -> None:
        entry = self._sums.get(name)
        if entry is None:
            self._sums[name] = [value, 1]
        else:
            entry[0] += value
            entry[1] += 1

    def _add_output(self, output: Mapping[str, Any]) -> None:
        for key, value in output.items():
            number = _as_number(value)
            if number is not None:
                self._add(f"learn/{key}", number)
            elif key.startswith("["):
                self._others[key] = value

    def _write_evaluation(self, ctx: RLContext) -> None:
        writer = self._run.tb_logger
        writer.add_scalar("eval/return_mean", ctx.eval_value, self._last)
        output = ctx.eval_output if isinstance(ctx.eval_output, Mapping) else {}
        for name in ("return_std", "return_min", "return_max"):
            if name in output:
                writer.add_scalar(f"eval/{name}", output[name], self._last)
        if "video" in output:
            add_video(writer, "eval/video", output["video"], self._last, fps=_FPS)
        _log.info(
            "%s %d, update %d: mean return %.2f in the evaluation",
            self.axis,
            self._last,
            ctx.train_iter,
            as_float(ctx.eval_value),
        )

    def _log_rates(self, ctx: RLContext) -> None:
        elapsed = self._clock.now() - self._time
        if elapsed > 0:
            for name, before in self._counts.items():
                self._add(f"speed/{name}_per_s", (getattr(ctx, name) - before) / elapsed)
        if ctx.task.router is not None:
            # There are too many totals for the text log.
            for name, total in ctx.task.router.counters().items():
                self._run.tb_logger.add_scalar(f"router/{name}", total, self._last)
        self._start_interval(ctx)

    def _start_interval(self, ctx: RLContext) -> None:
        self._time = self._clock.now()
        self._counts = {name: getattr(ctx, name) for name in self.counters}

    def _flush(self) -> None:
        unread, self._unread = self._unread, []
        for output in unread:
            self._add_output(output)
        writer = self._run.tb_logger
        means = {name: total / count for name, (total, count) in sorted(self._sums.items())}
        for name, mean in means.items():
            writer.add_scalar(name, mean, self._last)
        for key, value in self._others.items():
            kind, _, name = key.partition("]")
            if kind == "[histogram":
                finite = _finite(value)
                if len(finite):
                    writer.add_histogram(f"learn/{name}", finite, self._last)
            elif kind == "[scalars":
                writer.add_scalars(f"learn/{name}", value, self._last)
        writer.flush()
        text = ", ".join(f"{name} {_short(mean)}" for name, mean in means.items())
        _log.info("%s %d: %s", self.axis, self._last, text)
        self._sums.clear()
        self._others.clear()


class OnlineLoggerSettings(Settings):
    """The options of :class:`OnlineLogger`."""

    every_env_step: Count = 1000
    """Env steps from one write to the next."""


class OnlineLogger(_Logger):
    """Write metrics to tensorboard and the text log, over environment steps.

    These are everything that a middleware logged with ``ctx.log``, the scalars that learning
    reported (``learn/…``; a key that begins with ``[scalars]`` or ``[histogram]`` is written as
    such), evaluations (``eval/return_mean`` and so on, and films), and throughput (``speed/…``).
    Each value is a mean since the last write; evaluations are written at once. In a run of several
    processes, the router's totals by event (``router/event/…``) and by peer (``router/node…``) are
    written as well.

    The position in the chain does not matter, because it works on the way back. In a run of several
    processes each one writes its metrics to a separate folder.

    Args:
        run: the folder whose tensorboard writer is used.

    Reads:
        ctx.env_step, ctx.train_iter: counters.
        ctx.logged, ctx.train_output, ctx.eval_value, ctx.eval_output: on the way back, if they are
            set.

    Raises:
        ConfigError: if ``run`` is not a RunFolder, or an option is not valid.
    """

    axis = "env_step"
    counters = ("env_step", "train_iter")

    settings: OnlineLoggerSettings

    @takes_settings(OnlineLoggerSettings)
    def __init__(self, run: RunFolder, settings: OnlineLoggerSettings) -> None:
        super().__init__(run, every=settings.every_env_step)
        self.settings = settings


class OfflineLoggerSettings(Settings):
    """The options of :class:`OfflineLogger`."""

    every_train_iter: Count = 100
    """Updates from one write to the next."""


class OfflineLogger(_Logger):
    """Write metrics to tensorboard and the text log, over updates; see :class:`OnlineLogger`.

    Args:
        run: the folder whose tensorboard writer is used.

    Reads:
        ctx.train_iter: the counter.
        ctx.logged, ctx.train_output, ctx.eval_value, ctx.eval_output: on the way back, if they are
            set.

    Raises:
        ConfigError: if ``run`` is not a RunFolder, or an option is not valid.
    """

    axis = "train_iter"
    counters = ("train_iter",)

    settings: OfflineLoggerSettings

    @takes_settings(OfflineLoggerSettings)
    def __init__(self, run: RunFolder, settings: OfflineLoggerSettings) -> None:
        super().__init__(run, every=settings.every_train_iter)
        self.settings = settings


def _as_number(value: object) -> float | None:
    """Return a scalar of any library as a float; None for anything else."""
    if isinstance(value, float | int):
        return float(value)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        number = value.item()
        return float(number) if isinstance(number, float | int) else None
    return None


def _finite(values: Any) -> Any:
    """Return the finite ones of the values of a histogram, which has no place for the others."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float().numpy()
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    return array[np.isfinite(array)]


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:,.0f}"


online_logger = OnlineLogger
"""DI-engine's name of :class:`OnlineLogger`."""

offline_logger = OfflineLogger
"""DI-engine's name of :class:`OfflineLogger`."""
