"""A generative model of actions, with a perturbation and critics of them, for BCQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dmiddleware.model.actor_q import ActorQ
from dmiddleware.model.encoders import ConvLayers
from dmiddleware.model.layers import Norm
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.obs_and_vector import ObsAndVector
from dmiddleware.model.spaces import ActionKind, ActionShape, ObsShape
from dmiddleware.settings import Count, checked
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested, leaves

__all__ = ["ActionVAE", "BCQNetwork", "Perturbation"]

# Fujimoto et al. (2019) leave the range open; these are the authors' own.
_LOG_STD_RANGE = (-4.0, 15.0)


class Perturbation(ObsAndVector):
    """How an action should change, at most by 1 in each dimension.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        n_actions: length of the action vector.
        hidden_sizes: width of each hidden layer.
        **options: ``conv_layers``, ``activation`` and ``norm`` as in :class:`QEnsemble`.
    """

    def __init__(
        self, obs_shape: ObsShape, n_actions: int, *, hidden_sizes: Sequence[int], **options: Any
    ) -> None:
        super().__init__(obs_shape, n_actions, n_actions, hidden_sizes=hidden_sizes, **options)

    def forward(self, obs: Nested, action: torch.Tensor) -> torch.Tensor:
        """Return ``[B, A]`` in (-1, 1) for observations and actions ``[B, A]``."""
        return super().forward(obs, action).tanh()


class ActionVAE(nn.Module):
    """A conditional variational autoencoder: which actions the data has for an observation.

    Source: Kingma and Welling, "Auto-Encoding Variational Bayes" (2014); Sohn et al., "Learning
    Structured Output Representation Using Deep Conditional Generative Models" (2015).

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        n_actions: length of the action vector.
        n_latent: length of the latent vector.
        hidden_sizes: width of each hidden layer of the encoder and the decoder.
        **options: ``conv_layers``, ``activation`` and ``norm`` as in :class:`QEnsemble`.

    Attributes:
        n_latent: as given.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        n_actions: int,
        n_latent: int,
        *,
        hidden_sizes: Sequence[int],
        **options: Any,
    ) -> None:
        super().__init__()
        self.n_latent = checked("n_latent", n_latent, Count)
        shared: dict[str, Any] = {"hidden_sizes": hidden_sizes, **options}
        self.encoder = ObsAndVector(obs_shape, n_actions, 2 * n_latent, **shared)
        self.decoder = ObsAndVector(obs_shape, n_latent, n_actions, **shared)

    def encode(self, obs: Nested, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation ``[B, n_latent]`` of what stands for actions."""
        mean, log_std = call(self.encoder, obs, action).chunk(2, -1)
        return mean, log_std.clamp(*_LOG_STD_RANGE).exp()

    def decode(self, obs: Nested, latent: torch.Tensor) -> torch.Tensor:
        """Return actions ``[B, A]`` in (-1, 1) for observations and ``latent [B, n_latent]``."""
        action: torch.Tensor = call(self.decoder, obs, latent)
        return action.tanh()


@MODEL_REGISTRY.register("bcq")
class BCQNetwork(ActorQ):
    """A model of the actions in the data, a perturbation of them, and critics, for a Box.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`.
        action_space: ``"continuous"``.
        actor_hidden_sizes: width of each hidden layer of the perturbation.
        critic_hidden_sizes: width of each hidden layer of the critics.
        vae_hidden_sizes: width of each hidden layer of both parts of the autoencoder.
        n_latent: length of its latent vector; None: twice that of the action.
        conv_layers: see :class:`ImageEncoder`.
        n_critics: the number of critics.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.

    Attributes:
        actor: a :class:`Perturbation`.
        critic: a :class:`QEnsemble`.
        vae: an :class:`ActionVAE`.
    """

    actor: Perturbation  # type: ignore[assignment]  # changes actions, where others make them

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "continuous",
        actor_hidden_sizes: Sequence[int] = (400, 300),
        critic_hidden_sizes: Sequence[int] = (400, 300),
        vae_hidden_sizes: Sequence[int] = (750, 750),
        n_latent: int | None = None,
        conv_layers: ConvLayers | None = None,
        n_critics: int = 2,
        activation: str = "relu",
        norm: Norm = None,
    ) -> None:
        shared: dict[str, Any] = {
            "conv_layers": conv_layers,
            "activation": activation,
            "norm": norm,
        }
        super().__init__(
            obs_shape,
            action_shape,
            action_space=action_space,
            critic_hidden_sizes=critic_hidden_sizes,
            n_critics=n_critics,
            **shared,
        )
        n_actions = self.action_parts[0].sizes[0]
        self.actor = Perturbation(obs_shape, n_actions, hidden_sizes=actor_hidden_sizes, **shared)
        n_latent = 2 * n_actions if n_latent is None else n_latent
        self.vae = ActionVAE(
            obs_shape, n_actions, n_latent, hidden_sizes=vae_hidden_sizes, **shared
        )

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``mu`` ``[B, A]``, the action that the autoencoder has in its middle."""
        leaf: torch.Tensor = next(iter(leaves(obs)))[1]
        latent = torch.zeros(len(leaf), self.vae.n_latent, device=leaf.device)
        return {"mu": self.vae.decode(obs, latent)}
