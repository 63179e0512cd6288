"""An actor with critics of state-action values, for continuous actions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dmiddleware.errors import SpaceError
from dmiddleware.model.encoders import ConvLayers, convolutions_for, make_encoder
from dmiddleware.model.layers import BatchRenorm, Norm, activation_of
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.q_network import support_of_returns
from dmiddleware.model.spaces import ActionKind, ActionShape, ObsShape, as_obs_shape
from dmiddleware.settings import Count, Counts, checked
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = ["ActorQ", "CategoricalActorQ", "EnsembleLinear", "GaussianActor", "QEnsemble"]

# Haarnoja et al., "Soft Actor-Critic" (2018), leave the range open; these are the authors' own.
_LOG_STD_RANGE = (-20.0, 2.0)


class EnsembleLinear(nn.Module):
    """Several linear layers of the same size, computed together.

    Args:
        n: the number of layers.
        in_features: length of the input's last dimension.
        out_features: length of the output's.
    """

    def __init__(self, n: int, in_features: int, out_features: int) -> None:
        super().__init__()
        # As torch.nn.Linear starts each of them.
        bound = 1.0 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(n, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(n, 1, out_features))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[n, B, out_features]`` of ``x [n, B, in_features]``."""
        return torch.baddbmm(self.bias, x, self.weight)


