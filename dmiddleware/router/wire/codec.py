"""From Python values to bytes and back, with their types, without pickle or copies of arrays.

A value becomes a *skeleton* (msgpack) and a list of *buffers* (the raw bytes of its arrays, by
reference). None, bool, int, float, str, bytes, lists, and dictionaries with such keys are encoded
natively by msgpack. Everything else is an extension: tuples, ordered dictionaries, big integers,
numpy arrays and scalars, and the types of a :class:`TypeAdapter`, such as torch tensors and
treetensors, which this package does not import.

Adapters are found through the entry-point group ``dmiddleware.wire``.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dmiddleware.errors import DecodeError, EncodeError
from dmiddleware.event_values import Adapter, installed_adapters

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TypeAdapter", "Codec", "MAX_DEPTH"]

MAX_DEPTH: Final = 64
"""The deepest allowed nesting of a value."""

_TUPLE, _PAIRS, _BIG_INT, _ARRAY, _SCALAR, _ADAPTED, _PICKLE, _ORDERED = range(1, 9)
_NATIVE: Final = frozenset({type(None), bool, float, str, bytes})
_NATIVE_KEYS: Final = frozenset({bool, int, float, str, bytes, type(None)})
_INDEX: Final = struct.Struct("<I")
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class TypeAdapter:
    """Encodes a type that is not built in.

    Args:
        name: the type's name on the wire; must not change between versions.
        type: the class; instances of subclasses are not adapted.
        to_plain: converts an instance to a value that the codec can encode (arrays, dictionaries,
            …).
        from_plain: converts that value back; it must not execute code from the value.
        copy: copies an instance, for handlers of the process that has emitted it; None: it is
            converted, and a copy of the plain value back.
    """

    name: str
    type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]
    copy: Callable[[Any], Any] | None = None


class Codec:
    """Encodes values to a skeleton and buffers, and decodes them.

    Args:
        adapters: for types that are not built in; those of installed packages are found without
            being passed.
        pickle: ``(dumps, loads)`` for values that nothing else can encode. None, the default,
            neither sends nor loads pickles; both ends must opt in.
    """

    def __init__(
        self,
        adapters: Iterable[Adapter] = (),
        *,
        pickle: tuple[Callable[[Any], bytes], Callable[[bytes], Any]] | None = None,
    ) -> None:
        self._by_type: dict[type, Adapter] = {}
        self._by_name: dict[str, Adapter] = {}
        self._pickle = pickle
        for adapter in adapters:
            self.add(adapter)

    def add(self, adapter: Adapter) -> None:
        """Add an adapter; it replaces an earlier one for the same type or name."""
        self._by_type[adapter.type] = adapter
        self._by_name[adapter.name] = adapter

    def encode(self, value: Any) -> tuple[bytes, list[memoryview]]:
        """Encode a value.

        Returns:
            The skeleton, and one buffer of raw bytes for each array, in the order of their numbers
            in the skeleton. The buffer of a C-contiguous array is the array's own memory: do not
            change the array before the buffers have been sent.

        Raises:
            EncodeError: if a part of the value has a type that cannot be encoded; the error names
                the path to it.
        """
        buffers: list[memoryview] = []
        try:
            if _is_native(value, 0):
                return _encoder.encode(value), buffers
            return _encoder.encode(self._plain(value, buffers, "value", 0)), buffers
        except UnicodeEncodeError as error:
            raise EncodeError(
                f"a string in the value is not valid Unicode: {error}; send it as bytes"
            ) from error

    def decode(self, skeleton: bytes | memoryview, buffers: Sequence[Any]) -> Any:
        """Decode the result of :meth:`encode`.

        Args:
            skeleton: the skeleton.
            buffers: the raw bytes of the arrays; the decoded arrays are views of them.

        Raises:
            DecodeError: if the bytes are not an encoded value, or need an adapter or pickle that
                this side does not have.
        """
        try:
            return msgspec.msgpack.decode(skeleton, ext_hook=_Reader(self, buffers).extension)
        except DecodeError:
            raise
        except (
            msgspec.DecodeError,
            ValueError,
            TypeError,
            IndexError,
            RecursionError,
            struct.error,
        ) as error:
            raise DecodeError(
                f"the bytes are not an encoded value: {error}; install the same version of "
                "dmiddleware on all hosts"
            ) from error

    def _plain(self, value: Any, buffers: list[memoryview], path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _NATIVE:
            return value
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else _big_int(value)
        if depth >= MAX_DEPTH:
            raise EncodeError(
                f"{path} is nested more than {MAX_DEPTH} levels deep; send a flatter value"
            )
        if kind is dict:
            return self._plain_dict(value, buffers, path, depth)
        if kind is list:
            return [self._plain(item, buffers, path, depth + 1) for item in value]
        if kind is tuple:
            items = [self._plain(item, buffers, path, depth + 1) for item in value]
            return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(items))
        if kind is OrderedDict:
            return msgspec.msgpack.Ext(_ORDERED, self._pairs(value, buffers, path, depth))
        return self._plain_object(value, buffers, path, depth)

    def _plain_dict(
        self, value: dict[Any, Any], buffers: list[memoryview], path: str, depth: int
    ) -> Any:
        if all(
            type(key) in _NATIVE_KEYS and (type(key) is not int or _INT_MIN <= key <= _INT_MAX)
            for key in value
        ):
            return {
                key: self._plain(item, buffers, f"{path}[{key!r}]", depth + 1)
                for key, item in value.items()
            }
        return msgspec.msgpack.Ext(_PAIRS, self._pairs(value, buffers, path, depth))

    def _pairs(
        self, value: dict[Any, Any], buffers: list[memoryview], path: str, depth: int
    ) -> bytes:
        pairs = [
            [
                self._plain(key, buffers, f"a key of {path}", depth + 1),
                self._plain(item, buffers, f"{path}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
        return _encoder.encode(pairs)

    def _plain_object(
        self, value: Any, buffers: list[memoryview], path: str, depth: int
    ) -> msgspec.msgpack.Ext:
        if (numpy := sys.modules.get("numpy")) is not None:
            if type(value) is numpy.ndarray:
                return _plain_array(value, buffers, path)
            if isinstance(value, numpy.generic):
                return _plain_scalar(value, path)
        adapter = self._adapter_for(type(value))
        if adapter is not None:
            plain = self._plain(adapter.to_plain(value), buffers, path, depth + 1)
            return msgspec.msgpack.Ext(_ADAPTED, _encoder.encode([adapter.name, plain]))
        if self._pickle is not None:
            return msgspec.msgpack.Ext(_PICKLE, self._pickle[0](value))
        kind = type(value)
        raise EncodeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be encoded; send "
            "dict, list, tuple, str, bytes, int, float, bool, None, numpy arrays or torch tensors, "
            "or add a TypeAdapter for it"
        )

    def _adapter_for(self, kind: type) -> Adapter | None:
        adapter = self._by_type.get(kind)
        if adapter is None:
            self._load_installed(kind.__module__.partition(".")[0])
            adapter = self._by_type.get(kind)
        return adapter

    def _adapter_named(self, name: str) -> Adapter:
        adapter = self._by_name.get(name)
        if adapter is None:
            self._load_installed(name.partition(".")[0])
            adapter = self._by_name.get(name)
        if adapter is None:
            raise DecodeError(
                f"no adapter named {name!r} is installed; install the package that provides it"
            )
        return adapter

    def _load_installed(self, root: str) -> None:
        for adapter in installed_adapters(root):
            if adapter.name not in self._by_name:
                self.add(adapter)


@dataclass(slots=True)
class _Reader:
    """Decodes the extensions of one skeleton."""

    codec: Codec
    buffers: Sequence[Any]
    depth: int = 0

    def extension(self, code: int, data: memoryview) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise DecodeError(f"the value is nested more than {MAX_DEPTH} levels deep")
        try:
            return self._read(code, data)
        finally:
            self.depth -= 1

    def _read(self, code: int, data: memoryview) -> Any:
        if code == _TUPLE:
            return tuple(self._list(data))
        if code == _ARRAY:
            return self._array(data)
        if code == _ADAPTED:
            name, plain = self._list(data)
            return self.codec._adapter_named(str(name)).from_plain(plain)
        if code == _PAIRS:
            return dict(self._list(data))
        if code == _ORDERED:
            return OrderedDict(self._list(data))
        if code == _SCALAR:
            from dmiddleware.router.wire.arrays import scalar_of

            return scalar_of(data)
        if code == _BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == _PICKLE:
            return self._unpickle(data)
        raise DecodeError(
            f"unknown extension {code}; install the same version of dmiddleware on all hosts"
        )

    def _list(self, data: memoryview) -> list[Any]:
        items = msgspec.msgpack.decode(data, ext_hook=self.extension)
        if not isinstance(items, list):
            raise DecodeError(f"an extension holds a {type(items).__name__} instead of a list")
        return items

    def _array(self, data: memoryview) -> np.ndarray[Any, Any]:
        (index,) = _INDEX.unpack_from(data)
        code, *shape = self._list(data[_INDEX.size :])
        if index >= len(self.buffers):
            raise DecodeError(f"array {index} is missing, only {len(self.buffers)} arrays arrived")
        from dmiddleware.router.wire.arrays import array_of

        return array_of(code, shape, self.buffers[index])

    def _unpickle(self, data: memoryview) -> Any:
        codec = self.codec
        if codec._pickle is None:
            raise DecodeError(
                "the value is pickled, but this side does not accept pickles; pass pickle= to the "
                "Router on both ends, or send other types"
            )
        return codec._pickle[1](bytes(data))


def _is_native(value: Any, depth: int) -> bool:
    """Return whether msgpack can encode a value and all its parts natively."""
    kind = type(value)
    if kind is int:
        return bool(_INT_MIN <= value <= _INT_MAX)
    if kind is list:
        if depth < MAX_DEPTH:
            for item in value:
                if type(item) not in _NATIVE and not _is_native(item, depth + 1):
                    return False
            return True
        return False
    if kind is dict:
        return not value or (
            depth < MAX_DEPTH
            and all(type(key) is str for key in value)
            and _is_native(list(value.values()), depth)
        )
    return kind in _NATIVE


def _plain_array(
    array: np.ndarray[Any, Any], buffers: list[memoryview], path: str
) -> msgspec.msgpack.Ext:
    from dmiddleware.router.wire.arrays import array_bytes

    code, data = array_bytes(array, path)
    head = _INDEX.pack(len(buffers))
    buffers.append(data)
    return msgspec.msgpack.Ext(_ARRAY, head + _encoder.encode([code, *array.shape]))


def _plain_scalar(value: np.generic, path: str) -> msgspec.msgpack.Ext:
    from dmiddleware.router.wire.arrays import scalar_bytes

    return msgspec.msgpack.Ext(_SCALAR, scalar_bytes(value, path))


def _big_int(value: int) -> msgspec.msgpack.Ext:
    size = (value.bit_length() + 8) // 8
    return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(size, "little", signed=True))
