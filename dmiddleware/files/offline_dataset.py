"""Offline datasets: rows of experience in one .safetensors file, read when needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from dmiddleware.errors import DatasetError, NotEnoughData, StructureError
from dmiddleware.files.atomic_file import checksum, open_safetensors, write_safetensors
from dmiddleware.files.schema import Array, Ints, Schema, as_batch, as_index, lead_of
from dmiddleware.process.closing import Closing
from dmiddleware.settings import Count, Whole, checked, takes_options
from dmiddleware.tree import Batch, nest

__all__ = ["Minibatches", "OfflineDataset", "save_dataset"]

_FORMAT = "dmiddleware-dataset"
_VERSION = "1"


def save_dataset(
    path: str | Path,
    batches: Batch | Sequence[Batch],
    *,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write collected experience to a file atomically.

    Args:
        path: the file, usually ``….safetensors``; its folder is created if needed, and an existing
            file is replaced.
        batches: one or several batches of one structure, in temporal order: ``[N, …]``, or
            ``[T, E, …]`` if ``done`` has two dimensions. With a column ``episode_id``, the rows of
            each episode are written together, in temporal order, even if it spans several batches.
            Without it, the rows of one env stay together within each batch only.
        metadata: strings to store with it, such as the env's name or the collecting policy.

    Returns:
        The number of rows.

    Raises:
        StructureError: if the batches differ in structure, or have no rows.
        OSError: if the file cannot be written; an existing file is unchanged.
    """
    parts = list(batches) if isinstance(batches, Sequence) else [batches]
    schema: Schema | None = None
    rows: list[dict[str, Array]] = []
    for part in map(as_batch, parts):
        lead = lead_of(part)
        schema = Schema.of(part, len(lead)) if schema is None else schema
        rows.append(_by_env(schema.arrays(part, lead), lead))
    n_rows = sum(len(next(iter(part.values()))) for part in rows)
    if not n_rows:
        raise StructureError("a dataset must have at least one row, but the batches are empty")
    order = _order_by_episode(rows)
    columns: dict[str, torch.Tensor] = {}
    for leaf in rows[0]:
        column = np.concatenate([part[leaf] for part in rows])
        columns[leaf] = torch.from_numpy(column if order is None else column[order])
    notes = {
        "format": _FORMAT,
        "version": _VERSION,
        "crc32": f"{checksum(columns):08x}",
        "notes": json.dumps(dict(metadata or {})),
    }
    write_safetensors(Path(path), columns, notes)
    return n_rows


