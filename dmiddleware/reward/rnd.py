"""Random network distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from dmiddleware.model import ConvLayers, make_encoder
from dmiddleware.model.layers import MLP
from dmiddleware.model.spaces import HasSpaces, ObsShape
from dmiddleware.policy import Component, HasModes, LearnMode, adam
from dmiddleware.reward.intrinsic import IntrinsicReward, settings_of, shape_in_rows
from dmiddleware.tree import Batch

__all__ = ["RND"]


class RND(IntrinsicReward):
    """Random network distillation (Burda et al., 2018, section 2.2).

    A predictor network learns the output of a target network, whose weights are random and fixed.
    The reward of a row is the squared error for its next observation, averaged over the dimensions
    of the output: ``‖f̂(s') - f(s')‖² / embedding_size``. It is large where the predictor has not
    learned yet.

    Differences from the paper: the error is a mean, not a sum, which makes no difference after the
    rewards have been scaled; the networks see whole stacks of frames, not only the newest frame;
    the predictor learns from every collected row, not from a quarter; observations are normalized
    from the first batch on, without random steps before. The paper's second value head is
    :class:`IntrinsicCritic`.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        embedding_size: the length of the networks' outputs.
        hidden_sizes: width of each linear layer of the encoders; None: 128, 128, 64 for vectors,
            512 for images. The predictor has two more layers.
        conv_layers: see :class:`~dmiddleware.model.ImageEncoder`.
        learning_rate: Adam's learning rate for the predictor.
        **options: ``discount``, γ of the sum of rewards that scales them (0.99); ``obs_clip``, the
            largest absolute value of a normalized observation (5.0); ``batch_size``, rows per
            update (256); ``epochs``, passes over the collected rows (4); ``device``; and ``seed``,
            of the initial weights and the order of the minibatches (0).

    Raises:
        ValueError: if an option is invalid.
        SpaceError: if the shape is, or an image is too small for the convolutions.

    Example:
        >>> from dmiddleware.env import make_env_manager
        >>> from dmiddleware.policy import PPOPolicy
        >>> from dmiddleware.rollout import RolloutCollector
        >>> with make_env_manager("CartPole-v1", env_num=4, seed=0) as envs:
        ...     policy = PPOPolicy.for_env(envs, seed=0)
        ...     rnd = RND.for_env(envs, policy)
        ...     rows = RolloutCollector(policy.collect_mode, envs).collect(64)
        >>> rnd.reward(rows).shape
        torch.Size([16, 4])
        >>> first = rnd.update(rows)["loss"]
        >>> last = [rnd.update(rows)["loss"] for _ in range(100)][-1]
        >>> last < 0.5 * first
        True
    """

    target: Component[nn.Module]
    predictor: Component[nn.Module]
    columns: ClassVar[tuple[str, ...]] = ("next_obs",)

    def __init__(
        self,
        obs_shape: ObsShape,
        *,
        embedding_size: int = 128,
        hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        learning_rate: float = 1e-4,
        **options: Any,
    ) -> None:
        def network(n_more: int) -> nn.Module:
            encoder = make_encoder(
                obs_shape, hidden_sizes, conv_layers=conv_layers, init="orthogonal"
            )
            width = encoder.out_features
            head = MLP(width, [width] * n_more, out_features=embedding_size, init="orthogonal")
            return nn.Sequential(encoder, head)

        def make_components() -> dict[str, Component[Any]]:
            return {
                "target": Component(network(0).requires_grad_(False)),
                "predictor": Component(network(2), adam(learning_rate)),
            }

        super().__init__(
            obs_shape,
            make_components,
            settings={
                "embedding_size": embedding_size,
                "hidden_sizes": hidden_sizes,
                "conv_layers": conv_layers,
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
            SpaceError: if the observations are not supported.
        """
        shared = settings_of(policy, user=f"{cls.__name__}.for_env")
        return cls(shape_in_rows(env, policy, user=cls.__name__), **{**shared, **options})

    def _errors(self, batch: Batch) -> torch.Tensor:
        """Return ``[N]``, the mean squared error of each row's embedding."""
        obs = self._normalized(batch["next_obs"])
        with torch.no_grad():
            target: torch.Tensor = self.target.module(obs)
        errors: torch.Tensor = self.predictor.module(obs) - target
        return errors.square().mean(-1)

    def reward_of(self, batch: Batch) -> torch.Tensor:
        """Return the rewards ``[N]`` of rows ``[N, …]``."""
        return self._errors(batch)

    def update_minibatch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Learn from rows ``[B, …]``; return scalars to log."""
        loss = self._errors(batch).mean()
        self.predictor.step(loss)
        return {"loss": loss}
