"""Layers: activations, initialization, and the multi-layer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.registry import nearest
from dmiddleware.settings import Count, Counts, Positive, checked
from dmiddleware.torch_private import forward_layers

__all__ = [
    "BatchRenorm",
    "Init",
    "MLP",
    "NoisyLinear",
    "NoisyMLP",
    "Norm",
    "activation_of",
    "check_default_dtype",
    "orthogonal_init",
]

Init: TypeAlias = Literal["orthogonal"] | None
"""``"orthogonal"``, or None for torch's own (Kaiming uniform)."""

Norm: TypeAlias = Literal["layer", "batch_renorm"] | None
"""``"layer"``: layer normalization before each activation; ``"batch_renorm"``: a
:class:`BatchRenorm` of the input, and one after each activation; None: none."""

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
}


def check_default_dtype(user: str) -> None:
    """Refuse another default dtype than float32, of which networks and what they see are made.

    Args:
        user: what would be built, for the message.

    Raises:
        ConfigError: with the default dtype.
    """
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        raise ConfigError(
            f"{user} learns in float32, but torch's default dtype is {dtype}; call "
            "torch.set_default_dtype(torch.float32) before it is built and used. Data may be of "
            "any dtype, because it is converted"
        )


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


class BatchRenorm(nn.Module):
    """Batch renormalization, with a scale and a shift for each feature.

    Source: Ioffe, "Batch Renormalization" (2017), algorithm 1. In eval mode, features are
    normalized by running statistics. In training mode, they are normalized by those of the batch,
    and then corrected, without gradient, towards the running ones: by a factor from 1/3 to 3 and a
    shift from -5 to 5. The first 100,000 batches are not corrected. Each batch in training
    mode moves the running statistics by 1%; features that are NaN or infinite do not.

    The bounds, the share and the ε of 0.001 are those of CrossQ (Bhatt et al., 2024, appendix).

    Args:
        n_features: length of the input's last dimension.
        n_layers: as many layers are computed together, each with its own statistics; None: one.

    Attributes:
        mean: running mean of each feature, ``[n_features]`` or ``[n_layers, 1, n_features]``.
        variance: running variance of each.
        n_batches: float32 scalar, the batches in training mode.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    n_batches: torch.Tensor
    _SHARE: Final = 0.01
    _EPS: Final = 1e-3
    _LARGEST_FACTOR: Final = 3.0
    _LARGEST_SHIFT: Final = 5.0
    _N_WITHOUT_CORRECTION: Final = 100_000

    def __init__(self, n_features: int, *, n_layers: int | None = None) -> None:
        super().__init__()
        shape = (n_features,) if n_layers is None else (n_layers, 1, n_features)
        self._is_single = n_layers is None
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("n_batches", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized features, in the shape of ``x``.

        Args:
            x: ``[…, n_features]``; of several layers, ``[n_layers, B, n_features]``.
        """
        if not self.training:
            scale = self.weight * (self.variance + self._EPS).rsqrt()
            return torch.addcmul(self.bias, x - self.mean, scale)
        rows = tuple(range(x.dim() - 1)) if self._is_single else (1,)
        variance, mean = torch.var_mean(x, rows, correction=0, keepdim=not self._is_single)
        deviation = (variance + self._EPS).sqrt()
        with torch.no_grad():
            factor, shift = self._correction(mean, deviation)
            self._observe(mean, variance)
        scale = self.weight * factor / deviation
        return torch.addcmul(shift * self.weight + self.bias, x - mean, scale)

    def _correction(
        self, mean: torch.Tensor, deviation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factor and the shift that lead to the running statistics, bounded."""
        largest = self._LARGEST_FACTOR
        running = (self.variance + self._EPS).sqrt()
        factor = (deviation / running).clamp(1.0 / largest, largest)
        shift = ((mean - self.mean) / running).clamp(-self._LARGEST_SHIFT, self._LARGEST_SHIFT)
        is_corrected = self.n_batches >= self._N_WITHOUT_CORRECTION
        return torch.where(is_corrected, factor, 1.0), torch.where(is_corrected, shift, 0.0)

    def _observe(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics."""
        is_finite = variance.isfinite()  # a mean that is not has no finite variance
        self.mean.lerp_(torch.where(is_finite, mean, self.mean), self._SHARE)
        self.variance.lerp_(torch.where(is_finite, variance, self.variance), self._SHARE)
        self.n_batches += 1


class NoisyLinear(nn.Linear):
    """A linear layer whose weights are learned distributions, so that acting explores.

    Source: Fortunato et al., "Noisy Networks for Exploration" (2018), equations 9 to 11: the noise
    of a weight is the product of one number for its input and one for its output. The layer has no
    noise of its own: it is an argument of the forward, so that a random generator draws it. A layer
    without noise uses the means of its weights, ``weight`` and ``bias``.

    Args:
        in_features: length of the input's last dimension.
        out_features: length of the output's.
        sigma: the first standard deviation of all weights, times ``sqrt(in_features)`` (section
            3.2); positive.

    Attributes:
        n_noise: how many numbers one draw of the noise has.

    Raises:
        ConfigError: if ``sigma`` is not positive.

    Example:
        >>> layer = NoisyLinear(3, 2)
        >>> noise = torch.randn(5, layer.n_noise)
        >>> layer(torch.ones(5, 3), noise).shape
        torch.Size([5, 2])
    """

    def __init__(self, in_features: int, out_features: int, *, sigma: float = 0.5) -> None:
        super().__init__(in_features, out_features)
        sigma = checked("sigma", sigma, Positive)
        first = sigma / math.sqrt(in_features)
        self.weight_sigma = nn.Parameter(torch.full_like(self.weight, first))
        self.bias_sigma = nn.Parameter(torch.full_like(self.bias, first))
        self.n_noise = in_features + out_features

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[…, out_features]`` of ``x [… , in_features]``.

        Args:
            x: the input.
            noise: standard normal numbers, ``[n_noise]``, or ``[…, n_noise]`` for a draw per row;
                None: the weights are their means.
        """
        mean: torch.Tensor = F.linear(x, self.weight, self.bias)
        if noise is None:
            return mean
        shaped = noise.sign() * noise.abs().sqrt()
        for_input, for_output = shaped[..., : self.in_features], shaped[..., self.in_features :]
        # Equal to a matrix product with the noisy weights, which are never built.
        moved: torch.Tensor = F.linear(x * for_input, self.weight_sigma, self.bias_sigma)
        return mean + for_output * moved


class MLP(nn.Sequential):
    """Linear layers with activations after all of them: a faster ``nn.Sequential``.

    Args:
        in_features: length of the input's last dimension.
        hidden_sizes: width of each layer; may be empty if ``out_features`` is given.
        out_features: width of one more linear layer at the end, without activation.
        activation: see :func:`activation_of`.
        norm: what normalizes; see :data:`Norm`.
        init: ``"orthogonal"`` with gain ``sqrt(2)``, as PPO is published (Huang et al., "The 37
            Implementation Details of PPO", 2022, detail 2); None: torch's own.

    Attributes:
        out_features: length of the output's last dimension.
        linear_type: the class of the linear layers.
        n_noise: 0; see :class:`NoisyMLP`.

    Raises:
        ValueError: if a size is not positive, or a name unknown.
    """

    linear_type: ClassVar[type[nn.Linear]] = nn.Linear
    n_noise: int = 0

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
        in_features = checked("in_features", in_features, Count)
        hidden_sizes = checked("hidden_sizes", hidden_sizes, Counts)
        checked("norm", norm, Norm)
        checked("init", init, Init)
        layers: list[nn.Module] = []
        if norm == "batch_renorm":
            layers.append(BatchRenorm(in_features))
        width = in_features
        for size in hidden_sizes:
            layers.append(self.linear_type(width, size))
            if norm == "layer":
                layers.append(nn.LayerNorm(size))
            layers.append(activation_of(activation))
            if norm == "batch_renorm":
                layers.append(BatchRenorm(size))
            width = size
        if out_features is not None:
            out_features = checked("out_features", out_features, Count)
            layers.append(self.linear_type(width, out_features))
            width = out_features
        super().__init__(*layers)
        self.out_features = width
        if init == "orthogonal":
            orthogonal_init(self, math.sqrt(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[…, out_features]`` of numbers ``x [… , in_features]`` of any dtype."""
        if x.dtype is not torch.float32:
            x = x.to(next(self.parameters()).dtype)
        return forward_layers(self, x)


class NoisyMLP(MLP):
    """An :class:`MLP` of :class:`NoisyLinear` layers.

    Args:
        in_features: as in :class:`MLP`.
        hidden_sizes: as in :class:`MLP`.
        **options: the other options of :class:`MLP`.

    Attributes:
        n_noise: how many numbers one draw of the noise has.
    """

    linear_type: ClassVar[type[nn.Linear]] = NoisyLinear

    def __init__(self, in_features: int, hidden_sizes: Sequence[int], **options: Any) -> None:
        super().__init__(in_features, hidden_sizes, **options)
        self.n_noise = sum(layer.n_noise for layer in self if isinstance(layer, NoisyLinear))

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``[…, out_features]`` of ``x [… , in_features]``.

        Args:
            x: the input.
            noise: ``[n_noise]`` or ``[…, n_noise]``; None: the weights are their means.
        """
        if noise is None:
            return super().forward(x)
        start = 0
        for layer in self:
            if isinstance(layer, NoisyLinear):
                x = layer(x, noise[..., start : start + layer.n_noise])
                start += layer.n_noise
            else:
                x = layer(x)
        return x


def as_float(x: torch.Tensor, *, pixels: bool = False) -> torch.Tensor:
    """Return observations as float32.

    Args:
        x: of any shape and dtype.
        pixels: whether uint8 numbers are those of pixels, which are scaled by ``1 / 255``.
    """
    if x.dtype is torch.float32:
        return x
    if pixels and x.dtype is torch.uint8:
        return x.to(torch.float32).mul_(1.0 / 255.0)
    return x.to(torch.float32)
