"""Values of observations and rewards that nothing can be learned from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.env.batching import NestedArrays, is_tensor

__all__ = ["ValueCheck", "describe_unusable", "is_finite", "make_value_check"]

ValueCheck: TypeAlias = Callable[[NestedArrays], bool]


def is_finite(array: Any) -> bool:
    """Return whether no value of an array or tensor is NaN or infinite."""
    if type(array) is not np.ndarray and is_tensor(array):
        return bool(array.isfinite().all())
    # Much faster for few values. The sum of squares may overflow; vdot does not warn about it.
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def make_value_check(space: spaces.Space[Any]) -> ValueCheck | None:
    """Return a function that says whether all values of a batch can be used; None: they all can.

    Floats must be finite. Discrete and MultiDiscrete elements must be in their space, because
    networks use them as indices. Other bounds are not checked, which would take time in every step.

    Args:
        space: of a single env.
    """
    checks: list[tuple[Any, ValueCheck]]
    match space:
        case spaces.Dict():
            named = {str(key): make_value_check(sub) for key, sub in space.spaces.items()}
            checks = [(name, check) for name, check in named.items() if check is not None]
        case spaces.Tuple():
            items = enumerate(map(make_value_check, space.spaces))
            checks = [(index, check) for index, check in items if check is not None]
        case spaces.Box():
            return is_finite if space.dtype.kind == "f" else None
        case _ if is_choice(space):
            low, high = _limits(space)
            return lambda array: bool((array >= low).all() and (array <= high).all())
        case _:
            return None
    return (lambda arrays: all(check(arrays[key]) for key, check in checks)) if checks else None


def is_choice(space: spaces.Space[Any]) -> bool:
    """Return whether the elements of a space are numbers of choices."""
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)


def _limits(space: Any) -> tuple[Any, Any]:
    n = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return space.start, space.start + n - 1


def describe_unusable(space: spaces.Space[Any], obs: Any, name: str = "") -> str:
    """Describe the first value of one observation that cannot be used; empty: there is none.

    Args:
        space: the observation's space.
        obs: one row of a batch.
        name: where it is in a nested observation.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner: Any = space.spaces
        parts = inner.items() if isinstance(space, spaces.Dict) else enumerate(inner)
        found = (
            describe_unusable(
                sub, obs[str(key) if isinstance(obs, dict) else key], f"{name}[{key!r}]"
            )
            for key, sub in parts
        )
        return next(filter(None, found), "")
    check = make_value_check(space)
    if check is None or check(obs):
        return ""
    array: npt.NDArray[Any] = np.asarray(obs.cpu() if is_tensor(obs) else obs)
    if is_choice(space):
        return f"{array.tolist()}, which is not in {space}{_at(name)}"
    index = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
    return f"{array[index]} at {list(index)}{_at(name)}"


def _at(name: str) -> str:
    return f" of its part {name}" if name else ""
