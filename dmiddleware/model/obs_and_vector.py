"""Layers that see an observation and a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dmiddleware.model.encoders import ConvLayers, make_encoder
from dmiddleware.model.layers import MLP, Norm
from dmiddleware.model.spaces import ObsShape, as_obs_shape
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = ["ObsAndVector"]


class ObsAndVector(nn.Module):
    """Layers that see an observation and a vector, such as an action, next to each other.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`. Observations that are not vectors pass
            through an encoder first.
        n_inputs: length of the vector.
        n_outputs: length of the output.
        hidden_sizes: width of each hidden layer.
        conv_layers: see :class:`ImageEncoder`.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        n_inputs: int,
        n_outputs: int,
        *,
        hidden_sizes: Sequence[int],
        conv_layers: ConvLayers | None = None,
        activation: str = "relu",
        norm: Norm = None,
    ) -> None:
        super().__init__()
        shape = as_obs_shape(obs_shape)
        self.encoder = None
        if isinstance(shape, tuple) and len(shape) == 1 and conv_layers is None:
            n_features = shape[0]
        else:
            self.encoder = make_encoder(
                obs_shape, conv_layers=conv_layers, activation=activation, norm=norm
            )
            n_features = self.encoder.out_features
        options: dict[str, Any] = {"activation": activation, "norm": norm}
        self.layers = MLP(n_features + n_inputs, hidden_sizes, out_features=n_outputs, **options)

    def forward(self, obs: Nested, vector: torch.Tensor) -> torch.Tensor:
        """Return ``[B, n_outputs]`` for observations ``[B, *obs_shape]`` and ``[B, n_inputs]``."""
        features = obs if self.encoder is None else call(self.encoder, obs)
        output: torch.Tensor = call(self.layers, torch.cat([features.float(), vector], -1))
        return output
