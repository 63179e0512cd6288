"""Limits on how many items are pushed for each one sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["RateLimit"]

_LEFT_AFTER_WINDOW = 0.01
_NOTHING = 1e-5


class RateLimit:
    """Keeps the number of items pushed for each one sampled between two bounds.

    Both counts decay exponentially: after ``window_s`` seconds a hundredth of a count is left.

    Args:
        low: samples wait while fewer items than this were pushed for each one sampled.
        high: pushes wait while more items than this were pushed for each one sampled.
        window_s: the time in which a count decays to a hundredth, in seconds.
        clock: returns the time in seconds.
    """

    def __init__(
        self, *, low: float, high: float, window_s: float, clock: Callable[[], float]
    ) -> None:
        self._low = low
        self._high = high
        self._window_s = window_s
        self._clock = clock
        self._at = clock()
        self._n_pushed = 0.0
        self._n_sampled = 0.0

    def may_push(self, n: int) -> bool:
        """Return whether ``n`` more items may be pushed; without recent samples, any number."""
        self._decay()
        if self._n_sampled < _NOTHING:
            return True
        return (self._n_pushed + n) / self._n_sampled <= self._high

    def may_sample(self, n: int) -> bool:
        """Return whether ``n`` more items may be sampled."""
        self._decay()
        return n == 0 or self._n_pushed / (self._n_sampled + n) >= self._low

    def pushed(self, n: int) -> None:
        """Count pushed items."""
        self._decay()
        self._n_pushed += n

    def sampled(self, n: int) -> None:
        """Count sampled items."""
        self._decay()
        self._n_sampled += n

    def state_dict(self) -> dict[str, float]:
        """Return the counts at present."""
        self._decay()
        return {"n_pushed": self._n_pushed, "n_sampled": self._n_sampled}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what :meth:`state_dict` returned; the counts decay from now on."""
        self._at = self._clock()
        self._n_pushed = state["n_pushed"]
        self._n_sampled = state["n_sampled"]

    def _decay(self) -> None:
        now = self._clock()
        factor = _LEFT_AFTER_WINDOW ** ((now - self._at) / self._window_s)
        self._at = now
        self._n_pushed *= factor
        self._n_sampled *= factor
