"""Off-policy phasic policy gradient."""

from __future__ import annotations

from typing import ClassVar, Literal

from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.ppg import PPGPolicy, PPGSettings
from dmiddleware.schedule import LearningRate
from dmiddleware.tree import Batch

__all__ = ["OffPolicyPPGPolicy", "OffPolicyPPGSettings"]


class OffPolicyPPGSettings(PPGSettings):
    """The settings of off-policy PPG."""

    batch_size = 64
    """Rows per update."""
    learning_rate: LearningRate = 1e-3
    adv_norm = False
    actor_epoch_per_collect: Literal[1] = 1
    """Rows are drawn at random; the learner's `update_per_collect` says how many."""
    critic_epoch_per_collect: Literal[1] = 1
    """Likewise."""
    aux_freq = 5
    """Updates, each from one drawn batch, before an auxiliary phase."""


@POLICY_REGISTRY.register("ppg_offpolicy")
class OffPolicyPPGPolicy(PPGPolicy):
    """PPG from a replay buffer, as DI-engine's ``PPGOffPolicy`` does it.

    It is to :class:`PPGPolicy` (Cobbe et al., "Phasic Policy Gradient", 2020) what
    :class:`OffPolicyPPOPolicy` is to PPO: rows come from a buffer, with the advantages and returns
    that they were stored with. A policy phase is ``aux_freq`` updates, each from a drawn batch, and
    the auxiliary phase learns from the rows of these batches. Keep the buffer small, as for
    off-policy PPO.

    Values can learn from older rows than the policy: where a batch has the nested column
    ``valued_rows``, with the columns ``obs`` and ``ret`` of as many other rows, the critic and the
    auxiliary phase learn from those.

    One learn forward is one update. Learns from the columns of :class:`PPGPolicy`; ``adv`` and
    ``ret`` come from ``GAEEstimator``, before the rows are pushed.
    """

    cfg: OffPolicyPPGSettings
    on_policy: bool = False
    optional_columns: ClassVar[tuple[str, ...] | None] = None

    def valued_rows(self, batch: Batch) -> Batch:
        """Return the rows of a batch that values learn from: its own, or ``valued_rows``."""
        rows = batch.get("valued_rows", batch)
        assert isinstance(rows, Batch)  # a nested column
        return rows
