"""Encoders: from observations of any shape to one feature vector per row.

Every encoder takes observations with any leading dimensions (``[B, …]``, ``[T, B, …]``, none) and
returns features ``[…, out_features]`` float32. Numbers are seen as they are, except for uint8
pixels, which are scaled to [0, 1]; :mod:`dmiddleware.model.spaces` says which arrays are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from dmiddleware.errors import SpaceError
from dmiddleware.model.layers import MLP, Init, as_float, orthogonal_init
from dmiddleware.model.spaces import (
    ObsShape,
    array_shape,
    as_obs_shape,
    is_image,
    is_one_hot,
    is_pixels,
    shape_leaves,
)
from dmiddleware.settings import Count, Counts, checked
from dmiddleware.tree import Nested

__all__ = [
    "VectorEncoder",
    "OneHotEncoder",
    "ImageEncoder",
    "ResidualSection",
    "NestedEncoder",
    "Encoder",
    "convolutions_for",
    "make_encoder",
    "VECTOR_HIDDEN_SIZES",
    "IMAGE_HIDDEN_SIZES",
]

VECTOR_HIDDEN_SIZES = (128, 128, 64)
IMAGE_HIDDEN_SIZES = (512,)
ConvLayers: TypeAlias = Sequence[tuple[int, int, int] | int]
"""The channels, kernel size and stride of each convolution; a single number is the channels of a
:class:`ResidualSection`."""
NATURE_CONV_LAYERS: ConvLayers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""The convolutions of Mnih et al., "Human-level control through deep RL" (Nature, 2015)."""


class VectorEncoder(MLP):
    """An MLP over arrays of numbers; those of other than one dimension are flattened.

    Where there is one dimension, an :class:`MLP` does the same.

    Args:
        obs_shape: shape of one observation, such as ``(4,)``.
        hidden_sizes: width of each layer.
        **options: ``activation``, ``norm`` and ``init`` of :class:`MLP`.
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden_sizes: Sequence[int] = VECTOR_HIDDEN_SIZES,
        **options: Any,
    ) -> None:
        leaf = as_obs_shape(obs_shape)
        shape = array_shape(leaf)
        super().__init__(math.prod(shape), hidden_sizes, **options)
        self._n_dims = len(shape)
        self._pixels = is_pixels(leaf)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return features ``[…, out_features]`` of ``obs [… , *obs_shape]``."""
        return super().forward(_flat(as_float(obs, pixels=self._pixels), self._n_dims))


class OneHotEncoder(MLP):
    """An MLP over one-hot integers, for Discrete and MultiDiscrete observations.

    Args:
        sizes: how many values each integer can take.
        hidden_sizes: width of each layer.
        **options: ``activation``, ``norm`` and ``init`` of :class:`MLP`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        hidden_sizes: Sequence[int] = VECTOR_HIDDEN_SIZES,
        **options: Any,
    ) -> None:
        super().__init__(sum(sizes), hidden_sizes, **options)
        self._sizes = tuple(sizes)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return features ``[…, out_features]``.

        Args:
            obs: integers, ``[…]`` for one size, ``[…, n]`` for ``n`` sizes.
        """
        index = obs.long()
        if len(self._sizes) == 1:
            x = F.one_hot(index, self._sizes[0])
        else:
            parts = [F.one_hot(index[..., i], size) for i, size in enumerate(self._sizes)]
            x = torch.cat(parts, dim=-1)
        x = x.to(torch.float32)
        return super().forward(x)


