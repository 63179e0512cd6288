"""Packing: a nested state as one string of msgpack bytes, and its tensors apart.

Every container becomes a msgpack array whose first item tells its kind, so that a tuple comes back
as a tuple and a dictionary keeps keys that are not strings. Unpacking builds only the types that
are named here; nothing in the bytes can make it run code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from dmiddleware.data.batch import Batch, as_tree

__all__ = ["pack", "unpack"]

_DICT, _LIST, _TUPLE, _BATCH = "dict", "list", "tuple", "batch"
_TENSOR, _ARRAY, _INTEGER = "tensor", "array", "integer"

_INT64 = range(-(2**63), 2**63)


def pack(state: Any, *, reserved: Collection[str] = ()) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Take a nested state apart.

    Args:
        state: dictionaries (keys: str, int, float, bool, None or tuples of them), lists, tuples and
            batches of tensors, numpy arrays, numbers, strings, bytes, booleans and None.
            Subclasses of dict come back as plain dictionaries, numpy scalars as Python numbers.
        reserved: names that no tensor may get.

    Returns:
        msgpack bytes, and the tensors by a name that tells their place (arrays as tensors).

    Raises:
        TypeError: for any other type; the place is named.
    """
    packer = _Packer(reserved)
    return msgspec.msgpack.encode(packer.pack(state, ())), packer.tensors


def unpack(data: bytes, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put together what :func:`pack` took apart.

    Raises:
        ValueError: if the bytes are none of :func:`pack`'s, or a tensor is missing.
    """
    try:
        return _unpack(msgspec.msgpack.decode(data), tensors)
    except (msgspec.DecodeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"the packed state cannot be read: {error}") from error


class _Packer:
    def __init__(self, reserved: Collection[str]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._reserved = reserved

    def pack(self, value: Any, path: tuple[Any, ...]) -> Any:
        if value is None or isinstance(value, bool | float | str | bytes):
            return _plain(value)
        if isinstance(value, int):
            number = int(value)
            return number if number in _INT64 else [_INTEGER, str(number)]
        if isinstance(value, torch.Tensor):
            return [_TENSOR, self._keep(value.detach(), path)]
        if isinstance(value, np.ndarray):
            return [_ARRAY, self._keep(_array_as_tensor(value, path), path)]
        if isinstance(value, np.generic):
            return self.pack(value.item(), path)
        return self._pack_container(value, path)

    def _pack_container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Batch):
            items = {str(key): _inner(item) for key, item in value.items()}
            return [_BATCH, self._pack_items(items, path)]
        if isinstance(value, Mapping):
            return [_DICT, self._pack_items(value, path)]
        if type(value) is list or type(value) is tuple:
            kind = _LIST if type(value) is list else _TUPLE
            return [kind, [self.pack(item, (*path, i)) for i, item in enumerate(value)]]
        raise _cannot_hold(value, path)

    def _pack_items(self, items: Mapping[Any, Any], path: tuple[Any, ...]) -> list[Any]:
        return [
            part
            for key, item in items.items()
            for part in (self._pack_key(key, path), self.pack(item, (*path, key)))
        ]

    def _pack_key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, torch.Tensor | np.ndarray | list | dict):
            raise _cannot_hold(key, (*path, "(a key)"))
        return self.pack(key, (*path, "(a key)"))

    def _keep(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        if tensor.layout is not torch.strided:
            raise _cannot_hold(tensor, path, f"a tensor of layout {tensor.layout}")
        wanted = name = ".".join(map(str, path)) or "state"
        number = 1
        while name in self.tensors or name in self._reserved:  # the keys 0 and "0" read the same
            number += 1
            name = f"{wanted}~{number}"
        self.tensors[name] = tensor
        return name


def _plain(value: Any) -> Any:
    """Return a subclass's value (numpy's float64 is a float) as its plain type."""
    for kind in (float, str, bytes):
        if isinstance(value, kind):
            plain: Any = kind(value)  # type: ignore[arg-type]
            return plain
    return value


def _array_as_tensor(array: np.ndarray[Any, Any], path: tuple[Any, ...]) -> torch.Tensor:
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in native.strides) or not native.flags.writeable:
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise _cannot_hold(array, path, f"an array of {array.dtype}") from None


def _cannot_hold(value: Any, path: tuple[Any, ...], what: str | None = None) -> TypeError:
    name = what or f"of type {type(value).__module__}.{type(value).__qualname__}"
    return TypeError(
        f"state{''.join(f'[{key!r}]' for key in path)} is {name}, which a checkpoint cannot hold; "
        "turn it into tensors, arrays, numbers, strings, or dicts, lists and tuples of them"
    )


def _inner(value: Any) -> Any:
    """Return a subtree of a batch as a dictionary, so that only the outermost one is a batch."""
    if isinstance(value, Batch):
        return {str(key): _inner(item) for key, item in value.items()}
    return value


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    return _READERS[kind](content, tensors)


def _unpack_dict(content: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    keys, items = content[::2], content[1::2]
    return {
        _unpack(key, tensors): _unpack(item, tensors) for key, item in zip(keys, items, strict=True)
    }


def _unpack_list(content: Any, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    return [_unpack(item, tensors) for item in content]


_READERS: dict[str, Callable[[Any, Mapping[str, torch.Tensor]], Any]] = {
    _DICT: _unpack_dict,
    _LIST: _unpack_list,
    _TUPLE: lambda content, tensors: tuple(_unpack_list(content, tensors)),
    _BATCH: lambda content, tensors: as_tree(_unpack_dict(content, tensors)),
    _TENSOR: lambda name, tensors: tensors[name],
    _ARRAY: lambda name, tensors: tensors[name].cpu().numpy(),
    _INTEGER: lambda text, _: int(text),
}
