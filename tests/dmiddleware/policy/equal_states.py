"""Whether two states are equal."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["same"]


def same(one: Any, other: Any) -> bool:
    """Return whether two nested dictionaries have equal tensors and values."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)