class OfflineDataset(Closing):
    """A dataset on disk, mapped into memory: rows are read only when needed.

    Args:
        path: the file that :func:`save_dataset` wrote.

    Raises:
        DatasetError: if the file does not exist or is not a complete dataset.

    Attributes:
        path: the file.
        metadata: the strings stored with it.
    """

    @takes_options
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._crc32, self.metadata, self._columns = _opened(self.path)
        self._n_rows = _count_rows(self.path, self._columns)
        self._closed = False

    def __len__(self) -> int:
        return self._n_rows

    @property
    def leaves(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of a row's leaves, by dotted path."""
        return {name: (str(c.dtype), c.shape[1:]) for name, c in self._columns.items()}

    @property
    def nbytes(self) -> int:
        """Size of all rows, in bytes."""
        return sum(column.nbytes for column in self._columns.values())

    def rows(self, index: Any) -> Batch:
        """Read rows ``[n, …]``.

        Args:
            index: int64 ``[n]``, in ``[0, len)``, or a slice.

        Raises:
            IndexError: if an index is out of range, or is not an integer.
        """
        if self._closed:
            raise ValueError(f"the dataset {self.path} is closed; open it again")
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        indices = as_index(index)
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(
                f"the dataset has rows 0 … {len(self) - 1}, got {indices.min()} … {indices.max()}"
            )
        columns = {name: column.take(indices, axis=0) for name, column in self._columns.items()}
        return nest({name: torch.from_numpy(array) for name, array in columns.items()})

    def batches(
        self,
        batch_size: int,
        *,
        epochs: int | None = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> Minibatches:
        """Iterate over all rows in minibatches, in a new order each epoch.

        Args:
            batch_size: rows in a minibatch.
            epochs: number of passes over all rows; None for no limit.
            shuffle: whether to use a random order.
            drop_last: whether to leave out a final minibatch that is not full.
            seed: seed of the orders.

        Raises:
            NotEnoughData: if, with ``drop_last``, not even one minibatch is full.
        """
        return Minibatches(
            self, batch_size, epochs=epochs, shuffle=shuffle, drop_last=drop_last, seed=seed
        )

    def verify(self) -> None:
        """Read the whole file and compare it with its checksum.

        Raises:
            DatasetError: if the file has changed since it was written.
        """
        crc32 = checksum({name: torch.tensor(column) for name, column in self._columns.items()})
        if f"{crc32:08x}" != self._crc32:
            raise DatasetError(
                f"{self.path} is damaged: the checksum does not match the content; write it again"
            )

    def close(self) -> None:
        """Unmap the file; may be called twice."""
        self._closed = True
        self._columns.clear()


class Minibatches(Iterator[Batch]):
    """The minibatches of one or more epochs over a dataset, from ``dataset.batches``.

    The order of an epoch depends only on the seed and the epoch, so the state is small, and a
    resumed run continues with the same minibatches.

    Attributes:
        epoch: the number of epochs completed.
    """

    def __init__(
        self,
        dataset: OfflineDataset,
        batch_size: int,
        *,
        epochs: int | None,
        shuffle: bool,
        drop_last: bool,
        seed: int,
    ) -> None:
        batch_size = checked("batch_size", batch_size, Count)
        epochs = checked("epochs", epochs, Whole | None)
        checked("shuffle", shuffle, bool)
        checked("drop_last", drop_last, bool)
        seed = checked("seed", seed, Whole)
        if drop_last and batch_size > len(dataset):
            raise NotEnoughData(
                f"the dataset has {len(dataset)} rows, so no minibatch of {batch_size} is full; "
                "use a smaller batch_size, or drop_last=False"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._epochs = epochs
        self._shuffle = shuffle
        self._end = len(dataset) // batch_size * batch_size if drop_last else len(dataset)
        self._seed = seed
        self.epoch = 0
        self._position = 0
        self._order: Ints | None = None

    def __len__(self) -> int:
        """Return the number of minibatches in an epoch."""
        return -(-self._end // self._batch_size)

    def __next__(self) -> Batch:
        if self._epochs is not None and self.epoch >= self._epochs:
            raise StopIteration
        if self._order is None:
            self._order = self._new_order()
        stop = min(self._position + self._batch_size, self._end)
        batch = self._dataset.rows(self._order[self._position : stop])
        self._position = stop
        if stop == self._end:
            self.epoch, self._position, self._order = self.epoch + 1, 0, None
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position reached."""
        return {"seed": self._seed, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position that :meth:`state_dict` returned."""
        self._seed, self.epoch = state["seed"], state["epoch"]
        self._position, self._order = state["position"], None

    def _new_order(self) -> Ints:
        n = len(self._dataset)
        if not self._shuffle:
            return np.arange(n)
        return np.random.default_rng([self._seed, self.epoch]).permutation(n)


def _by_env(rows: dict[str, Array], lead: tuple[int, ...]) -> dict[str, Array]:
    if len(lead) == 1:
        return rows
    return {
        name: array.reshape(*lead, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        for name, array in rows.items()
    }


def _order_by_episode(parts: Sequence[Mapping[str, Array]]) -> Ints | None:
    """Return the order that puts the rows of each episode together; None if they are already.

    The episodes are in the order of their first rows.
    """
    if "episode_id" not in parts[0]:
        return None
    ids = np.concatenate([part["episode_id"].reshape(-1) for part in parts])
    _, first, number = np.unique(ids, return_index=True, return_inverse=True)
    begin = first[number]
    return None if (begin[1:] >= begin[:-1]).all() else begin.argsort(kind="stable")


def _opened(path: Path) -> tuple[str, dict[str, str], dict[str, Array]]:
    """Return the checksum, the metadata and the columns of a file, which are mapped."""
    if not path.is_file():
        raise DatasetError(f"{path} does not exist; write a dataset with save_dataset")
    try:
        with open_safetensors(path) as file:
            notes = file.metadata() or {}
            if notes.get("format") != _FORMAT or notes.get("version") != _VERSION:
                raise DatasetError(
                    f"{path} is not a dataset of format version {_VERSION}: its metadata has "
                    f"format={notes.get('format')!r}, version={notes.get('version')!r}"
                )
            columns = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DatasetError(f"{path} is not a complete dataset ({error}); write it again") from error
    return notes["crc32"], json.loads(notes["notes"]), columns


def _count_rows(path: Path, columns: Mapping[str, Array]) -> int:
    counts = {column.shape[:1] for column in columns.values()}
    if len(counts) != 1 or counts == {()}:
        raise DatasetError(f"{path} is damaged: its columns have different numbers of rows")
    return int(counts.pop()[0])
