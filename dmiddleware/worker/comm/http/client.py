"""Signed HTTP requests, and the check of their replies."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from dmiddleware.errors import ConfigError
from dmiddleware.worker.comm.http.signing import (
    HttpNode,
    SignedRequest,
    check_address,
    reply_signature,
    sign,
)
from dmiddleware.worker.errors import RequestFailed

try:
    import requests
except ImportError:  # the extra [flask]
    requests = None  # type: ignore[assignment]

__all__ = ["HttpClient", "encoded"]

_TIMEOUT_S: Final = 10.0


class HttpClient:
    """Sends signed requests to one server.

    Args:
        address: the server's address, such as ``http://127.0.0.1:7236``.
        node: the sender.
        key: the run's key; may be empty on loopback.
        to: the server's uid; empty if it is not known yet.
        clock: returns the seconds since the epoch.

    Raises:
        ConfigError: if the address is not such an address, is on another host while the key is
            empty, or if requests is not installed.
    """

    def __init__(
        self,
        address: str,
        node: HttpNode,
        *,
        key: bytes = b"",
        to: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if requests is None:
            raise ConfigError(
                "communicating over HTTP needs requests; install it with: "
                "pip install 'dmiddleware[flask]'"
            )
        check_address(_host(address), key)
        self._address, self._node, self._key, self._to = address, node, key, to
        self._clock = clock

    @property
    def address(self) -> str:
        """The server's address."""
        return self._address

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send a request, and return the ``data`` of the reply.

        Args:
            method: ``GET``, ``POST``, ``PUT`` or ``DELETE``.
            path: the endpoint.
            body: is sent as JSON.
            timeout_s: seconds to wait for a reply.

        Raises:
            RequestFailed: if the server refuses the request, or does not answer, or its reply is
                not signed with the run's key.
            TypeError: if the body is not JSON.
        """
        content = encoded(body) if body is not None else b""
        header = sign(self._key, self._node, self._clock(), method, path, content, to=self._to)
        what = f"{method} {self._address}{path}"
        try:
            with requests.Session() as session:
                session.trust_env = False  # neither proxies nor other credentials
                reply = session.request(
                    method, self._address + path, data=content, timeout=timeout_s,
                    headers={"Authorization": header, "Content-Type": "application/json"},
                    allow_redirects=False,
                )  # fmt: skip
        except requests.RequestException as error:
            raise RequestFailed(f"{what} was not answered: {error}") from error
        expected = reply_signature(
            self._key, SignedRequest.parsed(header).nonce, reply.status_code, reply.content
        )
        is_signed = hmac.compare_digest(
            expected.encode(), reply.headers.get("Authentication-Info", "").encode()
        )
        return _data(what, reply.status_code, reply.content, is_signed=is_signed)


def encoded(body: Mapping[str, Any]) -> bytes:
    """Return an object as JSON; arrays and tensors as lists.

    Raises:
        TypeError: if it cannot be JSON.
    """
    return json.dumps(body, default=_as_list).encode()


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a value of type {type(value).__name__} cannot be sent as JSON; convert it to numbers, "
        "strings, lists and dictionaries"
    )


def _data(what: str, status: int, content: bytes, *, is_signed: bool) -> dict[str, Any]:
    try:
        reply = json.loads(content)
        code, message, data = int(reply["code"]), str(reply["message"]), reply["data"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestFailed(
            f"{what} was answered with status {status}, but not with JSON", status=status
        ) from error
    if not is_signed:
        raise RequestFailed(
            f"{what} was answered with status {status}, but not with the run's key: {message}",
            status=status,
        )
    if status != 200:
        raise RequestFailed(
            f"{what} was refused with status {status}, code {code}: {message}",
            status=status,
            code=code,
        )
    return dict(data)


def _host(address: str) -> str:
    parts = urlsplit(address)
    try:
        is_usable = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_usable = False
    if not is_usable or parts.path:
        raise ConfigError(f"an address looks like http://127.0.0.1:7236, got {address!r}")
    return str(parts.hostname)
