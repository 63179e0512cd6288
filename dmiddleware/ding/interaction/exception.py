"""The face of ``ding.interaction.exception``: one class for each code of a reply."""

from __future__ import annotations

import enum
from typing import Any

from dmiddleware.ding.interaction.base import get_values_from_response
from dmiddleware.worker.errors import RequestFailed

__all__ = [
    "MasterErrorCode",
    "MasterResponseException",
    "ResponseException",
    "SlaveErrorCode",
    "SlaveResponseException",
    "get_master_exception_by_error",
    "get_master_exception_class_by_error_code",
    "get_slave_exception_by_error",
    "get_slave_exception_class_by_error_code",
]


class MasterErrorCode(enum.IntEnum):
    """The codes of a master's replies."""

    SUCCESS = 0
    SYSTEM_SHUTTING_DOWN = 101
    CHANNEL_NOT_GIVEN = 201
    CHANNEL_INVALID = 202
    MASTER_TOKEN_NOT_GIVEN = 301
    MASTER_TOKEN_INVALID = 302
    SELF_TOKEN_NOT_GIVEN = 401
    SELF_TOKEN_INVALID = 402
    SLAVE_TOKEN_NOT_GIVEN = 501
    SLAVE_TOKEN_INVALID = 502
    TASK_DATA_INVALID = 601


class SlaveErrorCode(enum.IntEnum):
    """The codes of a slave's replies."""

    SUCCESS = 0
    SYSTEM_SHUTTING_DOWN = 101
    CHANNEL_NOT_FOUND = 201
    CHANNEL_INVALID = 202
    MASTER_TOKEN_NOT_FOUND = 301
    MASTER_TOKEN_INVALID = 302
    SELF_TOKEN_NOT_FOUND = 401
    SELF_TOKEN_INVALID = 402
    SLAVE_ALREADY_CONNECTED = 501
    SLAVE_NOT_CONNECTED = 502
    SLAVE_CONNECTION_REFUSED = 503
    SLAVE_DISCONNECTION_REFUSED = 504
    TASK_ALREADY_EXIST = 601
    TASK_REFUSED = 602


class ResponseException(Exception):
    """A reply that says that a request has failed.

    Args:
        error: an ``HTTPError`` of requests with its reply, or the edge's ``RequestFailed``.

    Attributes:
        status_code: the HTTP status.
        success: whether the request has succeeded.
        code: the code in the reply.
        message: why.
        data: what the server says beside it.
    """

    def __init__(self, error: Any) -> None:
        values: tuple[Any, ...] = (
            (error.status, False, error.code, str(error), {})
            if isinstance(error, RequestFailed)
            else get_values_from_response(error.response)
        )
        self.status_code: int = values[0]
        self.success: bool = values[1]
        self.code: int = values[2]
        self.message: str = values[3]
        self.data: dict[str, Any] = values[4]
        super().__init__(self.message)


class MasterResponseException(ResponseException):
    """A reply of a master."""


class SlaveResponseException(ResponseException):
    """A reply of a slave."""


def _classes(codes: type[enum.IntEnum], base: type[Any]) -> dict[enum.IntEnum, type[Any]]:
    """Return the class of each code: of a slave's ``CHANNEL_INVALID``, ``SlaveChannelInvalid``."""
    kind = base.__name__.removesuffix("ResponseException")
    return {
        code: type(kind + code.name.title().replace("_", ""), (base,), {"__module__": __name__})
        for code in codes
    }


_MASTER = _classes(MasterErrorCode, MasterResponseException)
_SLAVE = _classes(SlaveErrorCode, SlaveResponseException)
_NAMED = {cls.__name__: cls for cls in (*_MASTER.values(), *_SLAVE.values())}
globals().update(_NAMED)
__all__ += list(_NAMED)


def get_master_exception_class_by_error_code(error_code: int) -> type[MasterResponseException]:
    """Return the class of a code."""
    return _MASTER[MasterErrorCode(error_code)]


def get_slave_exception_class_by_error_code(error_code: int) -> type[SlaveResponseException]:
    """Return the class of a code."""
    return _SLAVE[SlaveErrorCode(error_code)]


def get_master_exception_by_error(error: Any) -> MasterResponseException:
    """Return the exception for a failed request."""
    return get_master_exception_class_by_error_code(ResponseException(error).code)(error)


def get_slave_exception_by_error(error: Any) -> SlaveResponseException:
    """Return the exception for a failed request."""
    return get_slave_exception_class_by_error_code(ResponseException(error).code)(error)
