"""Parallelized Q-network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dmiddleware.errors import ConfigError
from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.modes import PolicySpec
from dmiddleware.policy.network_outputs import named_outputs, with_rows
from dmiddleware.policy.obs_norm import ObsNormSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.policy_settings import DiscountedSettings
from dmiddleware.policy.q_learning import Epsilon
from dmiddleware.rl import episode_cuts, epsilon_greedy, lambda_return, mask_logit, td_loss
from dmiddleware.schedule import LearningRate, Schedule
from dmiddleware.settings import Count, Fraction, Positive
from dmiddleware.tree import Batch, Columns, Nested, Value, with_columns

__all__ = ["PQNPolicy", "PQNSettings"]


class PQNSettings(ObsNormSettings, DiscountedSettings):
    """The settings of PQN."""

    batch_size = 128
    """Rows per minibatch."""
    epoch_per_collect: Count = 2
    """Passes over each collected batch."""
    learning_rate: LearningRate = 2.5e-4
    """Adam's learning rate."""
    grad_clip_norm: Positive | None = 10.0
    """Largest norm of the gradient; None does not clip."""
    trace_decay: Fraction = 0.65
    """λ of the returns; 0 is one-step Q-learning."""
    eps: Epsilon = Schedule.linear(1.0, 0.05, decay=100_000)
    """ε of the actions that explore while collecting."""


@POLICY_REGISTRY.register("pqn")
class PQNPolicy(Policy):
    """PQN (Gallici et al., "Simplifying Deep Temporal Difference Learning", ICLR 2025).

    Q-learning without replay and target network, for many envs that step together: layer
    normalization keeps the values from diverging (theorem 2), and the envs make the rows diverse.
    Each collected batch is learned from in minibatches, for a few epochs, and then dropped
    (algorithm 1). The targets are λ-returns, the Q(λ) of Peng (section 4), by the values of the
    network before the first minibatch.

    Differences from the paper: Adam instead of RAdam; and an episode that ends by a time limit
    bootstraps from its last observation. Acting is ε-greedy, and evaluating is greedy.

    Learns from the columns ``obs``, ``action`` int64 and ``ret``, the λ-returns, which
    :meth:`add_returns` computes of what was collected, so its chain has no estimator of advantages.
    Actions that a mask forbids are neither taken nor bootstrapped from; the mask is the key
    ``action_mask`` of observations, or the columns ``action_mask`` and ``next_action_mask``.
    Collecting takes the keyword ``eps``, the probability of a random action, and returns
    ``action`` and ``logit``, the action values.

    Raises:
        ConfigError: if the network is noisy.
    """

    cfg: PQNSettings
    q: Component[nn.Module]
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "q_value",
        "target_q_value",
        "td_error",
        "grad_norm",
        "cur_lr",
    )
    model_type: ClassVar[str] = "q_network"
    model_defaults: ClassVar[Mapping[str, Any]] = {"norm": "layer"}
    action_kinds: ClassVar[tuple[str, ...]] = ("discrete",)
    on_policy: bool = True
    explores: bool = False

    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action", "ret")
    optional_columns: ClassVar[tuple[str, ...]] = ("collect_iter",)
    learns_from_trajectories: ClassVar[bool] = True

    def setup(self) -> None:
        """Refuse a noisy network, whose noise nothing would draw."""
        if getattr(self.model, "n_noise", 0):
            raise ConfigError("PQN explores by ε-greedy actions; set model.noisy to False")

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the network, and how it is trained."""
        cfg = self.cfg
        clip = cfg.grad_clip_norm
        return {"q": Component(self.model, adam(cfg.learning_rate), grad_clip_norm=clip, acts=True)}

    @cached_property
    def spec(self) -> PolicySpec:
        """What others read of the policy."""
        return replace(super().spec, add_targets=self.add_returns)

    @torch.no_grad()
    def add_returns(self, rows: Batch) -> Batch:
        """Return collected rows ``[T, …]`` or ``[T, E, …]`` with their λ-returns, ``ret``."""
        if self.model.training:
            self.set_training(False)
        reward, cut = rows["reward"], episode_cuts(rows)
        next_obs = self.obs_norm(self.as_obs(rows["next_obs"]))
        q = self.q_values(next_obs, cut.dim()).to(reward.device)
        mask = mask_of(rows["next_obs"], rows.get("next_action_mask"))
        ret = lambda_return(
            reward,
            mask_logit(q, mask).amax(-1),
            rows["terminated"],
            cut,
            discount=self.cfg.discount,
            trace_decay=self.cfg.trace_decay,
        )
        return with_columns(rows, ret=ret)

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        q, target = self.q_values(batch["obs"]), batch["ret"]
        loss, error = td_loss(q, self.codec.to_raw(batch["action"]), target, criterion="mse")
        norm = self.q.step(loss)
        outcome = {
            "total_loss": loss.detach(),
            "q_value": target.mean() - error.mean(),
            "target_q_value": target.mean(),
            "td_error": error.abs().mean(),
        }
        if self.cfg.grad_clip_norm is not None:
            outcome["grad_norm"] = norm
        return outcome

    def q_values(self, obs: Value, n_lead: int = 1) -> torch.Tensor:
        """Return the action values ``[…, A]`` of observations ``[…, *obs_shape]``."""
        return self._values_in(self.model(obs), self.rows_of(obs, n_lead))

    def _values_in(self, output: Any, rows: Sequence[int]) -> torch.Tensor:
        logit = named_outputs(output, "logit")["logit"]
        return with_rows(logit, (*rows, "n_actions"), what="logit")

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network of other actions; see :meth:`Policy.check_outputs`."""
        self.codec.check_outputs({"logit": self.q_values(obs)})

    def act_collect(  # type: ignore[override]  # takes no other keywords
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        eps: float = 0.0,
        action_mask: Nested | None = None,
    ) -> dict[str, Any]:
        """Take a random action with the probability ``eps``; see :meth:`Policy.act_collect`."""
        logit = self._values_in(self.acting_model(obs), self.rows_of(obs))
        mask = mask_of(obs, action_mask)
        if self.on_gpu:
            logit = logit.to(self.draw_device)
            mask = None if mask is None else mask.to(self.draw_device)
        action = epsilon_greedy(logit, eps, generator=self.generator, mask=mask)
        return {"action": self.codec.to_env(action), "logit": logit}

    def act_eval(  # type: ignore[override]  # takes no other keywords
        self, obs: Value, env_id: np.ndarray, *, action_mask: Nested | None = None
    ) -> dict[str, Any]:
        """Take the action of the highest value; see :meth:`Policy.act_eval`."""
        best = mask_logit(self.q_values(obs), mask_of(obs, action_mask)).argmax(-1)
        return {"action": self.codec.to_env(best)}
