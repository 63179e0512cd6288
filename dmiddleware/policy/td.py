"""What all algorithms that learn from temporal differences have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dmiddleware.data.minibatches import select_columns
from dmiddleware.errors import ConfigError
from dmiddleware.policy.options import TD_COLUMNS, TD_OPTIONS
from dmiddleware.policy.policy import Policy
from dmiddleware.rl import td_target
from dmiddleware.tree import Batch

__all__ = ["TDPolicy"]


class TDPolicy(Policy):
    """A policy that bootstraps: its targets are n-step returns plus the value of what follows.

    The buffer sums the rewards of ``nstep`` steps and adds the column ``discount``, the factor of
    the value that follows. A batch without the column has one-step returns, which only a policy
    with ``nstep=1`` learns from.
    """

    config: ClassVar[dict[str, Any]] = TD_OPTIONS
    learn_columns: ClassVar[tuple[str, ...]] = TD_COLUMNS
    _discount_checked = False

    def td_target(self, batch: Mapping[str, Any], value: torch.Tensor) -> torch.Tensor:
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
            discount=batch.get("discount", self.cfg.discount_factor),
        )

    def check_batch(self, batch: Batch) -> Batch:
        """Refuse rows with other returns than the policy's, and drop weights that it ignores."""
        if not self._discount_checked:
            self._check_discount(batch.get("discount"))
        if not self.cfg.priority_IS_weight and "weight" in batch:
            batch = select_columns(batch, [key for key in batch if key != "weight"])
        return batch

    def _check_discount(self, column: torch.Tensor | None) -> None:
        """Reject rows whose returns have another γ, or fewer steps, than this policy's.

        Only the first batch is checked, since reading the column back from a GPU takes time.
        """
        gamma, nstep = self.cfg.discount_factor, int(self.cfg.nstep)
        if column is None:
            if self.nstep > 1:
                raise ConfigError(
                    f"this policy has nstep={self.nstep}, but the batch has no column discount, so "
                    "its rewards are those of single steps; draw it from a TensorBuffer(size, "
                    "n_step=policy.nstep), use nstep_reward_enhancer(policy) before the rows are "
                    "pushed, or build the policy with nstep=1"
                )
            return
        known = torch.tensor([0.0, *(gamma**k for k in range(nstep + 1))])
        found = torch.unique(column.detach().cpu())
        wrong = found[(found.unsqueeze(1) - known).abs().amin(1) > 1e-5].tolist()
        if wrong:
            raise ConfigError(
                f"the batch's column discount contains {wrong[0]:.6g}, which is not a power of "
                f"this policy's discount_factor {gamma} up to nstep={nstep}; set both in the "
                "policy, and build the buffer with the policy's values"
            )
        self._discount_checked = True
