"""The state of an env, as plain data.

An env with ``state_dict()`` and ``load_state_dict(state)`` is saved through them. For any other
env, and for the wrappers around it, all attributes are saved, provided that all of them are of
known kinds: numbers, strings, arrays, tensors, containers, enums, random generators, and Python
objects made of these. That covers Gymnasium's classic control and toy text, its wrappers, and most
envs written in plain Python or in torch. An env that holds anything else (a simulator written in C,
a file, a socket) cannot be saved at all; nothing is saved in part. Functions, classes, modules and
pygame's drawing objects are assumed to hold no state.

Python objects are restored by changing the objects that the other env has in the same attributes
and containers; no objects are created. A state with more objects than the env has (for example in a
list that grows during an episode) cannot be restored. The same holds for functions and classes in
containers, which the other env must have in the same places.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from dmiddleware.env.batching import is_tensor
from dmiddleware.errors import CheckpointMismatch

__all__ = [
    "get_state",
    "set_state",
    "get_space_state",
    "set_space_state",
    "encode_infos",
    "decode_infos",
    "Encoder",
    "Decoder",
    "MissingObjectError",
    "NotSavableError",
]

# Constructor arguments that Gymnasium keeps for `spec`; they never change.
_CONSTANT_ATTRIBUTES = frozenset({"_saved_kwargs", "_cached_spec", "spec"})
_CODE = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    type,
    EnvSpec,
    np.dtype,
    np.ufunc,
)
_TORCH_CONSTANTS = ("device", "dtype", "Size")
_PLAIN = (bool, int, float, str)
_CONTAINERS: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_BIT_GENERATORS: dict[str, Callable[[], np.random.BitGenerator]] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}


def get_state(env: Any) -> dict[str, Any] | None:
    """Return the state of an env (or vector env) and its wrappers.

    Returns:
        Plain data (dictionaries, lists, strings, numbers, arrays), or None if the env cannot be
        saved.
    """
    try:
        return {"layers": Encoder().layers(env)}
    except NotSavableError:
        return None


def set_state(env: Any, state: Mapping[str, Any]) -> None:
    """Restore a state that :func:`get_state` returned, in an env made by the same factory.

    Raises:
        MissingObjectError: if the env lacks an object or a function that the state has; the caller
            must reset it.
        CheckpointMismatch: if the state belongs to another env.
    """
    Decoder().set_layers(env, state["layers"])


def encode_infos(infos: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return infos as plain data, without the keys whose values cannot be saved.

    Tensors become arrays.
    """
    return [
        Encoder().encode(_savable_part({key: _as_array(info[key]) for key in info}))
        for info in infos
    ]


def _as_array(value: Any) -> Any:
    if not is_tensor(value):
        return value
    try:
        return value.detach().cpu().numpy()
    except TypeError:  # NumPy lacks bfloat16
        return value


