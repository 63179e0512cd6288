"""The structure of batches: the leaves of a row, with their shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dmiddleware.errors import StructureError
from dmiddleware.tree import Batch, as_tree, leaves, stack, to_array

__all__ = [
    "Array",
    "Leaf",
    "Rows",
    "Schema",
    "as_batch",
    "as_index",
    "lead_of",
    "same_rows",
]

Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]

Rows: TypeAlias = Batch | Mapping[str, Any] | Sequence[Batch | Mapping[str, Any]]
"""Data to push: a batch, a dictionary of columns, or a list of transitions."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of every row.

    Attributes:
        path: keys from the root of the batch, joined by dots, as
            :func:`~dmiddleware.tree.leaves` gives it.
        shape: shape in one row.
        dtype: numpy data type.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Schema:
    """The structure that every batch of a buffer shares.

    Args:
        all_leaves: the leaves, in any order.
    """

    def __init__(self, all_leaves: list[Leaf]) -> None:
        self.leaves = {leaf.path: leaf for leaf in all_leaves}
        self._is_flat = not any("." in path for path in self.leaves)
        self._plan: list[tuple[str, tuple[int, ...], np.dtype[Any]]] = []
        self._plan_lead: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: Batch, n_lead: int) -> Schema:
        """Read the structure of a batch whose leaves share ``n_lead`` leading dimensions.

        Raises:
            StructureError: if a leaf does not have these dimensions.
        """
        leaves_found = []
        for path, leaf in leaves(batch):
            if leaf.ndim < n_lead:
                raise StructureError(
                    f"leaf {path!r} has shape {list(leaf.shape)}, but the leaves of this batch "
                    f"start with {n_lead} dimension(s) (time and env if `done` has two)"
                )
            leaves_found.append(Leaf(path, tuple(leaf.shape[n_lead:]), to_array(leaf).dtype))
        if not leaves_found:
            raise StructureError("a batch must have at least one leaf, but this one is empty")
        return cls(leaves_found)

    def below(self, root: str) -> list[Leaf]:
        """Return the leaf called ``root``, or the leaves of the nested column of that name."""
        return [leaf for leaf in self.leaves.values() if leaf.path.partition(".")[0] == root]

    def without(self, root: str) -> Schema:
        """Return the structure without the column called ``root``."""
        left_out = self.below(root)
        return Schema([leaf for leaf in self.leaves.values() if leaf not in left_out])

    def arrays(self, batch: Batch, lead: tuple[int, ...]) -> dict[str, Array]:
        """Return the leaves of a batch as arrays of rows ``[N, …]``, checked against the schema.

        Args:
            batch: a batch of this structure.
            lead: its leading dimensions; ``N`` is their product.

        Raises:
            StructureError: if a leaf is missing, unexpected, or has a different shape or dtype.
        """
        storage = Batch._detach(batch)
        if not self._is_flat or storage.size() != len(self.leaves):
            return self._checked_arrays(batch, lead)
        if lead != self._plan_lead:
            self._plan = [(x.path, (*lead, *x.shape), x.dtype) for x in self.leaves.values()]
            self._plan_lead = lead
        # The usual case, flat batches of CPU tensors: faster than to look for each difference.
        arrays: dict[str, Array] = {}
        try:
            for path, shape, dtype in self._plan:
                arrays[path] = array = storage.get(path).numpy()
                if array.shape != shape or (array.dtype is not dtype and array.dtype != dtype):
                    return self._checked_arrays(batch, lead)
        except (KeyError, AttributeError, RuntimeError, TypeError):
            return self._checked_arrays(batch, lead)
        if len(lead) == 1:
            return arrays
        if lead[0] == 1:  # one step of all envs: indexing is the faster reshape
            return {path: array[0] for path, array in arrays.items()}
        return {path: array.reshape(-1, *array.shape[2:]) for path, array in arrays.items()}

    def _checked_arrays(self, batch: Batch, lead: tuple[int, ...]) -> dict[str, Array]:
        """Do the same for every batch, and name the first difference."""
        by_path = dict(leaves(batch))
        if by_path.keys() != self.leaves.keys():
            raise StructureError(_key_difference(set(by_path), set(self.leaves)))
        arrays: dict[str, Array] = {}
        for path, leaf in by_path.items():
            expected = self.leaves[path]
            array = to_array(leaf)
            if array.dtype != expected.dtype or array.shape != lead + expected.shape:
                raise StructureError(_difference(expected, array, lead))
            arrays[path] = array if len(lead) == 1 else array.reshape((-1, *expected.shape))
        return arrays


