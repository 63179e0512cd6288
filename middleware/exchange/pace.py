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
            its first update. Before that, its buffer fills.
    """

    def __init__(self, samples_per_insert: float) -> None:
        self._ratio = samples_per_insert
        self._begin: tuple[int, int] | None = None
        self._drawn = 0
        self._stalled = False

    def wants_data(self, ctx: OnlineRLContext) -> bool:
        """Return whether this step should take the next batch."""
        # A learner that may learn and did not lacks data; its buffer may have been cleared.
        return self._begin is None or self._stalled or not self.may_learn(ctx)

    def may_learn(self, ctx: OnlineRLContext) -> bool:
        """Return whether the collected rows allow further draws."""
        if self._begin is None:
            return True
        env_step, drawn = self._begin
        allowed = self._ratio * (ctx.env_step - env_step)
        return ctx.trained_env_step - drawn < allowed

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        begin = state["begin"]
        self._begin = None if begin is None else (int(begin[0]), int(begin[1]))
