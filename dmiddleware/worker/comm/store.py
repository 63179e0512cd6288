"""Where step data and policies are kept between the workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

__all__ = ["Store"]


class Store(Protocol):
    """Keeps step data until the learner has used it, and the newest state of each policy."""

    def put(self, name: str, value: Any) -> str:
        """Store step data: a tree of tensors, numbers and strings. Return its reference."""
        ...

    def get(self, ref: str) -> Any:
        """Return the step data of a reference.

        Raises:
            StepDataLost: if it is missing or damaged.
        """
        ...

    def delete(self, refs: Iterable[str]) -> None:
        """Delete step data; references that are already gone are ignored."""
        ...

    def missing(self, refs: Iterable[str]) -> set[str]:
        """Return which of the references have no step data, without reading the others."""
        ...

    def clear(self) -> None:
        """Delete all step data of the run, once it has ended; also what nobody refers to."""
        ...

    def publish(self, name: str, version: int, state: Mapping[str, Any]) -> None:
        """Replace the state of a policy; readers see the old state or the new one, whole."""
        ...

    def newest(self, name: str, have: int) -> tuple[int, Mapping[str, Any]] | None:
        """Return version and state of a policy, or None if none is newer than version ``have``."""
        ...
