"""When something is due that happens at an interval of updates or environment steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from dmiddleware.pipeline import ChainView
from dmiddleware.settings import Count, Settings
from middleware.context import OnlineRLContext, RLContext

__all__ = ["Interval", "IntervalSettings", "axis_of"]


class IntervalSettings(Settings):
    """The options of a middleware that does something at an interval; one of them is given."""

    exclusive: ClassVar[tuple[str, ...]] = ("every_train_iter", "every_env_step")

    every_train_iter: Count | None = None
    """Updates from one time to the next; None: the interval is not in updates."""
    every_env_step: Count | None = None
    """Env steps from one time to the next; None: the interval is not in env steps."""

    def require_interval(self) -> None:
        """Refuse settings without an interval.

        Raises:
            ConfigError: if neither is given.
        """
        is_given = self.every_train_iter is not None or self.every_env_step is not None
        self.require(is_given, "every_train_iter", "given, unless every_env_step is")


class Interval:
    """Decides when something is due that happens at an interval of updates or environment steps.

    It is due in each step that reaches or passes a multiple of the interval, once if it passes
    several. With an interval of 1,000 and 64 env steps in each step of the task, these are the
    steps that end at 1,024, 2,048, 3,008, and so on: the distances vary, but do not add up. Without
    an interval, it is never due.

    Args:
        settings: the interval.
        online: the env steps that count if the settings have no interval.
        offline: the same in updates, for a context without env steps.
    """

    def __init__(
        self, settings: IntervalSettings, *, online: int | None = None, offline: int | None = None
    ) -> None:
        self._settings = settings
        self._defaults = {"env_step": online, "train_iter": offline}
        self._counter, self._every = _given(settings)
        self._last = 0

    def preflight(self, chain: ChainView) -> Iterable[str]:
        """Refuse an interval in env steps in a chain that does not count them."""
        if self._settings.every_env_step and not isinstance(chain.context, OnlineRLContext):
            yield (
                f"it has an interval in env steps, which {type(chain.context).__name__} does not "
                "count; give every_train_iter instead"
            )

    def start(self, ctx: RLContext) -> None:
        """Count from here."""
        if _given(self._settings)[1] is None:
            self._counter = axis_of(ctx)
            self._every = self._defaults[self._counter]
        self._last = getattr(ctx, self._counter)

    def is_due(self, ctx: RLContext) -> bool:
        """Return whether a multiple was reached since the last call; call it once a step."""
        before, self._last = self._last, getattr(ctx, self._counter)
        return self._every is not None and self._last // self._every > before // self._every

    def state_dict(self) -> dict[str, Any]:
        """Return the counter at the last call."""
        return {"last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._last = int(state["last"])


def axis_of(ctx: RLContext) -> str:
    """Return the counter over which metrics are drawn: env steps, or updates if there are none."""
    return "env_step" if isinstance(ctx, OnlineRLContext) else "train_iter"


def _given(settings: IntervalSettings) -> tuple[str, int | None]:
    if settings.every_env_step is not None:
        return "env_step", settings.every_env_step
    return "train_iter", settings.every_train_iter
