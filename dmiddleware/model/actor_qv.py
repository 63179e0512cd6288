"""An actor with critics of actions and of states, for implicit Q-learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dmiddleware.model.actor_q import ActorQ, GaussianActor
from dmiddleware.model.encoders import ConvLayers, convolutions_for, make_encoder
from dmiddleware.model.layers import Norm
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.spaces import ActionKind, ActionShape, ObsShape
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = ["ActorQV", "BoundedGaussianActor", "StateValue"]

# Kostrikov et al. (2021) leave the range open; these are the authors' own.
_LOG_STD_RANGE = (-5.0, 2.0)


class BoundedGaussianActor(GaussianActor):
    """A Gaussian with a mean in ``(-1, 1)``, and a deviation that does not depend on the state.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        n_actions: length of the action vector.
        **options: as for :class:`GaussianActor`.
    """

    def __init__(self, obs_shape: ObsShape, n_actions: int, **options: Any) -> None:
        super().__init__(obs_shape, n_actions, deterministic=True, **options)
        self.log_std = nn.Parameter(torch.zeros(n_actions))

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``{"mu", "sigma"}``, each ``[…, A]``.

        Args:
            obs: ``[…, *obs_shape]``.
        """
        mu = super().forward(obs)["mu"].tanh()
        return {"mu": mu, "sigma": self.log_std.clamp(*_LOG_STD_RANGE).exp().expand_as(mu)}


class StateValue(nn.Module):
    """The value of a state.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        hidden_sizes: width of each hidden layer.
        **options: of the encoder; see :func:`make_encoder`.
    """

    def __init__(
        self, obs_shape: ObsShape, *, hidden_sizes: Sequence[int] = (256, 256), **options: Any
    ) -> None:
        super().__init__()
        self.encoder = make_encoder(obs_shape, hidden_sizes, **options)
        self.head = nn.Linear(self.encoder.out_features, 1)

    def forward(self, obs: Nested) -> torch.Tensor:
        """Return the values ``[…]`` of observations ``[…, *obs_shape]``."""
        value: torch.Tensor = call(self.head, call(self.encoder, obs))
        return value.squeeze(-1)


@MODEL_REGISTRY.register("actor_qv")
class ActorQV(ActorQ):
    """An :class:`ActorQ` with a state value, and an actor whose mean is bounded.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`.
        action_space: ``"continuous"``.
        actor_hidden_sizes: width of each hidden layer of the actor.
        critic_hidden_sizes: width of each hidden layer of the critics and the state value.
        conv_layers: see :class:`ImageEncoder`.
        n_critics: the number of critics.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        critic_obs_shape: what the critics and the state value see, if it is not what the actor
            sees; None: ``obs_shape``.

    Attributes:
        actor: a :class:`BoundedGaussianActor`.
        critic: a :class:`QEnsemble`.
        value: a :class:`StateValue`.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "continuous",
        actor_hidden_sizes: Sequence[int] = (256, 256),
        critic_hidden_sizes: Sequence[int] = (256, 256),
        conv_layers: ConvLayers | None = None,
        n_critics: int = 2,
        activation: str = "relu",
        norm: Norm = None,
        critic_obs_shape: ObsShape | None = None,
    ) -> None:
        shared: dict[str, Any] = {"activation": activation, "norm": norm}
        super().__init__(
            obs_shape,
            action_shape,
            action_space=action_space,
            actor_hidden_sizes=actor_hidden_sizes,
            critic_hidden_sizes=critic_hidden_sizes,
            n_critics=n_critics,
            conv_layers=conv_layers,
            critic_obs_shape=critic_obs_shape,
            **shared,
        )
        (part,) = self.action_parts
        critic = self.critic_obs_shape
        self.actor = BoundedGaussianActor(
            obs_shape,
            part.sizes[0],
            hidden_sizes=actor_hidden_sizes,
            conv_layers=convolutions_for(obs_shape, conv_layers, beside=critic),
            **shared,
        )
        self.value = StateValue(
            critic,
            hidden_sizes=critic_hidden_sizes,
            conv_layers=convolutions_for(critic, conv_layers, beside=obs_shape),
            **shared,
        )
