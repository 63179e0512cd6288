"""A training in another library, which ours is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A training in another library.

    Attributes:
        algorithm: the class of stable-baselines3 or sb3-contrib; C51 is Tianshou's.
        env: the environment's id.
        env_step: the budget.
        options: arguments of the class.
        policy_kwargs: its networks.
        env_num: environments that are collected from.
        normalize: whether observations and rewards are normalised.
        noise: the standard deviation of the Gaussian noise on actions; None: no noise.
        linear: options whose value falls linearly to 0.
        n_evaluations: evaluations in the training.
        n_episode: episodes of each.
    """

    algorithm: str
    env: str
    env_step: int
    options: Mapping[str, Any] = field(default_factory=dict)
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    env_num: int = 1
    normalize: bool = False
    noise: float | None = None
    linear: tuple[str, ...] = ()
    n_evaluations: int = 20
    n_episode: int = 10
