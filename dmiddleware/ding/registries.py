"""DI-engine's registries of classes that a program defines itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from dmiddleware.classic.reward_models import REWARD_MODEL_REGISTRY
from dmiddleware.registry import Registry
from dmiddleware.worker.player_league import LEAGUE_REGISTRY, PLAYER_REGISTRY

__all__ = [
    "ENV_REGISTRY",
    "ENV_WRAPPER_REGISTRY",
    "LEAGUE_REGISTRY",
    "OldRegistry",
    "PLAYER_REGISTRY",
    "REWARD_MODEL_REGISTRY",
]

T = TypeVar("T")


class OldRegistry:
    """A registry by DI-engine's interface; a later registration replaces an earlier one.

    Args:
        kind: what it registers, for messages.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._entries: dict[str, Any] = {}

    def register(
        self, name: str | None = None, module: Any = None, force_overwrite: bool = False
    ) -> Callable[[T], T]:
        """Return a decorator that registers its subject, or register ``module``."""

        def decorate(entry: T) -> T:
            self._entries[name or entry.__name__] = entry  # type: ignore[attr-defined]
            return entry

        if module is not None:
            decorate(module)
        return decorate

    def get(self, name: str) -> Any:
        """Return what is registered under a name.

        Raises:
            RegistryError: if nothing is; the nearest names are listed.
        """
        registry: Registry[Any] = Registry(self._kind)
        for key, entry in self._entries.items():
            registry.register(key)(entry)
        return registry.get(name)

    def build(self, obj_type: str, *arguments: Any, **options: Any) -> Any:
        """Call what is registered under a name."""
        return self.get(obj_type)(*arguments, **options)

    def query(self) -> list[str]:
        """Return the names."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


ENV_REGISTRY: Final = OldRegistry("env")
ENV_WRAPPER_REGISTRY: Final = OldRegistry("env wrapper")
