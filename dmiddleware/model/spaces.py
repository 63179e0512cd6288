"""What a network needs to know about Gymnasium's spaces: shapes, as plain values.

An observation shape is one of

- an integer ``n``: a vector of ``n`` numbers;
- a tuple of integers: an array. Three integers or more are an image, channels first,
  ``(C, H, W)``; a stack of images ``(K, C, H, W)`` is one image of ``K * C`` channels;
- ``("unscaled", n, …)``: an array whose uint8 numbers are not those of pixels;
- ``("one_hot", n, …)``: an integer below ``n`` (or one for each ``n``), which the network sees as a
  one-hot vector;
- a mapping of names to observation shapes: a Dict space, or a Tuple space with the names ``"0"``,
  ``"1"``, … A Dict space's key ``action_mask`` is left out, since networks do not encode it (see
  :mod:`dmiddleware.model.action_mask`).

An action is described by its kind and its shape:

- ``"discrete"``: the number of choices;
- ``"multi_discrete"``: the numbers of options of several choices;
- ``"multi_binary"``: the number of bits;
- ``"continuous"``: the number of components;
- two mappings with the same names, one to kinds and one to shapes: a Dict or Tuple space.

All of these can be written in YAML, where tuples become lists.

Networks see all numbers as they are, except for pixels, which are scaled to [0, 1]. Pixels are
uint8 numbers of arrays whose last two sizes, height and width, are 28 or more, unless the space has
other bounds than 0 and 255. So flags, counts, boards and grids, whose numbers mean something by
themselves, are not scaled, whatever their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dmiddleware.env.team import ACTION_MASK, AGENT_MASK
from dmiddleware.errors import DMiddlewareError, SpaceError
from dmiddleware.model.action_mask import sorted_names
from dmiddleware.tree import Nested, Value, from_numpy, leaves, leaves_by_path

__all__ = [
    "ObsShape",
    "ActionKind",
    "ActionPart",
    "ActionShape",
    "action_features",
    "action_parts",
    "as_obs_shape",
    "shape_leaves",
    "array_shape",
    "is_image",
    "is_one_hot",
    "joined_shape",
    "is_pixels",
    "fits_shape",
    "obs_shape_of",
    "action_shape_of",
    "action_kind_of",
    "HasSpaces",
    "check_spaces",
    "spaces_of",
    "try_model",
]

ObsShape: TypeAlias = Any
"""``int | tuple | Mapping[str, ObsShape]``, as the module's docstring says."""

SimpleKind: TypeAlias = Literal["discrete", "multi_discrete", "multi_binary", "continuous"]

ActionKind: TypeAlias = SimpleKind | Mapping[str, Any]
"""``"discrete"``, ``"multi_discrete"``, ``"multi_binary"``, ``"continuous"``, or a mapping."""

ActionShape: TypeAlias = Any
"""``int | tuple[int, ...] | Mapping[str, ActionShape]``, as the module's docstring says."""

_SIMPLE_KINDS: tuple[SimpleKind, ...] = get_args(SimpleKind)
ONE_HOT = "one_hot"
UNSCALED = "unscaled"
_LEAST_PIXELS = 28
"""The least height and width of images: smaller arrays are boards and grids of codes."""


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


