"""The face of ``ding.torch_utils``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["to_list", "to_ndarray", "to_tensor"]


def to_ndarray(item: Any, dtype: Any = None) -> Any:
    """Return numbers, tensors, and dictionaries and lists of them as arrays."""
    if isinstance(item, Mapping):
        return {name: to_ndarray(value, dtype) for name, value in item.items()}
    return np.asarray(item, dtype)


def to_tensor(item: Any, dtype: torch.dtype | None = None) -> Any:
    """Return numbers, arrays, and dictionaries of them as tensors."""
    if isinstance(item, Mapping):
        return {name: to_tensor(value, dtype) for name, value in item.items()}
    return torch.as_tensor(item, dtype=dtype)


def to_list(item: Any) -> Any:
    """Return arrays, and dictionaries of them as lists."""
    if isinstance(item, Mapping):
        return {name: to_list(value) for name, value in item.items()}
    return np.asarray(item).tolist()
