"""Wire adapters: how the router sends tensors and batches between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from dmiddleware.tree import Batch, as_tree, clone, items_of

__all__ = ["WireAdapter", "ADAPTERS", "TREE_ADAPTERS"]


class WireAdapter(NamedTuple):
    """Converts instances of a type to plain values and back.

    Attributes:
        name: the type's name on the wire.
        type: the class.
        to_plain: converts an instance to dictionaries, lists and numpy arrays.
        from_plain: the inverse.
        copy: copies an instance on its device, without gradient.
    """

    name: str
    type: type
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]
    copy: Callable[[Any], Any] = clone


def _tensor_to_plain(tensor: torch.Tensor) -> list[Any]:
    """Return a tensor as an array, with the dtype's name where numpy does not have it."""
    local = tensor.detach().cpu()
    if local.dtype is torch.bfloat16:
        return [local.contiguous().view(torch.int16).numpy(), "bfloat16"]
    return [local.numpy(), ""]


def _tensor_from_plain(plain: list[Any]) -> torch.Tensor:
    array, dtype = plain
    if not array.flags.writeable:
        array = np.array(array)
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _tree_to_plain(tree: Any) -> dict[str, Any]:
    return {str(key): value for key, value in items_of(tree)}


ADAPTERS: Final = (
    WireAdapter("torch.Tensor", torch.Tensor, _tensor_to_plain, _tensor_from_plain),
    WireAdapter("torch.Parameter", torch.nn.Parameter, _tensor_to_plain, _tensor_from_plain),
)
"""torch's tensors; a parameter arrives as a plain tensor."""

TREE_ADAPTERS: Final = (
    *ADAPTERS,
    WireAdapter("treetensor.Tensor", Batch, _tree_to_plain, as_tree),
)
"""Batches, and the tensors in them."""