def spaces_of(
    env: HasSpaces, *, several_agents: bool = False
) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the observation space and the action space of one environment.

    Args:
        env: the environment.
        several_agents: whether those of a team of agents are meant, where it has both.

    Raises:
        SpaceError: if ``env`` has no spaces.
    """
    if several_agents:
        env = getattr(env, "joint", env)
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
    """Normalize an observation shape: tuples for leaves, sorted dictionaries.

    Raises:
        SpaceError: if it is not an observation shape.
    """
    if isinstance(shape, Mapping):
        if not shape:
            raise SpaceError("an observation shape needs at least one entry, got an empty mapping")
        return {str(key): as_obs_shape(shape[key]) for key in sorted(shape, key=str)}
    items = (shape,) if isinstance(shape, int | np.integer) else shape
    if isinstance(items, Sequence) and not isinstance(items, str):
        marker = items[:1] if len(items) > 1 and items[0] in (ONE_HOT, UNSCALED) else ()
        sizes = items[len(marker) :]
        if all(_is_size(size) for size in sizes):
            plain = tuple(map(int, sizes))
            if tuple(marker) == (ONE_HOT,) or (marker and is_pixels(plain)):
                return (*marker, *plain)
            return plain
    raise SpaceError(
        f"an observation shape is a positive integer, a tuple of them, ('one_hot', n), "
        f"('unscaled', n, …) or a mapping of names to such shapes, got {shape!r}"
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


def joined_shape(first: ObsShape, second: ObsShape) -> ObsShape:
    """Return the shape of observations that have the parts of two shapes; shared ones once."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return first
    both = {**first, **second}
    shared = first.keys() & second.keys()
    return {
        key: joined_shape(first[key], second[key]) if key in shared else both[key] for key in both
    }


def is_one_hot(shape: tuple[Any, ...]) -> bool:
    """Return whether a leaf shape is that of one-hot encoded integers."""
    return len(shape) > 1 and shape[0] == ONE_HOT


def array_shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the sizes of a leaf shape that is an array."""
    return shape[1:] if shape[:1] == (UNSCALED,) else shape


def is_image(shape: tuple[Any, ...]) -> bool:
    """Return whether a leaf shape is of images: three sizes or more."""
    return len(array_shape(shape)) >= 3 and not is_one_hot(shape)


def is_pixels(shape: tuple[Any, ...]) -> bool:
    """Return whether uint8 numbers of a leaf shape are those of pixels.

    These are at least 28 by 28, as the module's docstring says.
    """
    if len(shape) < 2 or not all(isinstance(size, int) for size in shape):
        return False
    return bool(min(shape[-2:]) >= _LEAST_PIXELS)


def fits_shape(own: ObsShape, found: ObsShape) -> bool:
    """Return whether a network for observations of one shape takes those of another.

    It does if they are equal, or if only the network says that the numbers are not pixels.

    Args:
        own: that of the network, in the form of :func:`as_obs_shape`.
        found: that of an environment, in the same form.
    """
    if isinstance(own, dict) and isinstance(found, dict):
        return own.keys() == found.keys() and all(fits_shape(own[key], found[key]) for key in own)
    return bool(own == found or own == (UNSCALED, *found))


def obs_shape_of(space: gym.Space[Any]) -> ObsShape:
    """Return the observation shape of a space.

    Box, Discrete, MultiDiscrete (of two integers or more), MultiBinary, Dict and Tuple spaces have
    one. That of a uint8 Box with other bounds than 0 and 255 says that its numbers are not pixels.

    Raises:
        SpaceError: for an unsupported space, naming a wrapper that converts it.
    """
    match space:
        case gym.spaces.Box() | gym.spaces.MultiBinary():
            shape = tuple(space.shape or ())
            if 0 in shape:
                raise SpaceError(
                    f"observations of {space} have no numbers that a network could see; leave them "
                    "out with gymnasium.wrappers.TransformObservation"
                )
            return (UNSCALED, *shape) if _is_shaped_like_pixels(space) else _plain(shape)
        case gym.spaces.Discrete():
            _reject_start(space, int(space.start))
            return (ONE_HOT, int(space.n))
        case gym.spaces.MultiDiscrete():
            _reject_start(space, int(np.max(np.abs(space.start))))
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


class ActionPart(NamedTuple):
    """One leaf of an action space, as a network sees it.

    Attributes:
        path: names of the Dict and Tuple spaces around it; empty if there are none.
        kind: as in :data:`ActionKind`.
        sizes: ``(n,)``, or the number of options of each choice.
    """

    path: tuple[str, ...]
    kind: SimpleKind
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The path joined by dots; empty for an action that is not a Dict or Tuple."""
        return ".".join(self.path)

    @property
    def n_logits(self) -> int:
        """How many logits a network has for this part."""
        return 0 if self.kind == "continuous" else sum(self.sizes)

    @property
    def n_means(self) -> int:
        """How many means (and standard deviations) a network has for this part."""
        return self.sizes[0] if self.kind == "continuous" else 0

    def features(self, raw: torch.Tensor) -> torch.Tensor:
        """Return raw actions as numbers ``[…, n_logits + n_means]`` float32; choices one-hot."""
        if self.kind == "discrete":
            raw = F.one_hot(raw, self.sizes[0])
        elif self.kind == "multi_discrete":
            choices = enumerate(self.sizes)
            raw = torch.cat([F.one_hot(raw[..., i], size) for i, size in choices], -1)
        return raw.float()