class QEnsemble(nn.Module):
    """Several independent estimates of the value of an action.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`. Observations that are not vectors pass
            through one encoder, which all estimates share.
        n_actions: length of the action vector.
        hidden_sizes: width of each hidden layer.
        conv_layers: see :class:`ImageEncoder`.
        n_critics: the number of estimates.
        n_quantiles: how many quantiles of the return each estimate has, at the middles of as many
            equal intervals of [0, 1]; None: each estimate is one value.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: what normalizes; see :data:`~dmiddleware.model.layers.Norm`. With
            ``"batch_renorm"``, each estimate has its own statistics.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        n_actions: int,
        *,
        hidden_sizes: Sequence[int] = (256, 256),
        conv_layers: ConvLayers | None = None,
        n_critics: int = 2,
        n_quantiles: int | None = None,
        activation: str = "relu",
        norm: Norm = None,
    ) -> None:
        super().__init__()
        hidden_sizes = checked("critic_hidden_sizes", hidden_sizes, Counts)
        n_critics = checked("n_critics", n_critics, Count)
        n_quantiles = checked("n_quantiles", n_quantiles, Count | None)
        shape = as_obs_shape(obs_shape)
        is_vector = isinstance(shape, tuple) and len(shape) == 1
        self.encoder = None
        if not is_vector or conv_layers is not None:
            self.encoder = make_encoder(
                obs_shape, conv_layers=conv_layers, activation=activation, norm=norm
            )
        n_features = shape[0] if self.encoder is None else self.encoder.out_features
        self.n_critics = n_critics
        self.n_quantiles = n_quantiles
        checked("norm", norm, Norm)
        layers: list[nn.Module] = []
        width = n_features + n_actions
        if norm == "batch_renorm":
            layers.append(BatchRenorm(width, n_layers=n_critics))
        for size in hidden_sizes:
            layers.append(EnsembleLinear(n_critics, width, size))
            if norm == "layer":
                layers.append(nn.LayerNorm(size))
            layers.append(activation_of(activation))
            if norm == "batch_renorm":
                layers.append(BatchRenorm(size, n_layers=n_critics))
            width = size
        self.layers = nn.Sequential(*layers, EnsembleLinear(n_critics, width, n_quantiles or 1))

    def forward(self, obs: Nested, action: torch.Tensor) -> torch.Tensor:
        """Return the values.

        Args:
            obs: ``[B, *obs_shape]``.
            action: ``[B, A]`` float32, or ``[n_critics, B, A]``, one for each estimate.

        Returns:
            ``[n_critics, B]``, or the quantiles ``[n_critics, B, n_quantiles]``.
        """
        features = obs if self.encoder is None else call(self.encoder, obs)
        x = torch.cat([features.float().expand(*action.shape[:-1], -1), action], -1)
        values: torch.Tensor = self.layers(x.expand(self.n_critics, *x.shape[-2:]))
        return values.squeeze(-1) if self.n_quantiles is None else values


class GaussianActor(nn.Module):
    """The mean and the standard deviation of actions, both functions of the observation.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        n_actions: length of the action vector.
        hidden_sizes: width of each hidden layer.
        deterministic: leave out the standard deviation.
        **options: of the encoder; see :func:`make_encoder`.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        n_actions: int,
        *,
        hidden_sizes: Sequence[int] = (256, 256),
        deterministic: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.encoder = make_encoder(obs_shape, hidden_sizes, **options)
        self.head = nn.Linear(
            self.encoder.out_features, n_actions if deterministic else 2 * n_actions
        )
        self.is_deterministic = deterministic

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return ``{"mu", "sigma"}``, each ``[…, A]``; a deterministic actor returns ``mu`` only.

        Args:
            obs: ``[…, *obs_shape]``.
        """
        output: torch.Tensor = call(self.head, call(self.encoder, obs))
        if self.is_deterministic:
            return {"mu": output}
        mu, log_std = output.chunk(2, -1)
        return {"mu": mu, "sigma": log_std.clamp(*_LOG_STD_RANGE).exp()}


@MODEL_REGISTRY.register("actor_q")
class ActorQ(Network):
    """An actor and an ensemble of critics for a Box of actions, as SAC and TD3 need them.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`.
        action_space: ``"continuous"``.
        actor_hidden_sizes: width of each hidden layer of the actor.
        critic_hidden_sizes: width of each hidden layer of the critics.
        conv_layers: see :class:`ImageEncoder`.
        n_critics: the number of critics.
        n_quantiles: how many quantiles of the return each critic has; None: only its mean.
        activation: see :func:`~dmiddleware.model.layers.activation_of`.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        deterministic: the actor has no standard deviation.
        critic_obs_shape: what the critic sees, if it is not what the actor sees; None:
            ``obs_shape``.

    Attributes:
        actor: a :class:`GaussianActor`.
        critic: a :class:`QEnsemble`.
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
        n_quantiles: int | None = None,
        activation: str = "relu",
        norm: Norm = None,
        deterministic: bool = False,
        critic_obs_shape: ObsShape | None = None,
    ) -> None:
        super().__init__(
            obs_shape, action_shape, action_space=action_space, critic_obs_shape=critic_obs_shape
        )
        (part, *more) = self.action_parts
        if more or part.kind != "continuous":
            raise SpaceError(
                f"ActorQ needs a Box of actions, got {action_space}; use PPO or DQN for others"
            )
        n_actions = part.sizes[0]
        actor_layers = convolutions_for(obs_shape, conv_layers, beside=self.critic_obs_shape)
        critic_layers = convolutions_for(self.critic_obs_shape, conv_layers, beside=obs_shape)
        shared: dict[str, Any] = {"activation": activation, "norm": norm}
        self.actor = GaussianActor(
            obs_shape,
            n_actions,
            hidden_sizes=actor_hidden_sizes,
            deterministic=deterministic,
            conv_layers=actor_layers,
            **shared,
        )
        self.critic = QEnsemble(
            self.critic_obs_shape,
            n_actions,
            conv_layers=critic_layers,
            hidden_sizes=critic_hidden_sizes,
            n_critics=n_critics,
            n_quantiles=n_quantiles,
            **shared,
        )

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return what the actor does; the critics are called with the actions they judge."""
        output: dict[str, torch.Tensor] = call(self.actor, obs)
        return output


@MODEL_REGISTRY.register("categorical_actor_q")
class CategoricalActorQ(ActorQ):
    """A deterministic actor, and critics with a categorical distribution over returns.

    Source: Barth-Maron et al., "Distributed Distributional Deterministic Policy Gradients" (2018),
    appendix A.

    Args:
        obs_shape: as in :class:`ActorQ`.
        action_shape: as in :class:`ActorQ`.
        n_atoms: the number of returns that have a probability.
        v_min: the lowest of them.
        v_max: the highest; the others are evenly spaced between both.
        n_critics: the number of critics.
        **options: the other options of :class:`ActorQ`, without ``n_quantiles`` and
            ``deterministic``.

    Raises:
        ConfigError: if ``n_atoms`` is not a positive integer, or ``v_min`` or ``v_max`` is not a
            finite number.
        ValueError: if ``v_min`` is not below ``v_max``, or there is one atom.

    Attributes:
        critic: a :class:`QEnsemble`, which returns the logits ``[n_critics, B, n_atoms]``.
        support: ``[n_atoms]``, the returns.
    """

    support: torch.Tensor

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        n_atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        n_critics: int = 1,
        **options: Any,
    ) -> None:
        support = support_of_returns(n_atoms, v_min, v_max)
        fixed: dict[str, Any] = {
            "n_critics": n_critics,
            "n_quantiles": n_atoms,
            "deterministic": True,
        }
        super().__init__(obs_shape, action_shape, **{**options, **fixed})
        self.register_buffer("support", support, persistent=False)
