"""Policies as distributions over actions, with or without a state value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.model.encoders import ConvLayers, Encoder, convolutions_for, make_encoder
from dmiddleware.model.layers import MLP, Init, Norm, orthogonal_init
from dmiddleware.model.model_registry import MODEL_REGISTRY
from dmiddleware.model.network import Network
from dmiddleware.model.spaces import (
    ActionKind,
    ActionShape,
    ObsShape,
    as_obs_shape,
    is_image,
    shape_leaves,
)
from dmiddleware.torch_private import call
from dmiddleware.tree import Nested

__all__ = ["Actor", "ActorCritic", "FeatureActor", "PhasicActorCritic"]

# Huang et al., "The 37 Implementation Details of PPO" (2022), detail 2.
_POLICY_GAIN = 0.01
_VALUE_GAIN = 1.0


@MODEL_REGISTRY.register("actor")
class Actor(Network):
    """A distribution over actions.

    Choices and bits get logits; continuous actions a diagonal Gaussian, whose standard deviation is
    a separate parameter that does not depend on the state (Schulman et al., "Trust Region Policy
    Optimization", 2015, appendix D). An action with several parts has the logits of all its choices
    and bits one after the other, and so the means.

    Args:
        obs_shape: see :mod:`dmiddleware.model.spaces`.
        action_shape: see :mod:`dmiddleware.model.spaces`; the number of actions if these are
            discrete.
        action_space: the kind of actions: ``"discrete"``, ``"multi_discrete"``,
            ``"multi_binary"``, ``"continuous"``, or a mapping of names to kinds.
        encoder_hidden_sizes: width of each linear layer of the encoder; None: 64, 64 for vectors,
            512 for images.
        conv_layers: see :class:`ImageEncoder`.
        head_hidden_sizes: width of each layer between encoder and output.
        activation: see :func:`~dmiddleware.model.layers.activation_of`; None: ReLU where the
            observation has an image, else tanh.
        norm: ``"layer"``, ``"batch_renorm"`` or None.
        init: ``"orthogonal"`` (the last layer with gain 0.01) or None (torch's own).
        log_std_init: logarithm of the first standard deviation of continuous actions.
        tanh_mean: whether the means of continuous actions are the tanh of the last layer, so within
            [-1, 1]; draws are not.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "discrete",
        encoder_hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        head_hidden_sizes: Sequence[int] = (),
        activation: str | None = None,
        norm: Norm = None,
        init: Init = "orthogonal",
        log_std_init: float = 0.0,
        tanh_mean: bool = False,
    ) -> None:
        super().__init__(obs_shape, action_shape, action_space=action_space)
        has_image = any(is_image(leaf) for _, leaf in shape_leaves(obs_shape))
        if encoder_hidden_sizes is None and not has_image:
            encoder_hidden_sizes = (64, 64)
        self._encoder_options: dict[str, Any] = {
            "hidden_sizes": encoder_hidden_sizes,
            "conv_layers": conv_layers,
            "activation": activation or ("relu" if has_image else "tanh"),
            "norm": norm,
            "init": init,
        }
        self._has_image = has_image
        self.encoder = make_encoder(obs_shape, **self._encoder_options)
        self._n_logits = sum(part.n_logits for part in self.action_parts)
        n_means = sum(part.n_means for part in self.action_parts)
        self._head_hidden_sizes = tuple(head_hidden_sizes)
        n_outputs = self._n_logits + n_means
        width = self.encoder.out_features
        self.policy_head = self._make_head(width, n_outputs, _POLICY_GAIN, self._head_hidden_sizes)
        self._tanh_mean = tanh_mean
        self.log_std: nn.Parameter | None = None
        if n_means:
            self.log_std = nn.Parameter(torch.full((n_means,), float(log_std_init)))

    def _make_head(
        self, width: int, n_outputs: int, gain: float, hidden_sizes: Sequence[int]
    ) -> nn.Module:
        """Return what follows the encoder: a linear layer, with layers before it if configured."""
        options = self._encoder_options
        if not hidden_sizes:
            head: nn.Module = nn.Linear(width, n_outputs)
        else:
            head = MLP(
                width,
                hidden_sizes,
                out_features=n_outputs,
                activation=options["activation"],
                norm=options["norm"],
                init=options["init"],
            )
        if options["init"] == "orthogonal":
            last = [layer for layer in head.modules() if isinstance(layer, nn.Linear)][-1]
            orthogonal_init(last, gain)
        return head

    def new_critic_encoder(
        self, critic_obs_shape: ObsShape, conv_layers: ConvLayers | None
    ) -> Encoder:
        """Return another encoder with the same options, for what a critic sees.

        Args:
            critic_obs_shape: what it sees.
            conv_layers: of actor and critic, where they see images.
        """
        layers = convolutions_for(critic_obs_shape, conv_layers, beside=self.obs_shape)
        return make_encoder(critic_obs_shape, **{**self._encoder_options, "conv_layers": layers})

    def new_value_head(
        self, width: int | None = None, hidden_sizes: Sequence[int] | None = None
    ) -> nn.Module:
        """Return a head for values of features, initialized as one.

        Args:
            width: the number of features; None: as many as the actor has.
            hidden_sizes: width of each layer before the value; None: those of the actor's head.
        """
        sizes = self._head_hidden_sizes if hidden_sizes is None else tuple(hidden_sizes)
        width = self.encoder.out_features if width is None else width
        return self._make_head(width, 1, _VALUE_GAIN, sizes)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the distribution's ``logit``, ``mu`` and ``sigma``, as far as it has them.

        Each is ``[…, A]``, all parts of the action one after the other.

        Args:
            obs: ``[…, *obs_shape]``, a tensor or, for nested observations, a treetensor.
        """
        return self._distribution(call(self.encoder, obs))

    def _distribution(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        output: torch.Tensor = call(self.policy_head, features)
        if self.log_std is None:
            return {"logit": output}
        mu = output[..., self._n_logits :] if self._n_logits else output
        if self._tanh_mean:
            mu = mu.tanh()
        if self._n_logits == 0:
            return {"mu": mu, "sigma": self.log_std.exp().expand_as(mu)}
        return {
            "logit": output[..., : self._n_logits],
            "mu": mu,
            "sigma": self.log_std.exp().expand_as(mu),
        }


@MODEL_REGISTRY.register("actor_critic")
class ActorCritic(Actor):
    """An :class:`Actor` with a state value, for PPO and similar algorithms.

    Args:
        obs_shape: as in :class:`Actor`.
        action_shape: as in :class:`Actor`.
        share_encoder: actor and critic read the same features; None: where the observation has an
            image, as PPO is published (Schulman et al., 2017, section 6).
        value_head_hidden_sizes: width of each layer between the critic's encoder and the value;
            None: ``head_hidden_sizes``.
        conv_layers: see :class:`ImageEncoder`.
        critic_obs_shape: what the critic sees, if it is not what the actor sees, so they share no
            encoder; None: ``obs_shape``.
        **options: the other options of :class:`Actor`, which are also those of the critic; its last
            layer has the gain 1.

    Raises:
        ConfigError: for a shared encoder of an actor and a critic that see different things.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        share_encoder: bool | None = None,
        value_head_hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        critic_obs_shape: ObsShape | None = None,
        **options: Any,
    ) -> None:
        critic = obs_shape if critic_obs_shape is None else critic_obs_shape
        actor_layers = convolutions_for(obs_shape, conv_layers, beside=critic)
        super().__init__(obs_shape, action_shape, conv_layers=actor_layers, **options)
        self.critic_obs_shape = as_obs_shape(critic)
        shared = self._has_image if share_encoder is None else share_encoder
        if self.critic_obs_shape != self.obs_shape:
            if share_encoder:
                raise ConfigError(
                    "share_encoder must be False, or left out, where the critic sees other parts "
                    f"of observations than the actor: {self.critic_obs_shape}, not "
                    f"{self.obs_shape}"
                )
            shared = False
        self.critic_encoder = None if shared else self.new_critic_encoder(critic, conv_layers)
        judged = self.encoder if self.critic_encoder is None else self.critic_encoder
        self.value_head = self.new_value_head(judged.out_features, value_head_hidden_sizes)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the distribution and the value.

        Args:
            obs: ``[…, *obs_shape]``, a tensor or, for nested observations, a treetensor.

        Returns:
            What :class:`Actor` returns, and ``value`` ``[…]``.
        """
        features = call(self.encoder, obs)
        output = self._distribution(features)
        if self.critic_encoder is not None:
            features = call(self.critic_encoder, obs)
        output["value"] = call(self.value_head, features).squeeze(-1)
        return output

    def compute_actor(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the distribution alone, without the critic's work."""
        return self._distribution(call(self.encoder, obs))

    def compute_critic(self, obs: Nested) -> torch.Tensor:
        """Return the value ``[…]`` alone, without the actor's work."""
        encoder = self.encoder if self.critic_encoder is None else self.critic_encoder
        value: torch.Tensor = call(self.value_head, call(encoder, obs)).squeeze(-1)
        return value


