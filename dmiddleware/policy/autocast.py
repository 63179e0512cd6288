"""Networks that compute in bfloat16 and return float32."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import nn

from dmiddleware.tree import map_leaves

__all__ = ["compute_in_bfloat16"]

_METHODS: Final = ("forward", "compute_actor", "compute_critic", "encode", "decode", "mix")
"""What policies call of a network."""


def compute_in_bfloat16(network: nn.Module) -> None:
    """Let a network multiply matrices in bfloat16, from now on and in its copies.

    Its weights stay float32, and so do its outputs: those in bfloat16 are converted, so losses,
    densities and optimizers are those of float32. See ``torch.autocast`` for what is computed in
    bfloat16: linear layers, convolutions and recurrent ones.
    """
    for name in _METHODS:
        if hasattr(type(network), name):
            # A copy of the network copies this attribute too, and has itself in it.
            setattr(network, name, partial(_call, network, name))


def _call(network: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    device = next((parameter.device.type for parameter in network.parameters()), "cpu")
    with torch.autocast(device, dtype=torch.bfloat16):
        output = getattr(type(network), name)(network, *args, **kwargs)
    return map_leaves(_as_float, output)


def _as_float(leaf: Any) -> Any:
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bfloat16
    return leaf.float() if is_half else leaf
