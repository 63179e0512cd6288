"""Pace: how much is learned for how much is collected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Pace", "count_drawn"]


def count_drawn(ctx: Any, n_rows: int) -> None:
    """Count rows that were drawn from a buffer to learn, if someone asked for it."""
    counted = getattr(ctx, "trained_env_step", None)
    if counted is not None:
        ctx.trained_env_step = counted + n_rows


class Pace:
    """Says when a learner needs data before it may learn on.

    Args:
        samples_per_insert: rows that the learner draws for each row that is collected, from the
            step on in which it first learned (before, its buffer fills).
    """

    def __init__(self, samples_per_insert: float) -> None:
        self._ratio = samples_per_insert
        self._begin: tuple[int, int] | None = None
        self._drawn = 0
        self._stalled = False

    def begin(self, ctx: Any) -> None:
        """Have the rows counted that are drawn."""
        ctx.trained_env_step = getattr(ctx, "trained_env_step", 0)
        ctx.keep("trained_env_step")

    def wants_data(self, ctx: Any) -> bool:
        """Tell whether the next batch is to be taken in this step."""
        # Who may learn and does not lacks data: its buffer was cleared, say.
        return self._begin is None or self._stalled or not self.may_learn(ctx)

    def may_learn(self, ctx: Any) -> bool:
        """Tell whether fewer rows were drawn than the collected ones allow."""
        if self._begin is None:
            return True
        env_step, drawn = self._begin
        allowed = self._ratio * (ctx.env_step - env_step)
        return bool(ctx.trained_env_step - drawn < allowed)

    def end_step(self, ctx: Any) -> None:
        """Count from here, if this was the first step in which something was learned."""
        self._stalled = ctx.trained_env_step == self._drawn
        self._drawn = ctx.trained_env_step
        if self._begin is None and ctx.trained_env_step > 0:
            self._begin = ctx.env_step, ctx.trained_env_step

    def state_dict(self) -> dict[str, Any]:
        """Return where it is counted from."""
        return {"begin": None if self._begin is None else list(self._begin)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        begin = state["begin"]
        self._begin = None if begin is None else (int(begin[0]), int(begin[1]))
