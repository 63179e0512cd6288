"""Python values to bytes and back, with their types, without pickle and without copying arrays.

A value becomes a *skeleton* (msgpack) and a list of *buffers* (the raw bytes of its arrays, by
reference). What msgpack knows travels as itself: None, bool, int, float, str, bytes, list, and dict
with such keys. Everything else is an extension: tuples, ordered dicts, big integers, numpy arrays
and scalars, and the types of :class:`TypeAdapter` (torch tensors, treetensors), which this package
does not know.

Adapters are found through the entry-point group ``dmiddleware.wire``: the entry's name is the root
module of the types that it adapts, so that a process loads torch's adapters only once torch's
tensors are sent or received.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from dmiddleware.errors import DecodeError, EncodeError

__all__ = ["Adapter", "TypeAdapter", "Codec", "DTYPES", "MAX_DEPTH"]

DTYPES: Final[tuple[str, ...]] = (
    "|b1",
    "|u1",
    "|i1",
    "<u2",
    "<i2",
    "<u4",
    "<i4",
    "<u8",
    "<i8",
    "<f2",
    "<f4",
    "<f8",
    "<c8",
    "<c16",
)
"""The array types of the wire, numbered by their place; the order never changes."""

MAX_DEPTH: Final = 64
"""How deep a value may be nested."""

ENTRY_POINT_GROUP: Final = "dmiddleware.wire"

_TUPLE, _PAIRS, _BIG_INT, _ARRAY, _SCALAR, _ADAPTED, _PICKLE, _ORDERED = range(1, 9)
_NATIVE: Final = frozenset({type(None), bool, float, str, bytes})
_NATIVE_KEYS: Final = frozenset({bool, int, float, str, bytes, type(None)})
_DTYPE_CODE: Final = {np.dtype(name): code for code, name in enumerate(DTYPES)}
_DTYPE_OF: Final = tuple(np.dtype(name) for name in DTYPES)
_INDEX: Final = struct.Struct("<I")
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1

_encoder = msgspec.msgpack.Encoder()


class Adapter(Protocol):
    """What the codec needs of an adapter; see :class:`TypeAdapter`."""

    @property
    def name(self) -> str:
        """The type's name on the wire."""
        ...

    @property
    def type(self) -> type:
        """The class."""
        ...

    @property
    def to_plain(self) -> Callable[[Any], Any]:
        """From an instance to a value that the codec knows."""
        ...

    @property
    def from_plain(self) -> Callable[[Any], Any]:
        """Back."""
        ...


@dataclass(frozen=True, slots=True)
class TypeAdapter:
    """How a type that this package does not know travels.

    Args:
        name: its name on the wire; stable over versions.
        type: the class whose instances (exactly of this class) it adapts.
        to_plain: from an instance to a value that the codec knows (arrays, dictionaries, …).
        from_plain: back; it must not execute anything that the value brings with it.
    """

    name: str
    type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


