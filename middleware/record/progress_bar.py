"""The progress bar of a run."""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dmiddleware.best_effort import BestEffort
from dmiddleware.pipeline import ChainView, Clock, SystemClock, Task
from dmiddleware.process.terminal import can_redraw
from dmiddleware.settings import Positive, Settings, TakesSettings, takes_options
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext, RLContext
from middleware.evaluate import evaluation_prefixes
from middleware.roles import Role
from middleware.termination import limits_of

__all__ = ["ProgressBar", "ProgressBarSettings"]

_REFRESH_S = 0.1
_RATE_WINDOW_S = 10.0
_N_RETURNS = 20
_WIDE = 100
_TRAINING = "collect/return_mean"


class _Rate:
    """The growth rates of two counters over the last few seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()

    def __call__(self, now: float, done: int, updates: int) -> tuple[float, float]:
        marks = self._marks
        marks.append((now, done, updates))
        while len(marks) > 2 and now - marks[1][0] >= _RATE_WINDOW_S:
            marks.popleft()
        return _growth(marks[0], marks[-1])


class RunConsole(Console):
    """A console that raises ``BrokenPipeError`` when nobody reads what it prints.

    Rich's own console ends the program.
    """

    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught."""
        raise BrokenPipeError("nobody reads what is printed any more")


class ProgressBarSettings(Settings):
    """The options of :class:`ProgressBar`."""

    every_s: Positive = 5.0
    """Seconds from one line to the next, without a terminal."""
    console: Console | None = field(default=None, repr=False)
    """Where to show it; None: the standard error stream."""


