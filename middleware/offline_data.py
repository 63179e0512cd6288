"""Offline data: save what is collected to a file, and learn from such a file."""

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
from dmiddleware.pipeline import Middleware, OfflineRLContext, Role, Task
from middleware.support.checks import check_positive

__all__ = ["offline_data_saver", "offline_data_fetcher"]


class _OfflineDataSaver:
    """Gathers what is collected and writes it; see :func:`offline_data_saver`."""

    __name__ = "offline_data_saver"
    roles = (Role.COLLECTOR,)
    reads = ("trajectories",)

    def __init__(
        self,
        path: Path,
        *,
        columns: tuple[str, ...] | None,
        max_rows: int | None,
        metadata: Mapping[str, str],
    ) -> None:
        self._path = path
        self._columns = columns
        self._max_rows = max_rows
        self._metadata = metadata
        self._batches: list[Batch] = []
        self._n_rows = 0

    def __call__(self, ctx: Any) -> None:
        batch = self._chosen(ctx.trajectories)
        self._batches.append(batch)
        self._n_rows += batch["done"].numel()
        ctx.log("data/rows", self._n_rows)
        if self._max_rows is not None and self._n_rows >= self._max_rows:
            ctx.task.stop(f"{self._n_rows:,} rows were collected (max_rows is {self._max_rows:,})")

    def close(self) -> None:
        if self._batches:
            batches, self._batches = self._batches, []
            save_dataset(self._path, batches, metadata=self._metadata)

    def state_dict(self) -> dict[str, Any]:
        # Into one batch: a file holds a few large tensors well, and many small ones badly.
        if len(self._batches) > 1:
            self._batches = [cat([_by_env(batch) for batch in self._batches])]
        return {"batches": list(self._batches)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = list(state["batches"])
        self._n_rows = sum(batch["done"].numel() for batch in self._batches)

    def _chosen(self, batch: Batch) -> Batch:
        if self._columns is None:
            return batch
        missing = [name for name in self._columns if name not in batch]
        if missing:
            raise StructureError(
                f"the collected rows have no column {', '.join(missing)}; there are: "
                f"{', '.join(sorted(str(key) for key in batch))}"
            )
        return as_tree({name: batch[name] for name in self._columns})


def _by_env(batch: Batch) -> Batch:
    """Return rows ``[N, …]`` in the order in which a data set has them: env by env."""
    if batch["done"].dim() == 1:
        return batch
    return map_leaves(lambda leaf: leaf.transpose(0, 1).flatten(0, 1), batch)


def offline_data_saver(
    path: str | Path,
    *,
    columns: Iterable[str] | None = None,
    max_rows: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Middleware[Any]:
    """Save all that is collected as one data set, written when the task ends, also after an error.

    Until then the rows stay in memory. They are in each snapshot of the run, so that one that is
    resumed saves those from before, too.

    Args:
        path: the file, usually ``….safetensors``, which
            :class:`~dmiddleware.data.OfflineDataset` reads.
        columns: the columns to save, ``done`` among them; None: all.
        max_rows: stop the task once there are so many rows; None: never.
        metadata: notes to keep with the data.

    Reads:
        ctx.trajectories: what was collected in this step.

    Raises:
        ValueError: if ``max_rows`` is not positive, or ``done`` is not among the columns.
        StructureError: if the collected rows lack a column.
        OSError: if the file cannot be written; one that was there before is intact.
    """
    check_positive(max_rows=max_rows)
    chosen = None if columns is None else tuple(columns)
    if chosen is not None and "done" not in chosen:
        raise ValueError(f"columns must have 'done', which tells episodes apart, got {chosen}")
    return _OfflineDataSaver(
        Path(path), columns=chosen, max_rows=max_rows, metadata=dict(metadata or {})
    )


class _OfflineDataFetcher:
    """Reads minibatches of a data set; see :func:`offline_data_fetcher`."""

    __name__ = "offline_data_fetcher"
    roles = (Role.LEARNER,)
    reads = ("train_epoch", "trained_env_step")
    writes = ("train_data", "train_epoch", "trained_env_step")

    def __init__(self, dataset: OfflineDataset, *, batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._minibatches = self._make_minibatches(seed=0)

    def setup(self, task: Task[Any]) -> None:
        self._minibatches = self._make_minibatches(seed=task.seed_for("learner", "dataset"))

    def __call__(self, ctx: OfflineRLContext) -> None:
        ctx.train_data = next(self._minibatches)
        ctx.train_epoch = self._minibatches.epoch
        ctx.trained_env_step += self._batch_size

    def state_dict(self) -> dict[str, Any]:
        return self._minibatches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._minibatches.load_state_dict(state)

    def _make_minibatches(self, *, seed: int) -> Minibatches:
        return self._dataset.batches(self._batch_size, epochs=None, drop_last=True, seed=seed)


def offline_data_fetcher(
    dataset: OfflineDataset, *, batch_size: int
) -> Middleware[OfflineRLContext]:
    """Read the next minibatch of a data set, epoch after epoch, each in a new random order.

    Args:
        dataset: the data set; it stays open, and its owner's to close.
        batch_size: rows in a minibatch; rows that are left over at the end of an epoch are skipped.

    Reads:
        ctx.trained_env_step: counted on.

    Writes:
        ctx.train_data: a batch ``[batch_size, …]``.
        ctx.train_epoch: passes over the data set that are finished with this minibatch.
        ctx.trained_env_step: plus ``batch_size``.

    Raises:
        ValueError: if ``batch_size`` is not positive.
        NotEnoughData: if the data set has fewer rows than a minibatch.
    """
    check_positive(batch_size=batch_size)
    return _OfflineDataFetcher(dataset, batch_size=batch_size)