class FeatureActor(Actor):
    """An :class:`Actor` that also returns its features, ``[…, F]``."""

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return what :class:`Actor` returns, and ``features``."""
        features = call(self.encoder, obs)
        return {**self._distribution(features), "features": features}

    def compute_actor(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the distribution alone."""
        return super().forward(obs)


@MODEL_REGISTRY.register("phasic_actor_critic")
class PhasicActorCritic(Network):
    """An actor and a critic that share nothing, and an auxiliary value of the actor's features.

    It is the network of PPG (Cobbe et al., "Phasic Policy Gradient", 2020, figure 1).

    Args:
        obs_shape: as in :class:`Actor`, as all other options.
        action_shape: as in :class:`Actor`.
        action_space: as in :class:`Actor`.
        encoder_hidden_sizes: width of each linear layer of both encoders.
        conv_layers: of both encoders.
        head_hidden_sizes: width of each layer between an encoder and its outputs.
        value_head_hidden_sizes: the same before a value; None: ``head_hidden_sizes``.
        activation: of actor and critic.
        norm: of actor and critic.
        init: of actor and critic.
        log_std_init: as in :class:`Actor`.
        tanh_mean: as in :class:`Actor`.
        critic_obs_shape: as in :class:`ActorCritic`.

    Attributes:
        actor: a :class:`FeatureActor`.
        auxiliary: features to the auxiliary value ``[…, 1]``.
        critic: observations to the value ``[…, 1]``, with an encoder of its own.
    """

    def __init__(
        self,
        obs_shape: ObsShape,
        action_shape: ActionShape,
        *,
        action_space: ActionKind = "discrete",
        encoder_hidden_sizes: Sequence[int] | None = None,
        conv_layers: ConvLayers | None = None,
        head_hidden_sizes: Sequence[int] = (),
        value_head_hidden_sizes: Sequence[int] | None = None,
        activation: str | None = None,
        norm: Norm = None,
        init: Init = "orthogonal",
        log_std_init: float = 0.0,
        tanh_mean: bool = False,
        critic_obs_shape: ObsShape | None = None,
    ) -> None:
        super().__init__(
            obs_shape, action_shape, action_space=action_space, critic_obs_shape=critic_obs_shape
        )
        critic = self.critic_obs_shape
        self.actor = FeatureActor(
            obs_shape,
            action_shape,
            action_space=action_space,
            encoder_hidden_sizes=encoder_hidden_sizes,
            conv_layers=convolutions_for(obs_shape, conv_layers, beside=critic),
            head_hidden_sizes=head_hidden_sizes,
            activation=activation,
            norm=norm,
            init=init,
            log_std_init=log_std_init,
            tanh_mean=tanh_mean,
        )
        self.auxiliary = self.actor.new_value_head(hidden_sizes=value_head_hidden_sizes)
        encoder = self.actor.new_critic_encoder(critic, conv_layers)
        head = self.actor.new_value_head(encoder.out_features, value_head_hidden_sizes)
        self.critic = nn.Sequential(encoder, head)

    def forward(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the distribution, and the critic's ``value`` ``[…]``.

        Args:
            obs: ``[…, *obs_shape]``, a tensor or, for nested observations, a treetensor.
        """
        return {**self.compute_actor(obs), "value": self.compute_critic(obs)}

    def compute_actor(self, obs: Nested) -> dict[str, torch.Tensor]:
        """Return the distribution alone, without the critic's work."""
        return self.actor.compute_actor(obs)

    def compute_critic(self, obs: Nested) -> torch.Tensor:
        """Return the critic's value ``[…]`` alone."""
        value: torch.Tensor = call(self.critic, obs).squeeze(-1)
        return value
