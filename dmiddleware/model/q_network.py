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
from dmiddleware.model.layers import MLP, Init, Norm, call, check_sizes
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.spaces import ObsShape, action_kind_of, action_shape_of, obs_shape_of

__all__ = ["CategoricalQNetwork", "QNetwork", "QuantileQNetwork"]


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
        outputs_per_action: how many numbers each action gets; subclasses make its value of them.

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
        outputs_per_action: int = 1,
    ) -> None:
        super().__init__(obs_shape, action_shape)
        check_sizes("outputs_per_action", [outputs_per_action])
        options: dict[str, Any] = {"activation": activation, "norm": norm, "init": init}
        self.encoder = make_encoder(obs_shape, encoder_hidden_sizes, **options)
        width = self.encoder.out_features
        n = outputs_per_action
        self.head = MLP(width, head_hidden_sizes, out_features=action_shape * n, **options)
        self.value_head = (
            MLP(width, head_hidden_sizes, out_features=n, **options) if dueling else None
        )
        self._n_outputs = n

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

    def _outputs(self, obs: Nested) -> torch.Tensor:
        """Return ``[…, A, outputs_per_action]``."""
        features = call(self.encoder, obs)
        outputs: torch.Tensor = call(self.head, features).unflatten(-1, (-1, self._n_outputs))
        if self.value_head is not None:
            value: torch.Tensor = call(self.value_head, features).unsqueeze(-2)
            outputs = value + outputs - outputs.mean(-2, keepdim=True)
        return outputs


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

    Attributes:
        support: ``[n_atoms]``, the returns.

    Raises:
        SpaceError: if a shape is invalid.
        ValueError: if another option is.
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
        super().__init__(obs_shape, action_shape, outputs_per_action=n_atoms, **options)
        if n_atoms < 2 or not v_min < v_max:
            raise ValueError(
                f"n_atoms must be at least 2 and v_min below v_max, got n_atoms={n_atoms}, "
                f"v_min={v_min} and v_max={v_max}"
            )
        self.register_buffer("support", torch.linspace(v_min, v_max, n_atoms), persistent=False)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the values and the distributions.

        Args:
            obs: ``[…, *obs_shape]``.

        Returns:
            ``logit`` ``[…, A]``, the expected returns, and ``log_prob`` ``[…, A, n_atoms]``.
        """
        log_prob = self._outputs(obs).log_softmax(-1)
        value = (log_prob.exp() * self.support).sum(-1)
        return {"logit": masked_logit(value, obs), "log_prob": log_prob}


@MODEL_REGISTRY.register("quantile_q_network")
class QuantileQNetwork(QNetwork):
    """Quantiles of the return of every discrete action.

    Source: Dabney et al., "Distributional RL with Quantile Regression" (2018).

    Args:
        obs_shape: as in :class:`QNetwork`.
        action_shape: number of actions.
        n_quantiles: the number of quantiles, at the middles of as many equal intervals of [0, 1].
        **options: the other options of :class:`QNetwork`.

    Raises:
        SpaceError: if a shape is invalid.
        ValueError: if another option is.
    """

    def __init__(
        self, obs_shape: ObsShape, action_shape: int, *, n_quantiles: int = 50, **options: Any
    ) -> None:
        super().__init__(obs_shape, action_shape, outputs_per_action=n_quantiles, **options)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the values and the quantiles.

        Args:
            obs: ``[…, *obs_shape]``.

        Returns:
            ``logit`` ``[…, A]``, the mean returns, and ``quantiles`` ``[…, A, n_quantiles]``.
        """
        quantiles = self._outputs(obs)
        return {"logit": masked_logit(quantiles.mean(-1), obs), "quantiles": quantiles}


def _require_discrete(action_space: gym.Space[Any]) -> None:
    if action_kind_of(action_space) != "discrete":
        raise SpaceError(
            f"DQN and its QNetwork need a Discrete action space, but the environment takes "
            f"{action_space}; use PPO, or wrap the environment so that it takes discrete actions"
        )
