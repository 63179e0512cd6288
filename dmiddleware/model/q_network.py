"""Q-networks: the values of discrete actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dmiddleware.model.encoders import ConvLayers, make_encoder
from dmiddleware.model.layers import (
    MLP,
    Init,
    NoisyMLP,
    Norm,
    orthogonal_init,
)
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.spaces import ObsShape
from dmiddleware.rl.distributional import interval_middles
from dmiddleware.settings import Count, Number, checked
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = [
    "CategoricalQNetwork",
    "FractionQuantileQNetwork",
    "ImplicitQuantileQNetwork",
    "QNetwork",
    "QuantileQNetwork",
]


@MODEL_REGISTRY.register("q_network")
class QNetwork(Network):
    """The value of every discrete action (Mnih et al., "Human-level control", 2015).

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: number of actions.
        encoder_hidden_sizes: width of each linear layer of the encoder; None: 128, 128, 64 for
            vectors, 512 for images. For an image it may be empty: the first layers after the
            convolutions are then those of ``head_hidden_sizes``.
        conv_layers: see :class:`ImageEncoder`.
        dueling: separate streams for the state's value and the actions' advantages, joined by
            equation 9 of Wang et al., "Dueling Network Architectures" (2016).
        head_hidden_sizes: width of each layer between encoder and output, in both streams if
            dueling.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        init: ``"orthogonal"`` or None (torch's own).
        noisy: the layers after the encoder are noisy (:class:`NoisyLinear`).
        outputs_per_action: how many numbers each action gets, of which subclasses make its value;
            None: its value.

    Attributes:
        n_noise: how many numbers one draw of the noise has; 0: the network is not noisy.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: int,
        *,
        encoder_hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        dueling: bool = False,
        head_hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        norm: Norm = None,
        init: Init = None,
        noisy: bool = False,
        outputs_per_action: int | None = None,
    ) -> None:
        super().__init__(obs_shape, action_shape)
        self._n_outputs = checked("outputs_per_action", outputs_per_action, Count | None)
        options: dict[str, Any] = {"activation": activation, "norm": norm, "init": init}
        self.encoder = make_encoder(
            obs_shape, encoder_hidden_sizes, conv_layers=conv_layers, **options
        )
        width = self.encoder.out_features
        n = self._n_outputs or 1
        make = NoisyMLP if noisy else MLP
        self.head = make(width, head_hidden_sizes, out_features=action_shape * n, **options)
        self.value_head = (
            make(width, head_hidden_sizes, out_features=n, **options) if dueling else None
        )
        self.n_noise = sum(
            head.n_noise for head in (self.head, self.value_head) if head is not None
        )

    def forward(self, obs: Nested, noise: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return ``{"logit": [… , A]}``, the actions' values.

        Args:
            obs: ``[…, *obs_shape]``, a tensor or, for nested observations, a treetensor.
            noise: of a noisy network: standard normal numbers, ``[n_noise]`` or, for a draw per
                row, ``[…, n_noise]``; None: without noise.
        """
        return {"logit": self._outputs(call(self.encoder, obs), noise)}

    def _outputs(self, features: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Return ``[…, A]`` of features ``[…, F]``, or ``[…, A, outputs_per_action]``."""
        split = self.head.n_noise
        of_head = () if noise is None else (noise[..., :split],)
        of_value = () if noise is None else (noise[..., split:],)
        outputs: torch.Tensor = call(self.head, features, *of_head)
        if self._n_outputs is not None:
            outputs = outputs.reshape(*outputs.shape[:-1], -1, self._n_outputs)
        if self.value_head is None:
            return outputs
        value: torch.Tensor = call(self.value_head, features, *of_value)
        if self._n_outputs is None:
            return value + outputs - outputs.mean(-1, keepdim=True)
        return value.unsqueeze(-2) + outputs - outputs.mean(-2, keepdim=True)


@MODEL_REGISTRY.register("categorical_q_network")
class CategoricalQNetwork(QNetwork):
    """A categorical distribution over returns for every discrete action.

    Source: Bellemare et al., "A Distributional Perspective on Reinforcement Learning" (2017).

    Args:
        obs_shape: as in :class:`QNetwork`.
        action_shape: number of actions.
        n_atoms: the number of returns that have a probability.
        v_min: the lowest of them.
        v_max: the highest; the others are evenly spaced between both.
        **options: the other options of :class:`QNetwork`.

    Raises:
        ConfigError: if ``n_atoms`` is not a positive integer, or ``v_min`` or ``v_max`` is not a
            finite number.
        ValueError: if ``v_min`` is not below ``v_max``, or there is one atom.

    Attributes:
        support: ``[n_atoms]``, the returns.
    """

    support: torch.Tensor

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: int,
        *,
        n_atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        **options: Any,
    ) -> None:
        support = support_of_returns(n_atoms, v_min, v_max)
        super().__init__(obs_shape, action_shape, outputs_per_action=len(support), **options)
        self.register_buffer("support", support, persistent=False)

    def forward(self, obs: Nested, noise: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the values and the distributions.

        Args:
            obs: ``[…, *obs_shape]``.
            noise: as in :class:`QNetwork`.

        Returns:
            ``logit`` ``[…, A]``, the expected returns, and ``log_prob`` ``[…, A, n_atoms]``.
        """
        log_prob = self._outputs(call(self.encoder, obs), noise).log_softmax(-1)
        return {"logit": (log_prob.exp() * self.support).sum(-1), "log_prob": log_prob}


def support_of_returns(n_atoms: int, v_min: float, v_max: float) -> torch.Tensor:
    """Return ``[n_atoms]``: returns from ``v_min`` to ``v_max``, evenly spaced.

    Raises:
        ConfigError: if ``n_atoms`` is not a positive integer, or ``v_min`` or ``v_max`` is not a
            finite number.
        ValueError: if ``v_min`` is not below ``v_max``, or there is one atom.
    """
    n_atoms = checked("n_atoms", n_atoms, Count)
    for name, value in (("v_min", v_min), ("v_max", v_max)):
        checked(name, value, Number)
    if n_atoms < 2 or not v_min < v_max:
        raise ValueError(
            f"n_atoms must be at least 2 and v_min below v_max, got n_atoms={n_atoms}, "
            f"v_min={v_min} and v_max={v_max}"
        )
    return torch.linspace(v_min, v_max, n_atoms)


@MODEL_REGISTRY.register("quantile_q_network")
class QuantileQNetwork(QNetwork):
    """Quantiles of the return of every discrete action.

    Source: Dabney et al., "Distributional RL with Quantile Regression" (2018).

    Args:
        obs_shape: as in :class:`QNetwork`.
        action_shape: number of actions.
        n_quantiles: the number of quantiles, at the middles of as many equal intervals of [0, 1].
        **options: the other options of :class:`QNetwork`.
    """

    def __init__(
        self, obs_shape: ObsShape, action_shape: int, *, n_quantiles: int = 50, **options: Any
    ) -> None:
        super().__init__(obs_shape, action_shape, outputs_per_action=n_quantiles, **options)

    def forward(self, obs: Nested, noise: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the values and the quantiles.

        Args:
            obs: ``[…, *obs_shape]``.
            noise: as in :class:`QNetwork`.

        Returns:
            ``logit`` ``[…, A]``, the mean returns, and ``quantiles`` ``[…, A, n_quantiles]``.
        """
        quantiles = self._outputs(call(self.encoder, obs), noise)
        return {"logit": quantiles.mean(-1), "quantiles": quantiles}


@MODEL_REGISTRY.register("implicit_quantile_q_network")
class ImplicitQuantileQNetwork(QNetwork):
    """The return of every discrete action at any fraction of its distribution.

    Source: Dabney et al., "Implicit Quantile Networks for Distributional RL" (2018), section 3.1:
    the features of an observation are multiplied by an embedding of the fraction, a layer over
    ``cos(π i τ)`` for ``i`` from 0 (equation 4).

    Args:
        obs_shape: as in :class:`QNetwork`.
        action_shape: number of actions.
        n_cosines: the number of cosines in the embedding of a fraction.
        n_quantiles: the number of fractions where none are given, at the middles of as many equal
            intervals of [0, 1]; acting draws as many.
        **options: the other options of :class:`QNetwork`.

    Attributes:
        n_quantiles: as given.
    """

    frequencies: torch.Tensor
    middles: torch.Tensor

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: int,
        *,
        n_cosines: int = 64,
        n_quantiles: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(obs_shape, action_shape, **options)
        n_cosines = checked("n_cosines", n_cosines, Count)
        n_quantiles = checked("n_quantiles", n_quantiles, Count)
        self.n_quantiles = n_quantiles
        self.embedding = nn.Linear(n_cosines, self.encoder.out_features)
        if options.get("init") == "orthogonal":
            orthogonal_init(self.embedding, math.sqrt(2.0))
        self.register_buffer("frequencies", math.pi * torch.arange(n_cosines), persistent=False)
        self.register_buffer("middles", interval_middles(n_quantiles), persistent=False)

    def forward(
        self, obs: Nested, noise: torch.Tensor | None = None, *, tau: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the values, and the returns at some fractions.

        Args:
            obs: ``[…, *obs_shape]``.
            noise: as in :class:`QNetwork`.
            tau: ``[…, N]``, fractions from 0 to 1; None: ``n_quantiles`` fixed ones.

        Returns:
            ``logit`` ``[…, A]``, the means over the fractions; ``quantiles`` ``[…, A, N]``; and
            ``tau`` as given, or ``[n_quantiles]``.
        """
        features: torch.Tensor = call(self.encoder, obs)
        tau = self.middles if tau is None else tau
        quantiles = self._quantiles(features, tau, noise)
        return {"logit": quantiles.mean(-1), "quantiles": quantiles, "tau": tau}

    def _quantiles(
        self, features: torch.Tensor, tau: torch.Tensor, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``[…, A, N]``, the returns of features ``[…, F]`` at fractions ``[…, N]``."""
        # Fractions first: [N, …], so that noise for each row of observations fits.
        fractions = tau.movedim(-1, 0)
        if tau.dim() == 1:
            fractions = fractions.reshape(-1, *[1] * (features.dim() - 1))
        cosines = (fractions.unsqueeze(-1) * self.frequencies).cos()
        embedded = call(self.embedding, cosines).relu()
        return self._outputs(features * embedded, noise).movedim(0, -1)


@MODEL_REGISTRY.register("fraction_quantile_q_network")
class FractionQuantileQNetwork(ImplicitQuantileQNetwork):
    """The return of every discrete action at fractions that are proposed for the observation.

    Source: Yang et al., "Fully Parameterized Quantile Function for Distributional RL" (2019),
    sections 3.1 and 3.3: a layer over the features of an observation, and a softmax, give the
    widths of ``n_quantiles`` intervals of [0, 1]. Each has one quantile, at its middle.

    Args:
        obs_shape: as in :class:`QNetwork`.
        action_shape: number of actions.
        **options: the other options of :class:`ImplicitQuantileQNetwork`.

    Attributes:
        proposal: the layer that proposes the widths.
    """

    def __init__(self, obs_shape: ObsShape, action_shape: int, **options: Any) -> None:
        super().__init__(obs_shape, action_shape, **options)
        self.proposal = nn.Linear(self.encoder.out_features, self.n_quantiles)
        # So the first intervals are about equal.
        nn.init.xavier_uniform_(self.proposal.weight, gain=0.01)
        nn.init.zeros_(self.proposal.bias)

    def forward(  # type: ignore[override]  # fractions come from the network
        self,
        obs: Nested,
        noise: torch.Tensor | None = None,
        *,
        fractions: torch.Tensor | None = None,
        with_edges: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return the values, and the returns at the middles of the intervals.

        Args:
            obs: ``[…, *obs_shape]``.
            noise: as in :class:`QNetwork`.
            fractions: ``[…, N + 1]``, the edges of the intervals, from 0 to 1; None: proposed ones.
            with_edges: whether to return the returns at the inner edges, too.

        Returns:
            ``logit`` ``[…, A]``, the means, each quantile weighted by the width of its interval;
            ``quantiles`` ``[…, A, N]``; ``tau`` ``[…, N]``, their fractions; ``fractions``, whose
            gradient is that of the proposal alone; and ``edges`` ``[…, A, N - 1]`` without
            gradient.
        """
        features: torch.Tensor = call(self.encoder, obs)
        if fractions is None:
            widths = call(self.proposal, features.detach()).softmax(-1)
            fractions = nn.functional.pad(widths.cumsum(-1), (1, 0))
        fixed = fractions.detach()
        tau = (fixed[..., 1:] + fixed[..., :-1]) / 2
        quantiles = self._quantiles(features, tau, noise)
        logit = (quantiles * fixed.diff().unsqueeze(-2)).sum(-1)
        output = {"logit": logit, "quantiles": quantiles, "tau": tau, "fractions": fractions}
        if with_edges:
            with torch.no_grad():
                output["edges"] = self._quantiles(features, fixed[..., 1:-1], noise)
        return output
