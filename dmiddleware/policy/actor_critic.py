"""The base class of policies whose model returns a distribution and a state value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import nn

from dmiddleware.policy.action_codec import ActorSettings, mask_of
from dmiddleware.policy.component import Component, adam, adamw, rmsprop
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.policy.network_outputs import named_outputs, value_output, values_of_rows
from dmiddleware.policy.obs_groups import ObsGroupSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_settings import DiscountedSettings
from dmiddleware.rl import Distribution
from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import Count, Fraction, NonNegative, Numbers, Positive
from dmiddleware.tree import Columns, Nested, Value

__all__ = [
    "ActorCriticPolicy",
    "ActorCriticSettings",
    "PolicyGradientSettings",
    "follow_policy_gradient",
    "policy_gradient_component",
]


class ActorCriticSettings(ObsGroupSettings, ActorSettings, DiscountedSettings):
    """Settings of policies that learn from each collected batch once."""

    epoch_per_collect: Count = 1
    """Passes over each collected batch."""
    value_weight: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_weight: Annotated[float | Schedule, Scheduled(NonNegative)] = 0.01
    """Weight of the entropy bonus."""
    grad_clip_norm: Positive | None = 0.5
    """Largest norm of the gradient; None does not clip."""


class PolicyGradientSettings(ActorCriticSettings):
    """What A2C and IMPALA have."""

    optimizer: Literal["rmsprop", "adam", "adamw"] = "rmsprop"
    """What makes the steps."""
    optimizer_eps: Positive = 1e-5
    """The optimizer's ε."""
    adam_betas: Numbers = (0.9, 0.999)
    """Decay of Adam's and AdamW's means of the gradient and of its square."""
    rmsprop_decay: Fraction = 0.99
    """Decay of RMSprop's mean of squared gradients."""
    weight_decay: NonNegative = 0.01
    """AdamW's decay of the weights."""
    learning_rate: LearningRate = 7e-4
    """The optimizer's learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            len(self.adam_betas) == 2 and all(0 <= beta < 1 for beta in self.adam_betas),
            "adam_betas",
            "two numbers from 0 to below 1",
        )


class ActorCriticPolicy(Policy):
    """A policy whose model also returns ``value`` ``[…]``, the value of the observation.

    Collecting returns ``action``, ``log_prob``, ``value`` and what the actor returned, ``logit``,
    ``mu`` and ``sigma``. If the action has continuous parts, it also returns ``raw_action``, the
    draw whose log-density is ``log_prob``; ``action`` is within the environment's bounds.
    """

    cfg: ActorCriticSettings
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "policy_loss",
        "value_loss",
        "entropy",
        "entropy_weight",
        "grad_norm",
        "cur_lr",
    )
    model_type: ClassVar[str] = "actor_critic"
    on_policy: bool = True

    def as_return(self, value: torch.Tensor) -> torch.Tensor:
        """Return the critic's output in units of the return."""
        return value

    def acting_output(self, obs: Value, **inputs: Any) -> dict[str, torch.Tensor]:
        """Return the outputs ``[E, …]`` for what acting sees."""
        return self.acting_model(obs)

    def act_collect(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Draw actions, and return what learning needs; see :meth:`Policy.act_collect`."""
        output: dict[str, torch.Tensor] = {**named_outputs(self.acting_output(obs, **kwargs))}
        output["value"] = self.as_return(value_output(output, self.rows_of(obs)))
        distribution = self.acting_distribution(output, obs, action_mask)
        raw = distribution.sample(self.generator)
        drawn = {} if self.codec.is_lossless else {"raw_action": raw}
        action, log_prob = self.codec.to_env(raw), distribution.log_prob(raw)
        return {"action": action, **drawn, "log_prob": log_prob, **output}

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        return replace(super().spec, value_fn=self.value_fn)

    def raw_action(self, batch: Columns) -> Any:
        """Return the raw actions of a batch: those that were stored, or from the env's actions."""
        if "raw_action" in batch:
            return batch["raw_action"]
        return self.codec.to_raw(batch["action"])

    def learned_distribution(
        self, output: Mapping[str, torch.Tensor], batch: Columns
    ) -> Distribution:
        """Return the distribution of the model's output for a batch, without masked actions."""
        mask = mask_of(batch["obs"], batch.get("action_mask"))
        return self.codec.distribution(output, mask)

    def critic_output(self, obs: Any, n_lead: int | None = None) -> torch.Tensor:
        """Return the critic's output ``[…]``, without running the actor if possible.

        Args:
            obs: ``[…, *obs_shape]``.
            n_lead: the number of its leading dimensions; None: one, or as many as the output has.
        """
        compute = getattr(self.model, "compute_critic", None)
        value: torch.Tensor
        if compute is None:
            value = named_outputs(self.model(obs), "value")["value"]
        else:
            value = compute(obs)
        if n_lead is None:
            is_flat = value.dim() < 2 or value.shape[1:] == (1,)
            n_lead = 1 if is_flat else value.dim() - int(value.shape[-1] == 1)
        return values_of_rows(value, self.rows_of(obs, n_lead))

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network without a value, or whose actions cannot be drawn."""
        output = self.acting_output(obs, **inputs)
        self.codec.check_outputs(output, draws=True)
        value_output(output, self.rows_of(obs))
        if hasattr(self.model, "compute_critic"):
            self.critic_output(obs, n_lead=1)

    def value_fn(self, obs: Nested) -> torch.Tensor:
        """Return V of observations ``[…, *obs_shape]``: ``[…]`` float32, where they are."""
        if self.model.training:
            self.model.eval()
        self.draw_near(obs)
        with torch.no_grad():
            value = self.critic_output(self.obs_norm(self.as_obs(obs)))
        return self.as_return(value).to(self.draw_device)


def policy_gradient_component(
    network: nn.Module, cfg: PolicyGradientSettings
) -> Component[nn.Module]:
    """Return the network of A2C or IMPALA, with the optimizer that its settings ask for."""
    rate = cfg.learning_rate
    first, second = cfg.adam_betas
    if cfg.optimizer == "adam":
        optimizer = adam(rate, betas=(first, second), eps=cfg.optimizer_eps)
    elif cfg.optimizer == "adamw":
        optimizer = adamw(
            rate,
            weight_decay=cfg.weight_decay,
            betas=(first, second),
            eps=cfg.optimizer_eps,
        )
    else:
        optimizer = rmsprop(rate, decay=cfg.rmsprop_decay, eps=cfg.optimizer_eps)
    return Component(network, optimizer, grad_clip_norm=cfg.grad_clip_norm, acts=True)


def follow_policy_gradient(
    policy: ActorCriticPolicy,
    actor_critic: Component[nn.Module],
    distribution: Distribution,
    log_prob: torch.Tensor,
    adv: torch.Tensor,
    value: torch.Tensor,
    target: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Make the step of A2C or IMPALA, and return what to log.

    Args:
        policy: the algorithm.
        actor_critic: its network.
        distribution: the policy's, over ``[…]``.
        log_prob: ``[…]`` of the actions, with gradient.
        adv: ``[…]`` advantages.
        value: ``[…]`` of the observations, with gradient.
        target: ``[…]`` of the values.
    """
    cfg = policy.cfg
    policy_loss = -(log_prob * adv).mean()
    value_loss = 0.5 * (value - target).square().mean()
    entropy = distribution.entropy().mean()
    entropy_weight = policy.now(cfg.entropy_weight)
    loss = policy_loss + cfg.value_weight * value_loss - entropy_weight * entropy
    norm = actor_critic.step(loss)
    answer = {
        "total_loss": loss.detach(),
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach(),
    }
    if cfg.grad_clip_norm is not None:
        answer["grad_norm"] = norm
    return answer
