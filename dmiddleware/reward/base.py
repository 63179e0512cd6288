"""The base class of learned rewards."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from dmiddleware.reward.row_learner import RowLearner
from dmiddleware.tree import Batch

__all__ = ["RewardModel"]


class RewardModel(RowLearner):
    """A reward that is learned from the rows that a policy collects.

    :class:`middleware.RewardLearner` trains it, and writes its rewards over those of the
    environment, or adds them. A subclass declares its components, as a policy does, and writes

    - ``reward_of(batch)``, the rewards ``[N]`` of rows ``[N, …]``;
    - ``update_minibatch(batch)``, which learns from a minibatch ``[B, …]`` with
      :meth:`Component.step` and returns scalars to log.

    Both receive the columns that ``columns`` names, on the device.

    Args:
        components: modules with their optimizers, and other objects with a state, by name.
        batch_size: rows per update.
        epochs: passes over the collected rows.
        device: the device of the components.
        seed: of the order of the minibatches, and of ``self.generator``, from which a subclass
            draws.

    Raises:
        ConfigError: if ``batch_size`` or ``epochs`` is not a positive integer.
    """

    learns_first: ClassVar[bool] = False
    """Whether it learns from collected rows before it rewards them, not after."""

    @abstractmethod
    def reward_of(self, batch: Batch) -> torch.Tensor:
        """Return the rewards ``[N]`` of rows ``[N, …]``."""

    @torch.no_grad()
    def reward(self, rows: Batch) -> torch.Tensor:
        """Return the rewards of collected rows.

        Args:
            rows: ``[T, …]`` or ``[T, E, …]``.

        Returns:
            float32, in the shape of the column ``done``, on the CPU.
        """
        return self._for_each(self.reward_of, rows, self.columns)
