"""The intrinsic curiosity module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

import gymnasium as gym
import torch
import torch.nn.functional as F
from annotated_types import Lt
from torch import nn

from dmiddleware.errors import SpaceError
from dmiddleware.model import ConvLayers, make_encoder
from dmiddleware.model.layers import MLP
from dmiddleware.model.spaces import (
    HasSpaces,
    ObsShape,
    action_kind_of,
    action_shape_of,
    spaces_of,
)
from dmiddleware.policy import ActionCodec, Component, HasModes, LearnMode, adam
from dmiddleware.reward.intrinsic import IntrinsicReward, settings_of, shape_in_rows
from dmiddleware.settings import Positive, checked
from dmiddleware.tree import Batch, Value

__all__ = ["ICM"]


class ICM(IntrinsicReward):
    """The intrinsic curiosity module (Pathak et al., "Curiosity-driven Exploration", 2017).

    A forward model predicts the features of the next observation from those of the observation and
    the action; the reward of a row is the squared error, ``½ ‖φ̂(s') - φ(s')‖²`` (equation 6). The
    features are learned together with an inverse model, which tells the action from the features
    of both observations, so they describe what actions can change. The loss is
    ``(1 - β) L_I + β L_F`` (equation 7), with the inverse loss of equation 3 and the forward loss
    of equation 5. Actions are Discrete or Box; the inverse loss of Box actions is the squared
    error.

    Differences from the paper: rewards are divided by a running standard deviation, which replaces
    the factor η; observations are normalized; the policy's loss and that of the module have
    separate optimizers, so the weight λ between them is not needed.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_space: the space of actions, Discrete or Box.
        hidden_sizes: width of each linear layer of the encoder, the last one the number of
            features; None: 128, 128, 64 for vectors, 512 for images.
        conv_layers: see :class:`~dmiddleware.model.ImageEncoder`.
        model_size: width of the hidden layer of both models.
        beta: β, the share of the forward loss, above 0 and below 1.
        learning_rate: Adam's learning rate.
        **options: ``discount``, γ of the sum of rewards that scales them (0.99); ``obs_clip``, the
            largest absolute value of a normalized observation (5.0); ``batch_size``, rows per
            update (256); ``epochs``, passes over the collected rows (4); ``device``; and ``seed``,
            of the initial weights and the order of the minibatches (0).

    Raises:
        ValueError: if an option is invalid.
        SpaceError: if observations or actions are not supported.

    Example:
        >>> from dmiddleware.env import make_env_manager
        >>> from dmiddleware.policy import PPOPolicy
        >>> from dmiddleware.rollout import RolloutCollector
        >>> with make_env_manager("CartPole-v1", env_num=4, seed=0) as envs:
        ...     policy = PPOPolicy.for_env(envs, seed=0)
        ...     icm = ICM.for_env(envs, policy)
        ...     rows = RolloutCollector(policy.collect_mode, envs).collect(64)
        >>> icm.reward(rows).shape
        torch.Size([16, 4])
        >>> first = icm.update(rows)["inverse_loss"]
        >>> last = [icm.update(rows)["inverse_loss"] for _ in range(100)][-1]
        >>> last < 0.5 * first
        True
    """

    curiosity: Component[nn.ModuleDict]
    columns: ClassVar[tuple[str, ...]] = ("obs", "action", "next_obs")

    def __init__(
        self,
        obs_shape: ObsShape,
        action_space: gym.Space[Any],
        *,
        hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        model_size: int = 256,
        beta: float = 0.2,
        learning_rate: float = 1e-3,
        **options: Any,
    ) -> None:
        kind = action_kind_of(action_space)
        if kind not in ("discrete", "continuous"):
            raise SpaceError(f"ICM predicts Discrete or Box actions, got {action_space}; use RND")
        beta = checked("beta", beta, Annotated[Positive, Lt(1)])
        n = action_shape_of(action_space)
        self._n_choices = n if kind == "discrete" else 0
        self._beta = beta
        self._codec = ActionCodec.for_space(action_space)

        def make_components() -> dict[str, Component[Any]]:
            encoder = make_encoder(obs_shape, hidden_sizes, conv_layers=conv_layers)
            width = encoder.out_features
            models = {
                "encoder": encoder,
                "forward_model": MLP(width + n, [model_size], out_features=width),
                "inverse_model": MLP(2 * width, [model_size], out_features=n),
            }
            return {"curiosity": Component(nn.ModuleDict(models), adam(learning_rate))}

        super().__init__(
            obs_shape,
            make_components,
            settings={
                "hidden_sizes": hidden_sizes,
                "conv_layers": conv_layers,
                "model_size": model_size,
                "beta": beta,
                "learning_rate": learning_rate,
            },
            **options,
        )

    @classmethod
    def for_env(cls, env: HasSpaces, policy: HasModes | LearnMode, **options: Any) -> Self:
        """Build the reward for an environment, with the policy's discount, device and seed.

        Args:
            env: an env manager, a Gymnasium env or a Gymnasium vector env.
            policy: the policy that learns from the rewards.
            **options: other arguments of the class.

        Raises:
            ConfigError: if the policy has no discount.
            ValueError: if an option is invalid.
            SpaceError: if observations or actions are not supported.
        """
        shared = settings_of(policy, user=f"{cls.__name__}.for_env")
        shape = shape_in_rows(env, policy, user=cls.__name__)
        return cls(shape, spaces_of(env)[1], **{**shared, **options})

    def reward_of(self, batch: Batch) -> torch.Tensor:
        """Return the rewards ``[N]`` of rows ``[N, …]``."""
        phi, next_phi = self._phi(batch["obs"]), self._phi(batch["next_obs"])
        return self._forward_error(phi, next_phi, self._actions(batch))

    def update_minibatch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Learn from rows ``[B, …]``; return scalars to log."""
        action = self._actions(batch)
        phi, next_phi = self._phi(batch["obs"]), self._phi(batch["next_obs"])
        forward_loss = self._forward_error(phi, next_phi, action).mean()
        guess = self.curiosity.module["inverse_model"](torch.cat([phi, next_phi], -1))
        if self._n_choices:
            inverse_loss = F.cross_entropy(guess, action)
        else:
            inverse_loss = F.mse_loss(guess, action)
        self.curiosity.step((1 - self._beta) * inverse_loss + self._beta * forward_loss)
        return {"forward_loss": forward_loss, "inverse_loss": inverse_loss}

    def _phi(self, obs: Value) -> torch.Tensor:
        features: torch.Tensor = self.curiosity.module["encoder"](self._normalized(obs))
        return features

    def _forward_error(
        self, phi: torch.Tensor, next_phi: torch.Tensor, action: torch.Tensor
    ) -> torch.Tensor:
        """Return ``[N]``, half the squared error of the predicted features."""
        if self._n_choices:
            action = F.one_hot(action, self._n_choices).to(phi.dtype)
        errors: torch.Tensor = (
            self.curiosity.module["forward_model"](torch.cat([phi, action], -1)) - next_phi
        )
        return 0.5 * errors.square().sum(-1)

    def _actions(self, batch: Batch) -> torch.Tensor:
        """Return the actions: ``[N]`` int64 from 0, or ``[N, A]`` float32 about -1 to 1."""
        action: torch.Tensor = self._codec.to_raw(batch["action"])
        return action if self._n_choices else action.float()
