"""Observations and actions of several envs: batching rows, splitting and checking the arrays.

The processes that step envs import this module, but never torch. Everything else uses the functions
of ``dmiddleware.tree``, which take batches too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from dmiddleware.errors import EnvProtocolError, StructureError

__all__ = [
    "NestedArrays",
    "Collate",
    "Split",
    "ValueCheck",
    "Write",
    "make_check",
    "make_collate",
    "make_read",
    "make_split",
    "make_value_check",
    "make_write",
    "allocate",
    "copy_arrays",
    "axes_in_memory",
    "with_axes_in_memory",
    "describe_unusable",
    "has_items",
    "index_rows",
    "is_finite",
    "is_tensor",
    "map_arrays",
    "map_space",
    "own_copy",
    "replace_rows",
]

NestedArrays: TypeAlias = Any
"""An array whose first dimension counts envs, or a nested dict or tuple of such arrays.

Observations of a simulator that returns torch tensors are tensors, on its device.
"""

Collate: TypeAlias = Callable[[Sequence[Any]], NestedArrays]
Write: TypeAlias = Callable[[NestedArrays, int, Any], None]
Split: TypeAlias = Callable[[NestedArrays], list[Any]]
ValueCheck: TypeAlias = Callable[[NestedArrays], bool]

_IMMUTABLE = frozenset(
    (bool, int, float, str, type(None), np.bool_, np.float32, np.float64, np.int64)
)
_ARRAY_SPACES = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)


def make_collate(space: spaces.Space[Any]) -> Collate:
    """Return a function that batches observations of ``space`` into new arrays.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of supported spaces.

    Returns:
        A function from ``E`` observations to arrays ``[E, …]`` of the space's own dtype (Discrete:
        int64), nested like the space; it raises ValueError or TypeError for an observation of
        another shape.

    Raises:
        EnvProtocolError: for a space whose elements have no fixed shape.
    """
    if isinstance(space, spaces.Dict):
        parts = {str(key): (key, make_collate(sub)) for key, sub in space.spaces.items()}
        return lambda rows: {
            name: collate([row[key] for row in rows]) for name, (key, collate) in parts.items()
        }
    if isinstance(space, spaces.Tuple):
        items = tuple(make_collate(sub) for sub in space.spaces)
        return lambda rows: tuple(
            collate(column)
            for collate, column in zip(items, zip(*map(_items_of, rows), strict=True), strict=True)
        )
    return _collate_array(*_shape_and_dtype(space))


def has_items(nested: Any, n: int) -> bool:
    """Return whether this is a tuple of ``n`` items in treetensor form: keys "0", "1", …."""
    return isinstance(nested, Mapping) and set(nested) == set(map(str, range(n)))


def _items_of(row: Any) -> Sequence[Any]:
    """Return the items of a tuple, which a treetensor stores under "0", "1", …."""
    return [row[str(i)] for i in range(len(row))] if isinstance(row, Mapping) else row


def _collate_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Collate:
    def collate(rows: Sequence[Any]) -> npt.NDArray[Any]:
        # Twice as fast as np.array(rows, dtype=dtype), which converts row by row.
        out = np.array(rows)
        if out.dtype != dtype:
            out = _converted(out, dtype)
        if out.shape[1:] != shape:
            raise _wrong_shape(out.shape[1:], shape)
        return out

    return collate


def allocate(space: spaces.Space[Any], n_rows: int) -> NestedArrays:
    """Return uninitialized arrays ``[n_rows, …]`` for elements of ``space``."""
    return map_space(lambda shape, dtype: np.empty((n_rows, *shape), dtype), space)


def make_write(space: spaces.Space[Any]) -> Write:
    """Return a function ``(arrays, row, obs)`` that writes one observation into its row.

    Args:
        space: as in :func:`make_collate`; so are the arrays and the errors.
    """
    if isinstance(space, spaces.Dict):
        parts = [(str(key), key, make_write(sub)) for key, sub in space.spaces.items()]

        def write_dict(arrays: NestedArrays, row: int, obs: Any) -> None:
            if not isinstance(obs, Mapping) or len(obs) != len(parts):
                shown = sorted(map(str, obs)) if isinstance(obs, Mapping) else type(obs).__name__
                raise ValueError(
                    f"its keys are {sorted(map(str, space.spaces))}, but it is {shown}"
                )
            for name, key, write in parts:
                write(arrays[name], row, obs[key])

        return write_dict
    if isinstance(space, spaces.Tuple):
        items = [make_write(sub) for sub in space.spaces]

        def write_tuple(arrays: NestedArrays, row: int, obs: Any) -> None:
            for write, part, item in zip(items, arrays, obs, strict=True):
                write(part, row, item)

        return write_tuple
    return _write_array(*_shape_and_dtype(space))


def _write_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Write:
    def write(array: npt.NDArray[Any], row: int, obs: Any) -> None:
        value = obs if type(obs) is np.ndarray else np.asarray(obs)
        if value.shape != shape:
            raise _wrong_shape(value.shape, shape)
        array[row] = value if value.dtype == dtype else _converted(value, dtype)

    return write


def _converted(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    # Integers may become other integers or floats, but floats never become integers.
    if array.dtype.kind not in ("iub" if dtype.kind in "iub" else "iubf"):
        raise TypeError(f"its dtype is {array.dtype}, but the space has {dtype}")
    converted = array.astype(dtype)
    if dtype.kind in "iub" and not np.array_equal(converted, array):
        raise ValueError(f"it has the values {array.min()} to {array.max()}, too large for {dtype}")
    return converted


def _wrong_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    return ValueError(f"its shape is {found}, but the space has {expected}")


def map_space(
    function: Callable[[tuple[int, ...], np.dtype[Any]], Any], space: spaces.Space[Any]
) -> Any:
    """Apply ``function(shape, dtype)`` to every array of a space; the result is nested like it."""
    if isinstance(space, spaces.Dict):
        return {str(key): map_space(function, sub) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_space(function, sub) for sub in space.spaces)
    return function(*_shape_and_dtype(space))


def _shape_and_dtype(space: spaces.Space[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if isinstance(space, spaces.Discrete):
        return (), np.dtype(np.int64)
    if isinstance(space, _ARRAY_SPACES):
        return space.shape, np.dtype(space.dtype)
    raise EnvProtocolError(
        f"elements of the space {space} have no fixed shape and cannot be batched; wrap the env so "
        "that it uses Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
    )


def make_check(
    space: spaces.Space[Any], *, is_strict: bool = False
) -> Callable[[NestedArrays], NestedArrays]:
    """Return a function that converts a batch to the structure and dtypes of ``space``.

    Args:
        space: the action (or observation) space of a single env.
        is_strict: whether to refuse values that another dtype would change, such as floats where
            the space has integers, with TypeError or ValueError.

    Returns:
        A function from arrays ``[E, …]``, nested like the space, to such arrays with the dtypes of
        the space. It raises :class:`~dmiddleware.errors.StructureError` if the batch does not fit.

    Raises:
        EnvProtocolError: for a space whose elements have no fixed shape.
    """
    if isinstance(space, spaces.Dict):
        parts = {key: make_check(sub, is_strict=is_strict) for key, sub in space.spaces.items()}
        return lambda actions: {
            key: parts[key](actions[key]) for key in _checked_keys(actions, parts, space)
        }
    if isinstance(space, spaces.Tuple):
        items = tuple(make_check(sub, is_strict=is_strict) for sub in space.spaces)
        return lambda actions: tuple(
            check(part)
            for check, part in zip(items, _checked_tuple(actions, items, space), strict=True)
        )
    shape, dtype = _shape_and_dtype(space)
    dtype = np.dtype(space.dtype) if isinstance(space, spaces.Discrete) else dtype
    kinds = "iu" if isinstance(space, spaces.Discrete) else "iufb"
    rank = 1 + len(shape)

    def check(actions: Any) -> npt.NDArray[Any]:
        array = np.asarray(actions)
        if array.ndim != rank or array.shape[1:] != shape or array.dtype.kind not in kinds:
            raise _misfit(array, space, shape, kinds)
        if array.dtype == dtype:
            return array
        return _converted(array, dtype) if is_strict else array.astype(dtype)

    return check


def make_split(space: spaces.Space[Any]) -> Split:
    """Return a function that splits a batch of actions into one action per env.

    Args:
        space: as in :func:`make_check`; so are the errors.

    Returns:
        A function from arrays ``[E, …]`` that :func:`make_check` has converted to a list of ``E``
        actions in the form of ``space.sample()``: numpy integers for Discrete (which Gymnasium
        checks faster than Python's), arrays for the others.
    """
    if isinstance(space, spaces.Dict):
        parts = {key: make_split(sub) for key, sub in space.spaces.items()}
        return lambda actions: [
            dict(zip(parts, row, strict=True))
            for row in zip(*(parts[key](actions[key]) for key in parts), strict=True)
        ]
    if isinstance(space, spaces.Tuple):
        items = tuple(make_split(sub) for sub in space.spaces)
        return lambda actions: list(
            zip(*(split(part) for split, part in zip(items, actions, strict=True)), strict=True)
        )
    shape, _ = _shape_and_dtype(space)
    if isinstance(space, spaces.Discrete):
        return list
    if shape == ():
        # Iterating would yield numpy scalars, which such a space does not contain.
        return lambda actions: [np.array(action) for action in actions]
    # Copies, because an env may write to its action, which is still to be stored.
    return lambda actions: list(actions.copy())


def _checked_keys(actions: Any, parts: Mapping[Any, Any], space: spaces.Space[Any]) -> list[Any]:
    if not isinstance(actions, Mapping) or set(actions) != set(parts):
        shown = sorted(map(str, actions)) if isinstance(actions, Mapping) else type(actions)
        raise StructureError(f"a batch of {space} must be a dict with its keys, got {shown}")
    return list(parts)


def _checked_tuple(actions: Any, items: tuple[Any, ...], space: spaces.Space[Any]) -> Any:
    if has_items(actions, len(items)):
        return tuple(actions[str(index)] for index in range(len(items)))
    if not isinstance(actions, tuple | list) or len(actions) != len(items):
        raise StructureError(
            f"a batch of {space} must be a tuple of {len(items)}, got {actions!r:.120}"
        )
    return actions


def _misfit(
    array: npt.NDArray[Any], space: spaces.Space[Any], shape: tuple[int, ...], kinds: str
) -> StructureError:
    numbers = "integers" if kinds == "iu" else "numbers"
    return StructureError(
        f"an array of shape {array.shape} and dtype {array.dtype} does not fit the space {space}: "
        f"pass {numbers} of shape [E{''.join(f', {n}' for n in shape)}], one row per env"
    )


def make_read(space: spaces.Space[Any]) -> Callable[[NestedArrays, int], Any]:
    """Return a function ``(arrays, row)`` that copies one element of ``space`` out of its row."""
    if isinstance(space, spaces.Dict):
        parts = [(str(key), key, make_read(sub)) for key, sub in space.spaces.items()]
        return lambda arrays, row: {key: read(arrays[name], row) for name, key, read in parts}
    if isinstance(space, spaces.Tuple):
        items = [make_read(sub) for sub in space.spaces]
        return lambda arrays, row: tuple(
            read(part, row) for read, part in zip(items, arrays, strict=True)
        )
    if isinstance(space, spaces.Discrete):
        kind = np.dtype(space.dtype).type
        return lambda array, row: kind(array[row])
    return lambda array, row: np.array(array[row])


def map_arrays(function: Callable[..., Any], nested: NestedArrays, *others: NestedArrays) -> Any:
    """Apply ``function`` to every array and the corresponding arrays of the others."""
    if isinstance(nested, dict):
        return {
            key: map_arrays(function, item, *(part[key] for part in others))
            for key, item in nested.items()
        }
    if isinstance(nested, tuple):
        return tuple(map_arrays(function, *items) for items in zip(nested, *others, strict=True))
    return function(nested, *others)


def copy_arrays(nested: NestedArrays) -> NestedArrays:
    """Return copies of all arrays."""
    # The most common case skips the recursion: this runs at the end of every episode.
    return nested.copy() if type(nested) is np.ndarray else map_arrays(np.copy, nested)


def axes_in_memory(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the axes of an array in the order in which they lie in memory, the slowest first."""
    return np.argsort([-stride for stride in array.strides], kind="stable")


def with_axes_in_memory(array: npt.NDArray[Any], axes: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return a copy of an array whose axes lie in memory in the order of ``axes``."""
    return array.transpose(axes).copy().transpose(np.argsort(axes))


def own_copy(value: Any) -> Any:
    """Return a copy of nested dictionaries, lists, tuples, arrays and tensors, as of infos.

    Envs often fill what they returned again in the next step. Other objects are passed on.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if isinstance(value, Mapping):
        return {key: own_copy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        out = value.copy()
        if out.dtype.hasobject and not out.dtype.names:
            out[...] = np.frompyfunc(own_copy, 1, 1)(out)
        return out
    if kind is list or kind is tuple:
        return kind(map(own_copy, value))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(own_copy, value))
    if kind is set or kind is bytearray:
        return value.copy()
    return value.detach().clone() if is_tensor(value) else value


def kind_of(value: Any) -> str:
    """Return the type of a value for a message, with its shape if it has one."""
    name = type(value).__name__
    try:
        is_list = isinstance(value, list | tuple)
        shape = np.shape(value) if is_list else getattr(value, "shape", None)
        return name if shape is None else f"{name} of shape {tuple(shape)}"
    except (TypeError, ValueError):  # lists of different lengths, for example
        return name


def replace_rows(nested: NestedArrays, index: Any, rows: NestedArrays) -> NestedArrays:
    """Return a copy of ``nested`` in which the rows at ``index`` are ``rows``."""

    def replaced(array: Any, new: Any) -> Any:
        out = array.clone() if is_tensor(array) else array.copy()
        out[index] = new
        return out

    return map_arrays(replaced, nested, rows)


def is_tensor(array: Any) -> bool:
    """Return whether this is a torch tensor rather than an array, without importing torch."""
    return hasattr(array, "detach")


def index_rows(nested: NestedArrays, index: Any) -> Any:
    """Index the first dimension of every array.

    Args:
        nested: arrays ``[E, …]``.
        index: an integer, which gives one env's element as views, or an index array, a list of
            integers or a mask, which give copies.
    """
    return map_arrays(lambda array: array[index], nested)


def is_finite(array: Any) -> bool:
    """Return whether no value of an array or tensor is NaN or infinite."""
    if type(array) is not np.ndarray and is_tensor(array):
        return bool(array.isfinite().all())
    # Much faster for few values. The sum of squares may overflow; vdot does not warn about it.
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def make_value_check(space: spaces.Space[Any]) -> ValueCheck:
    """Return a function that says whether all values of a batch can be used.

    Floats must be finite. Discrete and MultiDiscrete elements must be in their space, because
    networks use them as indices. Other bounds are not checked, which would take time in every step.

    Args:
        space: of a single env.
    """
    checks: list[tuple[Any, ValueCheck]]
    match space:
        case spaces.Dict():
            checks = [(str(key), make_value_check(sub)) for key, sub in space.spaces.items()]
        case spaces.Tuple():
            checks = list(enumerate(map(make_value_check, space.spaces)))
        case spaces.Box() if space.dtype.kind == "f":
            return is_finite
        case _ if is_choice(space):
            low, high = _limits(space)
            return lambda array: _are_between(low, high, array)
        case _:
            return lambda array: True
    return lambda arrays: all(check(arrays[key]) for key, check in checks)


def _are_between(low: Any, high: Any, array: Any) -> bool:
    if is_tensor(array):  # which do not compare with arrays
        low, high = (array.new_tensor(bound) for bound in (low, high))
    return bool((array >= low).all() and (array <= high).all())


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
        descriptions = (
            describe_unusable(
                sub, obs[str(key) if isinstance(obs, dict) else key], f"{name}[{key!r}]"
            )
            for key, sub in parts
        )
        return next(filter(None, descriptions), "")
    if make_value_check(space)(obs):
        return ""
    array: npt.NDArray[Any] = np.asarray(obs.cpu() if is_tensor(obs) else obs)
    if is_choice(space):
        return f"{array.tolist()}, which is not in {space}{_at(name)}"
    index = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
    return f"{array[index]} at {list(index)}{_at(name)}"


def _at(name: str) -> str:
    return f" of its part {name}" if name else ""