def decode_infos(plain: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the infos that were passed to :func:`encode_infos`."""
    return [Decoder().decode(encoded) for encoded in plain]


def _savable_part(info: dict[str, Any]) -> dict[str, Any]:
    if _can_save(info):
        return info
    part: dict[str, Any] = {}
    for key, value in info.items():
        # Together with the keys before it, because two values may share their memory.
        if _can_save({**part, key: value}):
            part[key] = value
    return part


def _can_save(info: dict[str, Any]) -> bool:
    try:
        Decoder().decode(Encoder().encode(info))  # infos have no existing objects to restore into
    except (NotSavableError, CheckpointMismatch):
        return False
    return True


class _Ordinary:
    """An ordinary Python class, whose size is compared with that of others."""


class NotSavableError(Exception):
    """A value cannot be saved as plain data."""


class MissingObjectError(CheckpointMismatch):
    """The state has an object or a function where the env has none."""


class Encoder:
    """Turns a graph of Python objects into plain data: numbers, strings, arrays, lists, dicts.

    Other values become ``{"kind": …}``. An object that can be changed in place gets a number
    (``"ref"``) at its first occurrence and is referred to by it afterwards, so that objects shared
    between two names are shared again after loading.
    """

    def __init__(self) -> None:
        self._refs: dict[int, int] = {}
        self._unfinished: set[int] = set()
        self._memories: dict[int, int] = {}

    def layers(self, env: Any) -> list[Any]:
        """Return the states of an env (or vector env) and the wrappers around it.

        Raises:
            NotSavableError: if one of them holds a value of an unknown kind.
        """
        states: list[Any] = []
        for layer in _layers(env):
            name = type(layer).__name__
            if _saves_itself(layer):
                states.append({"class": name, "own": layer.state_dict()})
            else:
                states.append({"class": name, "attributes": self._attributes(layer)})
        return states

    def encode(self, value: Any) -> Any:
        """Return plain data for one value.

        Raises:
            NotSavableError: if it is or contains a value of an unknown kind.
        """
        if value is None or type(value) in _PLAIN:
            if type(value) is int and not -(2**63) <= value < 2**63:
                return {"kind": "int", "value": str(value)}
            return value
        if type(value) is bytes:
            return {"kind": "bytes", "value": value.hex()}
        if isinstance(value, enum.Enum):
            return _enum_member(value)
        if isinstance(value, np.generic):
            return {"kind": "scalar", "dtype": value.dtype.str, "value": self.encode(value.item())}
        if type(value) in (tuple, frozenset):
            return self._container(value)
        return self._referable(value)

    def _referable(self, value: Any) -> Any:
        if id(value) in self._unfinished and not hasattr(value, "__dict__"):
            raise NotSavableError  # a container that contains itself
        if id(value) in self._refs:
            return {"kind": "same", "ref": self._refs[id(value)]}
        ref = self._refs[id(value)] = len(self._refs)
        self._unfinished.add(id(value))
        if type(value) is np.ndarray:
            encoded = self._array(value)
        elif _is_of_torch(value, "Tensor"):
            encoded = self._tensor(value)
        elif type(value) in (list, set, deque, dict):
            encoded = self._container(value)
        else:
            encoded = self._object(value)
        self._unfinished.remove(id(value))
        return {**encoded, "ref": ref}

    def _array(self, value: npt.NDArray[Any]) -> dict[str, Any]:
        self._claim(_memory_of(value), value)
        if value.dtype.kind in "biuf":
            return {"kind": "array", "value": value.copy()}
        if value.dtype.kind in "SU":
            text = value.astype(np.str_).tolist()
            return {"kind": "strings", "dtype": value.dtype.str, "value": text}
        raise NotSavableError

    def _tensor(self, value: Any) -> dict[str, Any]:
        if str(value.layout) != "torch.strided" or value.is_quantized or value.is_meta:
            raise NotSavableError
        self._claim(_memory_of_tensor(value), value)
        return {
            "kind": "tensor",
            "value": value.detach().cpu().clone(),
            "device": str(value.device),
            "requires_grad": value.is_leaf and value.requires_grad,
        }

    def _claim(self, memory: int, value: Any) -> None:
        if self._memories.setdefault(memory, id(value)) != id(value):
            raise NotSavableError  # two views of one memory would be separate arrays after loading

    def _container(self, value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            pairs = [[self.encode(key), self._item(item)] for key, item in value.items()]
            return {"kind": "dict", "value": pairs}
        items = [self._item(item) for item in value]
        encoded: dict[str, Any] = {"kind": type(value).__name__, "value": items}
        if isinstance(value, deque):
            encoded["maxlen"] = value.maxlen
        return encoded

    def _item(self, item: Any) -> Any:
        return {"kind": "code"} if _is_code(item) else self.encode(item)

    def _object(self, value: Any) -> dict[str, Any]:
        if isinstance(value, np.random.Generator):
            if type(value.bit_generator).__name__ not in _BIT_GENERATORS:
                raise NotSavableError
            return {"kind": "generator", "value": _generator_state(value)}
        if type(value) is random.Random:
            return {"kind": "random", "value": json.dumps(value.getstate())}
        if _is_of_torch(value, "Generator"):
            state = value.get_state().clone()
            return {"kind": "torch_generator", "value": state, "device": value.device.type}
        if isinstance(value, spaces.Space):
            return {"kind": "space", "value": get_space_state(value)}
        if isinstance(value, gym.Env):
            return {"kind": "env", "value": self.layers(value)}
        return {"kind": "object", "value": self._attributes(value)}

    def _attributes(self, owner: Any) -> list[list[Any]]:
        # A class with slots, or with a part written in C, holds more than its attributes.
        if not hasattr(owner, "__dict__") or type(owner).__basicsize__ > _Ordinary.__basicsize__:
            raise NotSavableError
        left_out = _CONSTANT_ATTRIBUTES | ({"env"} if _is_wrapper(owner) else set())
        attributes = vars(owner)
        if isinstance(owner, gym.Env) and not _is_wrapper(owner):
            # Often class attributes; an env may sample from them.
            instance = {
                name: getattr(owner, name, None)
                for name in ("action_space", "observation_space")
                # The value of a property is stored elsewhere, or created at each access.
                if not isinstance(inspect.getattr_static(owner, name, None), property)
            }
            attributes = {**instance, **attributes}
        return [
            [name, self.encode(value)]
            for name, value in attributes.items()
            if name not in left_out and not _is_code(value)
        ]


class Decoder:
    """Restores a graph of Python objects to the state that an :class:`Encoder` saved.

    Objects and generators are changed in place; arrays and containers are replaced.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def set_layers(self, env: Any, saved: list[Any]) -> None:
        """Restore the saved state of an env and its wrappers.

        Raises:
            CheckpointMismatch: if the state belongs to another env.
        """
        layers = list(_layers(env))
        names = [type(layer).__name__ for layer in layers]
        saved_names = [layer_state["class"] for layer_state in saved]
        saves_itself = [_saves_itself(layer) for layer in layers]
        if names != saved_names or saves_itself != ["own" in layer_state for layer_state in saved]:
            raise CheckpointMismatch(
                f"the saved env is {' > '.join(saved_names)}, this one is {' > '.join(names)}; "
                "make it in the same way as when it was saved"
            )
        for layer, layer_state in zip(layers, saved, strict=True):
            if "own" in layer_state:
                layer.load_state_dict(layer_state["own"])
            else:
                self._set_attributes(layer, layer_state["attributes"])

    def decode(self, encoded: Any, existing: Any = None) -> Any:
        """Return the value that was encoded; ``existing`` is the value that it replaces."""
        if not isinstance(encoded, Mapping):
            return encoded
        kind = encoded["kind"]
        if kind == "same":
            return self._known[encoded["ref"]]
        if kind in _SIMPLE:
            value = _SIMPLE[kind](encoded, existing)
        elif kind == "dict":
            value = self._dict(encoded, existing)
        elif kind in _CONTAINERS:
            items = self._items(encoded["value"], existing)
            more = (encoded["maxlen"],) if kind == "deque" else ()
            value = _CONTAINERS[kind](items, *more)
        else:
            value = self._object(encoded, existing)
        if "ref" in encoded:
            self._known[encoded["ref"]] = value
        return value

    def _dict(self, encoded: Mapping[str, Any], existing: Any) -> dict[Any, Any]:
        current = existing if isinstance(existing, dict) else {}
        pairs = [(self.decode(key), item) for key, item in encoded["value"]]
        return {key: self.decode(item, current.get(key)) for key, item in pairs}

    def _items(self, items: list[Any], existing: Any) -> list[Any]:
        current = list(existing) if isinstance(existing, list | tuple | deque) else []
        current += [None] * (len(items) - len(current))
        return [self.decode(item, old) for item, old in zip(items, current, strict=False)]

    def _object(self, encoded: Mapping[str, Any], existing: Any) -> Any:
        if not hasattr(existing, "__dict__"):
            raise MissingObjectError(f"the saved env has an object where this env has {existing!r}")
        # Its own attributes may refer to it.
        self._known[encoded["ref"]] = existing
        if encoded["kind"] == "env":
            self.set_layers(existing, encoded["value"])
        else:
            self._set_attributes(existing, encoded["value"])
        return existing

    def _set_attributes(self, owner: Any, encoded: list[Any]) -> None:
        attributes_now = vars(owner)
        for name, value in encoded:
            # Not with setattr, which a frozen dataclass refuses.
            attributes_now[name] = self.decode(value, getattr(owner, name, None))


def get_space_state(space: spaces.Space[Any]) -> list[str]:
    """Return the states of the random generators of a space."""
    return [_generator_state(generator) for generator in _generators(space)]


def set_space_state(space: Any, state: list[str]) -> None:
    """Restore the states of a space's generators from :func:`get_space_state`.

    Raises:
        CheckpointMismatch: if the state belongs to another space.
    """
    generators = list(_generators(space)) if isinstance(space, spaces.Space) else []
    if len(generators) != len(state):
        raise CheckpointMismatch(f"the saved state does not belong to the space {space!r}")
    for generator, generator_state in zip(generators, state, strict=True):
        _set_generator_state(generator, generator_state)


def _generators(space: spaces.Space[Any]) -> Iterator[np.random.Generator]:
    yield space.np_random
    parts = getattr(space, "spaces", ())
    for part in parts.values() if isinstance(parts, Mapping) else parts:
        yield from _generators(part)


def _generator_state(generator: np.random.Generator) -> str:
    # As text, because the integers exceed 64 bits.
    return json.dumps(generator.bit_generator.state, default=lambda array: array.tolist())


def _set_generator_state(generator: np.random.Generator, state: str) -> None:
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


def _is_code(value: Any) -> bool:
    # Types of extensions, such as those of Box2D, may have no module.
    module = str(getattr(type(value), "__module__", ""))
    if module == "torch":
        return type(value).__name__ in _TORCH_CONSTANTS
    return isinstance(value, _CODE) or module.partition(".")[0] == "pygame"


def _is_of_torch(value: Any, name: str) -> bool:
    torch = sys.modules.get("torch")  # only where the env has imported it
    return torch is not None and type(value) is getattr(torch, name)


def _memory_of(array: npt.NDArray[Any]) -> int:
    """Return the identity of the memory that an array owns or is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, np.ndarray):
        return int(owner.__array_interface__["data"][0])
    return _memory_of_tensor(owner) if is_tensor(owner) else id(owner)


def _memory_of_tensor(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _array(encoded: Mapping[str, Any], _: Any) -> Any:
    return np.array(encoded["value"], dtype=encoded.get("dtype"))


def _tensor(encoded: Mapping[str, Any], existing: Any) -> Any:
    import torch  # the state has a tensor

    device = existing.device if is_tensor(existing) else encoded["device"]
    tensor = torch.as_tensor(encoded["value"]).to(device, copy=True)
    return tensor.requires_grad_(encoded["requires_grad"])


def _torch_generator(encoded: Mapping[str, Any], existing: Any) -> Any:
    import torch

    device = encoded["device"]
    if not isinstance(existing, torch.Generator) or existing.device.type != device:
        raise MissingObjectError(
            f"the saved env has a torch.Generator on {device} where this env has {existing!r}"
        )
    existing.set_state(torch.as_tensor(encoded["value"]))
    return existing


def _enum_member(value: enum.Enum) -> dict[str, Any]:
    kind = type(value)
    if value.name not in kind.__members__:
        raise NotSavableError  # several flags at once
    return {"kind": "enum", "class": [kind.__module__, kind.__qualname__], "value": value.name}


def _enum(encoded: Mapping[str, Any], existing: Any) -> Any:
    module, name = encoded["class"]
    # Only modules that are already imported are searched, so no code runs.
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, "__dict__", {}).get(part)
    if not isinstance(kind, enum.EnumType):
        kind = type(existing)
    if not isinstance(kind, enum.EnumType) or kind.__qualname__ != name:
        raise CheckpointMismatch(
            f"the saved env has a member of the enum {module}.{name}, which is not known here"
        )
    if encoded["value"] not in kind.__members__:
        raise CheckpointMismatch(
            f"the saved env has {name}.{encoded['value']}, but {name} has no such member here"
        )
    return kind[encoded["value"]]


def _scalar(encoded: Mapping[str, Any], _: Any) -> Any:
    value = Decoder().decode(encoded["value"])
    return np.dtype(encoded["dtype"]).type(value)


def _generator(encoded: Mapping[str, Any], existing: Any) -> Any:
    state = encoded["value"]
    if not isinstance(existing, np.random.Generator):
        existing = np.random.Generator(_BIT_GENERATORS[json.loads(state)["bit_generator"]]())
    _set_generator_state(existing, state)
    return existing


def _random(encoded: Mapping[str, Any], existing: Any) -> Any:
    if not isinstance(existing, random.Random):
        existing = random.Random()
    version, internal, gauss_next = json.loads(encoded["value"])
    existing.setstate((version, tuple(internal), gauss_next))
    return existing


def _space(encoded: Mapping[str, Any], existing: Any) -> Any:
    set_space_state(existing, encoded["value"])
    return existing


def _code(_: Mapping[str, Any], existing: Any) -> Any:
    if not _is_code(existing):
        raise MissingObjectError(f"the saved env has a function where this env has {existing!r}")
    return existing


_SIMPLE: dict[str, Callable[[Mapping[str, Any], Any], Any]] = {
    "code": _code,
    "int": lambda encoded, _: int(encoded["value"]),
    "bytes": lambda encoded, _: bytes.fromhex(encoded["value"]),
    "enum": _enum,
    "scalar": _scalar,
    "array": _array,
    "tensor": _tensor,
    "torch_generator": _torch_generator,
    "strings": _array,
    "generator": _generator,
    "random": _random,
    "space": _space,
}
