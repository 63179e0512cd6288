"""``float`` as files for NumPy 1 expect it."""

from __future__ import annotations

import builtins
from typing import Any, Final

import numpy as np

__all__ = ["TolerantFloat"]


class _TolerantType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.float)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.float)

    def __call__(cls, value: Any = 0.0) -> builtins.float:
        is_single = isinstance(value, np.ndarray) and value.size == 1
        return builtins.float(value.item() if is_single else value)


class TolerantFloat(metaclass=_TolerantType):
    """The built-in ``float``, but for an array of one element, whatever its dimensions."""

    # What NumPy asks a type for that is given as a dtype.
    dtype: Final = np.dtype(builtins.float)
