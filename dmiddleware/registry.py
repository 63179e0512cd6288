"""Registries: names for classes and functions, by which a config selects them."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from dmiddleware.errors import RegistryError

__all__ = ["Registry", "edit_distance", "nearest", "import_modules"]

T = TypeVar("T")
V = TypeVar("V")

# The similarity of two names from which on one is a typo of the other.
_TYPO = 0.75


def nearest(name: str, known: Iterable[str], *, n: int = 3) -> list[str]:
    """Return up to ``n`` of the known names for which ``name`` is probably a typo, best first.

    Dotted names are compared by their last parts. A name that is merely similar is left out, since
    no suggestion is better than a wrong one.
    """
    leaf = _leaf(name)
    scores = {candidate: _similarity(leaf, _leaf(candidate)) for candidate in known}
    close = [candidate for candidate, score in scores.items() if score >= _TYPO]
    return sorted(close, key=lambda candidate: -scores[candidate])[:n]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _similarity(name: str, other: str) -> float:
    if len(name) > 3 and other.startswith(f"{name}_"):
        return 1.0  # "discount" for "discount_factor"
    return difflib.SequenceMatcher(a=other, b=name, autojunk=False).ratio()


def edit_distance(a: str, b: str) -> int:
    """Return how many characters to insert, delete or replace to turn ``a`` into ``b``.

    Source: Wagner and Fischer, "The string-to-string correction problem", 1974.

    Example:
        >>> edit_distance("lerner", "learner")
        1
    """
    previous = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        current = [i]
        for j, y in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (x != y)))
        previous = current
    return previous[-1]


def import_modules(names: Iterable[str]) -> None:
    """Import modules for their side effect of registering names (a config's ``import_names``)."""
    for name in names:
        importlib.import_module(name)


class Registry(Generic[T]):
    """A registry of classes or functions of one kind, by name.

    Args:
        kind: the kind, used in messages ("policy", "buffer").

    Example:
        >>> POLICIES = Registry[type]("policy")
        >>> @POLICIES.register("null")
        ... class NullPolicy: ...
        >>> POLICIES.get("null").__name__
        'NullPolicy'
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[V], V]:
        """Return a decorator that registers its subject under ``name``.

        Raises:
            RegistryError: if the name is already registered for something else.
        """

        def decorate(entry: V) -> V:
            registered = self._entries.get(name)
            if (
                registered is not None
                and registered is not entry
                and not _same_definition(registered, entry)
            ):
                raise RegistryError(
                    f"the {self._kind} name {name!r} is already registered for {registered!r}; "
                    f"choose another name for {entry!r}"
                )
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Return the entry that is registered as ``name``.

        Raises:
            RegistryError: if there is none; the message suggests similar names.
        """
        try:
            return self._entries[name]
        except (KeyError, TypeError):
            near = nearest(str(name), self._entries)
            hint = (
                f"did you mean {', '.join(near)}?"
                if near
                else f"the known names are: {', '.join(sorted(self._entries)) or '(none)'}."
            )
            raise RegistryError(
                f"no {self._kind} is registered as {name!r}; {hint} "
                "To register a custom one, add its module to the config's import_names."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


def _same_definition(a: object, b: object) -> bool:
    """Return whether both are one definition, imported twice (as a program and as a module)."""
    return getattr(a, "__qualname__", a) == getattr(b, "__qualname__", b) and (
        getattr(getattr(a, "__init__", a), "__code__", None)
        == getattr(getattr(b, "__init__", b), "__code__", None)
    )
