"""The state of an env, as plain data that can be saved and loaded without executing code.

An env that has ``state_dict()`` and ``load_state_dict(state)`` is saved through them. Of any other
env, and of the wrappers around it, all attributes are saved, if all of them are understood:
numbers, strings, arrays, containers, random generators, and Python objects made of such. That
covers Gymnasium's classic control and toy text, its wrappers, and most envs written in plain
Python. An env that holds something else (a simulator written in C, a file, a socket) cannot be
saved, rather than saved in part. Functions, classes, modules and pygame's drawing are taken to hold
no state.
"""

from __future__ import annotations

import json
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from dmiddleware.errors import CheckpointMismatch

__all__ = [
    "get_state",
    "set_state",
    "space_state",
    "set_space_state",
    "plain_infos",
    "infos_of_plain",
]

# Constructor arguments that Gymnasium keeps for `spec`; they do not change.
_CONSTANT_ATTRIBUTES = frozenset({"_saved_kwargs", "_cached_spec", "spec"})
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    EnvSpec,
    np.dtype,
    np.ufunc,
)
_PLAIN = (bool, int, float, str)
_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}


class _Ordinary:
    """An object of an ordinary Python class, to compare sizes with."""


class _NotPlainError(Exception):
    """Something was met that cannot be saved as plain data."""


def get_state(env: Any) -> dict[str, Any] | None:
    """Return the state of an env (or vector env) and its wrappers.

    Returns:
        A dictionary of plain data (strings, numbers, arrays, lists), one entry per layer, or None
        if the env holds something that cannot be saved.
    """
    try:
        return {"layers": _Encoder().layers(env)}
    except _NotPlainError:
        return None


def set_state(env: Any, state: Mapping[str, Any]) -> None:
    """Bring an env made by the same factory into a state that :func:`get_state` gave.

    Raises:
        CheckpointMismatch: if the state is that of another env.
    """
    _set_layers(env, state["layers"])


def _set_layers(env: Any, saved: list[Any]) -> None:
    layers = list(_layers(env))
    names, saved_names = [type(layer).__name__ for layer in layers], [one["class"] for one in saved]
    if names != saved_names:
        raise CheckpointMismatch(
            f"the saved env is {' > '.join(saved_names)}, this one is {' > '.join(names)}; make it "
            "as it was made when it was saved"
        )
    for layer, one in zip(layers, saved, strict=True):
        if "own" in one:
            layer.load_state_dict(one["own"])
        else:
            _set_attributes(layer, one["attributes"])


def space_state(space: spaces.Space[Any]) -> list[str]:
    """Return the states of the generators that a space samples with."""
    return [_generator_state(generator) for generator in _generators(space)]


def set_space_state(space: spaces.Space[Any], state: list[str]) -> None:
    """Bring a space's generators into the states that :func:`space_state` gave.

    Raises:
        CheckpointMismatch: if the state is that of another space.
    """
    generators = list(_generators(space))
    if len(generators) != len(state):
        raise CheckpointMismatch(f"the saved state of a space does not fit {space}")
    for generator, one in zip(generators, state, strict=True):
        _set_generator_state(generator, one)


def plain_infos(infos: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return infos as plain data; one that holds something else becomes an empty one."""
    found: list[Any] = []
    for info in infos:
        try:
            found.append(_Encoder().encode(dict(info)))
        except _NotPlainError:
            found.append(_Encoder().encode({}))
    return found


def infos_of_plain(plain: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the infos that :func:`plain_infos` was given."""
    return [_decode(one, None) for one in plain]


def _generator_state(generator: np.random.Generator) -> str:
    """Return the state of a numpy generator as JSON text (its integers exceed 64 bits)."""
    return json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())


def _set_generator_state(generator: np.random.Generator, state: str) -> None:
    """Bring a numpy generator into a state that :func:`_generator_state` gave."""
    generator.bit_generator.state = json.loads(state)


