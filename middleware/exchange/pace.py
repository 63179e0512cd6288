"""The pace of a learner: how many rows it may draw for each collected row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from middleware.context import OnlineRLContext

__all__ = ["Pace"]


class Pace:
    """Decides when a learner has to wait for data before further updates.

    Args:
        samples_per_insert: rows that the learner draws per collected row, counted from the step of
            its first update. Before that, its buffer fills. After a resume with another ratio, it
            holds for what is collected from there on.

    Attributes:
        ratio: the ratio of the rows that were counted so far.
    """

    def __init__(self, samples_per_insert: float) -> None:
        self.ratio = self._next_ratio = samples_per_insert
        self._begin: tuple[int, float] | None = None
        self._drawn = 0
        self._stalled = False

    def begin_step(self, ctx: OnlineRLContext) -> None:
        """Change to this run's ratio, if the run before the resume had another one."""
        if self._begin is not None and self.ratio != self._next_ratio:
            self._begin = ctx.env_step, self._allowed(ctx, self._begin)
        self.ratio = self._next_ratio

    def wants_data(self, ctx: OnlineRLContext) -> bool:
        """Return whether this step should take the next batch."""
        # A learner that may learn and did not lacks data; its buffer may have been cleared.
        return self._begin is None or self._stalled or not self.may_learn(ctx)

    def may_learn(self, ctx: OnlineRLContext) -> bool:
        """Return whether the collected rows allow further draws."""
        return self._begin is None or ctx.trained_env_step < self._allowed(ctx, self._begin)

    def end_step(self, ctx: OnlineRLContext) -> None:
        """Start to count, if this step had the first update."""
        drawn = ctx.trained_env_step
        self._stalled = drawn == self._drawn
        self._drawn = drawn
        if self._begin is None and drawn > 0:
            self._begin = ctx.env_step, drawn

    def state_dict(self) -> dict[str, Any]:
        """Return the counters at the start."""
        return {"begin": None if self._begin is None else list(self._begin)}

    def load_state_dict(self, state: Mapping[str, Any], *, ratio: float) -> None:
        """Restore what :meth:`state_dict` returned.

        Args:
            state: the counters at the start.
            ratio: that of the pace that was saved.
        """
        begin = state["begin"]
        self._begin = None if begin is None else (int(begin[0]), begin[1])
        self.ratio = ratio

    def _allowed(self, ctx: OnlineRLContext, begin: tuple[int, float]) -> float:
        """Return how many rows may have been drawn by now."""
        env_step, drawn = begin
        return drawn + self.ratio * (ctx.env_step - env_step)
