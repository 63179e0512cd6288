"""Offline data: what was collected goes into a file, for learning without an environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dmiddleware.data import Batch, as_tree, cat, map_leaves, save_dataset
from dmiddleware.errors import StructureError
from dmiddleware.pipeline import Middleware, Role
from middleware.support.checks import check_positive

__all__ = ["offline_data_saver"]


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
