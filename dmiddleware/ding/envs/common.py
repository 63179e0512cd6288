"""The face of ``ding.envs.common``: functions and elements that env classes use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import imageio
import numpy as np
import torch
from torch.nn.functional import one_hot

__all__ = [
    "EnvElement",
    "EnvElementInfo",
    "affine_transform",
    "batch_binary_encode",
    "clip_one_hot",
    "div_func",
    "div_one_hot",
    "reorder_one_hot",
    "save_frames_as_gif",
    "sqrt_one_hot",
]

_NO_FOOTBALL: Final = "only its envs of Google Research Football use it, which is not maintained"

REFUSED: Final[Mapping[str, str]] = {
    "EnvElementRunner": _NO_FOOTBALL,
    "get_postion_vector": _NO_FOOTBALL,
    "num_first_one_hot": _NO_FOOTBALL,
    "reorder_boolean_vector": _NO_FOOTBALL,
    "reorder_one_hot_array": _NO_FOOTBALL,
}


class EnvElementInfo(NamedTuple):
    """The shape of a part of an env, and its limits and dtype."""

    shape: Any
    value: Any


class EnvElement:
    """A part of an env; a subclass defines ``_init``, which sets ``_shape`` and ``_value``."""

    _name = "EnvElement"
    _shape: Any
    _value: Any

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._init(*arguments, **options)

    def _init(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} defines no _init")

    @property
    def info(self) -> EnvElementInfo:
        """Its shape and value."""
        return EnvElementInfo(self._shape, self._value)


def affine_transform(
    data: Any,
    action_clip: bool = True,
    alpha: Any = None,
    beta: Any = None,
    min_val: Any = None,
    max_val: Any = None,
) -> Any:
    """Map values in [-1, 1] to ``[min_val, max_val]``, or to ``alpha * data + beta``.

    Args:
        data: an array.
        action_clip: clip the values to [-1, 1] first.
        alpha: the factor, without bounds.
        beta: what is added, without bounds; None: 0.
        min_val: the lower bound.
        max_val: the upper bound.
    """
    if action_clip:
        data = np.clip(data, -1, 1)
    if min_val is not None:
        alpha, beta = (max_val - min_val) / 2, (max_val + min_val) / 2
    return data * alpha + (0.0 if beta is None else beta)


def clip_one_hot(v: torch.Tensor, num: int) -> torch.Tensor:
    """Return integers, limited to ``[0, num)``, in one-hot form, float32 ``[…, num]``."""
    return one_hot(v.clamp(0, num - 1).long(), num).float()


def div_one_hot(v: torch.Tensor, max_val: int, ratio: int) -> torch.Tensor:
    """Return ``v / ratio``, limited to ``max_val / ratio``, in one-hot form."""
    return clip_one_hot(v.float().clamp(0, max_val) // ratio, int(max_val / ratio) + 1)


def sqrt_one_hot(v: torch.Tensor, max_val: int) -> torch.Tensor:
    """Return the roots of ``v``, rounded down and limited to that of ``max_val``, in one-hot."""
    return clip_one_hot(v.float().clamp(0, max_val).sqrt().floor(), int(max_val**0.5) + 1)


def div_func(inputs: torch.Tensor, other: float, unsqueeze_dim: int = 1) -> torch.Tensor:
    """Return ``inputs / other`` with one more dimension."""
    return inputs.float().unsqueeze(unsqueeze_dim) / other


def reorder_one_hot(
    v: torch.Tensor, dictionary: Mapping[int, int], num: int, transform: Any = None
) -> torch.Tensor:
    """Return what ``dictionary`` maps each value to, in one-hot form."""
    values = v.tolist() if transform is None else [transform[value] for value in v.tolist()]
    return clip_one_hot(torch.tensor([dictionary[value] for value in values]), num)


def batch_binary_encode(x: torch.Tensor, bit_num: int) -> torch.Tensor:
    """Return the bits of integers ``[…]``, the highest first, float32 ``[…, bit_num]``."""
    places = torch.arange(bit_num - 1, -1, -1)
    return ((x.long().unsqueeze(-1) >> places) & 1).float()


def save_frames_as_gif(frames: list[Any], path: str) -> None:
    """Write frames uint8 ``[H, W, 3]`` as an animation, 20 a second."""
    imageio.mimsave(path, frames, fps=20)