def _layers(env: Any) -> Iterator[Any]:
    while True:
        yield env
        if not _is_wrapper(env):
            return
        env = env.env


def _is_wrapper(env: Any) -> bool:
    return isinstance(env, gym.Wrapper | gym.vector.VectorWrapper)


def _saves_itself(layer: Any) -> bool:
    kind = type(layer)
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


class _Encoder:
    def __init__(self) -> None:
        self._objects: set[int] = set()
        self._mutables: set[int] = set()

    def layers(self, env: Any) -> list[Any]:
        found: list[Any] = []
        for layer in _layers(env):
            name = type(layer).__name__
            if _saves_itself(layer):
                found.append({"class": name, "own": layer.state_dict()})
            else:
                found.append({"class": name, "attributes": self.attributes(layer)})
        return found

    def attributes(self, owner: Any) -> list[list[Any]]:
        # A class with slots, or with a part written in C, is larger than its attributes show.
        if not hasattr(owner, "__dict__") or type(owner).__basicsize__ > _Ordinary.__basicsize__:
            raise _NotPlainError
        left_out = _CONSTANT_ATTRIBUTES | ({"env"} if _is_wrapper(owner) else set())
        return [
            [name, self.encode(value)]
            for name, value in vars(owner).items()
            if name not in left_out and not _is_code(value)
        ]

    def encode(self, value: Any) -> Any:
        """Return plain data for a value; what is not plain itself becomes ``{"kind": …}``."""
        if value is None or type(value) in _PLAIN:
            if type(value) is int and not -(2**63) <= value < 2**63:
                return {"kind": "int", "value": str(value)}
            return value
        if type(value) is bytes:
            return {"kind": "bytes", "value": value.hex()}
        if isinstance(value, np.generic):
            return {"kind": "scalar", "dtype": value.dtype.str, "value": self.encode(value.item())}
        if type(value) is np.ndarray:
            return self._array(value)
        if type(value) in (list, tuple, deque, set, frozenset, dict):
            return self._container(value)
        return self._object(value)

    def _array(self, value: Any) -> Any:
        self._note_mutable(value)
        if value.dtype.kind in "biuf":
            return {"kind": "array", "value": value.copy()}
        if value.dtype.kind in "SU":
            return {"kind": "strings", "dtype": value.dtype.str, "value": value.tolist()}
        raise _NotPlainError

    def _container(self, value: Any) -> Any:
        if not isinstance(value, tuple | frozenset):
            self._note_mutable(value)
        kind = type(value).__name__
        if isinstance(value, dict):
            pairs = [[self.encode(key), self.encode(item)] for key, item in value.items()]
            return {"kind": kind, "value": pairs}
        items = [None if _is_code(item) else self.encode(item) for item in value]
        encoded: dict[str, Any] = {"kind": kind, "value": items}
        if isinstance(value, deque):
            encoded["maxlen"] = value.maxlen
        return encoded

    def _object(self, value: Any) -> Any:
        if id(value) in self._objects:
            return {"kind": "seen"}
        self._objects.add(id(value))
        if isinstance(value, np.random.Generator):
            if type(value.bit_generator).__name__ not in _GENERATORS:
                raise _NotPlainError
            return {"kind": "generator", "value": _generator_state(value)}
        if type(value) is random.Random:
            return {"kind": "random", "value": json.dumps(value.getstate())}
        if isinstance(value, spaces.Space):
            return {"kind": "space", "value": space_state(value)}
        if isinstance(value, gym.Env):
            return {"kind": "env", "value": self.layers(value)}
        return {"kind": "object", "value": self.attributes(value)}

    def _note_mutable(self, value: Any) -> None:
        # What two names share could not be shared again by loading.
        if id(value) in self._mutables:
            raise _NotPlainError
        self._mutables.add(id(value))


