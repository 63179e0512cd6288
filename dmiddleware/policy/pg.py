"""Policy gradient."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import nn

from dmiddleware.policy.action_codec import ActorSettings, mask_of
from dmiddleware.policy.component import Component, adam
from dmiddleware.policy.obs_norm import ObsNormSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.policy_settings import DiscountedSettings
from dmiddleware.schedule import LearningRate, Schedule, Scheduled
from dmiddleware.settings import Count, NonNegative, Positive
from dmiddleware.tree import Columns, Nested, Value

__all__ = ["PGPolicy", "PGSettings"]


class PGSettings(ObsNormSettings, ActorSettings, DiscountedSettings):
    """The settings of policy gradient."""

    batch_size = 64
    """Rows per update."""
    epoch_per_collect: Count = 1
    """Passes over each collected batch."""
    learning_rate: LearningRate = 1e-3
    """Adam's learning rate."""
    entropy_weight: Annotated[float | Schedule, Scheduled(NonNegative)] = 0.01
    """Weight of the entropy bonus."""
    grad_clip_norm: Positive | None = 5.0
    """Largest norm of the gradient; None does not clip."""
    ret_norm: bool = False
    """Whether to normalize returns in each batch, which subtracts a baseline."""


@POLICY_REGISTRY.register("pg")
class PGPolicy(Policy):
    """Policy gradient: REINFORCE (Williams, "Simple Statistical Gradient-Following", 1992).

    The actor follows the gradient of the log-probability of its actions, each weighted by the sum
    of the discounted rewards from there to the end of its episode (Sutton et al., "Policy Gradient
    Methods for RL with Function Approximation", 2000, theorem 1 with sampled returns), and of an
    entropy bonus (Williams and Peng, 1991). It has no critic, so the chain collects whole
    episodes. ``ret_norm`` gives returns mean 0 and standard deviation 1 in each batch; their mean
    is Williams' reinforcement baseline.

    Differences from the papers: the gradient is averaged over the rows of a batch, where REINFORCE
    adds it up over each episode; it is clipped; Adam makes the steps; and the states of later steps
    count as much as those of the first one, where the theorem discounts them.

    One learn forward is one update. Learns from the columns ``obs``, ``action`` (``raw_action``
    where there is one) and ``ret``, which comes from ``MonteCarloReturnEstimator``. All kinds of
    actions are supported; see :class:`ActionCodec`.
    """

    cfg: PGSettings
    actor: Component[nn.Module]
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "policy_loss",
        "entropy",
        "entropy_weight",
        "grad_norm",
        "cur_lr",
    )
    model_type: ClassVar[str] = "actor"
    on_policy: bool = True
    learn_columns: ClassVar[tuple[str, ...]] = ("obs", "action", "ret")
    optional_columns: ClassVar[tuple[str, ...]] = ("raw_action",)

    def make_components(self) -> dict[str, Component[Any]]:
        """Return the network."""
        rate, clip = adam(self.cfg.learning_rate), self.cfg.grad_clip_norm
        return {"actor": Component(self.model, rate, grad_clip_norm=clip, acts=True)}

    def check_outputs(self, obs: Value, **inputs: Any) -> None:
        """Refuse a network whose actions cannot be drawn."""
        self.codec.check_outputs(self.actor_output(obs), draws=True)

    def act_collect(
        self,
        obs: Value,
        env_id: np.ndarray,
        *,
        action_mask: Nested | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Draw actions; see :meth:`Policy.act_collect`."""
        distribution = self.acting_distribution(self.actor_output(obs), obs, action_mask)
        raw = distribution.sample(self.generator)
        drawn = {} if self.codec.is_lossless else {"raw_action": raw}
        return {"action": self.codec.to_env(raw), **drawn}

    def update(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        cfg = self.cfg
        mask = mask_of(batch["obs"], batch.get("action_mask"))
        distribution = self.codec.distribution(self.actor_output(batch["obs"]), mask)
        raw = batch["raw_action"] if "raw_action" in batch else self.codec.to_raw(batch["action"])
        ret: torch.Tensor = batch["ret"]
        if cfg.ret_norm and len(ret) > 1:
            ret = (ret - ret.mean()) / (ret.std() + 1e-8)
        policy_loss = -(distribution.log_prob(raw) * ret).mean()
        entropy = distribution.entropy().mean()
        loss = policy_loss - self.now(cfg.entropy_weight) * entropy
        norm = self.actor.step(loss)
        output = {"total_loss": loss, "policy_loss": policy_loss, "entropy": entropy}
        if cfg.grad_clip_norm is not None:
            output["grad_norm"] = norm
        return {name: value.detach() for name, value in output.items()}
