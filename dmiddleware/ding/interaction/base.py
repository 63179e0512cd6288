"""The face of ``ding.interaction.base``: small helpers for programs that speak HTTP themselves."""

from __future__ import annotations

import abc
import enum
import functools
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn, Self
from urllib.parse import urlsplit

import flask
import requests

__all__ = [
    "CommonErrorCode",
    "ControllableContext",
    "ControllableService",
    "DblEvent",
    "HttpEngine",
    "ResponsibleException",
    "default_func",
    "failure_response",
    "flask_response",
    "get_host_ip",
    "get_http_engine_class",
    "get_values_from_response",
    "random_token",
    "responsible",
    "split_http_address",
    "success_response",
    "translate_dict_func",
]

_RETRIES: Final = 5
_RETRY_WAITING_S: Final = 1.0


class CommonErrorCode(enum.IntEnum):
    """The ``code`` of a reply that says no more."""

    SUCCESS = 0
    COMMON_FAILURE = 1


def flask_response(
    success: bool,
    data: Mapping[str, Any] | None = None,
    message: str | None = None,
    code: int | None = None,
) -> flask.Response:
    """Return a reply with ``success``, ``code``, ``message`` and ``data``."""
    return flask.jsonify(
        {
            "success": success,
            "code": 0 if success else code or CommonErrorCode.COMMON_FAILURE,
            "message": message or ("Success." if success else "Failed."),
            "data": data,
        }
    )


def success_response(
    data: Mapping[str, Any] | None = None, message: str | None = None
) -> flask.Response:
    """Return the reply to a request that has succeeded."""
    return flask_response(True, data, message)


def failure_response(
    code: int | None = None, message: str | None = None, data: Mapping[str, Any] | None = None
) -> flask.Response:
    """Return the reply to a request that has failed."""
    return flask_response(False, data, message, code)


def get_values_from_response(response: Any) -> tuple[int, bool, int, str, Any]:
    """Return status, success, code, message and data of a reply of Flask or requests."""
    content = response.content if hasattr(response, "content") else response.data
    body = json.loads(content)
    return (
        response.status_code, body["success"], body["code"],
        body.get("message", ""), body.get("data", {}),
    )  # fmt: skip


class ResponsibleException(Exception):
    """An error that :func:`responsible` answers with a reply."""

    def __init__(
        self,
        code: int = CommonErrorCode.COMMON_FAILURE,
        message: str | None = None,
        data: Mapping[str, Any] | None = None,
        status_code: int = 400,
    ) -> None:
        super().__init__(message)
        self._code, self._message, self._data = code, message, dict(data or {})
        self._status_code = status_code

    def get_response(self) -> tuple[flask.Response, int]:
        """Return the reply and its status."""
        return failure_response(self._code, self._message, self._data), self._status_code


def responsible(
    classes: Iterable[type[ResponsibleException]] = (ResponsibleException,),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an endpoint answer errors of some classes with their replies."""
    kinds = tuple(classes)

    def decorate(handle: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handle)
        def answer(*args: Any, **kwargs: Any) -> Any:
            try:
                return handle(*args, **kwargs)
            except kinds as error:
                return error.get_response()

        return answer

    return decorate


def random_token(length: int | None = None) -> str:
    """Return a random hexadecimal string, of 64 digits if no length is given."""
    n_digits = length or 64
    return secrets.token_hex(n_digits)[:n_digits]


def translate_dict_func(d: Mapping[str, Callable[..., Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that calls all functions of a dictionary with its own arguments."""
    return lambda *args, **kwargs: {key: call(*args, **kwargs) for key, call in d.items()}


def default_func(return_value: Any = None) -> Callable[[Callable[..., Any] | None], Any]:
    """Return a decorator that replaces None by a function that returns a value."""
    return lambda call: call or (lambda *args, **kwargs: return_value)


class ControllableContext(abc.ABC):
    """Something that ``with`` starts and closes."""

    @abc.abstractmethod
    def start(self) -> Any:
        """Start."""

    @abc.abstractmethod
    def close(self) -> Any:
        """End."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class ControllableService(ControllableContext):
    """Something that is shut down first, and has ended later."""

    @abc.abstractmethod
    def shutdown(self) -> Any:
        """Begin to end."""

    @abc.abstractmethod
    def join(self) -> Any:
        """Wait until it has ended."""

    def close(self) -> None:
        """Shut down, and wait until it has ended."""
        self.shutdown()
        self.join()


def get_host_ip() -> str:
    """Return the address of this host, by which others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("8.8.8.8", 80))  # chooses an interface, and sends nothing
        return str(probe.getsockname()[0])


