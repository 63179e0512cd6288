"""Generative adversarial imitation learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import gymnasium as gym
import torch
import torch.nn.functional as F
from torch import nn

from dmiddleware.data import select_columns
from dmiddleware.errors import NotEnoughData, StructureError
from dmiddleware.model import ConvLayers, make_encoder, obs_shape_of
from dmiddleware.model.layers import MLP
from dmiddleware.model.spaces import HasSpaces, spaces_of
from dmiddleware.policy import ActionCodec, Component, adam
from dmiddleware.reward.base import RewardModel
from dmiddleware.seeding import derive_seed
from dmiddleware.torch_seeding import torch_seeded
from dmiddleware.tree import Batch, Nested, flatten_lead, index_rows, lead_shape, to_device

__all__ = ["GAIL", "Discriminator"]


class Discriminator(nn.Module):
    """Tells the policy's observations and actions from the expert's.

    Args:
        observation_space: that of one environment.
        action_space: that of one environment.
        hidden_sizes: width of each linear layer.
        conv_layers: see :class:`~dmiddleware.model.ImageEncoder`.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.

    Raises:
        ValueError: if an option is invalid.
        SpaceError: if a space is not supported, or an image is too small for the convolutions.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        *,
        hidden_sizes: Sequence[int] = (100, 100),
        conv_layers: ConvLayers | None = None,
        activation: str = "tanh",
    ) -> None:
        super().__init__()
        self._codec = ActionCodec.for_space(action_space)
        shape = obs_shape_of(observation_space)
        self.encoder = make_encoder(
            shape, hidden_sizes[:1], conv_layers=conv_layers, activation=activation
        )
        self.joined = MLP(
            self.encoder.out_features + self._codec.n_outputs,
            hidden_sizes[1:],
            out_features=1,
            activation=activation,
        )

    def forward(self, obs: Nested, action: Nested) -> torch.Tensor:
        """Return the logit ``[…]`` of the probability that the policy chose the actions.

        Args:
            obs: ``[…, *obs_shape]``.
            action: ``[…]``, as the environment takes them.
        """
        features = [self.encoder(obs), self._codec.features(action)]
        logit: torch.Tensor = self.joined(torch.cat(features, -1))
        return logit.squeeze(-1)


class GAIL(RewardModel):
    """Generative adversarial imitation learning (Ho and Ermon, 2016): a reward from an expert.

    A discriminator ``D`` learns the probability that an observation and an action are the policy's
    and not the expert's, by equation 16; the policy gets the reward ``-log D``, which algorithm 1
    gives as the cost ``log D``. The reward is positive everywhere, so it also rewards long
    episodes. The policy can be any; the paper's is TRPO, and PPO replaces it here.

    Differences from the paper: the discriminator makes several updates from minibatches; its first
    layer sees the observations only; and the entropy bonus is an option of the policy.

    Args:
        discriminator: ``(obs, action)`` in, the logit ``[N]`` of ``D`` out.
        expert: the expert's rows ``[N, …]`` or ``[T, E, …]``, with the columns ``obs`` and
            ``action``.
        batch_size: rows of the policy per update; as many of the expert are drawn.
        epochs: passes over the collected rows.
        learning_rate: Adam's.
        device: the device of the discriminator and of the expert's rows.
        seed: of the drawn rows and of the minibatches.

    Raises:
        ConfigError: if ``batch_size`` or ``epochs`` is not a positive integer.
        StructureError: if the expert's rows lack a column.
        NotEnoughData: if there are none.
    """

    discriminator: Component[nn.Module]
    columns: ClassVar[tuple[str, ...]] = ("obs", "action")
    learns_first: ClassVar[bool] = True

    def __init__(
        self,
        discriminator: nn.Module,
        expert: Batch,
        *,
        batch_size: int = 256,
        epochs: int = 1,
        learning_rate: float = 3e-4,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__(
            {"discriminator": Component(discriminator, adam(learning_rate))},
            batch_size=batch_size,
            epochs=epochs,
            device=device,
            seed=seed,
        )
        self._learning_rate = learning_rate
        self._expert = to_device(_checked(expert), self._device)
        (self._n_expert,) = lead_shape(self._expert)

    @classmethod
    def for_env(
        cls,
        env: HasSpaces,
        expert: Batch,
        *,
        hidden_sizes: Sequence[int] = (100, 100),
        conv_layers: ConvLayers | None = None,
        activation: str = "tanh",
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Build the discriminator for an environment.

        Args:
            env: an env manager, a Gymnasium env or a Gymnasium vector env.
            expert: as in the class.
            hidden_sizes: as in :class:`Discriminator`.
            conv_layers: as in :class:`Discriminator`.
            activation: as in :class:`Discriminator`.
            seed: as in the class; also of the first weights.
            **options: other arguments of the class.

        Raises:
            ValueError: if an option is invalid.
            SpaceError: if a space is not supported, or an image is too small for the convolutions.
        """
        with torch_seeded(derive_seed(seed, "discriminator")):
            network = Discriminator(
                *spaces_of(env),
                hidden_sizes=hidden_sizes,
                conv_layers=conv_layers,
                activation=activation,
            )
        return cls(network, expert, seed=seed, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """What the run's config records."""
        return {
            **super().settings,
            "learning_rate": self._learning_rate,
            "n_expert": self._n_expert,
        }

    def reward_of(self, batch: Batch) -> torch.Tensor:
        """Return the rewards ``[N]`` of rows ``[N, …]``."""
        return -F.logsigmoid(self._logit(batch))

    def update_minibatch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Learn from rows ``[B, …]``; return scalars to log."""
        drawn = torch.randint(self._n_expert, lead_shape(batch), generator=self.generator)
        drawn = drawn.to(self._device)
        policy, expert = self._logit(batch), self._logit(index_rows(self._expert, drawn))
        loss = -F.logsigmoid(policy).mean() - F.logsigmoid(-expert).mean()
        self.discriminator.step(loss)
        return {
            "discriminator_loss": loss,
            "policy_accuracy": (policy > 0).float().mean(),
            "expert_accuracy": (expert < 0).float().mean(),
        }

    def _logit(self, batch: Batch) -> torch.Tensor:
        logit: torch.Tensor = self.discriminator.module(batch["obs"], batch["action"])
        return logit


def _checked(expert: Batch) -> Batch:
    """Return the columns of the expert that are needed, ``[N, …]``."""
    missing = [name for name in GAIL.columns if name not in expert]
    if missing:
        raise StructureError(
            f"the expert's rows lack the column {', '.join(missing)}; save the columns "
            f"{', '.join(GAIL.columns)}, and done if the rows are [T, E, …]"
        )
    n_lead = expert["done"].dim() if "done" in expert else 1
    rows = flatten_lead(select_columns(expert, GAIL.columns), n_lead)
    if lead_shape(rows) == (0,):
        raise NotEnoughData("the expert has no rows; record at least one episode")
    return rows
