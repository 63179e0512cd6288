"""Logging: what the run measures, into tensorboard and the text log."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dmiddleware.pipeline import Clock, Middleware, SystemClock, Task
from dmiddleware.tensorboard import add_video
from middleware.run_folder import RunFolder
from middleware.support.checks import check_positive

__all__ = ["online_logger", "offline_logger"]

_FPS = 20  # pictures a second of the films of evaluations

_log = logging.getLogger(__name__)


class _Logger:
    """Gathers metrics step by step, and writes their means now and then.

    Args:
        name: what the chain shows.
        axis: the field of the context over which metrics are drawn.
        counters: fields of the context whose growth per second is logged.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        name: str,
        axis: str,
        every: int,
        counters: tuple[str, ...],
    ) -> None:
        self.__name__ = name
        self.last_step = True
        self.reads = (axis, *counters)
        self._run = run
        self._axis = axis
        self._every = every
        self._counters = counters
        self._clock: Clock = SystemClock()
        self._sums: dict[str, list[float]] = {}
        self._others: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._time = 0.0
        self._next = every
        self._last = 0

    def setup(self, task: Task[Any]) -> None:
        """Begin to measure throughput."""
        self._clock = task.clock
        self._begin_interval(task.ctx)
        self._next = getattr(task.ctx, self._axis) + self._every

    def __call__(self, ctx: Any) -> Iterator[None]:
        """Gather what was logged in the step, on its way back; write, if it is time."""
        yield
        for name, value in ctx.logged.items():
            self._add(name, value)
        output = ctx.train_output
        if output is not None:
            for one in output if isinstance(output, list) else [output]:
                self._gather_output(one)
        self._last = getattr(ctx, self._axis)
        if ctx.eval_value is not None:
            self._write_evaluation(ctx)
        if self._last >= self._next:
            self._next = self._last + self._every
            self._log_rates(ctx)
            self._flush()

    def close(self) -> None:
        """Write what was gathered since the last time."""
        if self._sums:
            self._flush()

    def _add(self, name: str, value: float) -> None:
        entry = self._sums.get(name)
        if entry is None:
            self._sums[name] = [value, 1]
        else:
            entry[0] += value
            entry[1] += 1

    def _gather_output(self, output: Mapping[str, Any]) -> None:
        for key, value in output.items():
            if isinstance(value, float | int):
                self._add(f"learn/{key}", value)
            elif key.startswith("["):
                self._others[key] = value

    def _write_evaluation(self, ctx: Any) -> None:
        writer = self._run.tb_logger
        writer.add_scalar("eval/return_mean", ctx.eval_value, self._last)
        output = ctx.eval_output if isinstance(ctx.eval_output, Mapping) else {}
        for name in ("return_std", "return_min", "return_max"):
            if name in output:
                writer.add_scalar(f"eval/{name}", output[name], self._last)
        if "video" in output:
            add_video(writer, "eval/video", output["video"], self._last, fps=_FPS)
        _log.info(
            "%s %d, update %d: evaluated, mean return %.2f",
            self._axis,
            self._last,
            ctx.train_iter,
            ctx.eval_value,
        )

    def _log_rates(self, ctx: Any) -> None:
        elapsed = self._clock.now() - self._time
        if elapsed > 0:
            for name, before in self._counts.items():
                self._add(f"speed/{name}_per_s", (getattr(ctx, name) - before) / elapsed)
        if ctx.task.router is not None:
            # Totals, and many: not for the text log.
            for name, total in ctx.task.router.counters().items():
                self._run.tb_logger.add_scalar(f"router/{name}", total, self._last)
        self._begin_interval(ctx)

    def _begin_interval(self, ctx: Any) -> None:
        self._time = self._clock.now()
        self._counts = {name: getattr(ctx, name) for name in self._counters}

    def _flush(self) -> None:
        writer = self._run.tb_logger
        means = {name: total / count for name, (total, count) in sorted(self._sums.items())}
        for name, mean in means.items():
            writer.add_scalar(name, mean, self._last)
        for key, value in self._others.items():
            kind, _, name = key.partition("]")
            if kind == "[histogram":
                writer.add_histogram(f"learn/{name}", value, self._last)
            elif kind == "[scalars":
                writer.add_scalars(f"learn/{name}", value, self._last)
        writer.flush()
        text = ", ".join(f"{name} {_short(mean)}" for name, mean in means.items())
        _log.info("%s %d: %s", self._axis, self._last, text)
        self._sums.clear()
        self._others.clear()


def online_logger(run: RunFolder, *, every_env_step: int = 1000) -> Middleware[Any]:
    """Write metrics to tensorboard and the text log, over environment steps.

    What is written: everything that a middleware logged with ``ctx.log``, what learning reported
    (``learn/…``; a key that begins with ``[scalars]`` or ``[histogram]`` as such), evaluations
    (``eval/return_mean`` and so on, and films), and throughput (``speed/…``). Each is the mean
    since it was last written; evaluations are written as they come. In a run of several processes
    also the router's totals: what was sent, received, retried, refused and waited for, by event
    (``router/event/…``) and by peer (``router/node…``).

    Its place in the chain does not matter, as it works on the way back. In a run of several
    processes each writes what it knows, into a folder of its own.

    Args:
        run: whose tensorboard writer is used.
        every_env_step: environment steps from one writing to the next.

    Reads:
        ctx.env_step, ctx.train_iter: counters.
        ctx.logged, ctx.train_output, ctx.eval_value, ctx.eval_output: on the way back, if they are
            there.

    Raises:
        ValueError: if ``every_env_step`` is not positive.
    """
    check_positive(every_env_step=every_env_step)
    return _Logger(
        run,
        name="online_logger",
        axis="env_step",
        every=every_env_step,
        counters=("env_step", "train_iter"),
    )


def offline_logger(run: RunFolder, *, every_train_iter: int = 100) -> Middleware[Any]:
    """Write metrics to tensorboard and the text log, over updates; else as :func:`online_logger`.

    Args:
        run: whose tensorboard writer is used.
        every_train_iter: updates from one writing to the next.

    Reads:
        ctx.train_iter: the counter.
        ctx.logged, ctx.train_output, ctx.eval_value, ctx.eval_output: on the way back, if they are
            there.

    Raises:
        ValueError: if ``every_train_iter`` is not positive.
    """
    check_positive(every_train_iter=every_train_iter)
    return _Logger(
        run,
        name="offline_logger",
        axis="train_iter",
        every=every_train_iter,
        counters=("train_iter",),
    )


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:,.0f}"