def action_parts(kind: ActionKind, shape: ActionShape) -> tuple[ActionPart, ...]:
    """Return the leaves of an action's kind and shape, in the order of a network's outputs.

    Names are sorted, those of a Tuple space by number.

    Raises:
        SpaceError: for an unknown kind, or a shape that does not fit it.

    Example:
        >>> action_parts({"aim": "continuous", "move": "discrete"}, {"aim": 2, "move": 3})[1]
        ActionPart(path=('move',), kind='discrete', sizes=(3,))
    """
    if isinstance(kind, Mapping):
        return tuple(_mapped_parts(kind, shape))
    if kind not in _SIMPLE_KINDS:
        raise SpaceError(
            f"action_space must be one of {', '.join(map(repr, _SIMPLE_KINDS))}, or a mapping of "
            f"names to these, got {kind!r}"
        )
    several = kind == "multi_discrete"
    sizes = tuple(shape) if several and isinstance(shape, Sequence) else (shape,)
    if not sizes or not all(_is_size(size) for size in sizes):
        expected = "a list of positive integers" if several else "a positive integer"
        raise SpaceError(f"action_shape must be {expected} for {kind} actions, got {shape!r}")
    return (ActionPart((), kind, tuple(map(int, sizes))),)


def action_features(parts: Iterable[ActionPart], raw: Nested) -> torch.Tensor:
    """Return raw actions as the input of a network, ``[…, A]`` float32; choices are one-hot.

    Args:
        parts: the leaves of the action.
        raw: ``[…]``, a batch of the leaves by name for a Dict or Tuple (see
            :class:`~dmiddleware.policy.ActionCodec`).
    """
    by_path = leaves_by_path(raw)
    return torch.cat([part.features(by_path[part.name]) for part in parts], -1)


def _mapped_parts(kind: Mapping[str, Any], shape: ActionShape) -> Iterator[ActionPart]:
    if not isinstance(shape, Mapping) or not kind or set(kind) != set(shape):
        raise SpaceError(
            "action_space and action_shape must be mappings with the same names, got "
            f"{kind!r} and {shape!r}"
        )
    for name in sorted_names(kind):
        for part in action_parts(kind[name], shape[name]):
            yield part._replace(path=(str(name), *part.path))


def action_shape_of(space: gym.Space[Any]) -> ActionShape:
    """Return the shape of a space's actions, as :func:`action_parts` takes it.

    Raises:
        SpaceError: for an unsupported space, naming a wrapper that converts it.
    """
    return _describe_action(space)[1]


def action_kind_of(space: gym.Space[Any]) -> ActionKind:
    """Return the kind of a space's actions, as :func:`action_parts` takes it.

    Discrete, MultiDiscrete, MultiBinary, floating-point Box, Dict and Tuple spaces have one.

    Raises:
        SpaceError: for an unsupported space, naming a wrapper that converts it.
    """
    return _describe_action(space)[0]


def _describe_action(space: gym.Space[Any]) -> tuple[ActionKind, ActionShape]:
    match space:
        case gym.spaces.Discrete():
            return "discrete", int(space.n)
        case gym.spaces.MultiDiscrete():
            return "multi_discrete", tuple(map(int, space.nvec.flatten()))
        case gym.spaces.MultiBinary():
            return "multi_binary", math.prod(space.shape)
        case gym.spaces.Box() if np.issubdtype(space.dtype, np.floating) and 0 not in space.shape:
            return "continuous", math.prod(space.shape)
        case gym.spaces.Dict() | gym.spaces.Tuple():
            parts = {name: _describe_action(inner) for name, inner in inner_spaces(space)}
            return (
                {name: kind for name, (kind, _) in parts.items()},
                {name: shape for name, (_, shape) in parts.items()},
            )
    raise SpaceError(
        f"no network here gives actions of {space}; wrap the env in "
        "gymnasium.wrappers.TransformAction so that it takes a Discrete, MultiDiscrete, "
        "MultiBinary or floating-point Box action, or a Dict or Tuple of them"
    )


