"""Continuous actions: what a network gives, and what an environment takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch

from dmiddleware.errors import ConfigError, SpaceError

__all__ = ["ActionBounds"]


class ActionBounds:
    """The bounds of an environment's Box of actions, and the way there and back.

    A Gaussian has no bounds, an environment's action has. The raw action, what the policy drew, is
    what log-probabilities are about; the env action is what the environment gets:

    - ``mode="rescale"``: raw ``[-1, 1]`` is mapped to ``[low, high]``, and what is beyond is
      clipped, so that a new network, whose outputs are about 0 and 1 apart, explores the whole Box
      whatever its size. Dimensions without finite bounds are left as they are.
    - ``mode="clip"``: the raw action is clipped to ``[low, high]``.

    Args:
        low: ``[A]`` lower bounds; None (with ``high`` None): not known yet, actions pass unchanged.
        high: ``[A]`` upper bounds.
        mode: ``"rescale"`` or ``"clip"``.

    Raises:
        ConfigError: if only one bound is given, lengths differ, or a lower one is not below.
    """

    def __init__(
        self,
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
        *,
        mode: str = "rescale",
    ) -> None:
        self._mode = mode
        self._low: torch.Tensor | None = None
        self._high: torch.Tensor | None = None
        if (low is None) != (high is None):
            raise ConfigError(
                f"action_low and action_high belong together, got {low!r} and {high!r}; "
                "give both, or neither"
            )
        if low is not None and high is not None:
            self._set(torch.as_tensor(low), torch.as_tensor(high))

    @property
    def known(self) -> bool:
        """Whether there are bounds."""
        return self._low is not None

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the env actions ``[…, A]`` of raw actions, which are on the CPU."""
        if self._low is None:
            return raw
        if self._mode == "rescale":
            raw = self._center + raw * self._half
        return raw.clamp(self._low, self._high)

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        """Return raw actions that :meth:`to_env` maps to these env actions."""
        if self._low is None or self._mode == "clip":
            return action
        device = action.device
        return (action - self._center.to(device)) / self._half.to(device)

    def check(self, space: gym.Space[Any]) -> None:
        """Refuse a space with other bounds than these.

        Raises:
            SpaceError: with both bounds.
        """
        if not isinstance(space, gym.spaces.Box):
            raise SpaceError(f"the policy gives continuous actions, the environment takes {space}")
        if self._low is None or self._high is None:
            return
        low, high = _bounds_of(space)
        if not (torch.equal(low, self._low) and torch.equal(high, self._high)):
            raise SpaceError(
                f"the policy gives actions from {self._low.tolist()} to {self._high.tolist()}, the "
                f"environment takes {low.tolist()} to {high.tolist()}; set action_low and "
                "action_high to the environment's bounds"
            )

    def adopt(self, space: gym.spaces.Box) -> None:
        """Take over a space's bounds."""
        self._set(*_bounds_of(space))

    def state_dict(self) -> dict[str, Any]:
        """Return the bounds; nothing if there are none."""
        if self._low is None or self._high is None:
            return {}
        return {"low": self._low.clone(), "high": self._high.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the bounds."""
        if state:
            self._set(state["low"], state["high"])

    def _set(self, low: torch.Tensor, high: torch.Tensor) -> None:
        low, high = low.to("cpu", torch.float32), high.to("cpu", torch.float32)
        if low.shape != high.shape or low.dim() != 1 or not bool((low < high).all()):
            raise ConfigError(
                "action_low and action_high must be as long as the action, each lower bound below "
                f"its upper one, got {low.tolist()} and {high.tolist()}"
            )
        self._low, self._high = low, high
        bounded = low.isfinite() & high.isfinite()
        self._half = torch.where(bounded, high / 2 - low / 2, 1.0)
        self._center = torch.where(bounded, high / 2 + low / 2, 0.0)


def _bounds_of(space: gym.spaces.Box) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.as_tensor(space.low.copy(), dtype=torch.float32),
        torch.as_tensor(space.high.copy(), dtype=torch.float32),
    )
