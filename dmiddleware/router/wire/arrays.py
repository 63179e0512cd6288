"""numpy arrays and scalars as bytes.

The other modules of the wire load this one with the first array, because loading numpy takes a
quarter of the start of a process that uses no arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dmiddleware.errors import DecodeError, EncodeError

__all__ = [
    "DTYPES",
    "array_bytes",
    "array_of",
    "owner_of",
    "scalar_bytes",
    "scalar_of",
    "view_with_owner",
    "view_with_release",
]

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
"""The array types of the wire. Their index is their code, so the order must never change."""

_DTYPE_CODE: Final = {
    np.dtype(name.replace("<", order)): code for code, name in enumerate(DTYPES) for order in "<>"
}
_DTYPE_OF: Final = tuple(np.dtype(name) for name in DTYPES)


def array_bytes(array: np.ndarray[Any, Any], path: str) -> tuple[int, memoryview]:
    """Return the code of an array's type, and its bytes; those of a C-contiguous one are shared.

    Raises:
        EncodeError: if the type cannot be encoded; the error names the path to the array.
    """
    code = _dtype_code(array.dtype, path)
    data = np.ascontiguousarray(array, dtype=_DTYPE_OF[code])
    return code, data.reshape(-1).view(np.uint8).data


def array_of(code: Any, shape: list[Any], data: Any) -> np.ndarray[Any, Any]:
    """Return the array with these bytes, as a view of them.

    Raises:
        DecodeError: if the type is unknown.
    """
    return np.frombuffer(data, _dtype_of(code)).reshape(shape)


def scalar_bytes(value: np.generic, path: str) -> bytes:
    """Return the code of a scalar's type and its bytes.

    Raises:
        EncodeError: if the type cannot be encoded; the error names the path to the scalar.
    """
    code = _dtype_code(value.dtype, path)
    return bytes([code]) + np.asarray(value, _DTYPE_OF[code]).tobytes()


def scalar_of(data: memoryview) -> Any:
    """Return the scalar with these bytes.

    Raises:
        DecodeError: if the type is unknown.
    """
    return np.frombuffer(data[1:], _dtype_of(data[0]), count=1)[0]


def view_with_release(memory: Any, release: Callable[[], object]) -> memoryview:
    """Return a view of foreign memory that is released when no view of it is alive.

    Args:
        memory: a buffer of bytes.
        release: called once, on the thread that drops the last view.
    """
    return view_with_owner(memory, _Release(release))


def view_with_owner(memory: Any, owner: object) -> memoryview:
    """Return a view of foreign memory; all views made from it keep the owner alive."""
    view = np.frombuffer(memory, np.uint8).view(_OwnedView)
    view.owner = owner
    return view.data


def owner_of(piece: bytes | memoryview) -> object:
    """Return the owner that :func:`view_with_owner` was given for a view; None for other bytes."""
    whole = piece.obj if isinstance(piece, memoryview) else None
    return whole.owner if isinstance(whole, _OwnedView) else None


class _OwnedView(np.ndarray):
    """A view that keeps the owner of its memory alive."""

    owner: object = None


class _Release:
    """Calls a function when it is deleted."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release

    def __del__(self) -> None:
        self._release()


def _dtype_of(code: Any) -> np.dtype[Any]:
    if not isinstance(code, int) or not 0 <= code < len(_DTYPE_OF):
        raise DecodeError(
            f"unknown array type {code!r}; install the same version of dmiddleware on all hosts"
        )
    return _DTYPE_OF[code]


def _dtype_code(dtype: np.dtype[Any], path: str) -> int:
    code = _DTYPE_CODE.get(dtype)
    if code is None:
        raise EncodeError(
            f"{path} is an array of {dtype}, which cannot be encoded; convert it to one of "
            f"{', '.join(np.dtype(name).name for name in DTYPES)}"
        )
    return code
