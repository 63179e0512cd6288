"""The base class of policies whose model returns a distribution and a state value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from dmiddleware.config import Option, at_least, count, fraction, one_of, optional, positive
from dmiddleware.data.batch import Nested, Value, leaves
from dmiddleware.policy.base.actions import ActorOptions, ActorPolicy
from dmiddleware.policy.base.command import CommandModePolicy
from dmiddleware.policy.base.common_options import ON_POLICY_OPTIONS
from dmiddleware.policy.base.network_outputs import values_of_rows
from dmiddleware.policy.base.parts import Part, adam, adamw, rmsprop
from dmiddleware.rl import Distribution
from dmiddleware.schedule import Schedule, scheduled

__all__ = ["ActorCriticPolicy", "PolicyGradientOptions", "PolicyGradientPolicy"]


class PolicyGradientOptions(ActorOptions, total=False):
    """The options that A2C and IMPALA share in ``for_env``."""

    discount_factor: float
    batch_size: int
    epoch_per_collect: int
    learning_rate: float | Schedule
    optimizer: Literal["rmsprop", "adam", "adamw"]
    optimizer_eps: float
    rmsprop_decay: float
    weight_decay: float
    value_weight: float
    entropy_weight: float | Schedule
    grad_clip_norm: float | None
    n_sample: int | None
    n_episode: int | None


class ActorCriticPolicy(ActorPolicy, CommandModePolicy):
    """A policy whose model also returns ``value`` ``[…]``, the value of the observation.

    Collecting returns ``action``, ``log_prob``, ``value`` and what the actor returned, ``logit``,
    ``mu`` and ``sigma``. If the action has continuous parts, it also returns ``raw_action``, the
    draw whose log-density is ``log_prob``; ``action`` is within the environment's bounds.
    """

    def default_model(self) -> tuple[str, list[str]]:
        """Return the model to build where ``cfg.model`` names none."""
        return "actor_critic", ["dmiddleware.model"]

    def _as_return(self, value: torch.Tensor) -> torch.Tensor:
        """Return the critic's output in units of the return."""
        return value

    def _acting_output(self, obs: Value, **inputs: Any) -> dict[str, torch.Tensor]:
        """Return the outputs ``[E, …]`` for what acting sees."""
        output: dict[str, torch.Tensor] = self._model(obs)
        return output

    def _forward_collect_batch(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        output = dict(self._acting_output(obs, **kwargs))
        value = values_of_rows(output["value"], self._lead_of(obs, 1))
        output["value"] = self._as_return(value)
        distribution = self._acting_distribution(output, obs, action_mask)
        raw = distribution.sample(self._generator)
        drawn = {} if self._codec.is_lossless else {"raw_action": raw}
        action, log_prob = self._codec.to_env(raw), distribution.log_prob(raw)
        return {"action": action, **drawn, "log_prob": log_prob, **output}

    def _learned_distribution(
        self, output: Mapping[str, torch.Tensor], batch: Mapping[str, Any]
    ) -> Distribution:
        """Return the distribution of the model's output for a batch, without masked actions."""
        mask = self._mask_of(batch["obs"], batch.get("action_mask"))
        return self._codec.distribution(output, mask)

    def _critic_output(self, obs: Any, n_lead: int | None = None) -> torch.Tensor:
        """Return the critic's output ``[…]``, without running the actor if possible.

        Args:
            obs: ``[…, *obs_shape]``.
            n_lead: the number of its leading dimensions; None: one, or as many as the output has.
        """
        critic = getattr(self._model, "compute_critic", None)
        value = self._model(obs)["value"] if critic is None else critic(obs)
        if n_lead is None:
            is_flat = value.dim() < 2 or value.shape[1:] == (1,)
            n_lead = 1 if is_flat else value.dim() - int(value.shape[-1] == 1)
        return values_of_rows(value, self._lead_of(obs, n_lead))

    def _lead_of(self, obs: Any, n_lead: int) -> torch.Size:
        """Return for which rows there is one value each, of observations ``[…, *obs_shape]``."""
        shape: torch.Size = next(iter(leaves(obs)))[1].shape[:n_lead]
        return shape

    def _value_fn(self, obs: Nested) -> torch.Tensor:
        """Return V of observations ``[…, *obs_shape]``: ``[…]`` float32, on the CPU."""
        if self._model.training:
            self._model.eval()
        with torch.no_grad():
            value = self._critic_output(self._as_seen(self._as_obs(obs)))
        return self._as_return(value).cpu()


class PolicyGradientPolicy(ActorCriticPolicy):
    """An actor-critic that follows the policy gradient in one step per batch, as A2C and IMPALA do.

    A subclass computes advantages and targets of the values, and calls :meth:`_follow_gradient`.
    """

    config: ClassVar[dict[str, Any]] = {
        **ON_POLICY_OPTIONS,
        "learn": {
            "epoch_per_collect": Option(1, count, "passes over each collected batch"),
            "optimizer": Option(
                "rmsprop", one_of("rmsprop", "adam", "adamw"), "what makes the steps"
            ),
            "optimizer_eps": Option(1e-5, positive, "the optimiser's ε"),
            "rmsprop_decay": Option(0.99, fraction, "decay of RMSprop's mean of squared gradients"),
            "weight_decay": Option(0.01, at_least(0), "AdamW's decay of the weights"),
            "value_weight": Option(0.5, at_least(0), "weight of the value loss"),
            "entropy_weight": Option(0.01, scheduled(at_least(0)), "weight of the entropy bonus"),
            "grad_clip_norm": Option(
                0.5, optional(positive), "largest norm of the gradient; None does not clip"
            ),
        },
    }

    def _make_parts(self) -> dict[str, Part]:
        learn, rate = self._cfg.learn, self._schedules["learn.learning_rate"]
        if learn.optimizer == "adam":
            optimizer = adam(rate, eps=learn.optimizer_eps)
        elif learn.optimizer == "adamw":
            optimizer = adamw(rate, weight_decay=learn.weight_decay, eps=learn.optimizer_eps)
        else:
            optimizer = rmsprop(rate, decay=learn.rmsprop_decay, eps=learn.optimizer_eps)
        clip = learn.grad_clip_norm
        return {
            **super()._make_parts(),
            "actor_critic": Part(self._model, optimizer, grad_clip_norm=clip, acts=True),
        }

    def _follow_gradient(
        self,
        distribution: Distribution,
        log_prob: torch.Tensor,
        adv: torch.Tensor,
        value: torch.Tensor,
        target: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Make one step, and return what to log.

        Args:
            distribution: the policy's, over ``[…]``.
            log_prob: ``[…]`` of the actions, with gradient.
            adv: ``[…]`` advantages.
            value: ``[…]`` of the observations, with gradient.
            target: ``[…]`` of the values.
        """
        learn = self._cfg.learn
        policy_loss = -(log_prob * adv).mean()
        value_loss = 0.5 * (value - target).square().mean()
        entropy = distribution.entropy().mean()
        entropy_weight = self._values["learn.entropy_weight"]
        loss = policy_loss + learn.value_weight * value_loss - entropy_weight * entropy
        norm = self._parts["actor_critic"].step(loss)
        answer = {
            "total_loss": loss.detach(),
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
        }
        if learn.grad_clip_norm is not None:
            answer["grad_norm"] = norm
        return answer

    def _monitor_vars_learn(self) -> list[str]:
        return ["cur_lr", "total_loss", "policy_loss", "value_loss", "entropy"]
