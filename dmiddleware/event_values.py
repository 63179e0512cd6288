"""The values of events: types that other packages add, and copies for handlers."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Adapter", "ValueCopier", "copied_arguments", "installed_adapters"]

_GROUP: Final = "dmiddleware.wire"
_UNCHANGEABLE: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class Adapter(Protocol):
    """The interface of an adapter; see :class:`~dmiddleware.router.TypeAdapter`."""

    @property
    def name(self) -> str:
        """The type's name on the wire."""
        ...

    @property
    def type(self) -> type:
        """The class."""
        ...

    @property
    def to_plain(self) -> Callable[[Any], Any]:
        """Converts an instance to a value that the codec can encode."""
        ...

    @property
    def from_plain(self) -> Callable[[Any], Any]:
        """Converts that value back to an instance."""
        ...

    @property
    def copy(self) -> Callable[[Any], Any] | None:
        """Copies an instance; None: it is converted to a plain value, and a copy of that back."""
        ...


def installed_adapters(root: str) -> Iterable[Adapter]:
    """Yield the adapters for the types of a module, from the installed packages.

    They are in the entry-point group ``dmiddleware.wire``. The entry's name is the root module of
    the adapted types, so a process loads torch's adapters only when it uses torch's tensors.

    Args:
        root: the root module of the types.
    """
    for entry in _entries():
        if entry.name == root:
            yield from entry.load()


def copied_arguments(
    args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments of an event, as :class:`ValueCopier` makes them."""
    copier = ValueCopier()
    return (
        tuple(map(copier.copy, args)),
        {name: copier.copy(value) for name, value in kwargs.items()},
    )


class ValueCopier:
    """Copies what can be changed later: arrays, tensors, and the containers that hold them.

    These are numpy arrays, the types of installed adapters, dictionaries, lists, sets, tuples, and
    bytearrays. Objects of other classes stay the same, and so does a value that occurs twice.
    """

    def __init__(self) -> None:
        # By the id of the value, which must stay alive meanwhile.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copy(self, value: Any) -> Any:
        """Return a copy of a value."""
        if type(value) in _UNCHANGEABLE:
            return value
        if id(value) not in self._copies:
            self._note(value, self._new_copy(value))
        return self._copies[id(value)][1]

    def _note(self, value: Any, result: Any) -> None:
        self._copies[id(value)] = value, result

    def _new_copy(self, value: Any) -> Any:
        kind: Any = type(value)
        if isinstance(value, list | dict):
            return self._copy_items(value)
        if isinstance(value, tuple):
            if kind is not tuple and not hasattr(kind, "_fields"):
                return value
            items = map(self.copy, value)
            return tuple(items) if kind is tuple else kind(*items)
        numpy = sys.modules.get("numpy")
        if isinstance(value, set | bytearray if numpy is None else numpy.ndarray | set | bytearray):
            return value.copy()
        adapter = _adapter_of(kind)
        if adapter is None:
            return value
        if adapter.copy is not None:
            return adapter.copy(value)
        return adapter.from_plain(self.copy(adapter.to_plain(value)))

    def _copy_items(self, value: list[Any] | dict[Any, Any]) -> Any:
        result: Any = copy.copy(value)
        self._note(value, result)  # it may contain itself
        for key, item in enumerate(value) if isinstance(value, list) else value.items():
            result[key] = self.copy(item)
        return result


@functools.lru_cache(maxsize=256)
def _adapter_of(kind: Any) -> Adapter | None:
    for base in kind.__mro__:
        for adapter in installed_adapters(base.__module__.partition(".")[0]):
            if adapter.type is base:
                return adapter
    return None


@functools.cache
def _entries() -> tuple[EntryPoint, ...]:
    # Imported here because most processes need no adapters.
    from importlib.metadata import entry_points

    return tuple(entry_points(group=_GROUP))
