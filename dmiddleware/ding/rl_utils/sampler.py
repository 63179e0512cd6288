"""Samplers of actions, with DI-engine's names."""

from __future__ import annotations

from typing import Any

import torch
import treetensor.torch as ttorch
from torch.distributions import Categorical, Normal

__all__ = [
    "ArgmaxSampler",
    "HybridDeterminsticSampler",
    "HybridStochasticSampler",
    "MuSampler",
    "MultinomialSampler",
    "ReparameterizationSampler",
]


class ArgmaxSampler:
    """Takes the best action."""

    def __call__(self, logit: torch.Tensor) -> torch.Tensor:
        """Return ``[B]`` actions for ``[B, N]`` logits."""
        return logit.argmax(-1)


class MultinomialSampler:
    """Draws an action by its probability."""

    def __call__(self, logit: torch.Tensor) -> torch.Tensor:
        """Return ``[B]`` actions for ``[B, N]`` logits."""
        policy: Any = Categorical(logits=logit)
        action: torch.Tensor = policy.sample()
        return action


class MuSampler:
    """Takes the mean action."""

    def __call__(self, logit: Any) -> Any:
        """Return the tree's ``mu``."""
        return logit.mu


class ReparameterizationSampler:
    """Draws an action from a normal distribution, with gradient."""

    def __call__(self, logit: Any) -> torch.Tensor:
        """Return an action for the tree's ``mu`` and ``sigma``."""
        return Normal(logit.mu, logit.sigma).rsample()


class HybridStochasticSampler:
    """Draws a type of action and its arguments."""

    def __call__(self, logit: Any) -> Any:
        """Return ``action_type`` and ``action_args``."""
        return _hybrid(
            MultinomialSampler()(logit.action_type),
            ReparameterizationSampler()(logit.action_args),
        )


class HybridDeterminsticSampler:
    """Takes the best type of action, and its mean arguments."""

    def __call__(self, logit: Any) -> Any:
        """Return ``action_type`` and ``action_args``."""
        return _hybrid(ArgmaxSampler()(logit.action_type), logit.action_args.mu)


def _hybrid(action_type: torch.Tensor, action_args: torch.Tensor) -> Any:
    return ttorch.as_tensor({"action_type": action_type, "action_args": action_args})
