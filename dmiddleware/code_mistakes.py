"""Which errors are mistakes in the code, which a restart would repeat."""

from __future__ import annotations

import traceback
from typing import Final, NamedTuple

from dmiddleware.errors import (
    ChainError,
    ConfigError,
    EventError,
    LaunchError,
    RouterError,
    SpaceError,
    StructureError,
)
from dmiddleware.process.terminal import needs_terminal

__all__ = ["ERRORS_OF_PEERS", "ErrorSummary", "is_code_mistake"]

_CODE_ERRORS: Final = (
    ImportError,
    SyntaxError,
    NameError,
    AttributeError,
    TypeError,
    NotImplementedError,
    ChainError,
    ConfigError,
    LaunchError,
    SpaceError,
    StructureError,
)
ERRORS_OF_PEERS: Final = (RouterError, EventError)
"""Errors that other processes cause, whatever was raised from them."""

_GYMNASIUM_ERRORS: Final = "gymnasium.error"
"""The module of the errors of Gymnasium, which says so if an env does not exist for example."""


def is_code_mistake(error: BaseException | None) -> bool:
    """Return whether an error is a mistake in the code, contains one, or was raised from one."""
    if error is None or isinstance(error, ERRORS_OF_PEERS):
        return False
    if isinstance(error, BaseExceptionGroup) and any(map(is_code_mistake, error.exceptions)):
        return True
    if isinstance(error, _CODE_ERRORS) or type(error).__module__ == _GYMNASIUM_ERRORS:
        return True
    return needs_terminal(error) or is_code_mistake(_reason_of(error))


class ErrorSummary(NamedTuple):
    """What another process knows of an error, whose class it may be unable to import.

    Attributes:
        kind: the nearest class of the error that every process has.
        text: its message.
        reason: the error that it was raised from.
    """

    kind: type[Exception]
    text: str
    reason: ErrorSummary | None

    @classmethod
    def of(cls, error: Exception) -> ErrorSummary:
        """Return the summary of an error."""
        if isinstance(error, ExceptionGroup):
            inner = next(filter(is_code_mistake, error.exceptions), error.exceptions[0])
            return cls(RuntimeError, _text_of(error), cls.of(inner))
        kind = next(kind for kind in type(error).__mro__ if _is_everywhere(kind))
        reason = _reason_of(error)
        return cls(kind, _text_of(error), cls.of(reason) if isinstance(reason, Exception) else None)

    def error(self) -> Exception:
        """Return an error of this kind, with its reason as its cause."""
        error = self.kind.__new__(self.kind, self.text)
        error.__cause__ = None if self.reason is None else self.reason.error()
        return error


def _reason_of(error: BaseException) -> BaseException | None:
    # With `from None`, the context is what the error was raised for.
    return error.__cause__ or (error.__context__ if error.__suppress_context__ else None)


def _is_everywhere(kind: type) -> bool:
    return kind.__module__ in ("builtins", "dmiddleware.errors", _GYMNASIUM_ERRORS)


def _text_of(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).partition(": ")[2].strip()
