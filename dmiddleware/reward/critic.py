"""The value of learned rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from dmiddleware.errors import ConfigError, StructureError
from dmiddleware.model import ConvLayers, make_encoder
from dmiddleware.model.layers import MLP
from dmiddleware.model.spaces import HasSpaces, ObsShape
from dmiddleware.policy import Component, HasModes, LearnMode, adam, as_learn_mode
from dmiddleware.policy.obs_norm import ObsNorm
from dmiddleware.reward.base import RowLearner
from dmiddleware.reward.intrinsic import settings_of, shape_in_rows
from dmiddleware.rl import with_advantages
from dmiddleware.seeding import derive_seed
from dmiddleware.torch_seeding import torch_seeded
from dmiddleware.tree import Batch, as_tree, to_device, with_columns

__all__ = ["IntrinsicCritic"]


class IntrinsicCritic(RowLearner):
    """A critic of learned rewards, whose sum does not end with the episode.

    With one sum of both rewards, an agent that reaches its goal gives up the learned rewards of the
    rest of the episode, and so learns to stay away. This critic counts on, through the first steps
    of the next episode, and the environment's rewards keep their own critic, the policy's (Burda et
    al., "Exploration by Random Network Distillation", 2018, section 2.3).

    Difference from the paper: the two critics share no layers.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        hidden_sizes: width of each linear layer; None: 128, 128, 64 for vectors, 512 for images.
        conv_layers: see :class:`~dmiddleware.model.ImageEncoder`.
        learning_rate: Adam's learning rate.
        discount: γ of the learned rewards.
        gae_lambda: λ of generalized advantage estimation.
        batch_size: rows per update.
        epochs: passes over the collected rows.
        device: the device of the network.
        seed: of the initial weights and the order of the minibatches.

    Raises:
        ValueError: if an option is invalid.
        SpaceError: if the shape is, or an image is too small for the convolutions.
    """

    critic: Component[nn.Sequential]
    columns: ClassVar[tuple[str, ...]] = ("obs", "learned_return")

    def __init__(
        self,
        obs_shape: ObsShape,
        *,
        hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        learning_rate: float = 3e-4,
        discount: float = 0.99,
        gae_lambda: float = 0.95,
        batch_size: int = 256,
        epochs: int = 4,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        with torch_seeded(derive_seed(seed, "intrinsic_critic", "model")):
            encoder = make_encoder(
                obs_shape, hidden_sizes, conv_layers=conv_layers, init="orthogonal"
            )
            head = MLP(encoder.out_features, [], out_features=1, init="orthogonal")
        self._obs_norm = ObsNorm(obs_shape, device=device)
        super().__init__(
            {
                "critic": Component(nn.Sequential(encoder, head), adam(learning_rate)),
                "obs_norm": Component(self._obs_norm),
            },
            batch_size=batch_size,
            epochs=epochs,
            device=device,
            seed=derive_seed(seed, "intrinsic_critic", "minibatches"),
        )
        self._discount, self._gae_lambda = discount, gae_lambda
        self._learning_rate = learning_rate
        self._layers = {"hidden_sizes": hidden_sizes, "conv_layers": conv_layers}

    @classmethod
    def for_env(cls, env: HasSpaces, policy: HasModes | LearnMode, **options: Any) -> Self:
        """Build the critic for an environment, with the policy's γ, λ, device and seed.

        Args:
            env: an env manager, a Gymnasium env or a Gymnasium vector env.
            policy: the policy that learns from advantages.
            **options: other arguments of the class.

        Raises:
            ConfigError: if the policy does not learn from advantages, or computes them again in
                each epoch (``recompute_advantage``), which would lose those of this critic.
            SpaceError: if the observations are not supported.
        """
        user = f"{cls.__name__}.for_env"
        shared = settings_of(policy, user=user)
        spec = as_learn_mode(policy, user=user).spec
        gae_lambda = spec.gae_lambda
        if gae_lambda is None:
            raise ConfigError(
                f"{user} reads λ of the advantages from the policy, which has none; use a policy "
                "that learns from advantages, such as PPOPolicy, or add the learned rewards to the "
                "environment's with RewardLearner(weight=...)"
            )
        if getattr(spec.settings, "recompute_advantage", False):
            raise ConfigError(
                "with recompute_advantage, later epochs would lose the advantages of the "
                "learned rewards; set it to False"
            )
        shape = shape_in_rows(env, policy, user=user)
        return cls(shape, **{**shared, "gae_lambda": gae_lambda, **options})

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's config records."""
        return {
            **super().settings,
            **self._layers,
            "learning_rate": self._learning_rate,
            "discount": self._discount,
            "gae_lambda": self._gae_lambda,
        }

    @torch.no_grad()
    def estimate(self, rows: Batch) -> Batch:
        """Estimate the advantages of collected rows, and add the rows to the running statistics.

        Args:
            rows: ``[T, …]`` or ``[T, E, …]``, each batch once, with the column ``learned_reward``.

        Returns:
            The rows with the columns ``learned_adv`` and ``learned_return``, float32, in the shape
            of ``done``.

        Raises:
            StructureError: if the rows lack the column ``learned_reward``.
        """
        if "learned_reward" not in rows:
            raise StructureError(
                "the rows have no column learned_reward; write the rewards of a reward model there "
                "first, or use middleware.IntrinsicAdvantage, which does"
            )
        self._obs_norm.update(self._flat(rows, ("obs",))["obs"])
        never = torch.zeros_like(rows["done"])
        value = self._for_each(lambda batch: self._value(batch["obs"]), rows, ("obs",))
        estimated = with_advantages(
            # No episode ends: the row after the last of an episode is the first of the next.
            as_tree(
                {
                    "next_obs": rows["next_obs"],
                    "value": value,
                    "terminated": never,
                    "done": never,
                }
            ),
            reward=rows["learned_reward"],
            value_fn=lambda obs: self._value(to_device(obs, self._device)).cpu(),
            discount=self._discount,
            gae_lambda=self._gae_lambda,
        )
        return with_columns(rows, learned_adv=estimated["adv"], learned_return=estimated["ret"])

    def _value(self, obs: Any) -> torch.Tensor:
        """Return ``[N]``."""
        value: torch.Tensor = self.critic.module(self._obs_norm(obs))
        return value.squeeze(-1)

    def update_minibatch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Learn from rows ``[B, …]``; return scalars to log."""
        loss = (self._value(batch["obs"]) - batch["learned_return"]).square().mean()
        self.critic.step(loss)
        return {"value_loss": loss}
