"""Off-policy proximal policy optimization."""

from __future__ import annotations

from typing import Literal

from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.ppo import PPOPolicy, PPOSettings
from dmiddleware.schedule import LearningRate

__all__ = ["OffPolicyPPOPolicy", "OffPolicyPPOSettings"]


class OffPolicyPPOSettings(PPOSettings):
    """The settings of off-policy PPO."""

    batch_size = 64
    """Rows per update."""
    learning_rate: LearningRate = 1e-3
    entropy_weight = 0.01
    adv_norm = False
    epoch_per_collect: Literal[1] = 1
    """Rows are drawn at random; the learner's `update_per_collect` says how many."""
    recompute_advantage: Literal[False] = False
    """A row keeps the advantage that it was stored with."""
    target_kl: None = None
    """Batches are independent, so nothing stops early."""


@POLICY_REGISTRY.register("ppo_offpolicy")
class OffPolicyPPOPolicy(PPOPolicy):
    """PPO from a replay buffer, as DI-engine's ``PPOOffPolicy`` does it.

    :class:`PPOPolicy` (Schulman et al., "PPO Algorithms", 2017, equation 9), whose rows come from a
    buffer instead of the newest batch, so collecting and learning need not take turns: each row is
    learned from several times while the policy moves on. A row holds the probability with which
    its action was taken, and the advantage and return that were estimated when it was collected.
    The clipped objective removes the incentive to move further than ``clip_ratio`` from that
    probability, which bounds what an old row can do; those that are too old teach nothing.

    Advantages and returns are not corrected for the age of a row, as V-trace does
    (:class:`IMPALAPolicy`), so keep the buffer small: a few collected batches.

    One learn forward is one update. Learns from the columns of :class:`PPOPolicy`; ``adv`` and
    ``ret`` come from ``GAEEstimator``, before the rows are pushed.
    """

    cfg: OffPolicyPPOSettings
    on_policy: bool = False