def split_http_address(address: str, default_port: int | None = None) -> tuple[str, int, bool, str]:
    """Return host, port, whether it is HTTPS, and the path of an address."""
    parts = urlsplit(address)
    is_https = parts.scheme == "https"
    port = parts.port or default_port or (443 if is_https else 80)
    return parts.hostname or "", port, is_https, parts.path


class HttpEngine:
    """Sends JSON to one server, and repeats what was not answered."""

    def __init__(self, host: str, port: int, https: bool = False, path: str | None = None) -> None:
        self._root = f"{'https' if https else 'http'}://{host}:{port}"
        self._path = path or ""
        self._session = requests.Session()
        self._session.trust_env = False

    def _data_process(self, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return data or {}

    def _base_headers(self) -> Mapping[str, Any]:
        return {}

    def _error_handler(self, err: Exception) -> NoReturn:
        raise err

    def get_url(self, path: str | None = None) -> str:
        """Return the address of an endpoint."""
        words = [word for word in f"{self._path}/{path or ''}".split("/") if word]
        return "/".join((self._root, *words))

    def request(
        self,
        method: str,
        path: str,
        data: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        raise_for_status: bool = True,
        retries: int | None = None,
        retry_waiting: float | None = None,
    ) -> requests.Response:
        """Send a request and return the reply; other errors than statuses are tried again."""
        n_retries = retries or _RETRIES
        while True:
            try:
                response = self._session.request(
                    method, self.get_url(path), params=dict(params or {}),
                    data=json.dumps(self._data_process(data)),
                    headers={**self._base_headers(), **(headers or {})},
                )  # fmt: skip
                if raise_for_status:
                    response.raise_for_status()
                return response
            except requests.RequestException as error:
                n_retries -= 1
                if isinstance(error, requests.HTTPError) or n_retries < 0:
                    self._error_handler(error)
            time.sleep(retry_waiting or _RETRY_WAITING_S)


def get_http_engine_class(
    headers: Mapping[str, Callable[..., Any]],
    data_processor: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    http_error_gene: Callable[[requests.HTTPError], Exception] | None = None,
) -> Callable[..., type[HttpEngine]]:
    """Return a function that makes a class of engines with headers, data and errors of its own."""

    def new_class(*args: Any, **kwargs: Any) -> type[HttpEngine]:
        class Engine(HttpEngine):
            def _data_process(self, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
                return data_processor(data or {}) if data_processor else data or {}

            def _base_headers(self) -> Mapping[str, Any]:
                return translate_dict_func(headers)(*args, **kwargs)

            def _error_handler(self, err: Exception) -> NoReturn:
                if http_error_gene is not None and isinstance(err, requests.HTTPError):
                    raise http_error_gene(err)
                raise err

        return Engine

    return new_class


class DblEvent:
    """An event that can be waited for in both directions."""

    def __init__(self, opened: bool = False) -> None:
        self._changed = threading.Condition()
        self._is_open = opened

    def wait_for_open(self, timeout: float | None = None) -> None:
        """Wait until it is open, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(self.is_open, timeout)

    def wait_for_close(self, timeout: float | None = None) -> None:
        """Wait until it is closed, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(self.is_close, timeout)

    def open(self) -> None:
        """Open it."""
        self._set(is_open=True)

    def close(self) -> None:
        """Close it."""
        self._set(is_open=False)

    def is_open(self) -> bool:
        """Return whether it is open."""
        return self._is_open

    def is_close(self) -> bool:
        """Return whether it is closed."""
        return not self._is_open

    def _set(self, *, is_open: bool) -> None:
        with self._changed:
            self._is_open = is_open
            self._changed.notify_all()
