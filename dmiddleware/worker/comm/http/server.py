"""An HTTP server in a thread that answers signed requests only."""

from __future__ import annotations

import enum
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from dmiddleware.errors import AuthError, ConfigError, TransportError
from dmiddleware.worker.comm.http.client import encoded
from dmiddleware.worker.comm.http.signing import (
    HttpNode,
    Replays,
    SignedRequest,
    check_address,
    reply_signature,
)

try:
    from werkzeug.exceptions import HTTPException, RequestEntityTooLarge
    from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server
    from werkzeug.wrappers import Request, Response
except ImportError:  # the extra [flask]
    WSGIRequestHandler = object  # type: ignore[assignment, misc]
    make_server = None  # type: ignore[assignment]

__all__ = ["MAX_BODY_BYTES", "Code", "HttpServer", "Refusal", "Route"]

MAX_BODY_BYTES: Final = 64 * 2**20
"""The longest body that a server reads."""

_READ_TIMEOUT_S: Final = 30.0
"""How long a client may send nothing before its connection is closed."""

_POLL_S: Final = 0.05

_log = logging.getLogger(__name__)


class Code(enum.IntEnum):
    """The ``code`` in a reply."""

    SUCCESS = 0
    SHUTTING_DOWN = 101
    OTHER_RUN = 201
    OTHER_CHANNEL = 202
    NOT_SIGNED = 301
    WRONG_SIGNATURE = 302
    ALREADY_CONNECTED = 501
    NOT_CONNECTED = 502
    CONNECTION_REFUSED = 503
    DISCONNECTION_REFUSED = 504
    BUSY = 601
    TASK_REFUSED = 602
    UNKNOWN_TASK = 603
    NOT_FOUND = 701
    MALFORMED = 702
    TOO_LARGE = 703
    FAILED = 704