def inner_spaces(space: gym.Space[Any]) -> Iterator[tuple[str, gym.Space[Any]]]:
    """Yield names and spaces of a Dict space, or of a Tuple space with the names "0", "1", ….

    Raises:
        SpaceError: if a name of a Dict space is not a text without dots, or is empty.
    """
    if isinstance(space, gym.spaces.Tuple):
        yield from ((str(place), inner) for place, inner in enumerate(space.spaces))
        return
    assert isinstance(space, gym.spaces.Dict)
    for name, inner in space.spaces.items():
        if not isinstance(name, str) or not name or "." in name:
            empty = " and not empty" if name == "" else ""
            raise SpaceError(
                f"names in a Dict action space are texts without dots{empty}, got {name!r}; rename "
                "it with gymnasium.wrappers.TransformAction"
            )
        yield name, inner


def check_spaces(
    model: nn.Module,
    act: Callable[[Any], Value | None],
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
    try_model(model, act, observation_space, action_space)


def try_model(
    model: nn.Module,
    act: Callable[[Any], Value | None],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
) -> None:
    """Let a model act on one observation of zeros, and reject what it does not fit.

    Args:
        model: the policy's model, for the message.
        act: observations ``[1, …]`` in, actions ``[1, …]`` out; None if there are none to check.
        observation_space: that of one environment.
        action_space: that of one environment.

    Raises:
        SpaceError: naming what the environment has and what the model did with it.
        PolicyOutputError: from ``act``, if the model's outputs are not those of the action.
    """
    try:
        action = act(_zero_observation(observation_space))
    except DMiddlewareError:
        raise  # it names what is wrong
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        raise SpaceError(
            f"the model {type(model).__name__} cannot take observations of {observation_space}: "
            f"{error}"
        ) from error
    if action is None:
        return
    produced = {path: tuple(leaf.shape[1:]) for path, leaf in leaves(action)}
    sample = gym.vector.utils.create_empty_array(action_space, n=1)
    accepted = {path: tuple(leaf.shape[1:]) for path, leaf in leaves(from_numpy(sample))}
    if produced != accepted:
        raise SpaceError(
            f"for one environment the model {type(model).__name__} gives an action of shape "
            f"{produced.get('', produced)}, but the environment takes {action_space}"
        )


def _reject_start(space: gym.Space[Any], start: int) -> None:
    if start != 0:
        raise SpaceError(
            f"networks count from 0, but the observation space is {space}; shift it by its start "
            "with gymnasium.wrappers.TransformObservation"
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


def _is_shaped_like_pixels(space: gym.Space[Any]) -> bool:
    """Return whether the bounds of a space say that its numbers are not pixels, but not the shape.

    Other dtypes than uint8 are never scaled.
    """
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.uint8:
        return False
    has_bounds_of_pixels = bool((space.low == 0).all() and (space.high == 255).all())
    return is_pixels(tuple(space.shape)) and not has_bounds_of_pixels


def _plain(shape: tuple[int, ...]) -> ObsShape:
    return int(shape[0]) if len(shape) == 1 else shape


def _is_size(size: object) -> bool:
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and bool(size > 0)


def _zero_observation(space: gym.Space[Any]) -> Any:
    """Return one observation of zeros, ``[1, …]``: a tensor, or a treetensor for nested spaces.

    An action mask allows every action, and all agents take part.
    """
    obs = gym.vector.utils.create_empty_array(space, n=1)
    if isinstance(obs, Mapping):
        masks = {ACTION_MASK, AGENT_MASK}
        obs = {key: np.ones_like(part) if key in masks else part for key, part in obs.items()}
    return from_numpy(obs)
