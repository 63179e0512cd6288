"""Whether a model fits an environment's spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import torch
from torch import nn

from dmiddleware.data.batch import from_numpy
from dmiddleware.errors import SpaceError

__all__ = ["check_spaces", "zero_observation"]


def check_spaces(
    model: nn.Module,
    act: Callable[[Any], torch.Tensor | None],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
) -> None:
    """Refuse spaces that a model does not fit.

    A model with a method ``check_spaces`` of its own knows its shapes; any other is tried with one
    observation of zeros.

    Args:
        model: the policy's model.
        act: observations ``[1, …]`` in, actions ``[1, …]`` out; None if there are none to judge.
        observation_space: that of one environment.
        action_space: that of one environment.

    Raises:
        SpaceError: naming what the environment has and what the model did with it.
    """
    own_check = getattr(model, "check_spaces", None)
    if own_check is not None:
        own_check(observation_space, action_space)
        return
    try:
        action = act(zero_observation(observation_space))
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        raise SpaceError(
            f"the model {type(model).__name__} cannot take observations of {observation_space}: "
            f"{error}"
        ) from error
    if action is not None and tuple(action.shape[1:]) != tuple(action_space.shape or ()):
        raise SpaceError(
            f"for one environment the model {type(model).__name__} gives an action of shape "
            f"{tuple(action.shape[1:])}, but the environment takes {action_space}"
        )


def zero_observation(space: gym.Space[Any]) -> Any:
    """Return one observation of zeros, ``[1, …]``: a tensor, or a treetensor for nested spaces."""
    return from_numpy(gym.vector.utils.create_empty_array(space, n=1))
