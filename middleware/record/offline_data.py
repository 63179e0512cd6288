"""Save collected data to a file, to learn from it offline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from dmiddleware.data import save_dataset
from dmiddleware.errors import StructureError
from dmiddleware.settings import AS_TUPLE, Convert, Count, TakesSettings, takes_options
from dmiddleware.tree import Batch, as_tree, cat, map_leaves
from middleware.base import BaseMiddleware
from middleware.context import OnlineRLContext
from middleware.roles import Role
from middleware.support.part_name import PartSettings
from middleware.support.rows import rows_of

__all__ = ["OfflineDataSaver", "OfflineDataSaverSettings"]


class OfflineDataSaverSettings(PartSettings):
    """The options of :class:`OfflineDataSaver`."""

    columns: Annotated[tuple[str, ...], AS_TUPLE] | None = None
    """The columns to save, including ``done``; None: all. Without ``episode_id``, an episode that
    was collected in several steps of the task is not saved in one piece, which returns to go and
    n-step returns need."""
    max_rows: Count | None = None
    """Stop the task after this number of rows; None: never."""
    metadata: Annotated[Mapping[str, str], Convert(dict)] = dataclasses.field(default_factory=dict)
    """Strings to store with the data."""

    def __post_init__(self) -> None:
        """Refuse rows without the end of episodes."""
        super().__post_init__()
        self.require(
            self.columns is None or "done" in self.columns,
            "columns",
            "names that include 'done', which separates episodes",
        )


class OfflineDataSaver(BaseMiddleware[OnlineRLContext], TakesSettings[OfflineDataSaverSettings]):
    """Save all collected data as one dataset when the task ends, even after an error.

    Until then the rows stay in memory. They are part of each snapshot, so a resumed run also saves
    the rows from before. The rows of each episode are saved together, in temporal order.

    Args:
        path: the file, usually ``….safetensors``, which
            :class:`~dmiddleware.data.OfflineDataset` reads.
        settings: the options, each by keyword; see :class:`OfflineDataSaverSettings`.

    Reads:
        ctx.trajectories: the data collected in this step.

    Raises:
        ConfigError: if an option is not valid.
        StructureError: if the collected rows lack a column.
        OSError: if the file cannot be written; an earlier file of that name is intact.
    """

    roles = (Role.COLLECTOR,)
    reads = ("trajectories",)

    settings: OfflineDataSaverSettings

    @takes_options(OfflineDataSaverSettings)
    def __init__(self, path: str | Path, settings: OfflineDataSaverSettings) -> None:
        self.settings = settings
        self.components = {"path": path}
        self._path = Path(path)
        self._batches: list[Batch] = []
        self._n_rows = 0

    def __call__(self, ctx: OnlineRLContext) -> None:
        """Keep the rows."""
        batch = self._select(rows_of(ctx.trajectories))
        self._batches.append(batch)
        self._n_rows += batch["done"].numel()
        ctx.log("data/rows", self._n_rows)
        max_rows = self.settings.max_rows
        if max_rows is not None and self._n_rows >= max_rows:
            ctx.task.stop(f"collected {self._n_rows:,} rows (max_rows is {max_rows:,})")

    def close(self) -> None:
        """Write the file, if any rows were collected."""
        if self._batches:
            batches, self._batches = self._batches, []
            save_dataset(self._path, batches, metadata=self.settings.metadata)

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
        if self.settings.columns is None:
            return batch
        missing = [name for name in self.settings.columns if name not in batch]
        if missing:
            raise StructureError(
                f"the collected rows have no column {', '.join(missing)}; they have: "
                f"{', '.join(sorted(str(key) for key in batch))}"
            )
        return as_tree({name: batch[name] for name in self.settings.columns})


def _by_env(batch: Batch) -> Batch:
    """Return rows ``[N, …]`` in the order in which a dataset has them: env by env."""
    if batch["done"].dim() == 1:
        return batch
    return map_leaves(lambda leaf: leaf.transpose(0, 1).flatten(0, 1), batch)
