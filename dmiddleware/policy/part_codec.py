"""How each part of an action is mapped between network outputs, raw and env actions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import gymnasium as gym
import numpy as np
import torch

from dmiddleware.errors import ConfigError, SpaceError, StructureError
from dmiddleware.model.spaces import ActionPart
from dmiddleware.rl import (
    Bernoulli,
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    TanhGaussian,
)

__all__ = ["ActionBounding", "PartCodec", "codec_of"]

ActionBounding: TypeAlias = Literal["rescale", "clip", "tanh"]
"""How actions stay within the bounds of a Box; see :class:`~dmiddleware.policy.ActionCodec`."""

_ROUNDING: Final = 1e-4
"""How far an action may leave the bounds of a Box, as a part of half its width."""


class PartCodec(ABC):
    """Maps one part of an action; raw actions are ``[…]`` or ``[…, n]``.

    Args:
        part: the part, as a network sees it.

    Attributes:
        is_identity: whether raw actions are those of the environment, as choices from 0 on are.
    """

    def __init__(self, part: ActionPart) -> None:
        self.part = part
        self.sizes, self.n_logits, self.n_means = part.sizes, part.n_logits, part.n_means
        self._shape: tuple[int, ...] = (len(part.sizes),)
        self.is_identity = False
        self._start: Any = None  # of choices: an int, or one for each; None: not known, so 0

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of one action of the environment."""
        return self._shape

    @abstractmethod
    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Distribution:
        """Return the distribution over raw actions."""

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` bool, whether a mask ``[…, n_logits]`` allows raw actions."""
        raise NotImplementedError

    @abstractmethod
    def outside(self, action: torch.Tensor) -> torch.Tensor:
        """Return ``[…]`` bool, which of the environment's actions are not in its space."""

    @abstractmethod
    def describe(self) -> str:
        """Name the space, for a message."""

    def before_first(self, n: int) -> torch.Tensor:
        """Return the environment's actions ``[n, …]`` that stand for none."""
        return self.to_env(torch.zeros(n, len(self.sizes), dtype=torch.int64))

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions."""
        return raw if len(self._shape) == 1 else raw.reshape((*raw.shape[:-1], *self._shape))

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        """Return raw actions."""
        rank = len(self._shape)
        if rank == 1:
            return action
        lead = action.shape[: action.dim() - rank]
        return action.reshape((*lead, math.prod(self._shape)))

    def set_space(self, space: gym.Space[Any], *, was_used: bool) -> None:
        """Take the details of a space, or reject a space that differs from the known one."""
        start = _start_of(space)
        if self._start not in (None, start):
            raise SpaceError(
                f"the policy's actions count from {self._start}, but the environment takes "
                f"{space}; build another policy for it with for_env(env)"
            )
        self._start, self._shape = start, tuple(space.shape or ())

    def set_bounds(self, low: torch.Tensor, high: torch.Tensor) -> None:
        """Set the bounds of a Box, ``[A]``.

        Raises:
            ConfigError: if they are not as long as the action.
            SpaceError: if tanh is to map to an infinite bound.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the details."""
        start = {} if self._start is None else {"start": self._start}
        return {"shape": list(self._shape), **start}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the details; those that the state lacks stay as they are."""
        self._shape = tuple(state.get("shape", self._shape))
        self._start = state.get("start", self._start)


class _DiscreteCodec(PartCodec):
    def __init__(self, part: ActionPart) -> None:
        super().__init__(part)
        self.is_identity = True

    @property
    def item_shape(self) -> tuple[int, ...]:
        """The shape of one action of the environment."""
        return ()

    def set_space(self, space: gym.Space[Any], *, was_used: bool) -> None:
        super().set_space(space, was_used=was_used)
        self.is_identity = not self._start

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.is_identity = not self._start

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Categorical:
        return Categorical(outputs["logit"], mask)

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        return mask.gather(-1, raw.unsqueeze(-1)).squeeze(-1)

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        raw = self.to_raw(action)
        return (raw < 0) | (raw >= self.n_logits)

    def describe(self) -> str:
        first = self._start or 0
        return f"the choices {first} to {first + self.n_logits - 1}"

    def before_first(self, n: int) -> torch.Tensor:
        return self.to_env(torch.zeros(n, dtype=torch.int64))

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        return raw + self._start if self._start else raw

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        action = _as_integers(action)
        return action - self._start if self._start else action


class _MultiDiscreteCodec(PartCodec):
    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> MultiCategorical:
        return MultiCategorical(outputs["logit"], self.sizes, mask)

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(self.sizes, device=raw.device).cumsum(0)
        first = ends - ends.new_tensor(self.sizes)
        return mask.gather(-1, raw + first).all(-1)

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        raw = self.to_raw(action)
        return ((raw < 0) | (raw >= torch.tensor(self.sizes, device=raw.device))).any(-1)

    def describe(self) -> str:
        first = "" if self._start is None else f", counted from {self._start}"
        return f"the numbers of choices {[*self.sizes]}{first}"

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        return super().to_env(self._shifted(raw, 1))

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        return self._shifted(_as_integers(super().to_raw(action)), -1)

    def _shifted(self, action: torch.Tensor, sign: int) -> torch.Tensor:
        if self._start is None or not any(self._start):
            return action
        return action + sign * torch.tensor(self._start, device=action.device)


class _MultiBinaryCodec(PartCodec):
    def __init__(self, part: ActionPart) -> None:
        super().__init__(part)
        self._shape = part.sizes

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Bernoulli:
        return Bernoulli(outputs["logit"], mask)

    def allows(self, mask: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
        return ((raw == 0) | mask).all(-1)

    def before_first(self, n: int) -> torch.Tensor:
        return self.to_env(torch.zeros(n, *self.sizes, dtype=torch.int8))

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        raw = self.to_raw(action)
        return ((raw != 0) & (raw != 1)).any(-1)

    def describe(self) -> str:
        return "the values 0 and 1"


class _BoxCodec(PartCodec):
    def __init__(self, part: ActionPart, bounding: ActionBounding) -> None:
        super().__init__(part)
        self._shape = part.sizes
        self._bounding = bounding
        self._bounds: tuple[torch.Tensor, torch.Tensor] | None = None
        self._scales: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def distribution(
        self, outputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None
    ) -> Gaussian | TanhGaussian:
        mu = outputs["mu"]
        sigma = outputs["sigma"] if "sigma" in outputs else torch.zeros_like(mu)
        kind = TanhGaussian if self._bounding == "tanh" else Gaussian
        return kind(mu, sigma)

    def before_first(self, n: int) -> torch.Tensor:
        return torch.zeros(n, *self._shape)

    def to_env(self, raw: torch.Tensor) -> torch.Tensor:
        if self._bounds is not None:
            low, high, center, half, _ = self._scale(raw.device)
            if self._bounding != "clip":
                raw = center + raw * half
            raw = raw.clamp(low, high)
        return super().to_env(raw)

    def to_raw(self, action: torch.Tensor) -> torch.Tensor:
        action = super().to_raw(action)
        if action.dtype != torch.float32:  # of data that was made by hand
            action = action.float()
        if self._bounds is None or self._bounding == "clip":
            return action
        _, _, center, _, divisor = self._scale(action.device)
        return (action - center) / divisor

    def outside(self, action: torch.Tensor) -> torch.Tensor:
        action = super().to_raw(action)
        if self._bounds is None:
            return torch.zeros(action.shape[:-1], dtype=torch.bool, device=action.device)
        low, high, _, half, _ = self._scale(action.device)
        margin = _ROUNDING * half
        return ((action < low - margin) | (action > high + margin)).any(-1)

    def describe(self) -> str:
        if self._bounds is None:
            return "a Box without bounds"
        low, high = (bound.tolist() for bound in self._bounds)
        return f"the bounds {low} and {high}"

    def _scale(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the bounds, centers, half widths, and what maps actions back, on a device."""
        scale = self._scales.get(device)
        if scale is None:
            assert self._bounds is not None
            low, high = self._bounds
            bounded = low.isfinite() & high.isfinite()
            center = torch.where(bounded, high / 2 + low / 2, 0.0)
            half = torch.where(bounded, high / 2 - low / 2, 1.0)
            # Where both bounds are equal, the only action is that of any raw one, such as 0.
            divisor = half.masked_fill(half == 0, 1.0)
            scale = tuple(each.to(device) for each in (low, high, center, half, divisor))
            self._scales[device] = scale
        return scale

    def set_bounds(self, low: torch.Tensor, high: torch.Tensor) -> None:
        if low.shape != self.sizes:
            raise ConfigError(
                f"action_low and action_high must be as long as the action, {self.sizes[0]}, got "
                f"{low.tolist()} and {high.tolist()}"
            )
        if self._bounding == "tanh" and not bool((low.isfinite() & high.isfinite()).all()):
            raise SpaceError(
                f"action_bounding='tanh' needs finite bounds, got {low.tolist()} and "
                f"{high.tolist()}; give the env finite ones with "
                "gymnasium.wrappers.TransformAction, or use an algorithm with 'rescale'"
            )
        if self._bounds is not None:
            present_low, present_high = self._bounds
            if torch.equal(low, present_low) and torch.equal(high, present_high):
                return  # those on devices stay where a CUDA graph reads them
        self._bounds, self._scales = (low, high), {}

    def set_space(self, space: gym.Space[Any], *, was_used: bool) -> None:
        assert isinstance(space, gym.spaces.Box)
        super().set_space(space, was_used=was_used)
        low, high = _inner_bounds(space)
        if self._bounds is None:
            if not was_used:
                self.set_bounds(low, high)
            return
        own_low, own_high = self._bounds
        if not any(
            torch.equal(own_low, lower) and torch.equal(own_high, upper)
            for lower, upper in ((low, high), _nearest_bounds(space))
        ):
            raise SpaceError(
                f"the policy gives actions from {own_low.tolist()} to {own_high.tolist()}, the "
                f"environment takes {low.tolist()} to {high.tolist()}; set action_low and "
                "action_high to the environment's bounds"
            )
        self.set_bounds(low, high)

    def state(self) -> dict[str, Any]:
        if self._bounds is None:
            return super().state()
        low, high = self._bounds
        return {**super().state(), "low": low.clone(), "high": high.clone()}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        if "low" in state:
            self.set_bounds(*(state[name].to("cpu", torch.float32) for name in ("low", "high")))


_DISCRETE: Final[Mapping[str, type[PartCodec]]] = {
    "discrete": _DiscreteCodec,
    "multi_discrete": _MultiDiscreteCodec,
    "multi_binary": _MultiBinaryCodec,
}


def codec_of(part: ActionPart, bounding: ActionBounding) -> PartCodec:
    """Return the codec of a part.

    Args:
        part: the part.
        bounding: how it stays within the bounds of a Box.
    """
    return _BoxCodec(part, bounding) if part.kind == "continuous" else _DISCRETE[part.kind](part)


def _nearest_bounds(space: gym.spaces.Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 numbers nearest to the bounds of a Box, ``[A]``."""
    with np.errstate(over="ignore"):
        low, high = (bound.flatten().astype(np.float32) for bound in (space.low, space.high))
    return torch.from_numpy(low), torch.from_numpy(high)


def _inner_bounds(space: gym.spaces.Box) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest float32 numbers in a Box, ``[A]``.

    A float64 bound, such as 0.3, may lie between two of them.
    """
    low, high = (bound.numpy() for bound in _nearest_bounds(space))
    infinity = np.float32(np.inf)
    least = np.where(low < space.low.flatten(), np.nextafter(low, infinity), low)
    largest = np.where(high > space.high.flatten(), np.nextafter(high, -infinity), high)
    has_some = least <= largest  # else, the nearest number has to do
    return (
        torch.from_numpy(np.where(has_some, least, low)),
        torch.from_numpy(np.where(has_some, largest, high)),
    )


def _as_integers(action: torch.Tensor) -> torch.Tensor:
    if action.is_floating_point():
        raise StructureError(
            f"discrete actions must be integers, got {action.dtype}; convert them with .long(), or "
            "learn from a model with action_space='continuous'"
        )
    return action.long()


def _start_of(space: gym.Space[Any]) -> int | list[int] | None:
    """Return from where the choices of a space count; None: it has no choices."""
    match space:
        case gym.spaces.Discrete():
            return int(space.start)
        case gym.spaces.MultiDiscrete():
            return [int(first) for first in space.start.flatten()]
    return None