class ResidualSection(nn.Module):
    """A convolution, a pooling that halves both sides, and two residual blocks.

    IMPALA's deeper network has three of them, with 16, 32 and 32 channels (Espeholt et al.,
    "IMPALA", 2018, figure 3).

    Args:
        in_channels: of the input.
        channels: of the output.
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[N, channels, H / 2, W / 2]`` of images ``[N, in_channels, H, W]``."""
        x = self.pool(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return x


class ImageEncoder(nn.Module):
    """Convolutions with ReLU, and an MLP on their output.

    Args:
        obs_shape: ``(C, H, W)``, channels first, or that of a stack of images, ``(K, C, H, W)``,
            whose images are side by side as ``K * C`` channels.
        hidden_sizes: width of each linear layer after the convolutions.
        conv_layers: channels, kernel size and stride of each convolution, or a single number, the
            channels of a :class:`ResidualSection`: ``(16, 32, 32)`` is IMPALA's deeper network.
            None: the convolutions of Mnih et al., "Human-level control through deep RL" (Nature,
            2015), for images of at least 36 by 36.
        init: ``"orthogonal"`` or None.
        **options: ``activation`` and ``norm`` of :class:`MLP`, in the linear layers.

    Attributes:
        out_features: length of the output's last dimension.

    Raises:
        SpaceError: if the shape is not an image, or the image is too small or has channels last.
        ValueError: if ``conv_layers`` is not as described.
    """

    def __init__(
        self,
        obs_shape: Sequence[int],
        hidden_sizes: Sequence[int] = IMAGE_HIDDEN_SIZES,
        *,
        conv_layers: ConvLayers | None = None,
        init: Init = None,
        **options: Any,
    ) -> None:
        super().__init__()
        leaf = as_obs_shape(obs_shape)
        shape = array_shape(leaf)
        layers = NATURE_CONV_LAYERS if conv_layers is None else _check_conv_layers(conv_layers)
        _check_image(shape, layers)
        self._pixels = is_pixels(leaf)
        self._n_dims = len(shape)
        self._shape = (math.prod(shape[:-2]), *shape[-2:])
        channels, *sides = self._shape
        modules: list[nn.Module] = []
        for layer in layers:
            if isinstance(layer, int):
                modules.append(ResidualSection(channels, layer))
                channels, sides = layer, [(side + 1) // 2 for side in sides]
                continue
            width, kernel_size, stride = layer
            modules += [nn.Conv2d(channels, width, kernel_size, stride), nn.ReLU()]
            channels = width
            sides = [(side - kernel_size) // stride + 1 for side in sides]
        if isinstance(layers[-1], int):
            modules.append(nn.ReLU())  # a section ends with a sum
        self.convolutions = nn.Sequential(*modules)
        if init == "orthogonal":
            orthogonal_init(self.convolutions, math.sqrt(2.0))
        flat = channels * math.prod(sides)
        self.linear = MLP(flat, hidden_sizes, init=init, **options)
        self.out_features = self.linear.out_features

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return features ``[…, out_features]`` of images ``[…, *obs_shape]``, uint8 or float."""
        lead = obs.shape[: obs.dim() - self._n_dims]
        # Convolutions are faster over channels last.
        x = obs.reshape(-1, *self._shape).contiguous(memory_format=torch.channels_last)
        pixels = as_float(x, pixels=self._pixels)
        features: torch.Tensor = self.linear(self.convolutions(pixels).flatten(1))
        return features if len(lead) == 1 else features.reshape(*lead, -1)


class NestedEncoder(nn.Module):
    """An encoder of Dict and Tuple observations.

    All arrays of numbers are joined to one vector. If there are images or integers too, each of
    them has an encoder of its own, and one layer joins the features.

    Args:
        obs_shape: mapping of names to observation shapes, which may be nested.
        hidden_sizes: width of each layer in every encoder, the last one also that of the layer that
            joins them; None: each encoder's own default, joined in 128.
        conv_layers: as in :class:`ImageEncoder`, for all images.
        **options: ``activation``, ``norm`` and ``init`` of :class:`MLP`, for all layers.

    Attributes:
        out_features: length of the output's last dimension.
    """

    def __init__(
        self,
        obs_shape: Mapping[str, ObsShape],
        hidden_sizes: Sequence[int] | None = None,
        *,
        conv_layers: ConvLayers | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        shapes = dict(shape_leaves(obs_shape))
        others = {
            path: shape for path, shape in shapes.items() if is_image(shape) or is_one_hot(shape)
        }
        vectors = {path: shape for path, shape in shapes.items() if path not in others}
        self._vectors = [
            (path, len(array_shape(leaf)), is_pixels(leaf)) for path, leaf in vectors.items()
        ]
        self._others = list(others)
        encoders = []
        for path, shape in others.items():
            layers = conv_layers if is_image(shape) else None
            try:
                encoder = make_encoder(shape, hidden_sizes, conv_layers=layers, **options)
            except SpaceError as error:
                raise SpaceError(f"the part {'.'.join(path)!r} of observations: {error}") from None
            encoders.append(encoder)
        if vectors:
            width = sum(math.prod(array_shape(leaf)) for leaf in vectors.values())
            encoders.insert(0, make_encoder(width, hidden_sizes, **options))
        # A list, because names of a space may hold dots, which names of modules may not.
        self.encoders = nn.ModuleList(encoders)
        self.out_features: int = encoders[0].out_features
        self.join: MLP | None = None
        if len(encoders) > 1:
            self.out_features = hidden_sizes[-1] if hidden_sizes else 128
            width = sum(encoder.out_features for encoder in encoders)
            self.join = MLP(width, (self.out_features,), **options)

    def forward(self, obs: Nested) -> torch.Tensor:
        """Return features ``[…, out_features]``.

        Args:
            obs: a treetensor or nested dictionary of tensors, with the keys of the shape; more
                keys are ignored.
        """
        inputs = [_at(obs, path) for path in self._others]
        if self._vectors:
            flat = [
                _flat(as_float(_at(obs, path), pixels=pixels), n_dims)
                for path, n_dims, pixels in self._vectors
            ]
            inputs.insert(0, torch.cat(flat, dim=-1))
        features = [encoder(part) for encoder, part in zip(self.encoders, inputs, strict=True)]
        if self.join is None:
            only: torch.Tensor = features[0]
            return only
        joined: torch.Tensor = self.join(torch.cat(features, dim=-1))
        return joined


Encoder: TypeAlias = NestedEncoder | ImageEncoder | OneHotEncoder | VectorEncoder | MLP
"""What :func:`make_encoder` builds."""


def make_encoder(
    obs_shape: ObsShape,
    hidden_sizes: Sequence[int] | None = None,
    *,
    conv_layers: ConvLayers | None = None,
    **options: Any,
) -> Encoder:
    """Build the encoder for an observation shape (see :mod:`dmiddleware.model.spaces`).

    Args:
        obs_shape: an integer or tuple for a vector, a tuple of three or more for an image,
            ``("one_hot", n)`` for integers, a mapping for nested observations.
        hidden_sizes: width of each linear layer; None: 128, 128, 64 for vectors, 512 for images.
            For an image there may be none: its features are the output of the convolutions.
        conv_layers: of images, as in :class:`ImageEncoder`; not allowed without one.
        **options: ``activation``, ``norm`` and ``init`` of :class:`MLP`.

    Returns:
        A module with the attribute ``out_features``.

    Raises:
        SpaceError: if the shape is none of these, or an image too small for the convolutions.
        ValueError: if another option is invalid.
    """
    shape = as_obs_shape(obs_shape)
    may_be_empty = not isinstance(shape, dict) and is_image(shape)
    if hidden_sizes is not None and not hidden_sizes and not may_be_empty:
        raise ValueError(
            "hidden_sizes needs at least one layer, got none; leave it out or give one"
        )
    if conv_layers is not None and not _has_image(shape):
        raise ValueError(
            f"conv_layers are for images (C, H, W), but the observation has the shape {shape}; "
            "leave them out"
        )
    if isinstance(shape, dict):
        return NestedEncoder(shape, hidden_sizes, conv_layers=conv_layers, **options)
    if is_image(shape):
        sizes = IMAGE_HIDDEN_SIZES if hidden_sizes is None else hidden_sizes
        return ImageEncoder(shape, sizes, conv_layers=conv_layers, **options)
    if is_one_hot(shape):
        return OneHotEncoder(shape[1:], hidden_sizes or VECTOR_HIDDEN_SIZES, **options)
    sizes = hidden_sizes or VECTOR_HIDDEN_SIZES
    if len(array_shape(shape)) == 1:
        return MLP(array_shape(shape)[0], sizes, **options)
    return VectorEncoder(shape, sizes, **options)


def convolutions_for(
    obs_shape: ObsShape, conv_layers: ConvLayers | None, *, beside: ObsShape
) -> ConvLayers | None:
    """Return the convolutions of one of two encoders that have the same options.

    They are left out where only the other one sees an image.

    Args:
        obs_shape: what the encoder sees.
        conv_layers: of both, as in :class:`ImageEncoder`.
        beside: what the other one sees.
    """
    if _has_image(obs_shape) or not _has_image(beside):
        return conv_layers
    return None


def _has_image(shape: ObsShape) -> bool:
    return any(is_image(leaf) for _, leaf in shape_leaves(shape))


def _at(obs: Nested, path: Sequence[str]) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _flat(x: torch.Tensor, n_dims: int) -> torch.Tensor:
    """Return ``x`` with its last dimensions, none or more of them, as one."""
    if n_dims == 1:
        return x
    return x.flatten(-n_dims) if n_dims else x.unsqueeze(-1)


def _check_conv_layers(layers: ConvLayers) -> list[tuple[int, int, int] | int]:
    """Return the layers, if each has positive channels, kernel size and stride, or channels only.

    Raises:
        ValueError: if they are not.
    """
    layers_read: list[tuple[int, int, int] | int] = []
    for layer in layers:
        if not isinstance(layer, Sequence):
            layers_read.append(checked("conv_layers", layer, Count))
            continue
        if len(layer) != 3:
            raise ValueError(
                "conv_layers needs (channels, kernel size, stride) for each layer, or the channels "
                f"of a residual section alone, got {layer!r}"
            )
        channels, kernel_size, stride = checked("conv_layers", layer, Counts)
        layers_read.append((channels, kernel_size, stride))
    if not layers_read:
        raise ValueError("conv_layers needs at least one layer; leave it out or give one")
    return layers_read


def _least_side(layers: ConvLayers) -> int:
    """Return the side of the smallest images for which every layer has an output."""
    side = 1
    for layer in reversed(layers):
        _, kernel_size, stride = (layer, 1, 2) if isinstance(layer, int) else layer
        side = (side - 1) * stride + kernel_size
    return side


def _check_image(shape: tuple[int, ...], layers: ConvLayers) -> None:
    if len(shape) < 3:
        raise SpaceError(
            f"a convolutional network takes images (C, H, W), got shape {shape}; stack frames with "
            "gymnasium.wrappers.FrameStackObservation, or flatten them for an MLP"
        )
    *stacks, channels, height, width = shape
    if _seem_last(channels, height, width):
        single = ", before its frames are stacked," if stacks else ""
        raise SpaceError(
            f"the image shape {shape} looks like channels last; networks take channels first, "
            f"{(width, channels, height)}: wrap the env{single} in "
            "gymnasium.wrappers.TransformObservation(env, lambda obs: obs.transpose(2, 0, 1), "
            "gymnasium.spaces.Box(env.observation_space.low.transpose(2, 0, 1), "
            "env.observation_space.high.transpose(2, 0, 1), dtype=env.observation_space.dtype))"
        )
    least = _least_side(layers)
    if min(height, width) < least:
        raise SpaceError(
            f"the convolutions need images (C, H, W) of at least {least} by {least}, got {height} "
            f"by {width} in {shape}; enlarge them with gymnasium.wrappers.ResizeObservation, choose"
            " smaller convolutions with the model's conv_layers, or flatten the images for an MLP "
            "with gymnasium.wrappers.FlattenObservation"
        )


def _seem_last(first: int, second: int, third: int) -> bool:
    """Return whether an image of three sizes seems to be ``(H, W, C)``, not ``(C, H, W)``.

    Either it is square if read like that, or it is much thinner than it is high and wide.
    """
    return first == second != third or 2 * third < min(first, second)
