"""The progress of a serial run, on the screen."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.console import Console

from dmiddleware.worker.ranks import rank_and_world_size

__all__ = ["Progress"]


class Progress:
    """Prints how far a run is: a line at each evaluation, and one every few seconds in between.

    Args:
        total: env steps at which the run ends; None: unknown.
        show: whether to print at all. Other ranks than 0 never do.
        every_s: seconds between two lines without an evaluation.
        console: where to print; None: the standard error stream.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        show: bool = True,
        every_s: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._of = "" if total is None else f"/{total:,}"
        self._console = Console(stderr=True) if console is None else console
        self._shows = show and rank_and_world_size()[0] == 0
        self._every_s = every_s
        self._clock = clock
        self._began = self._last = clock()
        self._best = -math.inf

    def evaluated(self, envstep: int, train_iter: int, value: object) -> None:
        """Print the result of an evaluation: a number, or what a metric has found."""
        if isinstance(value, int | float):
            self._best = max(self._best, value)
            value = f"{value:.1f} (best {self._best:.1f})"
        self._print(envstep, train_iter, f"eval {value}")

    def at(self, envstep: int, train_iter: int) -> None:
        """Print counters, if the interval has passed."""
        if self._clock() - self._last >= self._every_s:
            self._print(envstep, train_iter)

    def ended(self, envstep: int, train_iter: int) -> None:
        """Print the last counters, and how long the run took."""
        self._print(envstep, train_iter, f"finished in {self._clock() - self._began:.0f} s")

    def _print(self, envstep: int, train_iter: int, more: str = "") -> None:
        self._last = self._clock()
        if self._shows:
            parts = [f"step {envstep:,}{self._of}", f"update {train_iter:,}", *filter(None, [more])]
            self._console.print(" | ".join(parts), highlight=False, soft_wrap=True)
