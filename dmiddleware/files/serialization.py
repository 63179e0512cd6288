"""Serialization of a nested state: one msgpack string, and the tensors and blocks separately.

Every container becomes a msgpack array that starts with its kind, so a tuple comes back as a tuple
and a dictionary keeps keys that are not strings. Unpacking builds only the types named here;
nothing in the bytes can make it run code.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from dmiddleware.files.atomic_file import DTYPE_NAMES
from dmiddleware.tree import Batch, as_tree, items_of

__all__ = ["StateBlock", "pack", "unpack"]

_BATCH, _BLOCK, _DEFAULTDICT, _DEQUE = "batch", "block", "defaultdict", "deque"
_TENSOR, _ARRAY, _INTEGER, _SCALAR = "tensor", "array", "integer", "scalar"
_TEXT = "text"
"""Text that is not Unicode, such as the name of a folder in another encoding."""
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordereddict",
    collections.Counter: "counter",
}
_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
}
_FACTORIES: dict[str, type | None] = {
    "None": None,
    **{kind.__name__: kind for kind in (int, float, str, bytes, bool, list, dict, set, tuple)},
}
"""The factories that a defaultdict may have."""

_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class StateBlock:
    """A part of a state that may be written to a file of its own, which several states share.

    Attributes:
        content: returns the part, a nested state.
        key: parts with equal keys are equal, so that only the first of them has to be read; None:
            it is not known whether the part has changed.
    """

    content: Callable[[], Any]
    key: Hashable | None = None


def pack(
    state: Any,
    *,
    reserved: Collection[str] = (),
    put_block: Callable[[StateBlock], int] | None = None,
) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Take a nested state apart.

    Args:
        state: dictionaries (keys: str, int, float, bool, None, numpy scalars or tuples of them;
            also ``OrderedDict``, ``Counter``, and ``defaultdict`` of a built-in type), lists,
            tuples, sets, frozensets, deques and batches of tensors, numpy arrays and scalars,
            numbers, strings, bytes, booleans and None. All come back as the same type.
            It may have blocks, which come back as their content.
        reserved: names that no tensor may get.
        put_block: takes a block, and returns its number; None: the content of blocks is packed with
            the rest.

    Returns:
        msgpack bytes, and the tensors by the dotted path where they were found (arrays as tensors).

    Raises:
        TypeError: for any other type, with its path.
    """
    packer = _Packer(reserved, put_block)
    return msgspec.msgpack.encode(packer.pack(state, ())), packer.tensors


def unpack(data: bytes, tensors: Mapping[str, torch.Tensor], blocks: Sequence[Any] = ()) -> Any:
    """Rebuild the state that :func:`pack` took apart.

    Args:
        data: the bytes.
        tensors: by name.
        blocks: the contents of the blocks, by number.

    Raises:
        ValueError: if the bytes do not come from :func:`pack`, or a tensor or a block is missing.
    """
    try:
        return _unpack(msgspec.msgpack.decode(data), _Source(tensors, blocks))
    except (
        msgspec.DecodeError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
    ) as error:
        raise ValueError(f"the packed state cannot be read: {error}") from error


class _Source(NamedTuple):
    tensors: Mapping[str, torch.Tensor]
    blocks: Sequence[Any]


