"""Reading a dataset from a chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.data import Minibatches, OfflineDataset
from dmiddleware.pipeline import Task
from dmiddleware.tree import Batch
from middleware.context import OfflineRLContext
from middleware.support.checks import check_instance

__all__ = ["DatasetReader", "check_dataset"]


class DatasetReader:
    """Reads the minibatches of a dataset epoch after epoch, each in a new random order.

    Rows that are left over at the end of an epoch are skipped.

    Args:
        dataset: the dataset. It stays open; its owner closes it.
        batch_size: rows in a minibatch.

    Raises:
        NotEnoughData: if the dataset has fewer rows than a minibatch.
    """

    def __init__(self, dataset: OfflineDataset, *, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._minibatches = self._ordered_by(0)

    @property
    def has_n_step(self) -> bool:
        """Whether the rows have n-step returns: the column of ``NStepRewardEnhancer``."""
        return "discount" in self._dataset.leaves

    def setup(self, task: Task[Any]) -> None:
        """Seed the order of the minibatches from the task's seed."""
        self._minibatches = self._ordered_by(task.seed_for("learner", "dataset"))

    def read(self) -> Batch:
        """Return the next minibatch ``[batch_size, …]``."""
        return next(self._minibatches)

    def count(self, ctx: OfflineRLContext) -> None:
        """Count the minibatch that was read last, in ``train_epoch`` and ``trained_env_step``."""
        ctx.train_epoch = self._minibatches.epoch
        ctx.trained_env_step += self._batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the dataset."""
        return self._minibatches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._minibatches.load_state_dict(state)

    def _ordered_by(self, seed: int) -> Minibatches:
        return self._dataset.batches(self._batch_size, epochs=None, drop_last=True, seed=seed)


def check_dataset(dataset: object, *, user: str) -> OfflineDataset:
    """Return a dataset.

    Raises:
        ConfigError: if it is something else.
    """
    hint = "open one with OfflineDataset(path)"
    return check_instance(dataset, OfflineDataset, user=user, hint=hint)