class Codec:
    """Encodes values to a skeleton and buffers, and decodes them.

    Args:
        adapters: for types beyond the built-in ones; those of installed packages are found by
            themselves.
        pickle: how to pickle what nothing else can carry, as ``(dumps, loads)``. None, the default,
            refuses to send and to read pickles; both ends must opt in.
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
        """Add an adapter; a later one for the same type or name replaces an earlier one."""
        self._by_type[adapter.type] = adapter
        self._by_name[adapter.name] = adapter

    def encode(self, value: Any) -> tuple[bytes, list[memoryview]]:
        """Encode a value.

        Returns:
            The skeleton, and one buffer of raw bytes for each array, in the order in which the
            skeleton numbers them. A C-contiguous array's buffer is its own memory: do not change
            the array before the buffers have been sent.

        Raises:
            EncodeError: for a value of a type that cannot travel; the path to it is named.
        """
        buffers: list[memoryview] = []
        try:
            if _is_native(value, 0):
                return _encoder.encode(value), buffers
            return _encoder.encode(self._plain(value, buffers, "value", 0)), buffers
        except UnicodeEncodeError as error:
            raise EncodeError(f"a string in the value is not valid Unicode: {error}") from error

    def decode(self, skeleton: bytes | memoryview, buffers: Sequence[Any]) -> Any:
        """Decode what :meth:`encode` made.

        Args:
            skeleton: as encoded.
            buffers: the raw bytes of the arrays; arrays are views of them, without a copy.

        Raises:
            DecodeError: if the bytes are no encoded value, or need an adapter or pickle that this
                side does not have.
        """
        try:
            return msgspec.msgpack.decode(skeleton, ext_hook=_Reader(self, buffers).extension)
        except DecodeError:
            raise
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError, struct.error) as error:
            raise DecodeError(f"the bytes are no encoded value: {error}") from error

    def _plain(self, value: Any, buffers: list[memoryview], path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _NATIVE:
            return value
        if kind is int:
            return value if _INT_MIN <= value <= _INT_MAX else _big_int(value)
        if depth >= MAX_DEPTH:
            raise EncodeError(f"{path} is nested deeper than {MAX_DEPTH}; send a flatter value")
        if kind is dict:
            return self._plain_dict(value, buffers, path, depth)
        if kind is list:
            return [self._plain(item, buffers, path, depth + 1) for item in value]
        if kind is tuple:
            items = [self._plain(item, buffers, path, depth + 1) for item in value]
            return msgspec.msgpack.Ext(_TUPLE, _encoder.encode(items))
        if kind is OrderedDict:
            return msgspec.msgpack.Ext(_ORDERED, self._pairs(value, buffers, path, depth))
        if kind is np.ndarray:
            return _plain_array(value, buffers, path)
        if isinstance(value, np.generic):
            return _plain_scalar(value, path)
        return self._plain_adapted(value, buffers, path, depth)

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

    def _plain_adapted(
        self, value: Any, buffers: list[memoryview], path: str, depth: int
    ) -> msgspec.msgpack.Ext:
        adapter = self._adapter_for(type(value))
        if adapter is not None:
            plain = self._plain(adapter.to_plain(value), buffers, path, depth + 1)
            return msgspec.msgpack.Ext(_ADAPTED, _encoder.encode([adapter.name, plain]))
        if self._pickle is not None:
            return msgspec.msgpack.Ext(_PICKLE, self._pickle[0](value))
        kind = type(value)
        raise EncodeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot travel; send dict, "
            "list, tuple, str, bytes, int, float, bool, None, numpy arrays or torch tensors, or "
            "add a TypeAdapter for it"
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
            raise DecodeError(f"no adapter named {name!r} is installed here; install what has it")
        return adapter

    def _load_installed(self, root: str) -> None:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=root):
            for adapter in entry.load():
                if adapter.name not in self._by_name:
                    self.add(adapter)


class _Reader:
    """Reads the extensions of one skeleton."""

    def __init__(self, codec: Codec, buffers: Sequence[Any]) -> None:
        self._codec = codec
        self._buffers = buffers
        self._depth = 0

    def extension(self, code: int, data: memoryview) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise DecodeError(f"the value is nested deeper than {MAX_DEPTH}")
        try:
            return self._read(code, data)
        finally:
            self._depth -= 1

    def _read(self, code: int, data: memoryview) -> Any:
        if code == _TUPLE:
            return tuple(self._list(data))
        if code == _ARRAY:
            return self._array(data)
        if code == _ADAPTED:
            name, plain = self._list(data)
            return self._codec._adapter_named(str(name)).from_plain(plain)
        if code == _PAIRS:
            return dict(self._list(data))
        if code == _ORDERED:
            return OrderedDict(self._list(data))
        if code == _SCALAR:
            return np.frombuffer(data[1:], _dtype_of(data[0]), count=1)[0]
        if code == _BIG_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == _PICKLE:
            return self._unpickle(data)
        raise DecodeError(f"unknown extension {code}; the sender is newer, use one version")

    def _list(self, data: memoryview) -> list[Any]:
        items = msgspec.msgpack.decode(data, ext_hook=self.extension)
        if not isinstance(items, list):
            raise DecodeError(f"an extension holds {type(items).__name__} where a list belongs")
        return items

    def _array(self, data: memoryview) -> np.ndarray[Any, Any]:
        (index,) = _INDEX.unpack_from(data)
        code, *shape = self._list(data[_INDEX.size :])
        if index >= len(self._buffers):
            raise DecodeError(f"array {index} is missing, {len(self._buffers)} arrived")
        array = np.frombuffer(self._buffers[index], _dtype_of(code))
        return array.reshape(shape)

    def _unpickle(self, data: memoryview) -> Any:
        codec = self._codec
        if codec._pickle is None:
            raise DecodeError("the value is pickled, and this side has not opted in to pickle")
        return codec._pickle[1](bytes(data))


def _is_native(value: Any, depth: int) -> bool:
    """Tell, fast, whether msgpack has a form for a value and for all within it."""
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


def _dtype_of(code: Any) -> np.dtype[Any]:
    if not isinstance(code, int) or not 0 <= code < len(_DTYPE_OF):
        raise DecodeError(f"unknown array type {code!r}; the sender is newer, use one version")
    return _DTYPE_OF[code]


def _dtype_code(dtype: np.dtype[Any], path: str) -> int:
    code = _DTYPE_CODE.get(dtype.newbyteorder("<"))
    if code is None:
        raise EncodeError(
            f"{path} is an array of {dtype}, which cannot travel; convert it to one of "
            f"{', '.join(np.dtype(name).name for name in DTYPES)}"
        )
    return code


def _plain_array(
    array: np.ndarray[Any, Any], buffers: list[memoryview], path: str
) -> msgspec.msgpack.Ext:
    code = _dtype_code(array.dtype, path)
    data = np.ascontiguousarray(array, dtype=_DTYPE_OF[code])
    index = len(buffers)
    buffers.append(data.reshape(-1).view(np.uint8).data)
    head = _INDEX.pack(index)
    return msgspec.msgpack.Ext(_ARRAY, head + _encoder.encode([code, *array.shape]))


def _plain_scalar(value: np.generic, path: str) -> msgspec.msgpack.Ext:
    code = _dtype_code(value.dtype, path)
    return msgspec.msgpack.Ext(
        _SCALAR, bytes([code]) + np.asarray(value, _DTYPE_OF[code]).tobytes()
    )


def _big_int(value: int) -> msgspec.msgpack.Ext:
    size = (value.bit_length() + 8) // 8
    return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(size, "little", signed=True))
