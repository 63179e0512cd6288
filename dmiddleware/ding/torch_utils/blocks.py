"""Parts of networks, with DI-engine's names, arguments and names of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "MLP",
    "Flatten",
    "NoiseLinearLayer",
    "ResBlock",
    "ResFCBlock",
    "ScatterConnection",
    "Swish",
    "build_activation",
    "build_normalization",
    "conv2d_block",
    "fc_block",
    "noise_block",
    "one_hot",
]

Flatten = nn.Flatten
Swish = nn.SiLU


class _Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


_ACTIVATIONS: Final[dict[str, Callable[[], nn.Module]]] = {
    "relu": nn.ReLU,
    "prelu": nn.PReLU,
    "swish": nn.SiLU,
    "gelu": lambda: nn.GELU(approximate="tanh"),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "square": lambda: _Function(torch.square),
    "identity": nn.Identity,
}
_NORMALIZATIONS: Final[dict[str, type[nn.Module]]] = {
    "BN1": nn.BatchNorm1d,
    "BN2": nn.BatchNorm2d,
    "IN1": nn.InstanceNorm1d,
    "IN2": nn.InstanceNorm2d,
    "LN": nn.LayerNorm,
    "SyncBN": nn.SyncBatchNorm,
}


def build_activation(activation: str, inplace: bool | None = None) -> nn.Module:
    """Return an activation by its name; ``inplace`` is not read, since it changes no result.

    Raises:
        KeyError: for an unknown name.
    """
    if activation not in _ACTIVATIONS:
        raise KeyError(f"no activation is called {activation!r}; there are {list(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]()


def build_normalization(norm_type: str, dim: int | None = None) -> type[nn.Module]:
    """Return the class of a normalization: BN or IN of ``dim`` dimensions, LN or SyncBN.

    Raises:
        KeyError: for an unknown name.
    """
    key = f"{norm_type}{dim}" if dim is not None and norm_type in ("BN", "IN") else norm_type
    if key not in _NORMALIZATIONS:
        raise KeyError(f"no normalization is called {key!r}; there are {list(_NORMALIZATIONS)}")
    return _NORMALIZATIONS[key]


def _packed(*layers: nn.Module | None, out_channels: int | None = None) -> nn.Sequential:
    packed = nn.Sequential(*[layer for layer in layers if layer is not None])
    if out_channels is not None:
        packed.out_channels = out_channels  # type: ignore[assignment]
    return packed


def _normalization(norm_type: str | None, dim: int, size: int) -> nn.Module | None:
    if norm_type is None:
        return None
    build: Any = build_normalization(norm_type, dim)
    layer: nn.Module = build(size)
    return layer


def fc_block(
    in_channels: int,
    out_channels: int,
    activation: nn.Module | None = None,
    norm_type: str | None = None,
    use_dropout: bool = False,
    dropout_probability: float = 0.5,
) -> nn.Sequential:
    """Return a linear layer with what comes after it."""
    return MLP(
        in_channels,
        out_channels,
        out_channels,
        1,
        activation=activation,
        norm_type=norm_type,
        use_dropout=use_dropout,
        dropout_probability=dropout_probability,
    )


def MLP(  # noqa: N802 (DI-engine's name)
    in_channels: int,
    hidden_channels: int,
    out_channels: int,
    layer_num: int,
    layer_fn: Callable[..., nn.Module] | None = None,
    activation: nn.Module | None = None,
    norm_type: str | None = None,
    use_dropout: bool = False,
    dropout_probability: float = 0.5,
    output_activation: bool = True,
    output_norm: bool = True,
    last_linear_layer_init_zero: bool = False,
) -> nn.Sequential:
    """Return ``layer_num`` linear layers, each with normalization, activation and dropout."""
    sizes = [in_channels, *[hidden_channels] * (layer_num - 1), out_channels]
    layers: list[nn.Module | None] = []
    linear: nn.Module = nn.Identity()
    for i in range(layer_num):
        is_last = i == layer_num - 1
        linear = (layer_fn or nn.Linear)(sizes[i], sizes[i + 1])
        layers.append(linear)
        if output_norm or not is_last:
            layers.append(_normalization(norm_type, 1, sizes[i + 1]))
        if output_activation or not is_last:
            layers += [activation, nn.Dropout(dropout_probability) if use_dropout else None]
    if last_linear_layer_init_zero:
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
    return _packed(*layers or [linear])


def conv2d_block(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    pad_type: str = "zero",
    activation: nn.Module | None = None,
    norm_type: str | None = None,
    num_groups_for_gn: int = 1,
    bias: bool = True,
) -> nn.Sequential:
    """Return a convolution with what comes before and after it.

    ``norm_type`` is also LN (over channels and places) or GN, of ``num_groups_for_gn`` groups.
    """
    pads: dict[str, Any] = {"reflect": nn.ReflectionPad2d, "replication": nn.ReplicationPad2d}
    pad = None if pad_type == "zero" else pads[pad_type](padding)
    conv = nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride,
        padding=padding if pad is None else 0,
        dilation=dilation,
        groups=groups,
        bias=bias,
    )
    if norm_type in ("LN", "GN"):
        n_groups = 1 if norm_type == "LN" else num_groups_for_gn
        norm: nn.Module | None = nn.GroupNorm(n_groups, out_channels)
    else:
        norm = _normalization(norm_type, 2, out_channels)
    return _packed(pad, conv, norm, activation, out_channels=out_channels)


class ResBlock(nn.Module):
    """A residual block of convolutions (He et al., "Deep Residual Learning", 2016).

    Args:
        in_channels: channels of the input.
        activation: after the first convolutions, and after the sum.
        norm_type: see :func:`conv2d_block`.
        res_type: ``"basic"``, ``"bottleneck"``, or ``"downsample"``, which halves the image.
        bias: whether convolutions have one.
        out_channels: channels of the output; None: those of the input.
    """

    def __init__(
        self,
        in_channels: int,
        activation: nn.Module | None = None,
        norm_type: str | None = "BN",
        res_type: str = "basic",
        bias: bool = True,
        out_channels: int | None = None,
    ) -> None:
        super().__init__()
        self.act = nn.ReLU() if activation is None else activation
        self.res_type = res_type
        n_in, n_out = in_channels, out_channels or in_channels
        # Kernel, stride and padding of each convolution.
        first = {"basic": (3, 1, 1), "bottleneck": (1, 1, 0), "downsample": (3, 2, 1)}
        if res_type not in first:
            raise ValueError(f"res_type must be one of {list(first)}, got {res_type!r}")
        common: dict[str, Any] = {"norm_type": norm_type, "bias": bias}
        is_bottleneck = res_type == "bottleneck"
        self.conv1 = conv2d_block(n_in, n_out, *first[res_type], activation=self.act, **common)
        self.conv2 = conv2d_block(
            n_out, n_out, 3, 1, 1, activation=self.act if is_bottleneck else None, **common
        )
        if is_bottleneck:
            self.conv3 = conv2d_block(n_out, n_out, 1, 1, 0, **common)
        elif res_type == "downsample":
            self.conv3 = conv2d_block(n_in, n_out, 3, 2, 1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[B, C, H, W]``."""
        y = self.conv2(self.conv1(x))
        if self.res_type == "bottleneck":
            y = self.conv3(y)
        elif self.res_type == "downsample":
            x = self.conv3(x)
        summed: torch.Tensor = self.act(y + x)
        return summed