class Refusal(Exception):
    """A request is answered with an error.

    Args:
        status: the HTTP status.
        code: the ``code`` in the reply.
        message: why.
        data: the ``data`` in the reply.
    """

    def __init__(
        self, status: int, code: Code, message: str, data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.data = dict(data or {})


class Route:
    """An endpoint.

    Args:
        handle: takes the sender and the body, and returns the ``data`` of the reply.
        own_token: only the server's owner may call it.
        to_anyone: the sender does not know the server's uid yet.
    """

    def __init__(
        self,
        handle: Callable[[HttpNode, dict[str, Any]], Mapping[str, Any] | None],
        *,
        own_token: bool = False,
        to_anyone: bool = False,
    ) -> None:
        self.handle = handle
        self.own_token = own_token
        self.to_anyone = to_anyone


class HttpServer:
    """Serves endpoints on a thread, until it is closed.

    A request is answered with ``{success, code, message, data}`` in JSON. Before anything else
    happens, not even decoding the body, its signature is checked.

    Args:
        node: this server's name.
        host: the address to listen on; without a key it must be loopback.
        port: the port; 0 lets the system choose one.
        routes: the endpoints, by method and path.
        key: the run's key; may be empty on loopback.
        clock: returns the seconds since the epoch.
        is_open: False makes the server answer 409, "shutting down", except to its owner.

    Raises:
        ConfigError: if other hosts can reach the address and the key is empty, or if Flask is not
            installed.
    """

    def __init__(
        self,
        node: HttpNode,
        host: str,
        port: int,
        routes: Mapping[tuple[str, str], Route],
        *,
        key: bytes = b"",
        clock: Callable[[], float] = time.time,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        if make_server is None:
            raise ConfigError(
                "communicating over HTTP needs Flask; install it with: "
                "pip install 'dmiddleware[flask]'"
            )
        check_address(host, key)
        self._node, self._host, self._port = node, host, port
        self._routes = routes
        self._key = key
        self._own_token = secrets.token_bytes(32)
        self._replays = Replays(clock)
        self._is_open = is_open
        self._is_closed = False
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def own_token(self) -> bytes:
        """The key with which the owner signs requests to its own server."""
        return self._own_token

    @property
    def port(self) -> int:
        """The port; if it was 0, the system chooses one when the server opens."""
        return self._port if self._server is None else self._server.port

    def open(self) -> None:
        """Start to listen; a second call does nothing.

        Raises:
            TransportError: if the address cannot be listened on, or the server was closed.
        """
        if self._is_closed:
            raise TransportError("the server was closed; create another one")
        if self._server is not None:
            return
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listening = socket.create_server((self._host, self._port), family=family, backlog=64)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                "choose another port"
            ) from error
        with listening:
            # With a socket of ours, because werkzeug ends the process if the port is taken.
            self._server = make_server(
                self._host, self._port, self._answer, threaded=True,
                request_handler=_Handler, fd=listening.fileno(),
            )  # fmt: skip
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="http-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop to listen; may be called twice."""
        self._is_closed = True
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = Request(environ, populate_request=False)
        request.max_content_length = MAX_BODY_BYTES
        nonce, key = "", self._key
        try:
            signed, key, route, body = self._verified(request)
            nonce = signed.nonce
            status, content = 200, self._content(signed, route, body)
        except Refusal as refusal:
            status = refusal.status
            content = _content(refusal.code, refusal.message, refusal.data)
        except Exception as error:  # noqa: BLE001 (logged, and answered with 500)
            _log.exception("the request %s %s has failed", request.method, request.path)
            status, content = 500, _content(Code.FAILED, f"{type(error).__name__}: {error}")
        response = Response(content, status, mimetype="application/json")
        if nonce:
            response.headers["Authentication-Info"] = reply_signature(key, nonce, status, content)
        return response(environ, start_response)

    def _verified(self, request: Request) -> tuple[SignedRequest, bytes, Route | None, bytes]:
        """Return the request's signature, verified, the key, the endpoint, and the body."""
        path = str(request.environ["REQUEST_URI"])
        route = self._routes.get((request.method, path))
        key = self._own_token if route and route.own_token else self._key
        to = "" if route and route.to_anyone else self._node.uid
        try:
            signed = SignedRequest.parsed(request.headers.get("Authorization", ""))
        except (AuthError, ConfigError) as error:
            raise Refusal(401, Code.NOT_SIGNED, str(error)) from error
        try:
            self._replays.check(signed)
            body = _body(request)
            signed.check(key, request.method, path, body, to=to)
            self._replays.add(signed)
        except AuthError as error:
            raise Refusal(401, Code.WRONG_SIGNATURE, str(error)) from error
        return signed, key, route, body

    def _content(self, signed: SignedRequest, route: Route | None, body: bytes) -> bytes:
        """Return the content of the reply to a verified request."""
        node = signed.node
        if node.run_id != self._node.run_id:
            raise Refusal(403, Code.OTHER_RUN, f"this is the run {self._node.run_id}")
        if node.channel != self._node.channel:
            raise Refusal(403, Code.OTHER_CHANNEL, f"this is channel {self._node.channel}")
        if route is None:
            raise Refusal(404, Code.NOT_FOUND, f"the endpoints are {self._known()}")
        if not self._is_open() and not route.own_token:
            raise Refusal(409, Code.SHUTTING_DOWN, "this node is shutting down")
        data = route.handle(node, _decoded(body))
        return _content(Code.SUCCESS, "", data)

    def _known(self) -> str:
        return ", ".join(f"{method} {path}" for method, path in self._routes)


class _Handler(WSGIRequestHandler):
    """Logs to this module's logger, and does not wait forever for a client."""

    timeout = _READ_TIMEOUT_S

    def log(self, type: str, message: str, *args: Any) -> None:
        _log.debug("%s %s", self.address_string(), message % args if args else message)


def _body(request: Request) -> bytes:
    if "Transfer-Encoding" in request.headers:
        raise Refusal(411, Code.MALFORMED, "send the body at once, with its Content-Length")
    try:
        return request.get_data(cache=False)
    except RequestEntityTooLarge:
        raise Refusal(
            413, Code.TOO_LARGE, f"the body is longer than {MAX_BODY_BYTES / 2**20:g} MiB"
        ) from None
    except (OSError, ValueError, HTTPException) as error:
        raise Refusal(400, Code.MALFORMED, f"the body cannot be read: {error}") from error


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refusal(400, Code.MALFORMED, f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Refusal(400, Code.MALFORMED, "the body must be a JSON object")
    return content


def _content(code: Code, message: str, data: Mapping[str, Any] | None = None) -> bytes:
    return encoded(
        {"success": code is Code.SUCCESS, "code": code, "message": message, "data": data or {}}
    )
