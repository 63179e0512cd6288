"""The errors of the workers, whose names are those of DI-engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmiddleware.errors import DataError, DMiddlewareError

__all__ = [
    "CoordinatorError",
    "StepDataLost",
    "TaskFail",
    "ConnectionRefuse",
    "DisconnectionRefuse",
    "TaskRefuse",
    "RequestFailed",
]


class CoordinatorError(DMiddlewareError, RuntimeError):
    """A coordinator was asked for an unknown task or buffer, or at the wrong time."""


class StepDataLost(DataError, LookupError):
    """Step data is missing or damaged in its store.

    Attributes:
        data_id: the id of the data; empty if it is unknown.
    """

    def __init__(self, message: str, *, data_id: str = "") -> None:
        super().__init__(message)
        self.data_id = data_id


class TaskFail(DMiddlewareError, RuntimeError):
    """A task that a worker was given has failed, or the worker does not have it.

    Attributes:
        result: plain values for the sender of the task, such as its id.
        message: why; the traceback, if an error ended the task.
    """

    def __init__(self, result: Mapping[str, Any] | None = None, message: str = "") -> None:
        super().__init__(result, message)
        self.result = dict(result or {})
        self.message = message

    def __str__(self) -> str:
        return self.message


class ConnectionRefuse(DMiddlewareError, PermissionError):
    """A slave does not accept this master; its ``_before_connection`` raises it."""


class DisconnectionRefuse(DMiddlewareError, PermissionError):
    """A slave does not release its master; its ``_before_disconnection`` raises it."""


class TaskRefuse(DMiddlewareError, PermissionError):
    """A slave does not take this task; its ``_before_task`` raises it."""


class RequestFailed(DMiddlewareError, ConnectionError):
    """An HTTP request was refused, or not answered.

    Attributes:
        status: the HTTP status of the reply; None if there was none.
        code: the ``code`` in the reply; None unless the reply was signed with the run's key.
    """

    def __init__(self, message: str, *, status: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
