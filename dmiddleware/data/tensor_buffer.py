"""TensorBuffer: a ring of rows, one preallocated array per leaf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dmiddleware.data.buffer_base import Buffer, generator_from_text, generator_to_text
from dmiddleware.data.columns import Array, Columns, Schema, nest
from dmiddleware.data.samplers import Eligible, Sampler, UniformSampler
from dmiddleware.data.tree import Batch
from dmiddleware.errors import NotEnoughData, StructureError

__all__ = ["TensorBuffer"]


class TensorBuffer(Buffer):
    """A replay buffer of tensors, that overwrites its oldest rows when it is full.

    Args:
        size: capacity in rows.
        sampler: draws rows; :class:`UniformSampler` by default.
        seed: seed of the buffer's own random generator; None draws one from the system.
    """

    def __init__(
        self,
        size: int,
        *,
        sampler: Sampler | None = None,
        n_step: int = 1,
        discount: float = 0.99,
        unroll_len: int | None = None,
        store_next_obs: bool = True,
        storage: str | Path = "ram",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"a buffer holds at least one row, got size={size}")
        if n_step != 1 or unroll_len is not None or not store_next_obs or storage != "ram":
            raise NotImplementedError
        self._size = size
        self._sampler: Sampler = UniformSampler() if sampler is None else sampler
        self._sampler.attach(size)
        self._generator = np.random.default_rng(seed)
        self._columns: Columns | None = None
        self._total = 0
        self._count = 0

    @property
    def size(self) -> int:
        """Capacity in rows."""
        return self._size

    def __len__(self) -> int:
        return self._count

    def count(self) -> int:
        """Return the number of rows held."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the columns, in bytes; zero before the first push."""
        return 0 if self._columns is None else self._columns.nbytes

    def push(self, batch: Batch) -> range:
        """Append the rows of a batch; the oldest rows go when there is no room.

        Args:
            batch: ``[N, …]``, or ``[T, E, …]`` if its ``done`` has two dimensions.

        Returns:
            The indices of the rows, ascending; time runs slowest: row ``(t, e)`` is the
            ``t * E + e``-th. Of a batch larger than the buffer only the newest rows stay.

        Raises:
            StructureError: if the batch differs from the first one; it names the leaf.
        """
        if self._middleware:
            pushed: range = self._through("push", self._push, batch)
            return pushed
        return self._push(batch)

    def sample(self, n: int) -> Batch:
        """Draw a batch of fresh tensors, which the caller owns.

        Args:
            n: number of rows.

        Returns:
            ``[n, …]``: the stored leaves, and ``index`` int64 ``[n]``, the rows' indices.

        Raises:
            NotEnoughData: if fewer than ``n`` rows are held.
        """
        if self._middleware:
            return self._through("sample", self._sample, n)
        return self._sample(n)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities of rows; rows that have been overwritten since are left out."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget all rows; the structure and the memory stay."""
        self._through("clear", self._clear)

    def state_dict(self) -> dict[str, Any]:
        """Return rows, order and generator; nothing that later draws depend on is missing."""
        with self._lock:
            arrays = {} if self._columns is None else self._columns.arrays
            return {
                "columns": {path: torch.from_numpy(a.copy()) for path, a in arrays.items()},
                "total": self._total,
                "count": self._count,
                "generator": generator_to_text(self._generator),
                "sampler": self._sampler.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        with self._lock:
            if state["columns"]:
                self._columns = Columns(self._size, Schema.of(state["columns"], 1), _in_ram)
                for path, tensor in state["columns"].items():
                    self._columns.arrays[path][...] = tensor.numpy()
            self._total, self._count = state["total"], state["count"]
            self._generator = generator_from_text(state["generator"])
            self._sampler.load_state_dict(state["sampler"])

    def _push(self, batch: Batch) -> range:
        with self._lock:
            lead = _lead(batch)
            if self._columns is None:
                self._columns = Columns(self._size, Schema.of(batch, len(lead)), _in_ram)
            rows = self._columns.schema.arrays(batch, lead)
            n = lead[0] if len(lead) == 1 else lead[0] * lead[1]
            first = self._total
            self._total += n
            if n > self._size:
                rows = {path: array[n - self._size :] for path, array in rows.items()}
                first, n = self._total - self._size, self._size
            self._columns.write(first % self._size, rows, n)
            self._count = min(self._count + n, self._size)
            self._sampler.pushed(first, n)
            return range(first, self._total)

    def _sample(self, n: int) -> Batch:
        with self._lock:
            if n > self._count or self._columns is None:
                raise NotEnoughData(
                    f"asked for {n} rows, but the buffer holds {self._count}; push "
                    f"{n - self._count} more rows before sampling, or sample fewer"
                )
            eligible = Eligible(self._total - self._count, self._count, self._size)
            index, weight = self._sampler.draw(n, eligible, self._generator)
            slots = index if self._total <= self._size else index % self._size
            taken: dict[str, Any] = {
                path: torch.from_numpy(array) for path, array in self._columns.take(slots).items()
            }
            taken["index"] = torch.from_numpy(index)
            if weight is not None:
                taken["weight"] = torch.from_numpy(weight)
            return nest(taken)

    def _clear(self) -> None:
        with self._lock:
            self._count = 0
            self._sampler.cleared()


def _in_ram(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.zeros(shape, dtype)


def _lead(batch: Batch) -> tuple[int, ...]:
    try:
        done = batch["done"]
    except KeyError:
        key = next(iter(batch.keys()), None)
        if key is None:
            raise StructureError("a batch has at least one leaf, this one is empty") from None
        leaf = batch[key]
        while not hasattr(leaf, "ndim"):
            leaf = leaf[next(iter(leaf.keys()))]
        return tuple(leaf.shape[:1])
    if done.ndim not in (1, 2):
        raise StructureError(f"`done` has shape {tuple(done.shape)}, it should be [N] or [T, E]")
    return tuple(done.shape)
