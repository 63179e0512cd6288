"""Batches: treetensors whose leaves share their leading dimensions.

A batch is a ``treetensor.torch.Tensor``. Its leaves are torch tensors; nested observations (Dict
and Tuple spaces) are nested trees. ``[N, …]`` is a batch of ``N`` independent rows, ``[T, E, …]``
one of ``T`` time steps of ``E`` environments.

``treetensor.torch.Tensor({...})`` formats every leaf as text (treevalue 1.5), which takes 0.3 ms
per leaf; :func:`as_tree` avoids that and takes microseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
import torch

from dmiddleware.errors import StructureError

with warnings.catch_warnings():
    # treevalue 1.5 registers its types with torch under a deprecated name, and DI-treetensor 0.5
    # imports numpy's internals under another. Users cannot do anything about either.
    for _text, _category in (
        ("`torch.utils._pytree._register_pytree_node` is deprecated", FutureWarning),
        ("numpy.core._multiarray_umath is deprecated", DeprecationWarning),
    ):
        warnings.filterwarnings("ignore", _text, _category)
    if not TYPE_CHECKING:
        from treetensor.torch import Tensor as TreeTensor
    from treevalue.tree.common import TreeStorage, create_storage

__all__ = [
    "Batch",
    "Value",
    "Nested",
    "as_tree",
    "to_dict",
    "items_of",
    "from_numpy",
    "to_numpy",
    "leaves",
    "nest",
    "map_leaves",
    "map_nested",
    "lead_shape",
    "flatten_lead",
    "index_rows",
    "cat",
    "stack",
    "to_device",
]

_Default = TypeVar("_Default")

if TYPE_CHECKING:

    class Batch:
        """A tree of tensors: the part of ``treetensor.torch.Tensor``'s interface used here."""

        def __init__(self, data: object) -> None: ...

        # Other columns may be nested too; code that handles these uses `items`.
        @overload
        def __getitem__(  # type: ignore[overload-overlap]
            self, key: Literal["obs", "next_obs"]
        ) -> Value: ...
        @overload
        def __getitem__(self, key: str) -> torch.Tensor: ...
        def __getitem__(self, key: str) -> Value: ...

        @overload
        def get(self, key: str) -> torch.Tensor | None: ...
        @overload
        def get(self, key: str, default: _Default) -> torch.Tensor | _Default: ...
        def get(self, key: str, default: object = None) -> object:
            """Return a column, or the default if there is none."""

        def __contains__(self, key: object) -> bool: ...
        def __iter__(self) -> Iterator[str]: ...
        def __len__(self) -> int: ...

        def keys(self) -> KeysView[str]:
            """Return the names of the columns."""

        def items(self) -> ItemsView[str, Value]:
            """Return names and columns."""

        def _detach(self) -> Any: ...

else:
    Batch = TreeTensor

_batch_items: Callable[[Any], Iterable[tuple[Any, Any]]] = Batch.items  # looked up once

Value: TypeAlias = torch.Tensor | Batch
"""A column of a batch: a tensor, or a batch if the column is nested."""

_ValueT = TypeVar("_ValueT", torch.Tensor, Batch)

Nested: TypeAlias = Any
"""A torch tensor or numpy array, or a nested dict, tuple or treetensor of them."""


