"""Q-networks: the values of discrete actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import torch

from dmiddleware.data.batch import Nested
from dmiddleware.errors import SpaceError
from dmiddleware.model.action_mask import masked_logit
from dmiddleware.model.encoders import make_encoder
from dmiddleware.model.layers import MLP, Init, Norm, call
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.spaces import ObsShape, action_kind_of, action_shape_of, obs_shape_of

__all__ = ["QNetwork"]


@MODEL_REGISTRY.register("q_network")
class QNetwork(Network):
    """The value of every discrete action (Mnih et al., "Human-level control", 2015).

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: number of actions.
        encoder_hidden_sizes: width of each linear layer of the encoder; None: 128, 128, 64 for
            vectors, 512 for images.
        dueling: separate streams for the state's value and the actions' advantages, joined by
            equation 9 of Wang et al., "Dueling Network Architectures" (2016).
        head_hidden_sizes: width of each layer between encoder and output, in both streams if
            dueling.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"`` or None.
        init: ``"orthogonal"`` or None (torch's own).

    Raises:
        SpaceError: if a shape is invalid.
        ValueError: if another option is.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: int,
        *,
        encoder_hidden_sizes: Sequence[int] | None = None,
        dueling: bool = False,
        head_hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        norm: Norm = None,
        init: Init = None,
    ) -> None:
        super().__init__(obs_shape, action_shape)
        options: dict[str, Any] = {"activation": activation, "norm": norm, "init": init}
        self.encoder = make_encoder(obs_shape, encoder_hidden_sizes, **options)
        width = self.encoder.out_features
        self.head = MLP(width, head_hidden_sizes, out_features=action_shape, **options)
        self.value_head = (
            MLP(width, head_hidden_sizes, out_features=1, **options) if dueling else None
        )

    @classmethod
    def from_spaces(
        cls, observation_space: gym.Space[Any], action_space: gym.Space[Any], **options: Any
    ) -> QNetwork:
        """Build the network for an environment's spaces.

        Args:
            observation_space: that of one environment.
            action_space: that of one environment, Discrete.
            **options: keyword arguments of the class.

        Raises:
            SpaceError: if a space is not supported.
        """
        _require_discrete(action_space)
        return cls(obs_shape_of(observation_space), action_shape_of(action_space), **options)

    def check_spaces(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        """Reject an environment whose spaces this network was not built for.

        Args:
            observation_space: that of one environment.
            action_space: that of one environment.

        Raises:
            SpaceError: saying what to use instead.
        """
        _require_discrete(action_space)
        super().check_spaces(observation_space, action_space)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``{"logit": [… , A]}``, the actions' values; forbidden ones get the lowest.

        Args:
            obs: ``[…, *obs_shape]``, a tensor or, for nested observations, a treetensor.
        """
        features = call(self.encoder, obs)
        q: torch.Tensor = call(self.head, features)
        if self.value_head is not None:
            q = call(self.value_head, features) + q - q.mean(-1, keepdim=True)
        return {"logit": masked_logit(q, obs)}


def _require_discrete(action_space: gym.Space[Any]) -> None:
    if action_kind_of(action_space) != "discrete":
        raise SpaceError(
            f"DQN and its QNetwork need a Discrete action space, but the environment takes "
            f"{action_space}; use PPO, or wrap the environment so that it takes discrete actions"
        )
