"""Deep Q-learning from demonstrations."""

from __future__ import annotations

from typing import Any, Final

import torch

from dmiddleware.errors import StructureError
from dmiddleware.policy.action_codec import mask_of
from dmiddleware.policy.dqn import DQNPolicy, DQNSettings
from dmiddleware.policy.policy_registry import POLICY_REGISTRY
from dmiddleware.policy.q_learning import Inputs
from dmiddleware.rl import mask_logit, taken_rows, weighted_mean
from dmiddleware.settings import Count, NonNegative
from dmiddleware.tree import Batch, Columns, with_columns

__all__ = ["DQfDPolicy", "DQfDSettings"]

_STEP: Final = "step_"
_OF_STEP: Final = ("reward", "next_obs", "terminated", "next_action_mask")
_NOTHING: Final[Inputs] = {}


class DQfDSettings(DQNSettings):
    """The settings of DQfD."""

    n_step: Count = 10
    """Number of rewards in the target of the n-step loss."""
    n_step_weight: NonNegative = 1.0
    """λ₁, the weight of the n-step loss."""
    margin_weight: NonNegative = 1.0
    """λ₂, the weight of the large-margin loss of demonstrations."""
    l2_weight: NonNegative = 1e-5
    """λ₃, the weight of half the sum of the squared weights."""
    margin: NonNegative = 0.8
    """How far the value of a demonstrated action shall exceed those of all others."""


@POLICY_REGISTRY.register("dqfd")
class DQfDPolicy(DQNPolicy):
    """Deep Q-learning from demonstrations (Hester et al., "Deep Q-learning from Demonstrations").

    AAAI 2018, algorithm 1. As :class:`DQNPolicy`, with the loss (section "Deep Q-Learning from
    Demonstrations")

    ``J(Q) = J_DQ(Q) + λ₁ J_n(Q) + λ₂ J_E(Q) + λ₃ J_L2(Q)``

    of the errors of single steps and of n steps, and of the margin by which the values of
    demonstrated actions exceed the others, ``max_a [Q(s, a) + l(a_E, a)] - Q(s, a_E)``, where ``l``
    is ``margin`` for all actions but the demonstrated one. The column ``is_expert`` bool says which
    rows are demonstrations; :class:`~dmiddleware.data.MixedReplay` mixes them into samples
    and adds it. Without the column no row is one.

    Beside the columns of :class:`DQNPolicy`, whose returns the buffer sums over ``n_step`` steps,
    rows have those of the single step: ``step_reward``, ``step_next_obs`` and ``step_terminated``.
    :meth:`train_batch` adds them to what was collected, and so does ``StepCollector``.

    Differences from the paper: each sample has the same share of demonstrations, which are drawn
    uniformly, instead of higher priorities; and the losses are those of :class:`DQNPolicy`.
    """

    cfg: DQfDSettings
    reports = (*DQNPolicy.reports, "n_step_loss", "margin_loss")

    def train_batch(self, batch: Batch) -> Batch:
        """Return collected rows ``[…]`` with the columns of the single step; see the class."""
        if self.n_step == 1:
            return batch
        columns = {f"{_STEP}{name}": batch[name] for name in _OF_STEP if name in batch}
        return with_columns(batch, **columns)

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse rows without the columns of the single step, where they are needed."""
        missing = [name for name in _OF_STEP if name in batch and f"{_STEP}{name}" not in batch]
        if self.n_step > 1 and missing:
            raise StructureError(
                f"DQfDPolicy also learns from single steps, but the rows have no {_STEP}"
                f"{missing[0]}; collect them with StepCollector(policy, ...), add the columns by "
                "policy.train_batch(rows) before they are pushed, or set n_step=1"
            )
        return super().check_batch(batch)

    def update(
        self,
        batch: Columns,
        *,
        online: Inputs = _NOTHING,
        target: Inputs = _NOTHING,
        choice: Inputs = _NOTHING,
    ) -> dict[str, torch.Tensor]:
        """Make one update; see :meth:`Policy.update`."""
        cfg, weight = self.cfg, batch.get("weight")
        action = self.codec.to_raw(batch["action"])
        output: dict[str, torch.Tensor] = self.model(batch["obs"], **online)
        q = self.values_of(output, action.shape)
        n_step, single = (
            self.loss(rows, action, output, self.next_values(rows, target, choice))
            for rows in (batch, self._single_steps(batch))
        )
        loss, td_error, logged = single
        margin = weighted_mean(self.margin_loss(q, action, batch), weight)
        l2 = sum(parameter.square().sum() for parameter in self.model.parameters()) / 2
        loss = (
            loss + cfg.n_step_weight * n_step[0] + cfg.margin_weight * margin + cfg.l2_weight * l2
        )
        norm = self.q.step(loss)
        outcome = {
            "total_loss": loss.detach(),
            **logged,
            "n_step_loss": n_step[0].detach(),
            "margin_loss": margin.detach(),
        }
        if cfg.grad_clip_norm is not None:
            outcome["grad_norm"] = norm
        if weight is not None or cfg.priority:
            outcome["priority"] = td_error
        return outcome

    def margin_loss(self, q: torch.Tensor, action: torch.Tensor, batch: Columns) -> torch.Tensor:
        """Return ``[B]``, ``max_a [Q(s, a) + l(a_E, a)] - Q(s, a_E)``, and 0 for the policy's rows.

        Args:
            q: ``[B, A]`` action values.
            action: ``[B]`` int64, from 0.
            batch: the columns.
        """
        if "is_expert" not in batch:
            return q.new_zeros(action.shape)
        demonstrated = taken_rows(q, action)
        raised = mask_logit(q + self.cfg.margin, mask_of(batch["obs"], batch.get("action_mask")))
        raised = raised.scatter(-1, action.unsqueeze(-1), demonstrated.unsqueeze(-1))
        return (raised.amax(-1) - demonstrated).where(batch["is_expert"].bool(), 0.0)

    def _single_steps(self, batch: Columns) -> dict[str, Any]:
        """Return the columns of the single steps, as those of one-step returns."""
        columns: dict[str, Any] = {**batch}
        columns.pop("discount", None)
        if self.n_step == 1:
            return columns
        single = {name: batch[f"{_STEP}{name}"] for name in _OF_STEP if f"{_STEP}{name}" in batch}
        return {**columns, **single, "next_obs": self.obs_norm(single["next_obs"])}
