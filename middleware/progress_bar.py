"""The progress bar: how far a run is, while it runs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dmiddleware.pipeline import Clock, Middleware, OnlineRLContext, Role, SystemClock, Task
from middleware.support.checks import check_positive

__all__ = ["progress_bar"]

_REFRESH_S = 0.1
_RATE_WINDOW_S = 10.0
_N_RETURNS = 20
_WIDE = 100


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a run is.

    Attributes:
        unit: what ``done`` and ``total`` count.
        done: how much is done.
        total: how much there is to do; None if no one knows.
        updates: updates of the policy.
        train_return: mean return of the newest training episodes; None before the first.
        eval_return: mean return of the last evaluation; None before the first.
        units_per_s: how fast ``done`` grows now.
        updates_per_s: how fast ``updates`` grows now.
    """

    unit: str
    done: int
    total: int | None
    updates: int
    train_return: float | None
    eval_return: float | None
    units_per_s: float
    updates_per_s: float

    @property
    def left_s(self) -> float | None:
        """Seconds until all is done, at the present rate; None if no one knows."""
        if self.total is None or self.units_per_s <= 0:
            return None
        return max(self.total - self.done, 0) / self.units_per_s

    def counts(self) -> str:
        """Return what is done of how much."""
        of = "" if self.total is None else f"/{self.total:,}"
        return f"{self.unit} {self.done:,}{of}"

    def returns(self) -> str:
        """Return the returns, as far as there are any."""
        parts = [
            f"{name} {value:.1f}"
            for name, value in (("return", self.train_return), ("eval", self.eval_return))
            if value is not None
        ]
        return " ".join(parts) or "return -"

    def rates(self, *, brief: bool = False) -> str:
        """Return the throughput; if brief, only that of the unit."""
        text = f"{self.units_per_s:,.0f}/s"
        if brief or self.unit == "update":
            return text
        return f"{text} {self.updates_per_s:,.0f} updates/s"

    def time_left(self) -> str:
        """Return the time left, or nothing if no one knows."""
        return "" if self.left_s is None else f" {_minutes(self.left_s)} left"


class _Rate:
    """How fast counters grow, over the last few seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()

    def __call__(self, now: float, done: int, updates: int) -> tuple[float, float]:
        marks = self._marks
        marks.append((now, done, updates))
        while len(marks) > 2 and now - marks[1][0] >= _RATE_WINDOW_S:
            marks.popleft()
        return _growth(marks[0], marks[-1])


class _ProgressBar:
    """Shows how far the run is; see :func:`progress_bar`."""

    __name__ = "progress_bar"
    roles = (Role.LEARNER,)
    last_step = True

    def __init__(
        self,
        *,
        max_env_step: int | None,
        max_train_iter: int | None,
        every_s: float,
        console: Console,
    ) -> None:
        self._limits = {"env_step": max_env_step, "train_iter": max_train_iter}
        self._console = console
        self._clock: Clock = SystemClock()
        self._axis, self._unit = "env_step", "step"
        self._every_s = _REFRESH_S if console.is_terminal else every_s
        self._returns: deque[float] = deque(maxlen=_N_RETURNS)
        self._rate = _Rate()
        self._next = -math.inf
        self._begin = (0.0, 0, 0)
        self._task: Task[Any] | None = None
        self._bar: Progress | None = None

    def setup(self, task: Task[Any]) -> None:
        if not isinstance(task.ctx, OnlineRLContext) or (
            self._limits["env_step"] is None and self._limits["train_iter"] is not None
        ):
            self._axis, self._unit = "train_iter", "update"
        self._task = task
        self._clock = task.clock
        now = self._clock.now()
        self._begin = (now, getattr(task.ctx, self._axis), task.ctx.train_iter)
        self._rate(*self._begin)
        self._next = now + self._every_s
        if self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.description}"),
                console=self._console,
                expand=True,
                auto_refresh=False,
            )
            self._bar.start()
            self._bar.add_task("", total=self._limits[self._axis])
            self._bar.refresh()

    def __call__(self, ctx: Any) -> Iterator[None]:
        yield
        train_return = ctx.logged.get("collect/return_mean")
        if train_return is not None:
            self._returns.append(train_return)
        now = self._clock.now()
        if now >= self._next:
            self._next = now + self._every_s
            snapshot = self._snapshot(ctx, self._rate(now, *self._counts(ctx)))
            self._show(snapshot, snapshot.time_left())

    def close(self) -> None:
        if self._task is None:
            return
        task, self._task = self._task, None
        # At the end, what counts is the whole run.
        now = self._clock.now()
        snapshot = self._snapshot(task.ctx, _growth(self._begin, (now, *self._counts(task.ctx))))
        self._show(snapshot, f" in {_minutes(now - self._begin[0])}")
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        elif task.stop_reason is not None:
            self._console.print(f"stopped: {task.stop_reason}", highlight=False, soft_wrap=True)

    def _counts(self, ctx: Any) -> tuple[int, int]:
        return getattr(ctx, self._axis), ctx.train_iter

    def _snapshot(self, ctx: Any, rates: tuple[float, float]) -> Snapshot:
        units_per_s, updates_per_s = rates
        return Snapshot(
            unit=self._unit,
            done=getattr(ctx, self._axis),
            total=self._limits[self._axis],
            updates=ctx.train_iter,
            train_return=sum(self._returns) / len(self._returns) if self._returns else None,
            eval_return=ctx.last_eval_value if math.isfinite(ctx.last_eval_value) else None,
            units_per_s=units_per_s,
            updates_per_s=updates_per_s,
        )

    def _show(self, snapshot: Snapshot, duration: str) -> None:
        # On a narrow terminal the bar would have no room.
        brief = self._bar is not None and self._console.width < _WIDE
        pace = snapshot.rates(brief=brief) + duration
        texts = (snapshot.counts(), snapshot.returns(), pace)
        if self._bar is not None:
            (bar_task,) = self._bar.task_ids
            self._bar.update(bar_task, completed=snapshot.done, description="  ".join(texts))
            self._bar.refresh()
        else:
            self._console.print(" | ".join(texts), highlight=False, soft_wrap=True)


def progress_bar(
    *,
    max_env_step: int | None = None,
    max_train_iter: int | None = None,
    every_s: float = 5.0,
    console: Console | None = None,
) -> Middleware[Any]:
    """Show how far the run is: steps, returns, throughput, and the time left.

    On a terminal it is a live bar; elsewhere it is a plain line every few seconds. Of several
    processes the learner shows it.

    Args:
        max_env_step: environment steps at which the bar is full.
        max_train_iter: updates at which the bar is full, if the run has no limit of steps. Without
            any limit there is no time left to tell.
        every_s: seconds from one plain line to the next.
        console: where to show it; None: the standard error stream.

    Reads:
        ctx.env_step or ctx.train_iter, ctx.last_eval_value: counters.
        ctx.logged: on the way back, the returns of training episodes, if they are there.

    Raises:
        ValueError: if a limit or ``every_s`` is not positive.
    """
    check_positive(max_env_step=max_env_step, max_train_iter=max_train_iter, every_s=every_s)
    return _ProgressBar(
        max_env_step=max_env_step,
        max_train_iter=max_train_iter,
        every_s=every_s,
        console=Console(stderr=True) if console is None else console,
    )


def _growth(then: tuple[float, int, int], now: tuple[float, int, int]) -> tuple[float, float]:
    """Return how much the two counters have grown each second."""
    elapsed = now[0] - then[0]
    if elapsed <= 0:
        return 0.0, 0.0
    return (now[1] - then[1]) / elapsed, (now[2] - then[2]) / elapsed


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
