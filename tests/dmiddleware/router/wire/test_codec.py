"""The codec: values round-trip with their types, or are refused by name."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dmiddleware.errors import DecodeError, EncodeError
from dmiddleware.router.wire.arrays import DTYPES
from dmiddleware.router.wire.codec import MAX_DEPTH, Codec, TypeAdapter

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
numpy_scalars = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(np.dtype(name), (1,)).map(lambda array: array[0])
)
keys = (
    st.text(st.characters(codec="utf-8")) | st.integers() | st.tuples(st.integers(), st.text("ab"))
)
values = st.recursive(
    scalars | arrays | numpy_scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def there_and_back(value: Any, codec: Codec | None = None) -> Any:
    codec = codec or Codec()
    skeleton, buffers = codec.encode(value)
    return codec.decode(skeleton, [bytes(buffer) for buffer in buffers])


@given(values)
def test_every_value_round_trips_with_its_types(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(st.binary(max_size=200), st.lists(st.binary(max_size=16), max_size=3))
def test_random_bytes_are_decoded_or_refused(skeleton: bytes, buffers: list[bytes]) -> None:
    with contextlib.suppress(DecodeError):
        Codec().decode(skeleton, buffers)


@given(values, st.data())
def test_a_damaged_skeleton_is_decoded_or_refused(value: Any, data: st.DataObject) -> None:
    codec = Codec()
    skeleton, buffers = codec.encode(value)
    damaged = bytearray(skeleton)
    place = data.draw(st.integers(0, len(damaged) - 1))
    damaged[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError):
        codec.decode(bytes(damaged), buffers)


def test_a_contiguous_array_is_not_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    _, (buffer,) = Codec().encode({"x": array})
    assert np.shares_memory(np.frombuffer(buffer, np.float32), array)


def test_a_decoded_array_is_a_view_of_its_buffer() -> None:
    codec = Codec()
    skeleton, buffers = codec.encode(np.arange(4))
    received = bytearray(buffers[0])
    array = codec.decode(skeleton, [received])
    received[0] = 9
    assert array[0] == 9


def test_strided_and_big_endian_arrays_arrive_with_their_values() -> None:
    matrix = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    back = there_and_back(matrix)
    assert back.tolist() == matrix.tolist()


@dataclass(frozen=True)
class Celsius:
    degrees: float


def test_an_adapter_encodes_its_type() -> None:
    codec = Codec([TypeAdapter("test.celsius", Celsius, lambda c: c.degrees, Celsius)])
    assert there_and_back([Celsius(3.5)], codec) == [Celsius(3.5)]


def test_a_value_that_cannot_be_encoded_is_named_with_its_path() -> None:
    with pytest.raises(EncodeError, match=r"value\['a'\]\['b'\] is a .*Celsius"):
        Codec().encode({"a": {"b": Celsius(1.0)}})


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(EncodeError, match="array of object"):
        Codec().encode(np.array([object()], dtype=object))


def test_an_unknown_adapter_is_named() -> None:
    sender = Codec([TypeAdapter("test.celsius", Celsius, lambda c: c.degrees, Celsius)])
    skeleton, buffers = sender.encode(Celsius(1.0))
    with pytest.raises(DecodeError, match=r"test\.celsius"):
        Codec().decode(skeleton, buffers)


@pytest.mark.parametrize("code", range(1, 9))
def test_an_extension_without_content_is_decoded_or_refused(code: int) -> None:
    skeleton = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, b""))
    with contextlib.suppress(DecodeError):
        Codec().decode(skeleton, [])


def test_infinite_nesting_is_refused() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(EncodeError, match="levels deep"):
        Codec().encode(value)


def test_nested_extensions_are_refused_when_too_deep() -> None:
    skeleton = msgspec.msgpack.encode(0)
    for _ in range(MAX_DEPTH + 1):
        skeleton = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, skeleton)])
    with pytest.raises(DecodeError, match="levels deep"):
        Codec().decode(skeleton, [])


class Bomb:
    exploded = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "exploded", True))


@pytest.fixture
def bomb() -> Any:
    Bomb.exploded = False
    yield Bomb()
    Bomb.exploded = False


def test_nothing_is_pickled_by_default(bomb: Bomb) -> None:
    with pytest.raises(EncodeError, match="cannot be encoded"):
        Codec().encode(bomb)


def test_a_pickle_is_not_loaded_unless_the_receiver_opted_in(bomb: Bomb) -> None:
    willing = Codec(pickle=(pickle.dumps, pickle.loads))
    skeleton, buffers = willing.encode(bomb)
    with pytest.raises(DecodeError, match="does not accept pickles"):
        Codec().decode(skeleton, buffers)
    assert not Bomb.exploded
    willing.decode(skeleton, buffers)
    assert Bomb.exploded
