"""The base class of what is used in a ``with`` block, and closed at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing:
    """Calls :meth:`close` at the end of a ``with`` block, also on error.

    A class that must be started as well overrides ``__enter__``.
    """

    def close(self) -> None:
        """Free what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