class ProgressBar(BaseMiddleware[RLContext], TakesSettings[ProgressBarSettings]):
    """Show the progress of the run: steps, returns, throughput, and the time left.

    On a terminal it is a live bar; elsewhere it prints a line every few seconds. In a run of
    several processes the learner shows it. The bar is full at the limit of the chain's
    :class:`~middleware.TerminationChecker`; without a limit the time left is unknown.

    If it cannot be shown, because the terminal is gone, a pipe was closed or a disk is full, a
    warning says so, and the run continues.

    Args:
        settings: the options, each by keyword; see :class:`ProgressBarSettings`.

    Reads:
        ctx.env_step or ctx.train_iter, ctx.last_eval_value: counters.
        ctx.logged, ctx.other_evaluations: on the way back, the returns of training episodes, and of
            evaluations that are not primary, if they are set.

    Raises:
        ConfigError: if an option is not valid.
    """

    roles = (Role.LEARNER,)
    lead_only = True
    reads = ("train_iter", "last_eval_value")
    last_step = True

    settings: ProgressBarSettings

    @takes_options(ProgressBarSettings)
    def __init__(self, settings: ProgressBarSettings) -> None:
        self.settings = settings
        self._limits: Mapping[str, float] = {}
        self._console = settings.console or RunConsole(
            stderr=True, force_terminal=can_redraw(sys.stderr)
        )
        self._clock: Clock = SystemClock()
        self._axis, self._unit = "env_step", "step"
        self._every_s = _REFRESH_S if self._console.is_terminal else settings.every_s
        self._returns: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_N_RETURNS)
        )  # by part; that of the whole chain is empty
        self._prefix = "eval"
        self._logged_names: tuple[tuple[str, str], ...] = (("", _TRAINING),)
        self._others: dict[str, float] = {}
        self._rate = _Rate()
        self._next = -math.inf
        self._start = (0.0, 0, 0)
        self._task: Task[Any] | None = None
        self._bar: Progress | None = None
        # A closed stream is a ValueError.
        self._best_effort = BestEffort("show the progress", OSError, ValueError)

    def bind(self, chain: ChainView) -> None:
        """Take the limits from the chain's TerminationChecker, and find the evaluators."""
        self._limits = limits_of(chain.of(None))
        self._prefix = evaluation_prefixes(chain.of(None))[0]
        parts = ((name, f"{name}/{_TRAINING}") for name in chain.parts)
        self._logged_names = (("", _TRAINING), *parts)

    def setup(self, task: Task[Any]) -> None:
        """Show the bar."""
        if not isinstance(task.ctx, OnlineRLContext) or (
            "env_step" not in self._limits and "train_iter" in self._limits
        ):
            self._axis, self._unit = "train_iter", "update"
        self._task = task
        self._clock = task.clock
        now = self._clock.now()
        self._start = (now, getattr(task.ctx, self._axis), task.ctx.train_iter)
        self._rate(*self._start)
        self._next = now + self._every_s
        if self._console.is_terminal:
            with self._best_effort:
                self._bar = self._start_bar()

    def _start_bar(self) -> Progress:
        bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.description}"),
            console=self._console,
            expand=True,
            auto_refresh=False,
        )
        bar.start()
        bar.add_task("", total=self._limits.get(self._axis))
        bar.refresh()
        return bar

    def __call__(self, ctx: RLContext) -> Iterator[None]:
        """Update the bar on the way back, if the interval has passed."""
        yield
        for name, logged_name in self._logged_names:
            train_return = ctx.logged.get(logged_name)
            if train_return is not None:
                self._returns[name].append(train_return)
        for prefix, output in ctx.other_evaluations.items():
            self._others[prefix] = output["return_mean"]
        now = self._clock.now()
        if now >= self._next:
            self._next = now + self._every_s
            self._show(ctx, self._rate(now, *self._counts(ctx)))

    def close(self) -> None:
        """Show the final state."""
        if self._task is None:
            return
        task, self._task = self._task, None
        # The final line shows the rates of the whole run.
        now = self._clock.now()
        rates = _growth(self._start, (now, *self._counts(task.ctx)))
        self._show(task.ctx, rates, f"in {_minutes(now - self._start[0])}")
        bar, self._bar = self._bar, None
        with self._best_effort:
            if bar is not None:
                bar.stop()
            elif task.stop_reason is not None:
                self._console.print(f"stopped: {task.stop_reason}", highlight=False, soft_wrap=True)

    def recent_returns(self) -> dict[str, Any]:
        """Return the returns that it shows and the context does not have, for a snapshot."""
        parts = {name: list(returns) for name, returns in self._returns.items()}
        training = parts.pop("", [])
        return {"training": training, "evaluations": dict(self._others), "parts": parts}

    def show_returns(self, returns: Mapping[str, Any]) -> None:
        """Show what :meth:`recent_returns` returned, until there are newer ones."""
        for name, values in {"": returns["training"], **returns.get("parts", {})}.items():
            self._returns[name].extend(values)
        self._others.update(returns["evaluations"])

    def _counts(self, ctx: RLContext) -> tuple[int, int]:
        return getattr(ctx, self._axis), ctx.train_iter

    def _show(self, ctx: RLContext, rates: tuple[float, float], duration: str = "") -> None:
        """Show counts, returns, rates and a duration; without one, the time left if known."""
        with self._best_effort:
            done, total = getattr(ctx, self._axis), self._limits.get(self._axis)
            counts = f"{self._unit} {done:,}{'' if total is None else f'/{total:,.0f}'}"
            pace = [f"{rates[0]:,.0f}/s"]
            # On a narrow terminal the bar would have no room.
            is_brief = self._bar is not None and self._console.width < _WIDE
            if self._unit == "step" and not is_brief:
                pace.append(f"{rates[1]:,.0f} updates/s")
            if duration:
                pace.append(duration)
            elif total is not None and rates[0] > 0:
                pace.append(f"{_minutes(max(total - done, 0) / rates[0])} left")
            texts = (counts, self._returns_of(ctx), " ".join(pace))
            if self._bar is None:
                self._console.print(" | ".join(texts), highlight=False, soft_wrap=True)
            else:
                (bar_task,) = self._bar.task_ids
                self._bar.update(bar_task, completed=done, description="  ".join(texts))
                self._bar.refresh()

    def _returns_of(self, ctx: RLContext) -> str:
        """Return the mean return of the last training episodes, and the returns of evaluations."""
        texts = []
        for name, part in {"": ctx, **ctx.parts}.items():
            prefix = f"{name} " if name else ""
            if returns := self._returns[name]:
                texts.append(f"{prefix}return {sum(returns) / len(returns):.1f}")
            if math.isfinite(part.last_eval_value):
                evaluation = f"{name} eval" if name else self._prefix
                texts.append(f"{evaluation} {part.last_eval_value:.1f}")
        texts += [f"{prefix} {value:.1f}" for prefix, value in self._others.items()]
        return " ".join(texts) or "return -"


def _growth(then: tuple[float, int, int], now: tuple[float, int, int]) -> tuple[float, float]:
    """Return the growth of the two counters per second."""
    elapsed = now[0] - then[0]
    if elapsed <= 0:
        return 0.0, 0.0
    return (now[1] - then[1]) / elapsed, (now[2] - then[2]) / elapsed


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
