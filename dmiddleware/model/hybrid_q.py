"""Values of choices that come with numbers, for P-DQN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dmiddleware.errors import SpaceError
from dmiddleware.model.actor_q import GaussianActor
from dmiddleware.model.encoders import ConvLayers
from dmiddleware.model.layers import Norm
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.obs_and_vector import ObsAndVector
from dmiddleware.model.spaces import ActionKind, ActionShape, ObsShape
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = ["HybridQNetwork", "ParameterActor"]


class ParameterActor(GaussianActor):
    """The numbers that come with each choice, in (-1, 1).

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        n_numbers: how many there are.
        **options: as for :class:`GaussianActor`.
    """

    def __init__(self, obs_shape: ObsShape, n_numbers: int, **options: Any) -> None:
        super().__init__(obs_shape, n_numbers, deterministic=True, **options)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``{"mu"}``, ``[…, n_numbers]``, for observations ``[…, *obs_shape]``."""
        return {"mu": super().forward(obs)["mu"].tanh()}


@MODEL_REGISTRY.register("hybrid_q")
class HybridQNetwork(Network):
    """A choice with numbers: a Dict or Tuple of one Discrete space and at least one Box.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`.
        action_space: a mapping of names to ``"discrete"`` and ``"continuous"``.
        actor_hidden_sizes: width of each hidden layer of the actor.
        critic_hidden_sizes: width of each hidden layer of the critic.
        conv_layers: see :class:`ImageEncoder`.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.

    Attributes:
        actor: a :class:`ParameterActor`: observations to the numbers of all choices.
        critic: observations and these numbers to the values of the choices, ``[B, K]``.

    Raises:
        SpaceError: for other actions.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind,
        actor_hidden_sizes: Sequence[int] = (256, 256),
        critic_hidden_sizes: Sequence[int] = (256, 256),
        conv_layers: ConvLayers | None = None,
        activation: str = "relu",
        norm: Norm = None,
    ) -> None:
        super().__init__(obs_shape, action_shape, action_space=action_space)
        kinds = sorted(part.kind for part in self.action_parts)
        n_continuous = len(kinds) - 1
        if n_continuous < 1 or kinds != [*n_continuous * ["continuous"], "discrete"]:
            raise SpaceError(
                "P-DQN needs a Dict or Tuple of one Discrete space and at least one Box of "
                f"actions, got {action_space}; use PPO for others"
            )
        n_choices = sum(part.n_logits for part in self.action_parts)
        n_numbers = sum(part.n_means for part in self.action_parts)
        shared: dict[str, Any] = {
            "conv_layers": conv_layers,
            "activation": activation,
            "norm": norm,
        }
        self.actor = ParameterActor(obs_shape, n_numbers, hidden_sizes=actor_hidden_sizes, **shared)
        self.critic = ObsAndVector(
            obs_shape, n_numbers, n_choices, hidden_sizes=critic_hidden_sizes, **shared
        )

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``logit``, the values ``[B, K]`` of the choices, and their numbers ``mu``."""
        mu: torch.Tensor = call(self.actor, obs)["mu"]
        return {"logit": call(self.critic, obs, mu), "mu": mu}
