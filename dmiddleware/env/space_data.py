"""Spaces as plain data, as checkpoints and YAML can hold them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from dmiddleware.errors import SpaceError

__all__ = ["space_data", "space_from"]

_MOST_NUMBERS: Final = 1 << 24
"""The most numbers in one observation or action."""


def space_data(space: gym.Space[Any]) -> dict[str, Any]:
    """Return a space as nested dictionaries and lists of numbers and texts.

    Args:
        space: a Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple space.

    Raises:
        SpaceError: for another space.
    """
    match space:
        case gym.spaces.Box():
            return {
                "type": "Box",
                "low": _short(space.low),
                "high": _short(space.high),
                "shape": list(space.shape),
                "dtype": space.dtype.name,
            }
        case gym.spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
        case gym.spaces.MultiDiscrete():
            return {
                "type": "MultiDiscrete",
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
                "dtype": space.dtype.name,
            }
        case gym.spaces.MultiBinary():
            n = space.n if isinstance(space.n, int) else list(map(int, space.n))
            return {"type": "MultiBinary", "n": n}
        case gym.spaces.Dict():
            inner = {str(name): space_data(part) for name, part in space.spaces.items()}
            return {"type": "Dict", "spaces": inner}
        case gym.spaces.Tuple():
            return {"type": "Tuple", "spaces": [space_data(part) for part in space.spaces]}
    raise SpaceError(f"the space {space} cannot be written as plain data; wrap the env")


def space_from(data: object) -> gym.Space[Any]:
    """Return the space that :func:`space_data` described.

    Raises:
        SpaceError: if the data describe no space.
    """
    try:
        assert isinstance(data, Mapping), data
        return _READERS[data["type"]](data)
    except SpaceError:
        raise
    except (
        AssertionError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise SpaceError(f"these data do not describe a space: {data!r:.200} ({error})") from error


def _short(bounds: npt.NDArray[Any]) -> Any:
    """Return the bounds of a Box, as one number if they are equal."""
    is_one = bounds.size > 0 and bool((bounds == bounds.flat[0]).all())
    return bounds.flat[0].item() if is_one else bounds.tolist()


def _shape(sizes: Sequence[Any]) -> tuple[int, ...]:
    shape = tuple(map(int, sizes))
    if min(shape, default=0) < 0 or math.prod(shape) > _MOST_NUMBERS:
        raise SpaceError(f"a space has at most {_MOST_NUMBERS:,} numbers, got the shape {shape}")
    return shape


def _box(data: Mapping[str, Any]) -> gym.Space[Any]:
    shape, dtype = _shape(data["shape"]), np.dtype(str(data["dtype"]))
    low, high = (
        np.broadcast_to(np.asarray(data[name]), shape).astype(dtype) for name in ("low", "high")
    )
    return gym.spaces.Box(low, high, shape, dtype.type)


def _discrete(data: Mapping[str, Any]) -> gym.Space[Any]:
    return gym.spaces.Discrete(int(data["n"]), start=int(data["start"]))


def _multi_discrete(data: Mapping[str, Any]) -> gym.Space[Any]:
    dtype = np.dtype(str(data["dtype"])).type
    nvec, start = (np.asarray(data[name], dtype) for name in ("nvec", "start"))
    return gym.spaces.MultiDiscrete(nvec, dtype, start=start)


def _multi_binary(data: Mapping[str, Any]) -> gym.Space[Any]:
    n = data["n"]
    sizes = _shape([n] if isinstance(n, int) else n)
    return gym.spaces.MultiBinary(sizes[0] if isinstance(n, int) else sizes)


def _dict(data: Mapping[str, Any]) -> gym.Space[Any]:
    spaces: Mapping[str, Any] = data["spaces"]
    # Pairs keep their order, which a dictionary would lose to that of the names.
    return gym.spaces.Dict([(str(name), space_from(part)) for name, part in spaces.items()])


def _tuple(data: Mapping[str, Any]) -> gym.Space[Any]:
    spaces: Sequence[Any] = data["spaces"]
    return gym.spaces.Tuple([space_from(part) for part in spaces])


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], gym.Space[Any]]]] = {
    "Box": _box,
    "Discrete": _discrete,
    "MultiDiscrete": _multi_discrete,
    "MultiBinary": _multi_binary,
    "Dict": _dict,
    "Tuple": _tuple,
}
