"""Offline data: save collected data to a file, and learn from such a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dmiddleware.data import (
    Batch,
    Minibatches,
    OfflineDataset,
    as_tree,
    cat,
    map_leaves,
    save_dataset,
)
from dmiddleware.errors import StructureError
from dmiddleware.pipeline import Task
from middleware.base import BaseMiddleware
from middleware.context import OfflineRLContext, OnlineRLContext
from middleware.roles import Role
from middleware.support.checks import check_instance, check_positive
from middleware.support.rows import rows_of

__all__ = [
    "OfflineDataFetcher",
    "OfflineDataSaver",
    "offline_data_fetcher",
    "offline_data_saver",
]


class OfflineDataSaver(BaseMiddleware):
    """Save all collected data as one dataset when the task ends, even after an error.

    Until then the rows stay in memory. They are part of each snapshot, so a resumed run also saves
    the rows from before. The rows of each episode are saved together, in temporal order.

    Args:
        path: the file, usually ``….safetensors``, which
            :class:`~dmiddleware.data.OfflineDataset` reads.
        columns: the columns to save, including ``done``; None: all. Without ``episode_id``, an
            episode that was collected in several steps of the task is not saved in one piece, which
            returns to go and n-step returns need.
        max_rows: stop the task after this number of rows; None: never.
        metadata: strings to store with the data.

    Reads:
        ctx.trajectories: the data collected in this step.

    Raises:
        ValueError: if ``max_rows`` is not positive, or ``done`` is not among the columns.
        StructureError: if the collected rows lack a column.
        OSError: if the file cannot be written; an earlier file of that name is intact.
    """

    roles = (Role.COLLECTOR,)
    reads = ("trajectories",)

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Iterable[str] | None = None,
        max_rows: int | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        check_positive(max_rows=max_rows)
        self._columns = None if columns is None else tuple(columns)
        if self._columns is not None and "done" not in self._columns:
            raise ValueError(
                f"columns must include 'done', which separates episodes, got {self._columns}"
            )
        self.settings = {"path": str(path), "columns": self._columns, "max_rows": max_rows}
        self._path = Path(path)
        self._max_rows = max_rows
        self._metadata = dict(metadata or {})
        self._batches: list[Batch] = []
        self._n_rows = 0

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Keep the rows."""
        batch = self._select(rows_of(ctx.trajectories))
        self._batches.append(batch)
        self._n_rows += batch["done"].numel()
        ctx.log("data/rows", self._n_rows)
        if self._max_rows is not None and self._n_rows >= self._max_rows:
            ctx.task.stop(f"collected {self._n_rows:,} rows (max_rows is {self._max_rows:,})")

    def close(self) -> None:
        """Write the file, if any rows were collected."""
        if self._batches:
            batches, self._batches = self._batches, []
            save_dataset(self._path, batches, metadata=self._metadata)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows."""
        # As one batch, because a file stores a few large tensors better than many small ones.
        if len(self._batches) > 1:
            self._batches = [cat([_by_env(batch) for batch in self._batches])]
        return {"batches": list(self._batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._batches = list(state["batches"])
        self._n_rows = sum(batch["done"].numel() for batch in self._batches)

    def _select(self, batch: Batch) -> Batch:
        if self._columns is None:
            return batch
        missing = [name for name in self._columns if name not in batch]
        if missing:
            raise StructureError(
                f"the collected rows have no column {', '.join(missing)}; they have: "
                f"{', '.join(sorted(str(key) for key in batch))}"
            )
        return as_tree({name: batch[name] for name in self._columns})


class OfflineDataFetcher(BaseMiddleware):
    """Read the next minibatch of a dataset, epoch after epoch, each in a new random order.

    Args:
        dataset: the dataset. It stays open; its owner closes it.
        batch_size: rows in a minibatch; rows that are left over at the end of an epoch are skipped.

    Reads:
        ctx.trained_env_step: incremented.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``.
        ctx.train_epoch: passes over the dataset that are finished with this minibatch.
        ctx.trained_env_step: plus ``batch_size``.

    Raises:
        ConfigError: if ``dataset`` is not an OfflineDataset.
        ValueError: if ``batch_size`` is not positive.
        NotEnoughData: if the dataset has fewer rows than a minibatch.
    """

    roles = (Role.LEARNER,)
    reads = ("train_epoch", "trained_env_step")
    writes = ("train_data", "train_epoch", "trained_env_step")

    def __init__(self, dataset: OfflineDataset, *, batch_size: int) -> None:
        hint = "open one with OfflineDataset(path)"
        self._dataset = check_instance(
            dataset, OfflineDataset, user="offline_data_fetcher", hint=hint
        )
        check_positive(batch_size=batch_size)
        self._batch_size = batch_size
        self._minibatches = self._make_minibatches(seed=0)
        if "discount" in dataset.leaves:  # saved after nstep_reward_enhancer
            self.computes_n_step = True
        self.policy_settings = {"learn.batch_size": batch_size}
        self.settings = {"dataset": str(dataset.path), "batch_size": batch_size}

    def setup(self, task: Task[Any]) -> None:
        """Seed the order of the minibatches from the task's seed."""
        self._minibatches = self._make_minibatches(seed=task.seed_for("learner", "dataset"))

    def __call__(self, ctx: OfflineRLContext) -> None:
        """Read a minibatch."""
        ctx.train_data = next(self._minibatches)
        ctx.train_epoch = self._minibatches.epoch
        ctx.trained_env_step += self._batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the dataset."""
        return self._minibatches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._minibatches.load_state_dict(state)

    def _make_minibatches(self, *, seed: int) -> Minibatches:
        return self._dataset.batches(self._batch_size, epochs=None, drop_last=True, seed=seed)


def _by_env(batch: Batch) -> Batch:
    """Return rows ``[N, …]`` in the order in which a dataset has them: env by env."""
    if batch["done"].dim() == 1:
        return batch
    return map_leaves(lambda leaf: leaf.transpose(0, 1).flatten(0, 1), batch)


offline_data_saver = OfflineDataSaver
"""DI-engine's name of :class:`OfflineDataSaver`."""

offline_data_fetcher = OfflineDataFetcher
"""DI-engine's name of :class:`OfflineDataFetcher`."""
