"""Layers: activations, initialisation, and the multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from dmiddleware.registry import nearest

__all__ = ["Init", "Norm", "MLP", "activation_of", "call", "orthogonal_init"]

Init: TypeAlias = Literal["orthogonal"] | None
"""``"orthogonal"``, or None for torch's own (Kaiming uniform)."""

Norm: TypeAlias = Literal["layer"] | None
"""``"layer"``: layer normalisation before each activation; None: none."""

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
}


def activation_of(name: str) -> nn.Module:
    """Return a new activation module: relu, tanh, elu, gelu, silu or leaky_relu.

    Raises:
        ValueError: for another name; the nearest known one is named.
    """
    if name not in _ACTIVATIONS:
        near = nearest(str(name), _ACTIVATIONS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(_ACTIVATIONS)}"
        raise ValueError(f"unknown activation {name!r}; {hint}")
    return _ACTIVATIONS[name]()


def orthogonal_init(module: nn.Module, gain: float) -> None:
    """Fill the weights of all linear and convolutional layers orthogonally, the biases with 0.

    Args:
        module: changed in place, with all it contains.
        gain: factor of the orthogonal matrix; see Saxe et al., "Exact Solutions to the Nonlinear
            Dynamics of Learning in Deep Linear Neural Networks" (2014).
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class MLP(nn.Sequential):
    """Linear layers with activations after all of them: a faster ``nn.Sequential``.

    Args:
        in_features: length of the input's last dimension.
        hidden_sizes: width of each layer; may be empty if ``out_features`` is given.
        out_features: width of one more linear layer at the end, without activation.
        activation: see :func:`activation_of`.
        norm: ``"layer"`` normalises before each activation.
        init: ``"orthogonal"`` with gain ``sqrt(2)``, as PPO is published (Huang et al., "The 37
            Implementation Details of PPO", 2022, detail 2); None: torch's own.

    Attributes:
        out_features: length of the output's last dimension.

    Raises:
        ValueError: if a size is not positive, or a name unknown.
    """

    def __init__(
        self,
        in_features: int,
        hidden_sizes: Sequence[int],
        *,
        out_features: int | None = None,
        activation: str = "relu",
        norm: Norm = None,
        init: Init = None,
    ) -> None:
        check_sizes("in_features", [in_features])
        check_sizes("hidden_sizes", hidden_sizes)
        check_choice("norm", norm, ("layer", None))
        check_choice("init", init, ("orthogonal", None))
        layers: list[nn.Module] = []
        width = in_features
        for size in hidden_sizes:
            layers.append(nn.Linear(width, size))
            if norm == "layer":
                layers.append(nn.LayerNorm(size))
            layers.append(activation_of(activation))
            width = size
        if out_features is not None:
            check_sizes("out_features", [out_features])
            layers.append(nn.Linear(width, out_features))
            width = out_features
        super().__init__(*layers)
        self.out_features = width
        if init == "orthogonal":
            orthogonal_init(self, math.sqrt(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[…, out_features]`` of ``x [… , in_features]``."""
        # With small layers and batches, calling a module, and even getting its weight as an
        # attribute (torch looks it up in Python), costs more than the arithmetic.
        unseen = None  # a linear layer's output, which nothing else refers to
        for layer in self._modules.values():
            if type(layer) is nn.Linear and not _has_hooks(layer):
                parameters: dict[str, Any] = layer._parameters
                x = unseen = F.linear(x, parameters["weight"], parameters["bias"])
            elif type(layer) is nn.ReLU and not _has_hooks(layer):
                x = torch.relu_(x) if x is unseen else torch.relu(x)
            else:
                x = layer(x)
        return x


def call(module: nn.Module, x: Any) -> Any:
    """Return ``module(x)``, without torch's hook handling unless it has hooks."""
    return module(x) if _has_hooks(module) else module.forward(x)


def _has_hooks(layer: nn.Module) -> bool:
    return bool(
        layer._compiled_call_impl
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def as_float(x: torch.Tensor) -> torch.Tensor:
    """Return observations as float32: uint8 scaled by ``1 / 255``, other dtypes as they are."""
    if x.dtype is torch.float32:
        return x
    if x.dtype is torch.uint8:
        return x.to(torch.float32).mul_(1.0 / 255.0)
    return x.to(torch.float32)


def check_sizes(name: str, sizes: Any) -> None:
    """Reject sizes that are not positive integers.

    Raises:
        ValueError: naming the option and its value.
    """
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ValueError(f"{name} must be a list of positive integers, got {sizes!r}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be positive integers, got {size!r} in {list(sizes)!r}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Reject a value that is not one of the choices.

    Raises:
        ValueError: naming the option, its value and the choices.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
