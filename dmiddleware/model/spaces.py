"""What a network needs to know about Gymnasium's spaces: shapes, as plain values.

An observation shape is one of

- an integer ``n``: a vector of ``n`` numbers;
- a tuple of integers: an array, ``(C, H, W)`` being an image, channels first;
- ``("one_hot", n, …)``: an integer below ``n`` (or one for each ``n``), which the network sees as a
  one-hot vector;
- a mapping of names to observation shapes: a Dict space, or a Tuple space with the names ``"0"``,
  ``"1"``, … A Dict space's key ``action_mask`` is left out, since networks do not encode it (see
  :mod:`dmiddleware.model.action_mask`).

All of these can be written in YAML, where tuples become lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from dmiddleware.data.batch import from_numpy
from dmiddleware.errors import SpaceError
from dmiddleware.model.action_mask import ACTION_MASK

__all__ = [
    "ObsShape",
    "ActionKind",
    "as_obs_shape",
    "shape_leaves",
    "is_image",
    "is_one_hot",
    "obs_shape_of",
    "action_shape_of",
    "action_kind_of",
    "HasSpaces",
    "check_spaces",
    "spaces_of",
]

ObsShape: TypeAlias = Any
"""``int | tuple | Mapping[str, ObsShape]``, as the module's docstring says."""

ActionKind: TypeAlias = Literal["discrete", "continuous"]
"""Whether an action is the number of a choice or a vector."""

ONE_HOT = "one_hot"


class HasSpaces(Protocol):
    """An env manager, a Gymnasium env or a Gymnasium vector env."""

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of observations."""
        ...

    @property
    def action_space(self) -> gym.Space[Any]:
        """The space of actions."""
        ...


def spaces_of(env: HasSpaces) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the observation space and the action space of one environment.

    Raises:
        SpaceError: if ``env`` has no spaces.
    """
    observation_space, action_space = (
        getattr(env, f"single_{name}", getattr(env, name, None))
        for name in ("observation_space", "action_space")
    )
    if not (isinstance(observation_space, gym.Space) and isinstance(action_space, gym.Space)):
        raise SpaceError(
            f"expected an env manager or a Gymnasium env, got {env!r:.100}, which has no "
            "observation_space and action_space"
        )
    return observation_space, action_space


def as_obs_shape(shape: ObsShape) -> ObsShape:
    """Normalise an observation shape: tuples for leaves, sorted dictionaries.

    Raises:
        SpaceError: if it is not an observation shape.
    """
    if isinstance(shape, Mapping):
        if not shape:
            raise SpaceError("an observation shape needs at least one entry, got an empty mapping")
        return {str(key): as_obs_shape(shape[key]) for key in sorted(shape, key=str)}
    items = (shape,) if isinstance(shape, int | np.integer) else shape
    if isinstance(items, Sequence) and not isinstance(items, str):
        marked = len(items) > 1 and items[0] == ONE_HOT
        sizes = items[1:] if marked else items
        if all(_is_size(size) for size in sizes):
            return (ONE_HOT, *map(int, sizes)) if marked else tuple(map(int, sizes))
    raise SpaceError(
        f"an observation shape is a positive integer, a tuple of them, ('one_hot', n) or a mapping "
        f"of names to such shapes, got {shape!r}"
    )


