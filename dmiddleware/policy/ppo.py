"""Proximal policy optimization."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt
from torch import nn

from dmiddleware.policy.advantage import AdvantagePolicy, AdvantageSettings
from dmiddleware.policy.agents import present_agents, weights_of_agents
from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.network_outputs import value_output
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.rl import ppo_policy_loss, ppo_value_loss
from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import NonNegative, Positive
from dmiddleware.tree import Columns

__all__ = ["PPOPolicy", "PPOSettings"]


class PPOSettings(AdvantageSettings):
    """The settings of PPO."""

    batch_size = 64
    """Rows per minibatch."""
    epoch_per_collect = 10
    learning_rate: LearningRate = 3e-4
    """Adam's learning rate."""
    adam_eps: Positive = 1e-5
    """Adam's ε."""
    clip_ratio: Annotated[float | Schedule, Scheduled(Positive)] = 0.2
    """ε of the clipped objective."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """Factor of dual clipping; None disables it."""
    value_clip: Positive | None = None
    """Range of the clipped value loss; None does not clip."""
    entropy_weight: Annotated[float | Schedule, Scheduled(NonNegative)] = 0.0
    recompute_advantage: bool = False
    """Whether every epoch starts with new values and advantages."""
    target_kl: Positive | None = None
    """KL divergence at which learning stops early; None never stops; Spinning Up and
    stable-baselines3 stop at 1.5 times theirs."""


@POLICY_REGISTRY.register("ppo")
class PPOPolicy(AdvantagePolicy):
    """Proximal policy optimization (Schulman et al., "PPO Algorithms", 2017), with clipping.

    The details follow Huang et al., "The 37 Implementation Details of PPO" (2022): orthogonal
    initialization (the model's), Adam with ε = 1e-5, advantages normalized in each minibatch, and a
    clipped gradient. Others are options that are off by default: a clipped value loss, an entropy
    bonus, a learning rate that falls linearly, normalized observations and scaled rewards.

    One learn forward is one minibatch. Learns from the columns ``obs``, ``action`` (``raw_action``
    where there is one), ``log_prob``, ``value``, ``adv`` and ``ret``.

    - Discrete, MultiDiscrete, MultiBinary, Box, Dict and Tuple action spaces are supported; see
      :class:`ActionCodec`.
    - Collecting returns ``action``, ``log_prob``, ``value`` and what the actor returned, ``logit``,
      ``mu`` and ``sigma``. If the action has continuous parts, it also returns ``raw_action``, the
      draw whose log-density is ``log_prob``; ``action`` is within the environment's bounds.
    - Actions that a mask forbids are neither taken nor learned from; the mask is the key
      ``action_mask`` of observations or the column ``action_mask``.
    - ``obs_norm``, ``reward_norm``, ``value_norm`` and ``adv_norm`` are those of
      :class:`AdvantagePolicy`; with ``value_norm``, ``value_clip`` is in units of the deviation.
    - ``target_kl``: an output with ``kl_stop=True`` means that the policy has moved further than
      this from the policy that collected (estimator ``approx_kl``). That minibatch made no step,
      and the learner should skip the remaining epochs. Spinning Up and stable-baselines3 stop at
      1.5 times their ``target_kl``, so 0.015 here is 0.01 there.
    """

    cfg: PPOSettings
    actor_critic: Component[nn.Module]
    reports: ClassVar[tuple[str, ...]] = (
        *AdvantagePolicy.reports,
        "approx_kl",
        "clip_fraction",
        "clip_ratio",
        "kl_stop",
    )

    learn_columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "action",
        "log_prob",
        "value",
        "adv",
        "ret",
    )
    optional_columns: ClassVar[tuple[str, ...]] = ("raw_action", "collect_iter")

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the networks, and how each is trained."""
        cfg = self.cfg
        optimizer = adam(cfg.learning_rate, eps=cfg.adam_eps)
        clip = cfg.grad_clip_norm
        return {
            **super().make_components(),
            "actor_critic": Component(self.model, optimizer, grad_clip_norm=clip, acts=True),
        }

    def learning_output(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Return the outputs for a minibatch, with its leading dimensions."""
        output: dict[str, torch.Tensor] = self.model(batch["obs"])
        return output

    def update(self, batch: Columns) -> dict[str, Any]:
        """Make one update; see :meth:`Policy.update`."""
        cfg = self.cfg
        output = self.learning_output(batch)
        distribution = self.learned_distribution(output, batch)
        log_prob = distribution.log_prob(self.raw_action(batch))
        weight = self._row_weight(batch)
        policy = ppo_policy_loss(
            log_prob,
            batch["log_prob"],
            self.learned_advantage(batch, weight),
            clip_ratio=self.now(cfg.clip_ratio),
            dual_clip=cfg.dual_clip,
            weight=weight,
        )
        value_loss = ppo_value_loss(
            value_output(output, log_prob.shape),
            self.as_output(batch["ret"]),
            old_value=self.as_output(batch["value"]),
            clip_range=cfg.value_clip,
            weight=weight,
        )
        entropy = distribution.entropy()
        entropy = (entropy if weight is None else entropy * weight).mean()
        entropy_weight = self.now(cfg.entropy_weight)
        loss = policy.loss + cfg.value_weight * value_loss - entropy_weight * entropy
        stop = self._has_moved_too_far(policy.approx_kl)
        norm = self.actor_critic.step(loss, skip=stop)
        answer = {
            "total_loss": loss.detach(),
            "policy_loss": policy.loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach(),
            "approx_kl": policy.approx_kl,
            "clip_fraction": policy.clip_fraction,
            "kl_stop": False if stop is None else stop,
        }
        if cfg.grad_clip_norm is not None:
            answer["grad_norm"] = norm
        return answer

    def _has_moved_too_far(self, kl: torch.Tensor) -> torch.Tensor | None:
        """Return whether the policy is further than ``target_kl`` from the collecting policy."""
        target_kl = self.cfg.target_kl
        if target_kl is None:
            return None
        if self.reducer is not None:
            # All ranks stop together; otherwise some would wait for the others' gradients.
            kl = kl.clone()
            self.reducer.average([kl])
        near: torch.Tensor = kl <= target_kl
        return near.logical_not()

    def _row_weight(self, batch: Columns) -> torch.Tensor | None:
        """Return the weight of each row in the losses, of mean 1; None: all weigh the same.

        Agents that do not take part have no weight.
        """
        return weights_of_agents(batch["obs"]) if self.several_agents else None

    def n_learned_rows(self, batch: Columns) -> int:
        """Return over how many rows, or agents, the loss of a batch is a mean."""
        if self.several_agents:
            return int(present_agents(batch["obs"]).sum())
        return super().n_learned_rows(batch)
