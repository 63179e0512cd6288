"""Doing what only informs people, without which a run continues."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from dmiddleware.errors import DMiddlewareError

__all__ = ["BestEffort"]

_log = logging.getLogger(__name__)


class BestEffort:
    """A block that may fail: the first error is logged as a warning, and none leaves the block.

    A disk may be full, a pipe closed, or too many files open. Errors of this project leave the
    block, since a policy or a snapshot that cannot be saved ends a run.

    Args:
        what: what the block does, for the warning: ``write the learning curve``.
        errors: the errors that do not matter; none: ``OSError``.
    """

    def __init__(self, what: str, *errors: type[Exception]) -> None:
        self._what = what
        self._errors = errors or (OSError,)
        self._has_warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, self._errors) or isinstance(error, DMiddlewareError):
            return False
        if not self._has_warned:
            self._has_warned = True  # first, because the warning may fail in the same way
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            _log.warning("cannot %s (%s); the run continues without it", self._what, reason)
        return True
