"""Exploration: schedules of epsilon and epsilon-greedy actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from dmiddleware.rl.distribution import mask_logit

__all__ = [
    "Schedule",
    "LinearSchedule",
    "ExponentialSchedule",
    "EpsilonSchedule",
    "epsilon_greedy",
]

Schedule: TypeAlias = Callable[[float], float]
"""A function from a step count to the value at that step."""

_FEW = 64


@dataclass(frozen=True, slots=True)
class LinearSchedule:
    """Go from ``start`` to ``end`` in a straight line, then stay.

    Attributes:
        start: value at step 0.
        end: value from ``decay_steps`` on.
        decay_steps: length of the line, positive.

    Raises:
        ValueError: if a value is not finite or ``decay_steps`` not positive.
    """

    start: float
    end: float
    decay_steps: float

    def __post_init__(self) -> None:
        _check_schedule(self.start, self.end, self.decay_steps)

    def __call__(self, step: float) -> float:
        """Return the value for ``step``; a negative step counts as 0."""
        return _linear(self.start, self.end, max(step, 0.0) / self.decay_steps)


@dataclass(frozen=True, slots=True)
class ExponentialSchedule:
    """Approach ``end`` from ``start``: ``end + (start - end) * exp(-step / decay_steps)``.

    Attributes:
        start: value at step 0.
        end: value that is approached and never reached.
        decay_steps: steps after which ``1 / e`` of the way is left, positive.

    Raises:
        ValueError: if a value is not finite or ``decay_steps`` not positive.
    """

    start: float
    end: float
    decay_steps: float

    def __post_init__(self) -> None:
        _check_schedule(self.start, self.end, self.decay_steps)

    def __call__(self, step: float) -> float:
        """Return the value for ``step``; a negative step counts as 0."""
        return _exponential(self.start, self.end, max(step, 0.0) / self.decay_steps)


@dataclass(frozen=True, slots=True)
class EpsilonSchedule:
    """The probability of a random action as a function of the steps so far.

    Attributes:
        start: epsilon at step 0, in ``[0, 1]``.
        end: epsilon in the long run, in ``[0, 1]``.
        decay_steps: the pace of the decay, positive; see the two kinds.
        kind: ``"linear"`` (:class:`LinearSchedule`) or ``"exponential"``
            (:class:`ExponentialSchedule`); ``"exp"`` is DI-engine's name of the latter.

    Raises:
        ValueError: if a probability is outside ``[0, 1]``, ``decay_steps`` not positive, or the
            kind unknown.
    """

    start: float = 1.0
    end: float = 0.05
    decay_steps: float = 10_000
    kind: Literal["linear", "exponential", "exp"] = "linear"

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("end", self.end)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"epsilon's {name} must be a probability in [0, 1], got {value}")
        if self.kind not in ("linear", "exponential", "exp"):
            raise ValueError(f"epsilon's kind must be 'linear' or 'exponential', got {self.kind!r}")
        _check_schedule(self.start, self.end, self.decay_steps)

    def __call__(self, step: float) -> float:
        """Return epsilon for ``step``; a negative step counts as 0."""
        curve = _linear if self.kind == "linear" else _exponential
        return curve(self.start, self.end, max(step, 0.0) / self.decay_steps)


def epsilon_greedy(
    q: torch.Tensor,
    eps: float | torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Take a uniformly random action with probability ``eps``, else the best one.

    A call draws the same number of random numbers for every ``eps``, so runs that differ only in
    ``eps`` stay comparable.

    Args:
        q: ``[…, A]`` action values.
        eps: probability of a random action; a tensor ``[…]`` gives each row its own.
        generator: source of randomness, on the values' device; None: torch's own.
        mask: ``[…, A]`` bool, True where the action is allowed; no other action is ever chosen.

    Returns:
        ``[…]`` int64 actions.

    Raises:
        ValueError: if the mask allows no action in a row.
    """
    rows, n_actions = q.shape[:-1], q.shape[-1]
    if mask is not None:
        if not bool(mask.any(-1).all()):
            raise ValueError(
                "the action mask allows no action in at least one row; allow one in each"
            )
        explore = torch.rand(rows, generator=generator, device=q.device) < eps
        # The largest of independent uniform numbers is equally likely to be any allowed one.
        lottery = torch.rand(q.shape, generator=generator, device=q.device)
        uniform = lottery.masked_fill_(~mask, -1.0).argmax(-1)
        return torch.where(explore, uniform, mask_logit(q, mask).argmax(-1))
    # Whether to explore, and which action then. No action's probability is off by more than 2**-53.
    draws = torch.rand((2, *rows), dtype=torch.float64, generator=generator, device=q.device)
    if q.is_cpu and len(rows) == 1 and rows[0] <= _FEW and isinstance(eps, float | int):
        return _of_few(q, eps, draws)
    return torch.where(draws[0] < eps, (draws[1] * n_actions).long(), q.argmax(-1))


def _of_few(q: torch.Tensor, eps: float, draws: torch.Tensor) -> torch.Tensor:
    """Do the same row by row; for a few numbers, lists are much faster than torch calls."""
    action = (q.detach() if q.requires_grad else q).numpy().argmax(-1)
    chances, lots = draws.tolist()
    for row, chance in enumerate(chances):
        if chance < eps:
            action[row] = int(lots[row] * q.shape[-1])
    return torch.from_numpy(action)


def _linear(start: float, end: float, progress: float) -> float:
    # At the end the formula would miss ``end`` by a rounding error.
    return end if progress >= 1.0 else start + progress * (end - start)


def _exponential(start: float, end: float, progress: float) -> float:
    return end + (start - end) * math.exp(-progress)


def _check_schedule(start: float, end: float, decay_steps: float) -> None:
    for name, value in (("start", start), ("end", end)):
        if not math.isfinite(value):
            raise ValueError(f"a schedule's {name} must be finite, got {value}")
    if not (math.isfinite(decay_steps) and decay_steps > 0):
        raise ValueError(f"a schedule's decay_steps must be positive, got {decay_steps}")
