"""An actor with critics that give every discrete action a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dmiddleware.model.actor_critic import Actor
from dmiddleware.model.encoders import ConvLayers, convolutions_for
from dmiddleware.model.layers import Norm
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.q_network import QNetwork
from dmiddleware.model.spaces import ObsShape
from dmiddleware.settings import Count, checked
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = ["DiscreteActorQ"]


class _Critics(nn.ModuleList):
    """Several Q-networks for the same observations."""

    def forward(self, obs: Nested) -> torch.Tensor:
        """Return the values, ``[n_critics, …, A]``."""
        return torch.stack([call(critic, obs)["logit"] for critic in self])


@MODEL_REGISTRY.register("discrete_actor_q")
class DiscreteActorQ(Network):
    """A distribution over discrete actions, and several independent estimates of their values.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: number of actions.
        actor_hidden_sizes: width of each linear layer of the actor.
        critic_hidden_sizes: width of each linear layer of the critics.
        conv_layers: see :class:`ImageEncoder`.
        n_critics: the number of critics.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        critic_obs_shape: what the critic sees, if it is not what the actor sees; None:
            ``obs_shape``.

    Attributes:
        actor: an :class:`Actor`.
        critic: called with observations ``[…, *obs_shape]``, returns values
            ``[n_critics, …, A]``.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: int,
        *,
        actor_hidden_sizes: Sequence[int] = (256, 256),
        critic_hidden_sizes: Sequence[int] = (256, 256),
        conv_layers: ConvLayers | None = None,
        n_critics: int = 2,
        activation: str = "relu",
        norm: Norm = None,
        critic_obs_shape: ObsShape | None = None,
    ) -> None:
        super().__init__(obs_shape, action_shape, critic_obs_shape=critic_obs_shape)
        n_critics = checked("n_critics", n_critics, Count)
        actor_layers = convolutions_for(obs_shape, conv_layers, beside=self.critic_obs_shape)
        critic_layers = convolutions_for(self.critic_obs_shape, conv_layers, beside=obs_shape)
        shared: dict[str, Any] = {"activation": activation, "norm": norm}
        self.actor = Actor(
            obs_shape,
            action_shape,
            encoder_hidden_sizes=actor_hidden_sizes,
            conv_layers=actor_layers,
            **shared,
        )
        self.critic = _Critics(
            QNetwork(
                self.critic_obs_shape,
                action_shape,
                encoder_hidden_sizes=critic_hidden_sizes,
                conv_layers=critic_layers,
                **shared,
            )
            for _ in range(n_critics)
        )

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``{"logit": […, A]}`` of the actor.

        Args:
            obs: ``[…, *obs_shape]``, a tensor or, for nested observations, a treetensor.
        """
        output: dict[str, torch.Tensor] = call(self.actor, obs)
        return output