def _is_code(value: Any) -> bool:
    return isinstance(value, _CODE) or type(value).__module__.partition(".")[0] == "pygame"


def _generators(space: spaces.Space[Any]) -> Iterator[np.random.Generator]:
    yield space.np_random
    parts = getattr(space, "spaces", ())
    for part in parts.values() if isinstance(parts, Mapping) else parts:
        yield from _generators(part)


def _set_attributes(owner: Any, encoded: Any) -> None:
    for name, value in encoded:
        setattr(owner, name, _decode(value, vars(owner).get(name)))


def _decode(encoded: Any, existing: Any) -> Any:
    """Return the value; objects and generators are changed in place, as others may hold them."""
    if not isinstance(encoded, Mapping):
        return encoded
    return _DECODERS[encoded["kind"]](encoded, existing)


def _seen(_: Mapping[str, Any], existing: Any) -> Any:
    return existing


def _array(encoded: Mapping[str, Any], _: Any) -> Any:
    return np.array(encoded["value"], dtype=encoded.get("dtype"))


def _scalar(encoded: Mapping[str, Any], _: Any) -> Any:
    return np.dtype(encoded["dtype"]).type(_decode(encoded["value"], None))


def _dict(encoded: Mapping[str, Any], existing: Any) -> Any:
    known = existing if isinstance(existing, dict) else {}
    pairs = [(_decode(key, None), item) for key, item in encoded["value"]]
    return {key: _decode(item, known.get(key)) for key, item in pairs}


def _items(encoded: Mapping[str, Any], existing: Any) -> list[Any]:
    items = encoded["value"]
    known = list(existing) if isinstance(existing, list | tuple | deque) else []
    known = known if len(known) == len(items) else [None] * len(items)
    return [
        old if item is None and _is_code(old) else _decode(item, old)
        for item, old in zip(items, known, strict=True)
    ]


def _generator(encoded: Mapping[str, Any], existing: Any) -> Any:
    state = encoded["value"]
    if not isinstance(existing, np.random.Generator):
        existing = np.random.Generator(_GENERATORS[json.loads(state)["bit_generator"]]())
    _set_generator_state(existing, state)
    return existing


def _random(encoded: Mapping[str, Any], existing: Any) -> Any:
    if not isinstance(existing, random.Random):
        existing = random.Random()
    version, internal, gauss_next = json.loads(encoded["value"])
    existing.setstate((version, tuple(internal), gauss_next))
    return existing


def _space(encoded: Mapping[str, Any], existing: Any) -> Any:
    if not isinstance(existing, spaces.Space):
        raise CheckpointMismatch(f"the saved env has a space where this one has {existing!r}")
    set_space_state(existing, encoded["value"])
    return existing


def _object(encoded: Mapping[str, Any], existing: Any) -> Any:
    if not hasattr(existing, "__dict__"):
        raise CheckpointMismatch(f"the saved env has an object where this one has {existing!r}")
    _set_attributes(existing, encoded["value"])
    return existing


def _env(encoded: Mapping[str, Any], existing: Any) -> Any:
    _set_layers(existing, encoded["value"])
    return existing


_DECODERS: dict[str, Callable[[Mapping[str, Any], Any], Any]] = {
    "seen": _seen,
    "int": lambda encoded, _: int(encoded["value"]),
    "bytes": lambda encoded, _: bytes.fromhex(encoded["value"]),
    "scalar": _scalar,
    "array": _array,
    "strings": _array,
    "dict": _dict,
    "list": _items,
    "tuple": lambda encoded, existing: tuple(_items(encoded, existing)),
    "set": lambda encoded, existing: set(_items(encoded, existing)),
    "frozenset": lambda encoded, existing: frozenset(_items(encoded, existing)),
    "deque": lambda encoded, existing: deque(_items(encoded, existing), encoded["maxlen"]),
    "generator": _generator,
    "random": _random,
    "space": _space,
    "object": _object,
    "env": _env,
}
