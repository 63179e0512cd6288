"""Trees of columns: batches, nested observations and actions, and everything that maps them.

A tree is a dictionary, a tuple or a ``treetensor.torch.Tensor`` (:class:`Batch`) of trees. Its
leaves are torch tensors, numpy arrays or numbers. A leaf alone is a tree too. A batch may also have
columns that cannot be tensors, such as text; these are lists with one item per row.

The leaves of a batch share their leading dimensions: ``[N, …]`` is a batch of ``N`` independent
rows, ``[T, E, …]`` one of ``T`` time steps of ``E`` environments.

``treetensor.torch.Tensor({...})`` formats every leaf as text (treevalue 1.5), which takes 0.3 ms
per leaf; :func:`as_tree` avoids that and takes microseconds.

The processes that step environments never import torch, which would take seconds in each of them.
For them, ``dmiddleware.env.batching`` maps nested numpy arrays.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
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
    "Columns",
    "Value",
    "Nested",
    "as_tree",
    "to_dict",
    "items_of",
    "with_columns",
    "from_numpy",
    "to_numpy",
    "to_array",
    "to_float",
    "as_number",
    "to_device",
    "leaf_of",
    "leaves",
    "leaves_by_path",
    "nest",
    "map_leaves",
    "clone",
    "lead_shape",
    "flatten_lead",
    "index_rows",
    "assign_rows",
    "cat",
    "stack",
]

_Default = TypeVar("_Default")
_TreeT = TypeVar("_TreeT")

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
        def get(self, key: str, default: None = None) -> torch.Tensor | None: ...
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


class Columns(Protocol):
    """The columns of a batch, by name: a :data:`Batch`, or a dictionary."""

    @overload
    def __getitem__(  # type: ignore[overload-overlap]
        self, key: Literal["obs", "next_obs"], /
    ) -> Value: ...
    @overload
    def __getitem__(self, key: str, /) -> torch.Tensor: ...
    def __getitem__(self, key: str, /) -> Value: ...

    @overload
    def get(self, key: str, default: None = None, /) -> torch.Tensor | None: ...
    @overload
    def get(self, key: str, default: _Default, /) -> torch.Tensor | _Default: ...
    def get(self, key: str, default: object = None, /) -> object:
        """Return a column, or the default if there is none."""
        ...

    def __contains__(self, key: object, /) -> bool: ...
    def keys(self) -> KeysView[str]:
        """Return the names of the columns."""
        ...


Nested: TypeAlias = Any
"""A tree: a torch tensor or numpy array, or a nested dict, tuple or treetensor of them."""

_LEAF_TYPES: Final = frozenset((torch.Tensor, np.ndarray))  # the usual ones, recognized first
_NODE_TYPES: Final = (Batch, Mapping, tuple)
_ALIGNMENT: Final = 16
"""Bytes; tensors of every type may begin at a multiple of it."""


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


def with_columns(batch: Batch, /, **columns: Nested) -> Batch:
    """Return a batch with further columns, or others in place of its own; nothing is copied.

    Args:
        batch: the batch.
        **columns: by name, as :func:`as_tree` takes them.

    Raises:
        StructureError: as in :func:`as_tree`.

    Example:
        >>> sorted(with_columns(as_tree({"reward": torch.ones(2)}), done=torch.zeros(2)))
        ['done', 'reward']
    """
    before = dict(_batch_items(batch))
    lists = {name: column for name, column in before.items() if type(column) is list}
    tensors = {name: column for name, column in before.items() if name not in lists}
    lists_left = {name: column for name, column in lists.items() if name not in columns}
    return as_tree(tensors | columns, lists=lists_left)


def from_numpy(nested: Nested) -> Value:
    """Turn arrays into tensors: a bare leaf into a tensor, anything else into a treetensor.

    Memory is shared where numpy allows it; tensors stay as they are. Numbers become tensors without
    dimensions.

    Raises:
        StructureError: as in :func:`as_tree`, for a nested value.
    """
    if type(nested) is np.ndarray:
        return torch.from_numpy(nested)
    if isinstance(nested, torch.Tensor | Batch):
        return nested
    if isinstance(nested, Mapping | tuple):
        return as_tree(nested if isinstance(nested, Mapping) else _enumerated(nested))
    return torch.as_tensor(nested)


def to_numpy(tree: Nested) -> Any:
    """Turn tensors (on any device) into arrays; treetensors become dictionaries.

    Raises:
        StructureError: for a bfloat16 tensor.
    """
    return map_leaves(to_array, to_dict(tree))


def to_array(leaf: Any) -> npt.NDArray[Any]:
    """Return a tensor (on any device) or an array as a numpy array, sharing memory if possible.

    Raises:
        StructureError: for a bfloat16 tensor.
    """
    if isinstance(leaf, torch.Tensor):
        try:
            return leaf.numpy()
        except (RuntimeError, TypeError):
            if leaf.dtype is torch.bfloat16:
                raise StructureError(
                    "numpy arrays cannot be bfloat16; convert the leaf, e.g. `leaf.float()`"
                ) from None
            return leaf.detach().cpu().numpy()
    return np.asarray(leaf)


def to_float(value: Any) -> float:
    """Return a number as a float, also if it is an array or a tensor with one element."""
    return float(value.item() if hasattr(value, "item") else value)


def as_number(value: object) -> float | None:
    """Return a value with one element as a float; None if it is not one number.

    The element may be a number or a boolean of Python or of any array library, or the only one of
    an array, a tensor, a list or a tuple.
    """
    if isinstance(value, list | tuple):
        return as_number(value[0]) if len(value) == 1 else None
    try:
        if math.prod(getattr(value, "shape", ())) == 1 and hasattr(value, "item"):
            value = value.item()
        return float(value) if isinstance(value, numbers.Real) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def to_dict(tree: Nested) -> Any:
    """Return a tree with dictionaries in place of treetensors, and the same leaf objects."""
    if isinstance(tree, Batch | Mapping):
        return {str(key): to_dict(value) for key, value in items_of(tree)}
    return tuple(map(to_dict, tree)) if isinstance(tree, tuple) else tree


def to_device(tree: _TreeT, device: torch.device | str) -> _TreeT:
    """Move the tensors of a tree to a device; tensors already there are not copied.

    The host's tensors go to a GPU in one transfer, from page-locked memory, and nothing waits for
    it. They are without gradient, and share their memory there.
    """
    sent = _sent(tree, device) if _is_gpu(device) else tree
    moved: _TreeT = _mapped(lambda leaf: leaf.to(device, non_blocking=True), sent)
    return moved


def _sent(tree: Any, device: torch.device | str) -> Any:
    """Return a tree whose tensors of the host are parts of one tensor on the device."""
    starts: dict[int, int] = {}
    end = 0
    for _, leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
            starts[id(leaf)] = end
            end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Torch keeps the memory from being used again until it has been read.
    staging = _page_locked(end)

    def place_in(flat: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        start = starts[id(leaf)]
        return flat[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)

    for _, leaf in leaves(tree):
        if id(leaf) in starts:
            place_in(staging, leaf).copy_(leaf.detach())
    there = staging.to(device, non_blocking=True)
    return _mapped(lambda leaf: place_in(there, leaf) if id(leaf) in starts else leaf, tree)


def _is_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def _page_locked(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)


def leaf_of(tree: Nested) -> Any:
    """Return the first leaf."""
    return tree if type(tree) in _LEAF_TYPES else next(iter(leaves(tree)))[1]


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
    """Yield ``(dotted path, leaf)`` of a tree in sorted order; a bare leaf has the path ``""``.

    A dot in a name, such as ``"observation.state"``, is ``%2E`` in the path, so that each path
    stands for one leaf.
    """
    if isinstance(tree, _NODE_TYPES):
        yield from _leaves(tree, f"{prefix}." if prefix else "")
    else:
        yield prefix, tree


def _leaves(tree: Nested, before: str) -> Iterator[tuple[str, Any]]:
    items = enumerate(tree) if isinstance(tree, tuple) else items_of(tree)
    for key, value in sorted(items, key=_name):
        if type(value) is not torch.Tensor and isinstance(value, _NODE_TYPES):
            yield from _leaves(value, f"{before}{_escaped(key)}.")
        else:
            yield f"{before}{_escaped(key)}", value


def _name(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _escaped(key: Any) -> str:
    """Return a name as a part of a path."""
    name = str(key)
    if "." not in name and "%2" not in name:
        return name
    return name.replace("%", "%25").replace(".", "%2E")


def _unescaped(part: str) -> str:
    """Return the name that a part of a path stands for."""
    return part.replace("%2E", ".").replace("%25", "%") if "%2" in part else part


def leaves_by_path(action: Nested) -> dict[str, Any]:
    """Return the leaves of an action by dotted path.

    The names of its parts have no dots, so a dictionary may have such paths as names.
    """
    return {_unescaped(path): leaf for path, leaf in leaves(action)}


def nest(flat: Mapping[str, Any]) -> Batch:
    """Build a batch from leaves by dotted path: the inverse of :func:`leaves`."""
    paths = "".join(flat)
    if "." not in paths and "%2" not in paths:
        return as_tree(flat)
    root: dict[str, Any] = {}
    for path, value in flat.items():
        node = root
        *parents, name = map(_unescaped, path.split("."))
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return as_tree(root)


@overload
def map_leaves(function: Callable[..., Any], tree: Batch, *others: Batch) -> Batch: ...
@overload
def map_leaves(function: Callable[..., Any], tree: Nested, *others: Nested) -> Any: ...
def map_leaves(function: Callable[..., Any], tree: Nested, *others: Nested) -> Any:
    """Apply ``function`` to every leaf, together with the leaves of the others at the same path.

    Returns:
        A tree of the same kind: a treetensor, whose leaves must be tensors, arrays or numbers and
        whose lists stay as they are; a dictionary; a tuple; or ``function(leaf)`` for a bare leaf.

    Raises:
        StructureError: if the others do not have the structure of the first tree, with the path.
    """
    for number, tree_n in enumerate(others, start=1):
        _check_alike(tree, tree_n, number, "")
    return _mapped(function, tree, others)


def _mapped(
    function: Callable[..., Any],
    tree: Nested,
    others: Sequence[Nested] = (),
    on_list: Callable[[list[Any]], Any] | None = None,
) -> Any:
    if type(tree) in _LEAF_TYPES:
        return function(tree, *others)
    if isinstance(tree, Batch):
        columns: dict[str, Any] = {}
        lists: dict[str, Any] = {}
        for key, value in _batch_items(tree):
            if type(value) is torch.Tensor and not others:
                columns[key] = function(value)
            elif type(value) is list:
                lists[key] = value if on_list is None else on_list(value)
            else:
                matching = [sibling[key] for sibling in others]
                columns[key] = _mapped(function, value, matching, on_list)
        return as_tree(columns, lists=lists)
    if isinstance(tree, Mapping):
        return {
            str(key): _mapped(function, value, [sibling[key] for sibling in others], on_list)
            for key, value in tree.items()
        }
    if isinstance(tree, tuple):
        rows = zip(tree, *others, strict=True)
        return tuple(_mapped(function, value, matching, on_list) for value, *matching in rows)
    return function(tree, *others)


def clone(tree: _TreeT) -> _TreeT:
    """Return a tree with copies of the tensors, without gradient, and of its lists."""
    copied: _TreeT = _mapped(lambda leaf: leaf.detach().clone(), tree, on_list=list)
    return copied


def lead_shape(tree: Batch, n_dims: int = 1) -> tuple[int, ...]:
    """Return the first ``n_dims`` dimensions, which all leaves must share.

    Raises:
        StructureError: if a leaf has different leading dimensions, with its path.
    """
    shape: tuple[int, ...] | None = None
    first = ""
    for path, leaf in leaves(tree):
        leaf_shape = tuple(leaf.shape[:n_dims])
        if shape is None:
            shape, first = leaf_shape, path
        if len(leaf_shape) < n_dims:
            raise StructureError(
                f"the leaf {path!r} has shape {list(leaf.shape)}, but needs {n_dims} leading "
                "dimensions"
            )
        if leaf_shape != shape:
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


def index_rows(tree: _TreeT, index: Any) -> _TreeT:
    """Index the first dimension of every leaf, and the lists of a batch.

    Args:
        tree: leaves ``[N, …]``.
        index: an integer or a slice, which give views, or a mask or an index tensor.
    """
    if type(tree) in _LEAF_TYPES:
        return tree[index]  # type: ignore[index,no-any-return]

    def rows_of(column: list[Any]) -> Any:
        rows: Any = torch.arange(len(column))[index].tolist()
        return column[rows] if isinstance(rows, int) else [column[row] for row in rows]

    indexed: _TreeT = _mapped(lambda leaf: leaf[index], tree, on_list=rows_of)
    return indexed


def assign_rows(tree: Value, index: Any, rows: Value) -> None:
    """Write rows into the tensors of a tree, converting dtype and device.

    Args:
        tree: tensors ``[N, …]``.
        index: what to write to, as in :func:`index_rows`.
        rows: a tree of the same structure with these rows.

    Raises:
        StructureError: if ``rows`` has another structure, with the path.
    """
    try:
        _assign(tree, index, rows)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError):
        _check_alike(tree, rows, 1, "")
        raise


def _assign(tree: Any, index: Any, rows: Any) -> None:
    if isinstance(tree, torch.Tensor):
        tree[index] = rows.detach().to(tree)
        return
    for key, value in items_of(tree):
        _assign(value, index, rows[key])


@overload
def cat(trees: Sequence[Batch], dim: int = 0) -> Batch: ...
@overload
def cat(trees: Sequence[Nested], dim: int = 0) -> Any: ...
def cat(trees: Sequence[Nested], dim: int = 0) -> Any:
    """Concatenate trees of one structure along a dimension.

    Args:
        trees: leaves are tensors or arrays; the lists of batches are joined.
        dim: the dimension.

    Returns:
        A tensor, or for nested values a treetensor, which shares no memory with ``trees``.

    Raises:
        StructureError: if ``trees`` is empty, or they differ in structure or shapes, with the path.
    """
    return _join(_cat_leaves, trees, dim, "")


@overload
def stack(trees: Sequence[Batch], dim: int = 0, *, path: str = "") -> Batch: ...
@overload
def stack(trees: Sequence[Nested], dim: int = 0, *, path: str = "") -> Any: ...
def stack(trees: Sequence[Nested], dim: int = 0, *, path: str = "") -> Any:
    """Stack trees of one structure along a new dimension.

    Args:
        trees: leaves are tensors, arrays or numbers; numbers become float32, int64 or bool. The
            lists of batches become a list of lists.
        dim: the new dimension.
        path: where the trees come from, for messages.

    Returns:
        A tensor, or for nested values a treetensor, which shares no memory with ``trees``.

    Raises:
        StructureError: if ``trees`` is empty, or they differ in structure or shapes, with the path.

    Example:
        >>> stack([{"reward": 0.5}, {"reward": 1.0}])["reward"]
        tensor([0.5000, 1.0000])
    """
    return _join(_stack_leaves, trees, dim, path)


def _join(
    function: Callable[[Sequence[Any], int], Any], trees: Sequence[Nested], dim: int, path: str
) -> Any:
    if not trees:
        raise StructureError("cannot join an empty list of trees; pass at least one sample")
    first = trees[0]
    if type(first) in _LEAF_TYPES or not isinstance(first, _NODE_TYPES):
        try:
            return function(trees, dim)
        except (TypeError, ValueError, RuntimeError) as error:
            verb = "stacked" if function is _stack_leaves else "concatenated"
            raise StructureError(
                f"the values{path and f' of {path!r}'} cannot be {verb} (the first one is "
                f"{first!r:.100}): {error}"
            ) from error
    names, *others = rows = [_columns_of(tree, number, path) for number, tree in enumerate(trees)]
    for number, sibling in enumerate(others, start=1):
        if sibling.keys() != names.keys():
            raise _other_keys(names, sibling, number, path)
    columns: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    for key, value in names.items():
        parts = [row[key] for row in rows]
        if type(value) is list and isinstance(first, Batch):
            lists[key] = parts if function is _stack_leaves else [x for part in parts for x in part]
        else:
            columns[key] = _join(function, parts, dim, f"{path}.{key}" if path else key)
    return as_tree(columns, lists=lists)


def _cat_leaves(parts: Sequence[Any], dim: int) -> torch.Tensor:
    if set(map(type, parts)) == {np.ndarray}:
        return torch.from_numpy(np.concatenate(parts, dim))
    return torch.cat([torch.as_tensor(part) for part in parts], dim)


def _stack_leaves(parts: Sequence[Any], dim: int) -> torch.Tensor:
    if type(parts[0]) is torch.Tensor:
        try:
            return torch.stack(parts, dim)  # type: ignore[arg-type]
        except TypeError:
            pass  # not all are tensors
    elif set(map(type, parts)) == {np.ndarray}:
        return torch.from_numpy(np.stack(parts, dim))
    if isinstance(parts[0], torch.Tensor | np.ndarray):
        return torch.stack([torch.as_tensor(part) for part in parts], dim)
    return torch.as_tensor([x.item() if isinstance(x, np.generic) else x for x in parts])


def _check_alike(first: Nested, other: Nested, number: int, path: str) -> None:
    """Check that two trees have the same keys everywhere."""
    if type(first) in _LEAF_TYPES or not isinstance(first, _NODE_TYPES):
        if isinstance(other, _NODE_TYPES):
            raise StructureError(
                f"{_named(number, path)} is nested, but the first one is not; all must have the "
                "same structure"
            )
        return
    if isinstance(first, tuple) != isinstance(other, tuple):
        raise StructureError(
            f"{_named(number, path)} is a {type(other).__name__}, but the first one is a "
            f"{type(first).__name__}; all must have the same structure"
        )
    names, others = _columns_of(first, 0, path), _columns_of(other, number, path)
    if names.keys() != others.keys():
        raise _other_keys(names, others, number, path)
    for key, value in names.items():
        _check_alike(value, others[key], number, f"{path}.{key}" if path else key)


def _columns_of(tree: Nested, number: int, path: str) -> dict[str, Any]:
    if isinstance(tree, Batch | Mapping):
        return {str(key): value for key, value in items_of(tree)}
    if isinstance(tree, tuple):
        return _enumerated(tree)
    raise StructureError(
        f"{_named(number, path)} is {tree!r:.60}, but the first one is nested; all must have the "
        "same structure"
    )


def _other_keys(
    first: Mapping[str, Any], other: Mapping[str, Any], number: int, path: str
) -> StructureError:
    return StructureError(
        f"{_named(number, path)} differs from the first one in the keys "
        f"{', '.join(sorted(first.keys() ^ other.keys()))}; all must have the same keys"
    )


def _named(number: int, path: str) -> str:
    return f"{path or 'item'} {number}"


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