def shape_leaves(shape: ObsShape) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Yield ``(path of keys, leaf shape)`` of an observation shape, keys sorted.

    Raises:
        SpaceError: if it is not an observation shape.
    """
    normal = as_obs_shape(shape)
    if not isinstance(normal, dict):
        yield (), normal
        return
    for key, inner in normal.items():
        for path, leaf in shape_leaves(inner):
            yield (key, *path), leaf


def is_one_hot(shape: tuple[Any, ...]) -> bool:
    """Return whether a leaf shape is that of one-hot encoded integers."""
    return len(shape) > 1 and shape[0] == ONE_HOT


def is_image(shape: tuple[Any, ...]) -> bool:
    """Return whether a leaf shape is of images: three sizes."""
    return len(shape) == 3 and not is_one_hot(shape)


def obs_shape_of(space: gym.Space[Any]) -> ObsShape:
    """Return the observation shape of a space.

    Box, Discrete, MultiDiscrete (of two integers or more), MultiBinary, Dict and Tuple spaces have
    one.

    Raises:
        SpaceError: for an unsupported space, naming a wrapper that converts it.
    """
    match space:
        case gym.spaces.Box() | gym.spaces.MultiBinary():
            return _plain(tuple(space.shape or ()))
        case gym.spaces.Discrete():
            _reject_start(space, int(space.start), "observation")
            return (ONE_HOT, int(space.n))
        case gym.spaces.MultiDiscrete():
            _reject_start(space, int(np.max(np.abs(space.start))), "observation")
            if space.nvec.ndim == 1:
                _reject_one_number(space)
                return (ONE_HOT, *map(int, space.nvec))
        case gym.spaces.Dict():
            return {
                str(key): obs_shape_of(inner)
                for key, inner in space.spaces.items()
                if key != ACTION_MASK
            }
        case gym.spaces.Tuple():
            return {str(place): obs_shape_of(inner) for place, inner in enumerate(space.spaces)}
    raise SpaceError(
        f"no network here takes observations of {space}; wrap the env so that it gives a Box, "
        "Discrete, MultiBinary, one-dimensional MultiDiscrete, Dict or Tuple space "
        "(gymnasium.wrappers.TransformObservation)"
    )


def action_shape_of(space: gym.Space[Any]) -> int:
    """Return how many numbers the network outputs for an action.

    Returns:
        ``n`` of a Discrete space; the length of a one-dimensional Box.

    Raises:
        SpaceError: for an unsupported space, naming a wrapper that converts it.
    """
    action_kind_of(space)
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    shape = space.shape or ()
    return int(shape[0])


def action_kind_of(space: gym.Space[Any]) -> ActionKind:
    """Return whether an action of a space is the number of a choice or a vector.

    Raises:
        SpaceError: for a space that is neither Discrete nor a one-dimensional floating-point Box.
    """
    if isinstance(space, gym.spaces.Discrete):
        _reject_start(space, int(space.start), "action")
        return "discrete"
    if isinstance(space, gym.spaces.Box):
        if len(space.shape) == 1 and np.issubdtype(space.dtype, np.floating):
            return "continuous"
        raise SpaceError(
            f"a continuous action is a one-dimensional floating-point Box, got {space}; wrap the "
            "env in gymnasium.wrappers.TransformAction to take a flat float32 vector"
        )
    raise SpaceError(
        f"no network here gives actions of {space}; wrap the env in "
        "gymnasium.wrappers.TransformAction so that it takes a Discrete action (one number for "
        "each combination) or a one-dimensional Box"
    )


def check_spaces(
    model: nn.Module,
    act: Callable[[Any], torch.Tensor | None],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
) -> None:
    """Reject spaces that do not fit a model.

    A model with a method ``check_spaces`` checks its shapes itself; any other model is tried with
    one observation of zeros.

    Args:
        model: the policy's model.
        act: observations ``[1, …]`` in, actions ``[1, …]`` out; None if there are none to check.
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
        action = act(_zero_observation(observation_space))
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


def _reject_start(space: gym.Space[Any], start: int, what: str) -> None:
    if start == 0:
        return
    wrapper = "TransformObservation" if what == "observation" else "TransformAction"
    raise SpaceError(
        f"networks count from 0, but the {what} space is {space}; shift it by its start with "
        f"gymnasium.wrappers.{wrapper}"
    )


def _reject_one_number(space: gym.spaces.MultiDiscrete) -> None:
    # Its shape would be that of a Discrete space, whose observations have one dimension less.
    if len(space.nvec) > 1:
        return
    raise SpaceError(
        f"no network here takes observations of {space}, a vector of a single integer; make it a "
        f"Discrete({int(space.nvec[0])}) one with gymnasium.wrappers.TransformObservation and "
        "lambda obs: obs[0]"
    )


def _plain(shape: tuple[int, ...]) -> ObsShape:
    return int(shape[0]) if len(shape) == 1 else shape


def _is_size(size: object) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size > 0)


def _zero_observation(space: gym.Space[Any]) -> Any:
    """Return one observation of zeros, ``[1, …]``: a tensor, or a treetensor for nested spaces.

    An action mask allows every action.
    """
    obs = gym.vector.utils.create_empty_array(space, n=1)
    if isinstance(obs, Mapping) and ACTION_MASK in obs:
        obs = {**obs, ACTION_MASK: np.ones_like(obs[ACTION_MASK])}
    return from_numpy(obs)