def same_rows(a: Array, b: Array) -> npt.NDArray[np.bool_]:
    """Return for each row whether two arrays have the same bits (NaN equals NaN)."""
    if a.tobytes() == b.tobytes():  # the usual case; for few rows, much faster than the following
        return np.ones(len(a), np.bool_)
    bits = np.dtype(f"V{a.dtype.itemsize}") if a.dtype.itemsize > 8 else f"u{a.dtype.itemsize}"
    equal = a.view(bits) == b.view(bits)
    same: npt.NDArray[np.bool_] = equal.all(axis=tuple(range(1, equal.ndim)))
    return same


def as_index(index: Any) -> npt.NDArray[np.int64]:
    """Return the index of rows as an array, int64 ``[n]``.

    Raises:
        IndexError: if it does not consist of integers; a mask would select rows 0 and 1.
    """
    array = to_array(index)
    if array.ndim == 1 and array.dtype == np.int64:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise IndexError(
            f"index must be int64 [n], got {array.dtype}{list(array.shape)}; convert a mask with "
            "mask.nonzero()"
        )
    return array.astype(np.int64).reshape(-1)


def as_batch(rows: Rows) -> Batch:
    """Return a batch as it is, and build one from a dictionary or a list of transitions.

    Raises:
        StructureError: for anything else.
    """
    if isinstance(rows, Batch):
        return rows
    if isinstance(rows, Mapping):
        return as_tree(rows)
    if not isinstance(rows, list | tuple) or not rows:
        raise StructureError(
            "expected a batch, a dictionary of columns or a list of transitions, got "
            f"{rows!r:.100}; build a batch with dmiddleware.data.as_tree"
        )
    transitions = [as_batch(row) for row in rows]
    for number, transition in enumerate(transitions):
        done = transition.get("done")
        if done is None or done.ndim:
            raise StructureError(
                f"the transitions of a list have a `done` without dimensions, but item {number} "
                f"has {'none' if done is None else f'shape {list(done.shape)}'}; join batches with "
                "dmiddleware.data.cat"
            )
    return stack(transitions)


def lead_of(batch: Batch) -> tuple[int, ...]:
    """Return the leading dimensions of a batch: those of ``done``, else the first of a leaf.

    Raises:
        StructureError: if there are none, or ``done`` has more than two dimensions.
    """
    if "done" not in batch:
        first = next((leaf for _, leaf in leaves(batch)), None)
        if first is None or first.ndim < 1:
            raise StructureError(
                "the leaves of a batch are [N, …], but this one is empty or has a leaf without "
                "dimensions"
            )
        return tuple(first.shape[:1])
    done = batch["done"]
    if done.ndim not in (1, 2):
        raise StructureError(
            f"`done` must be [N], or [T, E] (time, env), but has shape {list(done.shape)}"
        )
    lead: tuple[int, ...] = done.shape
    if lead[1:] == (1,) and any(leaf.shape[:2] != lead for _, leaf in leaves(batch)):
        raise StructureError(
            f"`done` has shape {list(lead)}, so it is read as [T, E] (time, env), but other leaves "
            "do not start with these dimensions; if it is [N, 1], push done.squeeze(-1)"
        )
    return lead


def _key_difference(found: set[str], expected: set[str]) -> str:
    missing, extra = sorted(expected - found), sorted(found - expected)
    parts = [f"{', '.join(missing)} missing"] if missing else []
    parts += [f"{', '.join(extra)} unexpected"] if extra else []
    return (
        f"the keys of the batch differ from those of the first one: {' and '.join(parts)}; the "
        "first batch fixed the structure"
    )


def _difference(expected: Leaf, array: Array, lead: tuple[int, ...]) -> str:
    return (
        f"leaf {expected.path!r} of the batch is {array.dtype}{list(array.shape)}, but it should "
        f"be {expected.dtype}{[*lead, *expected.shape]} (the first batch fixed the structure)"
    )