class _Packer:
    def __init__(
        self, reserved: Collection[str], put_block: Callable[[StateBlock], int] | None
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._reserved = reserved
        self._put_block = put_block

    def pack(self, value: Any, path: tuple[Any, ...]) -> Any:
        if value is None or type(value) in (bool, float, bytes):
            return value
        if type(value) is str:
            return value if _is_unicode(value) else [_TEXT, value.encode(errors="surrogatepass")]
        if type(value) is int:
            return value if value in _INT64 else [_INTEGER, str(value)]
        if isinstance(value, torch.Tensor):
            return [_TENSOR, self._keep(value.detach(), path)]
        if type(value) in (np.ndarray, np.memmap):
            return [_ARRAY, self._keep(_array_as_tensor(value, path), path)]
        if isinstance(value, np.generic):
            return [_SCALAR, _scalar_as_bytes(value, path)]
        if isinstance(value, StateBlock):
            if self._put_block is None:
                return self.pack(value.content(), path)
            return [_BLOCK, self._put_block(value)]
        return self._pack_container(value, path)

    def _pack_container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Batch):
            items = {str(key): _inner(item) for key, item in items_of(value)}
            return [_BATCH, self._pack_items(items, path)]
        if type(value) in _MAPPINGS:
            return [_MAPPINGS[type(value)], self._pack_items(value, path)]
        if type(value) in _SEQUENCES:
            packed = [self.pack(item, (*path, i)) for i, item in enumerate(value)]
            if isinstance(value, set | frozenset):  # in an order that does not depend on hashes
                packed.sort(key=msgspec.msgpack.encode)
            return [_SEQUENCES[type(value)], packed]
        if type(value) is collections.deque:
            return [_DEQUE, [value.maxlen, self.pack(list(value), path)]]
        if type(value) is collections.defaultdict:
            factory = getattr(value.default_factory, "__name__", "None")
            if _FACTORIES.get(factory) is not value.default_factory:
                raise _cannot_hold(value, path, f"a defaultdict of {value.default_factory!r}")
            return [_DEFAULTDICT, [factory, self._pack_items(value, path)]]
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
        if tensor.dtype not in DTYPE_NAMES:
            raise _cannot_hold(tensor, path, f"a tensor of dtype {tensor.dtype}")
        stem = name = ".".join(map(str, path)).encode(errors="replace").decode() or "state"
        number = 1
        while name in self.tensors or name in self._reserved:  # the keys 0 and "0" read the same
            number += 1
            name = f"{stem}~{number}"
        self.tensors[name] = tensor
        return name


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _scalar_as_bytes(value: np.generic, path: tuple[Any, ...]) -> list[Any]:
    if value.dtype.kind not in "biufcmMSU":
        raise _cannot_hold(value, path)
    return [value.dtype.str, value.tobytes()]


def _unpack_scalar(content: Any) -> Any:
    name, data = content
    dtype = np.dtype(name)
    if not dtype.itemsize:  # the empty string
        return dtype.type()
    return np.frombuffer(data, dtype)[0]


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
        "convert it to tensors, arrays, numbers, strings, or dicts, lists, tuples and sets of them"
    )


def _inner(value: Any) -> Any:
    """Return a subtree of a batch as a dictionary, so that only the outermost one is a batch."""
    if isinstance(value, Batch):
        return {str(key): _inner(item) for key, item in items_of(value)}
    return value


def _unpack(value: Any, source: _Source) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    return _READERS[kind](content, source)


def _unpack_dict(content: Any, source: _Source) -> dict[Any, Any]:
    keys, items = content[::2], content[1::2]
    return {
        _unpack(key, source): _unpack(item, source) for key, item in zip(keys, items, strict=True)
    }


def _unpack_list(content: Any, source: _Source) -> list[Any]:
    return [_unpack(item, source) for item in content]


def _unpack_as(
    build: Callable[[Any], Any],
    read: Callable[[Any, _Source], Any],
    content: Any,
    source: _Source,
) -> Any:
    return build(read(content, source))


def _unpack_defaultdict(content: Any, source: _Source) -> Any:
    factory, items = content
    return collections.defaultdict(_FACTORIES[factory], _unpack_dict(items, source))


_READERS: dict[str, Callable[[Any, _Source], Any]] = {
    **{name: partial(_unpack_as, kind, _unpack_dict) for kind, name in _MAPPINGS.items()},
    **{name: partial(_unpack_as, kind, _unpack_list) for kind, name in _SEQUENCES.items()},
    _BATCH: partial(_unpack_as, as_tree, _unpack_dict),
    _DEQUE: lambda content, source: collections.deque(_unpack(content[1], source), content[0]),
    _DEFAULTDICT: _unpack_defaultdict,
    _TENSOR: lambda name, source: source.tensors[name],
    _ARRAY: lambda name, source: source.tensors[name].cpu().numpy(),
    _BLOCK: lambda index, source: source.blocks[index],
    _INTEGER: lambda text, _: int(text),
    _TEXT: lambda data, _: data.decode(errors="surrogatepass"),
    _SCALAR: lambda content, _: _unpack_scalar(content),
}
