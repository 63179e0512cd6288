"""Whether a categorical distribution over returns can hold those of an env."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from dmiddleware.errors import ConfigError

__all__ = ["ReturnSupport"]

_log = logging.getLogger(__name__)
_CLIPPED_SHARE_TO_WARN = 0.05


class ReturnSupport:
    """Compares the returns that a distribution can have with those that occur.

    Args:
        support: ``[n_atoms]``, the returns that have a probability, evenly spaced.
        options: of the model that has the support; None: a network of the user's own, whose range
            was chosen.
        discount: γ.
        owner: the policy's name, for messages.
    """

    def __init__(
        self,
        support: torch.Tensor,
        options: Mapping[str, Any] | None,
        *,
        discount: float,
        owner: str,
    ) -> None:
        self._support, self._options = support, options
        self._discount, self._owner = discount, owner
        self._has_warned = False

    def check(self, returns: torch.Tensor, rest: torch.Tensor, rewards: torch.Tensor) -> None:
        """Refuse returns outside of a default range; see :meth:`C51Policy.check_returns`."""
        if self._options is None:
            return
        low, high = float(self._support[0]), float(self._support[-1])
        margin = (high - low) / (2 * (len(self._support) - 1))
        # Even if the rest is in the support, these returns are outside of it.
        is_low = bool((returns + rest * high < low - margin).any())
        is_high = bool((returns + rest * low > high + margin).any())
        options = self._options
        if not (is_low and "v_min" not in options) and not (is_high and "v_max" not in options):
            return
        lowest = options.get("v_min", self._bound(min(float(rewards.min()), 0.0)))
        highest = options.get("v_max", self._bound(max(float(rewards.max()), 0.0)))
        raise ConfigError(
            f"{self._owner} needs v_min and v_max for this env: its first rewards sum up "
            f"to discounted returns from {float(returns.min()):.3g} to {float(returns.max()):.3g}, "
            f"but the range is {low:g} to {high:g}, and returns outside cannot be learned. Pass "
            "the lowest and the highest discounted return, such as model="
            f"{{'v_min': {lowest}, 'v_max': {highest}}} (ditask train: --policy.model "
            f"v_min={lowest} v_max={highest}), which hold any with such rewards and "
            f"discount={self._discount:g}"
        )

    def _bound(self, reward: float) -> str:
        """Return the return of the same reward forever, rounded away from 0 to two digits."""
        value = reward / (1.0 - self._discount) if self._discount < 1.0 else math.inf * reward
        if value == 0.0 or not math.isfinite(value):
            return "0" if reward == 0.0 else "..."
        unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
        return f"{math.copysign(math.ceil(abs(value) / unit - 1e-9) * unit, value):g}"

    def warn_of_clipping(self, share: float | torch.Tensor) -> None:
        """Warn, once, if an update clipped more than 5% of the target's probability.

        Args:
            share: what it clipped; see :func:`~dmiddleware.rl.clipped_share`.
        """
        if self._has_warned or share <= _CLIPPED_SHARE_TO_WARN:
            return
        self._has_warned = True
        low, high = float(self._support[0]), float(self._support[-1])
        _log.warning(
            "%s clips %.0f%% of the target's probability, because these returns are outside of "
            "[v_min, v_max] = [%g, %g]; it cannot learn them. Pass model={'v_min': ..., 'v_max': "
            "...} with the lowest and the highest discounted return, or scale the rewards",
            self._owner,
            100.0 * float(share),
            low,
            high,
        )
