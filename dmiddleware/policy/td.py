"""What all algorithms that learn from temporal differences have in common."""

from __future__ import annotations

from typing import ClassVar, Final

import torch
from torch import nn

from dmiddleware.data.minibatches import select_columns
from dmiddleware.errors import ConfigError
from dmiddleware.policy.obs_norm import ObsNormSettings
from dmiddleware.policy.policy import Policy
from dmiddleware.policy.policy_settings import DiscountedSettings
from dmiddleware.rl import td_target
from dmiddleware.settings import Count
from dmiddleware.tree import Batch, Columns, Value

__all__ = ["TD_COLUMNS", "TDPolicy", "TDSettings"]

TD_COLUMNS: Final = ("obs", "action", "reward", "next_obs", "terminated")
"""The columns of a batch that such algorithms learn from."""


class TDSettings(ObsNormSettings, DiscountedSettings):
    """Settings of policies that learn from temporal differences."""

    priority: bool = False
    """Whether to return the TD errors as priorities."""
    importance_weights: bool = True
    """Whether the importance weights of a batch weigh the loss."""
    n_step: Count = 1
    """Number of rewards in an n-step target."""


class TDPolicy(Policy):
    """A policy that bootstraps: its targets are n-step returns plus the value of what follows.

    The buffer sums the rewards of ``n_step`` steps and adds the column ``discount``, the factor of
    the value that follows. A batch without the column has one-step returns, which only a policy
    with ``n_step=1`` learns from.
    """

    cfg: TDSettings
    reports: ClassVar[tuple[str, ...]] = (
        "total_loss",
        "q_value",
        "target_q_value",
        "td_error",
        "cur_lr",
    )

    learn_columns: ClassVar[tuple[str, ...]] = TD_COLUMNS
    _discount_checked = False

    @property
    def n_step(self) -> int:
        """Number of steps that a bootstrapped target sums before it bootstraps."""
        return self.cfg.n_step

    def td_target(self, batch: Columns, value: torch.Tensor) -> torch.Tensor:
        """Return ``[B, …]``: ``reward + discount * value``, or ``reward`` at the end of an episode.

        Args:
            batch: the columns.
            value: ``[B]``, or ``[B, N]`` for several values per row, of what follows.

        Raises:
            StructureError: if rewards or flags are not ``[B]``.
        """
        return td_target(
            value,
            batch["reward"],
            batch["terminated"],
            discount=batch.get("discount", self.cfg.discount),
        )

    def actor_outputs(self, actor: nn.Module, obs: Value) -> dict[str, torch.Tensor]:
        """Return what an actor, or its target network, says of a batch's observations."""
        output: dict[str, torch.Tensor] = actor(obs)
        return output

    def row_mean(self, column: torch.Tensor, batch: Columns) -> torch.Tensor:
        """Return the mean of a column ``[…, B]`` over a batch's rows."""
        return column.mean()

    def row_means(self, batch: Columns, **columns: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the means of columns ``[…, B]`` over a batch's rows, by name."""
        return {name: self.row_mean(column, batch) for name, column in columns.items()}

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse rows with other returns than the policy's, and drop weights that it ignores."""
        column = batch.get("discount")
        if not self._discount_checked and (column is not None or self.cfg.n_step > 1):
            self._check_discount(column)
        if not self.cfg.importance_weights and "weight" in batch:
            batch = select_columns(batch, [key for key in batch if key != "weight"])
        return batch

    def _check_discount(self, column: torch.Tensor | None) -> None:
        """Reject rows whose returns have another γ, or fewer steps, than this policy's.

        Only the first batch is checked, since reading the column back from a GPU takes time.
        """
        gamma, n_step = self.cfg.discount, self.cfg.n_step
        if column is None:
            if self.n_step == 1:
                return
            raise ConfigError(
                f"this policy has n_step={self.n_step}, but the batch has no column discount, "
                "so its rewards are those of single steps; draw it with OffPolicyLearner from a "
                f"TensorBuffer, or from one with n_step={self.n_step}, use "
                "NStepRewardEnhancer(policy) before the rows are pushed, or build the policy with "
                "n_step=1"
            )
        factors = torch.tensor([0.0, *(float(gamma**k) for k in range(n_step + 1))])
        discounts: torch.Tensor = torch.unique(column.detach().cpu())
        distance = (discounts.unsqueeze(1) - factors).abs().amin(1)
        wrong = discounts[distance > 1e-5]
        if len(wrong):
            raise ConfigError(
                f"the batch's column discount contains {float(wrong[0]):.6g}, which is not a power "
                f"of this policy's discount {gamma} up to n_step={n_step}; set both in the "
                "policy, and build the buffer with the policy's values"
            )
        self._discount_checked = True