def as_tree(mapping: Mapping[str, Any], *, lists: Mapping[str, list[Any]] | None = None) -> Batch:
    """Build a batch from a (nested) dictionary of tensors, without copying.

    Args:
        mapping: leaves are tensors or numpy arrays (which share memory with the result); values may
            be dictionaries, tuples (their items become the keys ``"0"``, ``"1"``, …) or
            treetensors.
        lists: further columns that cannot be tensors, such as text; :func:`index_rows` indexes
            them, and :func:`map_leaves` keeps them as they are.

    Returns:
        A ``treetensor.torch.Tensor`` with the same keys.

    Raises:
        StructureError: if a value is None, text or anything else that is not a tensor.
    """
    columns = dict(items_of(mapping))
    try:
        for key, item in columns.items():
            if type(item) is not torch.Tensor:
                columns[key] = _as_value(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_a_column(mapping, error) from None
    if lists:
        columns |= lists
    return Batch(create_storage(columns))


def from_numpy(nested: Nested) -> Value:
    """Turn an array, or a nested dict or tuple of arrays, into a tensor or a treetensor.

    Memory is shared where numpy allows it. Scalars become tensors without dimensions.
    """
    if isinstance(nested, Batch):
        return nested
    if isinstance(nested, Mapping | tuple):
        items = nested if isinstance(nested, Mapping) else _enumerated(nested)
        return as_tree(items)
    value: Value = _as_value(nested)
    return value


def to_numpy(tree: Any) -> Any:
    """Turn a tensor or treetensor (on any device) into an array or nested dict of arrays."""
    return map_nested(lambda leaf: leaf.detach().cpu().numpy(), tree)


def to_dict(tree: Any) -> Any:
    """Return a tree as nested dictionaries with the same leaf objects; a leaf is returned as is."""
    if isinstance(tree, Batch | Mapping):
        return {str(key): to_dict(value) for key, value in items_of(tree)}
    return tree


def items_of(tree: Batch | Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Return the names and values of a tree or mapping, whatever the names are.

    An attribute of a tree is first of all the value of that name, so ``tree.items()`` calls a
    tensor where a part of an observation is called ``items``.
    """
    return _batch_items(tree) if type(tree) is Batch else tree.items()


@overload
def leaves(tree: Value, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]: ...
@overload
def leaves(tree: Nested, prefix: str = "") -> Iterator[tuple[str, Any]]: ...
def leaves(tree: Nested, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted path, leaf)`` of a tree in sorted order; a bare leaf has the path ``""``."""
    if isinstance(tree, Batch | Mapping):
        yield from _leaves(tree, f"{prefix}." if prefix else "")
    else:
        yield prefix, tree


def _leaves(tree: Batch | Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for key, value in sorted(items_of(tree), key=_name):
        if type(value) is not torch.Tensor and isinstance(value, Batch | Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _name(item: tuple[Any, Any]) -> str:
    return str(item[0])


def nest(flat: Mapping[str, Any]) -> Batch:
    """Build a batch from leaves by dotted path: the inverse of :func:`leaves`."""
    if "." not in "".join(flat):
        return as_tree(flat)
    root: dict[str, Any] = {}
    for path, value in flat.items():
        node = root
        *parents, name = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return as_tree(root)


def map_leaves(function: Callable[..., Any], tree: Batch, *others: Batch) -> Batch:
    """Apply ``function`` to every leaf, together with the leaves of the others at the same path."""
    return _mapped(function, tree, others)


def _mapped(
    function: Callable[..., Any],
    tree: Batch | Mapping[str, Any],
    others: Sequence[Batch] = (),
    on_list: Callable[[list[Any]], list[Any]] | None = None,
) -> Batch:
    columns: dict[str, Any] = {}
    lists: dict[str, list[Any]] | None = None
    for key, value in items_of(tree):
        # Where the tree has a batch, the others have one too.
        matching: list[Any] = [other[key] for other in others]
        if isinstance(value, Batch | Mapping):
            columns[str(key)] = _mapped(function, value, matching, on_list)
        elif type(value) is list:
            lists = {**(lists or {}), key: value if on_list is None else on_list(value)}
        else:
            columns[str(key)] = function(value, *matching)
    return as_tree(columns, lists=lists)


def map_nested(function: Callable[[Any], Any], nested: Nested) -> Any:
    """Apply ``function`` to every leaf of a nested dict, tuple or treetensor.

    Returns:
        Nested dictionaries (treetensors become dictionaries) and tuples, or ``function(leaf)`` for
        a bare leaf.
    """
    if isinstance(nested, Batch | Mapping):
        return {str(key): map_nested(function, value) for key, value in items_of(nested)}
    if isinstance(nested, tuple):
        return tuple(map_nested(function, value) for value in nested)
    return function(nested)


def lead_shape(tree: Batch, n_dims: int = 1) -> tuple[int, ...]:
    """Return the first ``n_dims`` dimensions, which all leaves must share.

    Raises:
        StructureError: if a leaf has different leading dimensions, with its path.
    """
    shape: tuple[int, ...] | None = None
    first = ""
    for path, leaf in leaves(tree):
        own = tuple(leaf.shape[:n_dims])
        if shape is None:
            shape, first = own, path
        if len(own) < n_dims:
            raise StructureError(
                f"the leaf {path!r} has shape {list(leaf.shape)}, but needs {n_dims} leading "
                "dimensions"
            )
        if own != shape:
            raise StructureError(
                f"all leaves of a batch must share their first {n_dims} dimension(s), but {path!r} "
                f"has shape {list(leaf.shape)} and {first!r} starts with {list(shape)}"
            )
    if shape is None:
        raise StructureError("a batch must have at least one leaf, but this tree is empty")
    return shape


def flatten_lead(tree: Batch, n_dims: int = 2) -> Batch:
    """Merge the first ``n_dims`` dimensions of every leaf: ``[T, E, …]`` to ``[T * E, …]``."""
    return map_leaves(lambda leaf: leaf.flatten(0, n_dims - 1), tree)


def index_rows(tree: Batch, index: Any) -> Batch:
    """Index the first dimension of every leaf (an integer, a slice, a mask or an index tensor)."""

    def rows_of(column: list[Any]) -> list[Any]:
        return [column[row] for row in torch.arange(len(column))[index].tolist()]

    return _mapped(lambda leaf: leaf[index], tree, on_list=rows_of)


def cat(trees: Sequence[Batch], dim: int = 0) -> Batch:
    """Concatenate batches of one structure along a dimension.

    Raises:
        StructureError: if the list is empty, or the structures differ.
    """
    return _join(torch.cat, trees, dim)


def stack(trees: Sequence[Batch], dim: int = 0) -> Batch:
    """Stack batches of one structure along a new dimension.

    Raises:
        StructureError: if the list is empty, or the structures differ.
    """
    return _join(torch.stack, trees, dim)


def to_device(tree: _ValueT, device: torch.device | str) -> _ValueT:
    """Move a tensor or a batch to a device; tensors already there are not copied."""
    if isinstance(tree, Batch):
        return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), tree)
    return tree.to(device, non_blocking=True)


def _join(function: Callable[..., torch.Tensor], trees: Sequence[Batch], dim: int) -> Batch:
    if not trees:
        raise StructureError("cannot join an empty list of batches")
    first = [path for path, _ in leaves(trees[0])]
    for number, tree in enumerate(trees[1:], start=1):
        paths = [path for path, _ in leaves(tree)]
        if paths != first:
            odd = sorted(set(paths) ^ set(first))
            raise StructureError(
                f"batch {number} and batch 0 differ in the keys {', '.join(odd)}; only batches "
                "with the same structure can be joined"
            )
    return map_leaves(lambda *parts: function(parts, dim=dim), *trees)


def _enumerated(items: Sequence[Any]) -> dict[str, Any]:
    return {str(position): item for position, item in enumerate(items)}


def _as_value(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item
    if isinstance(item, np.ndarray):
        return torch.from_numpy(item)
    if isinstance(item, Batch):
        return Batch._detach(item)
    if isinstance(item, TreeStorage):
        return item
    if isinstance(item, Mapping):
        return create_storage({str(key): _as_value(value) for key, value in item.items()})
    if isinstance(item, tuple):
        return create_storage({k: _as_value(value) for k, value in _enumerated(item).items()})
    return torch.as_tensor(item)


def _not_a_column(mapping: Mapping[str, Any], error: Exception) -> StructureError:
    """Return the error of the first value that is not a tensor, with its path."""
    for key, item in items_of(mapping):
        try:
            _as_value(item)
        except (TypeError, ValueError, RuntimeError):
            if isinstance(item, Mapping) and item:
                inner = _not_a_column({f"{key}.{k}": v for k, v in item.items()}, error)
                return inner
            return StructureError(
                f"the column {key!r} is {item!r:.60}, which is not a tensor, an array or a number; "
                "leave it out of the batch, or convert it first"
            )
    return StructureError(f"the batch cannot be built: {error}")
