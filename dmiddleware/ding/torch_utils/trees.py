"""Numbers, arrays and tensors in dictionaries and lists, with DI-engine's names."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
import treetensor.torch as ttorch
from torch import nn

from dmiddleware.ding.utils.collections import get_shape0

__all__ = [
    "get_shape0",
    "tensor_to_list",
    "to_device",
    "to_dtype",
    "to_item",
    "to_list",
    "to_ndarray",
    "to_tensor",
]


def _mapped(item: Any, leaf: Callable[[Any], Any], keep: Collection[str] = ()) -> Any:
    """Replace the leaves of dictionaries, lists and named tuples; other tuples become lists."""
    if isinstance(item, dict):
        return {key: x if key in keep else _mapped(x, leaf, keep) for key, x in item.items()}
    if isinstance(item, list | tuple):
        parts = [_mapped(x, leaf, keep) for x in item]
        return type(item)(*parts) if hasattr(item, "_fields") else parts
    return leaf(item)


def _is_numbers(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and isinstance(item[0], numbers.Real)


def to_device(item: Any, device: Any, ignore_keys: Collection[str] = ()) -> Any:
    """Move modules, tensors, and those in dictionaries and lists; other values stay."""
    return _mapped(
        item,
        lambda x: x.to(device) if isinstance(x, torch.Tensor | nn.Module | ttorch.Tensor) else x,
        ignore_keys,
    )


def to_dtype(item: Any, dtype: torch.dtype) -> Any:
    """Convert tensors in dictionaries and lists to a dtype."""
    return _mapped(item, lambda x: x.to(dtype=dtype))


def to_tensor(
    item: Any,
    dtype: torch.dtype | None = None,
    ignore_keys: Collection[str] = (),
    transform_scalar: bool = True,
) -> Any:
    """Convert arrays, lists of numbers and numbers to tensors; float64 arrays become float32.

    Flags, strings and None stay, and numbers stay without ``transform_scalar``.

    Raises:
        TypeError: for a value of another type.
    """
    if isinstance(item, dict):
        return {
            key: x if key in ignore_keys else to_tensor(x, dtype, ignore_keys, transform_scalar)
            for key, x in item.items()
        }
    if _is_numbers(item):
        return torch.as_tensor(item, dtype=dtype)
    if isinstance(item, list | tuple):
        parts = [to_tensor(x, dtype, ignore_keys, transform_scalar) for x in item]
        return type(item)(*parts) if hasattr(item, "_fields") else parts
    if isinstance(item, np.ndarray):
        is_double = item.dtype == np.float64
        return torch.as_tensor(item, dtype=dtype or (torch.float32 if is_double else None))
    if item is None or isinstance(item, bool | str):
        return item
    if isinstance(item, torch.Tensor):
        return item if dtype is None else item.to(dtype)
    if not np.isscalar(item):
        raise TypeError(f"no tensor can be made of {item!r:.100}")
    return torch.as_tensor(item, dtype=dtype) if transform_scalar else item


def to_ndarray(item: Any, dtype: Any = None) -> Any:
    """Convert tensors, lists of numbers and numbers to arrays; flags, strings and None stay."""
    if _is_numbers(item):
        return np.array(item, dtype)
    if isinstance(item, list | tuple) and not item:
        return None
    if isinstance(item, dict):
        return {key: to_ndarray(x, dtype) for key, x in item.items()}
    if isinstance(item, list | tuple):
        parts = [to_ndarray(x, dtype) for x in item]
        return type(item)(*parts) if hasattr(item, "_fields") else parts
    if item is None or isinstance(item, bool | str):
        return item
    if isinstance(item, torch.Tensor):
        return np.asarray(item.detach().cpu(), dtype)
    return np.asarray(item, dtype)


def to_list(item: Any) -> Any:
    """Convert tensors and arrays to lists."""
    return _mapped(item, lambda x: x.tolist() if isinstance(x, torch.Tensor | np.ndarray) else x)


tensor_to_list = to_list


def to_item(data: Any, ignore_error: bool = True) -> Any:
    """Convert tensors and arrays of one element to numbers.

    In a dictionary, those of more elements are left out.

    Raises:
        ValueError: for more elements, without ``ignore_error`` or outside of a dictionary.
        RuntimeError: likewise, for tensors.
    """
    if isinstance(data, Mapping):
        return {
            key: to_item(x, ignore_error)
            for key, x in data.items()
            if not (ignore_error and isinstance(x, torch.Tensor | np.ndarray) and _size(x) != 1)
        }
    if isinstance(data, list | tuple):
        return [to_item(x, ignore_error) for x in data]
    return data.item() if isinstance(data, torch.Tensor | np.ndarray | ttorch.Tensor) else data


def _size(x: torch.Tensor | np.ndarray) -> int:
    return x.numel() if isinstance(x, torch.Tensor) else x.size