class ResFCBlock(nn.Module):
    """A residual block of two linear layers."""

    def __init__(
        self,
        in_channels: int,
        activation: nn.Module | None = None,
        norm_type: str | None = "BN",
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        self.act = nn.ReLU() if activation is None else activation
        self.dropout = None if dropout is None else nn.Dropout(dropout)
        self.fc1 = fc_block(in_channels, in_channels, activation=self.act, norm_type=norm_type)
        self.fc2 = fc_block(in_channels, in_channels, norm_type=norm_type)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[B, N]``."""
        y: torch.Tensor = self.act(self.fc2(self.fc1(x)) + x)
        return y if self.dropout is None else self.dropout(y)


class NoiseLinearLayer(nn.Module):
    """A linear layer with factorized noise (Fortunato et al., "Noisy Networks", 2018).

    ``enable_noise`` switches the noise on, and ``reset_noise`` draws it again.
    """

    def __init__(self, in_channels: int, out_channels: int, sigma0: float = 0.4) -> None:
        super().__init__()
        self.in_channels, self.out_channels, self.sigma0 = in_channels, out_channels, sigma0
        self.enable_noise = False
        bound = 1.0 / math.sqrt(in_channels)
        scale = sigma0 / math.sqrt(in_channels), sigma0 / math.sqrt(out_channels)
        self.weight_mu = nn.Parameter(
            torch.empty(out_channels, in_channels).uniform_(-bound, bound)
        )
        self.weight_sigma = nn.Parameter(torch.full((out_channels, in_channels), scale[0]))
        self.bias_mu = nn.Parameter(torch.empty(out_channels).uniform_(-bound, bound))
        self.bias_sigma = nn.Parameter(torch.full((out_channels,), scale[1]))
        self.register_buffer("weight_eps", torch.empty(out_channels, in_channels))
        self.register_buffer("bias_eps", torch.empty(out_channels))
        self.reset_noise()

    def reset_noise(self) -> None:
        """Draw the noise again."""
        noise = [torch.randn(n).to(self.weight_mu) for n in (self.out_channels, self.in_channels)]
        self.bias_eps, inner = (x.sign() * x.abs().sqrt() for x in noise)
        self.weight_eps = self.bias_eps.outer(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[…, out_channels]``."""
        if not self.enable_noise:
            return F.linear(x, self.weight_mu, self.bias_mu)
        weight = self.weight_mu + self.weight_sigma * self.weight_eps
        return F.linear(x, weight, self.bias_mu + self.bias_sigma * self.bias_eps)


def noise_block(
    in_channels: int,
    out_channels: int,
    activation: nn.Module | None = None,
    norm_type: str | None = None,
    use_dropout: bool = False,
    dropout_probability: float = 0.5,
    sigma0: float = 0.4,
) -> nn.Sequential:
    """Return :func:`fc_block` with a :class:`NoiseLinearLayer`."""
    return MLP(
        in_channels,
        out_channels,
        out_channels,
        1,
        lambda n_in, n_out: NoiseLinearLayer(n_in, n_out, sigma0),
        activation,
        norm_type,
        use_dropout,
        dropout_probability,
    )


class ScatterConnection(nn.Module):
    """Puts the features of entities at their places on a map (Vinyals et al., 2019).

    Args:
        scatter_type: what happens at a place of several: the last ``"cover"``s, or they ``"add"``.
    """

    def __init__(self, scatter_type: str) -> None:
        super().__init__()
        if scatter_type not in ("cover", "add"):
            raise ValueError(f"scatter_type must be 'cover' or 'add', got {scatter_type!r}")
        self.scatter_type = scatter_type

    def forward(
        self, x: torch.Tensor, spatial_size: tuple[int, int], location: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[B, N, H, W]`` of features ``[B, M, N]`` at ``location`` ``[B, M, 2]``, y, x."""
        n_rows, _, n_features = x.shape
        height, width = spatial_size
        index = location[..., 0] * width + location[..., 1]
        index = index.unsqueeze(1).expand(n_rows, n_features, -1)
        flat = x.new_zeros(n_rows, n_features, height * width)
        scatter = flat.scatter if self.scatter_type == "cover" else flat.scatter_add
        return scatter(2, index, x.transpose(1, 2)).view(n_rows, n_features, height, width)


def one_hot(val: torch.Tensor, num: int, num_first: bool = False) -> torch.Tensor:
    """Return ``[…, num]`` float32 of int64 ``[…]``; -1 is all zeros.

    ``num_first`` gives ``[num, …]``.
    """
    encoded = F.one_hot(val.clamp(min=0), num).float() * (val != -1).unsqueeze(-1)
    return encoded.movedim(-1, 0) if num_first else encoded
