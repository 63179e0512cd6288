"""Epsilon schedules and action noise, with DI-engine's names and arguments."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import torch

from dmiddleware.schedule import Schedule

__all__ = [
    "BaseNoise",
    "GaussianNoise",
    "OUNoise",
    "create_noise_generator",
    "get_epsilon_greedy_fn",
    "noise_mapping",
]


def get_epsilon_greedy_fn(
    start: float, end: float, decay: int, type_: str = "exp"
) -> Callable[[float], float]:
    """Return epsilon as a function of the env step: a ``linear`` or exponential schedule.

    Raises:
        ValueError: if ``type_`` is neither ``"exp"`` nor ``"linear"``.
    """
    types: Any = {"exp": "exponential", "linear": "linear"}
    if type_ not in types:
        raise ValueError(f"type_ must be 'exp' or 'linear', got {type_!r}")
    return Schedule(types[type_], start, end, decay)


class BaseNoise(ABC):
    """The base of noise on actions."""

    @abstractmethod
    def __call__(self, shape: tuple[int, ...], device: Any) -> torch.Tensor:
        """Return noise of this shape on this device."""


class GaussianNoise(BaseNoise):
    """Independent noise of this mean and standard deviation."""

    def __init__(self, mu: float = 0.0, sigma: float = 1.0) -> None:
        if sigma < 0:
            raise ValueError(f"sigma must not be negative, got {sigma}")
        self._mu, self._sigma = mu, sigma

    def __call__(self, shape: tuple[int, ...], device: Any) -> torch.Tensor:
        """Return noise of this shape on this device."""
        return self._mu + self._sigma * torch.randn(shape, device=device)


class OUNoise(BaseNoise):
    """The increments of an Ornstein-Uhlenbeck process, which is what DI-engine adds to actions.

    Args:
        mu: the process's mean.
        sigma: its scale.
        theta: how fast it returns to the mean.
        dt: the length of a step.
        x0: where it starts, a number or a tensor of the action's shape.
    """

    def __init__(
        self,
        mu: float = 0.0,
        sigma: float = 0.3,
        theta: float = 0.15,
        dt: float = 1e-2,
        x0: float | torch.Tensor | None = 0.0,
    ) -> None:
        self._mu = mu
        self._alpha = theta * dt
        self._beta = sigma * math.sqrt(dt)
        self.x0 = x0

    @property
    def x0(self) -> float | torch.Tensor | None:
        """Where the process starts; setting it starts the process again."""
        return self._x0

    @x0.setter
    def x0(self, x0: float | torch.Tensor | None) -> None:
        self._x0 = x0
        self.reset()

    def reset(self) -> None:
        """Start the process again."""
        self._x: Any = copy.deepcopy(self._x0)

    def __call__(
        self, shape: tuple[int, ...], device: Any, mu: float | None = None
    ) -> torch.Tensor:
        """Return the next increment; ``mu`` replaces the mean for this step."""
        if self._x is None or (isinstance(self._x, torch.Tensor) and self._x.shape != shape):
            self._x = torch.zeros(shape)
        pull = self._alpha * ((self._mu if mu is None else mu) - self._x)
        increment: torch.Tensor = pull + self._beta * torch.randn(shape)
        self._x = self._x + increment
        return increment.to(device)


noise_mapping: Final[dict[str, Callable[..., BaseNoise]]] = {"gauss": GaussianNoise, "ou": OUNoise}


def create_noise_generator(noise_type: str, noise_kwargs: dict[str, Any]) -> BaseNoise:
    """Return the noise that a config names.

    Raises:
        KeyError: if ``noise_type`` is not in ``noise_mapping``.
    """
    if noise_type not in noise_mapping:
        raise KeyError(f"no noise is called {noise_type!r}; there are {', '.join(noise_mapping)}")
    return noise_mapping[noise_type](**noise_kwargs)
