"""A Flask application that answers signed requests only, and the server that runs it.

Until the head of a request has proved that its sender has the run's key, a connection costs a few
KB and two seconds, and there is a bounded number of them.
"""

from __future__ import annotations

import contextlib
import enum
import io
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
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
    from flask import Flask, Response, g, request
    from werkzeug.exceptions import HTTPException
    from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
except ImportError:  # the extra [flask]
    WSGIRequestHandler = ThreadedWSGIServer = object  # type: ignore[assignment, misc]
    Flask = None  # type: ignore[assignment, misc]

__all__ = [
    "HEAD_S",
    "MAX_BODY_BYTES",
    "MAX_HEAD_BYTES",
    "MAX_UNVERIFIED",
    "Code",
    "HttpServer",
    "Refusal",
    "Route",
]

MAX_BODY_BYTES: Final = 64 * 2**20
"""The longest body that a server reads."""

MAX_HEAD_BYTES: Final = 8 * 1024
"""The longest head of a request: all that is read before its signature is checked."""

HEAD_S: Final = 2.0
"""How long a client may take to send the head."""

MAX_UNVERIFIED: Final = 64
"""How many connections may be open without a verified request; one more closes the oldest."""

_BODY_S: Final = 30.0
"""How long a client with the key may take to send the body, and to read the reply."""

_POLL_S: Final = 0.05
_HANDLER: Final = "dmiddleware.handler"

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
    """Serves a Flask application of endpoints on a thread, until it is closed.

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

    Attributes:
        app: the application.

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
        if Flask is None:
            raise ConfigError(
                "communicating over HTTP needs Flask; install it with: "
                "pip install 'dmiddleware[flask]'"
            )
        check_address(host, key)
        self._node, self._host, self._port = node, host, port
        self._routes = {f"{method} {path}": route for (method, path), route in routes.items()}
        self._key = key
        self._own_token = secrets.token_bytes(32)
        self._replays = Replays(clock)
        self._is_open = is_open
        self._is_closed = False
        self.app = self._new_app()
        self._server: _Server | None = None
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
            self._server = _Server(
                self._host,
                self._port,
                self.app,
                handler=_Handler,
                fd=listening.fileno(),
            )
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

    def _new_app(self) -> Flask:
        app = Flask(__name__, static_folder=None)
        for name, route in self._routes.items():
            method, path = name.split()
            app.add_url_rule(
                path, name, partial(_serve, route),
                methods=[method], provide_automatic_options=False,
            )  # fmt: skip
        app.before_request(self._admit)  # also of unknown endpoints
        app.register_error_handler(Exception, _refused)
        app.after_request(_signed)
        return app

    def _admit(self) -> None:
        """Check a request before anything else happens to it.

        Raises:
            Refusal: if it is not to be served.
        """
        path, rule = str(request.environ["REQUEST_URI"]), request.url_rule
        route = self._routes[rule.endpoint] if rule is not None and rule.rule == path else None
        key = self._own_token if route and route.own_token else self._key
        to = "" if route and route.to_anyone else self._node.uid
        try:
            signed = SignedRequest.parsed(request.headers.get("Authorization", ""))
        except (AuthError, ConfigError) as error:
            raise Refusal(401, Code.NOT_SIGNED, str(error)) from error
        try:
            self._replays.check(signed)
            signed.check_head(key, request.method, path, to=to)
            self._replays.add(signed)
            g.body = _body()
            signed.check_body(g.body)
        except AuthError as error:
            raise Refusal(401, Code.WRONG_SIGNATURE, str(error)) from error
        g.sender = node = signed.node
        g.sign = partial(reply_signature, key, signed.nonce)
        if node.run_id != self._node.run_id:
            raise Refusal(403, Code.OTHER_RUN, f"this is the run {self._node.run_id}")
        if node.channel != self._node.channel:
            raise Refusal(403, Code.OTHER_CHANNEL, f"this is channel {self._node.channel}")
        if route is None:
            raise Refusal(404, Code.NOT_FOUND, f"the endpoints are {', '.join(self._routes)}")
        if not self._is_open() and not route.own_token:
            raise Refusal(409, Code.SHUTTING_DOWN, "this node is shutting down")


def _serve(route: Route) -> Response:
    """Answer a request that was admitted."""
    return _reply(200, Code.SUCCESS, "", route.handle(g.sender, _decoded(g.body)))


def _refused(error: Exception) -> Response:
    """Answer a request that cannot be served."""
    if isinstance(error, Refusal):
        return _reply(error.status, error.code, error.message, error.data)
    _log.error("the request %s %s has failed", request.method, request.path, exc_info=error)
    return _reply(500, Code.FAILED, f"{type(error).__name__}: {error}")


def _signed(response: Response) -> Response:
    """Sign the reply to a request that was signed with the key."""
    request.environ[_HANDLER].input.discard()
    if "sign" in g:
        signature = g.sign(response.status_code, response.get_data())
        response.headers["Authentication-Info"] = signature
    return response


def _reply(
    status: int, code: Code, message: str, data: Mapping[str, Any] | None = None
) -> Response:
    content = {"success": code is Code.SUCCESS, "code": code, "message": message}
    return Response(encoded({**content, "data": data or {}}), status, mimetype="application/json")


class _Server(ThreadedWSGIServer):
    """Answers each connection on a thread, a bounded number of which may be unverified."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        self._unverified: dict[socket.socket, None] = {}
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._unverified[request] = None
            if len(self._unverified) > MAX_UNVERIFIED:
                # A client with the key needs a moment only, so the oldest one has none.
                oldest = next(iter(self._unverified))
                del self._unverified[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def note_verified(self, request: socket.socket) -> None:
        """Count a connection no longer, because its client has the key or it is over."""
        with self._lock:
            self._unverified.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.note_verified(request)
        super().shutdown_request(request)


class _Input(io.RawIOBase):
    """What a client sends, read only as far and as long as is allowed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read_ahead = memoryview(b"")
        self._left, self._until = 0, 0.0
        self._discards = False

    def readable(self) -> bool:
        return True

    def read_head(self) -> bool:
        """Read to the end of the head; return False if it does not come, or is too long."""
        head = bytearray()
        self.allow(MAX_HEAD_BYTES, HEAD_S)
        while b"\r\n\r\n" not in head:
            piece = bytearray(4096)
            n_read = self._receive(memoryview(piece))
            if not n_read:
                return False
            head += piece[:n_read]
        self._read_ahead = memoryview(bytes(head))
        self.allow(0, 0.0)
        return True

    def allow(self, n_bytes: int, seconds: float) -> None:
        """Allow up to ``n_bytes`` more to be received, for up to ``seconds``."""
        self._left, self._until = n_bytes, time.monotonic() + seconds

    def allow_body(self, n_bytes: int) -> None:
        """Allow to receive the rest of a body."""
        self.allow(max(0, n_bytes - len(self._read_ahead)), _BODY_S)

    def discard(self) -> None:
        """Receive the rest of a body that nobody wants, without keeping it.

        Otherwise a client that is still sending would see a reset instead of the reply.
        """
        self._read_ahead, self._discards = memoryview(b""), True
        self.allow(MAX_BODY_BYTES, HEAD_S)

    def readinto(self, buffer: Any) -> int:
        if self._discards:
            with contextlib.suppress(OSError):
                while self._receive(memoryview(bytearray(1 << 16))):
                    pass
            return 0
        if self._read_ahead:
            n_read = min(len(buffer), len(self._read_ahead))
            buffer[:n_read] = self._read_ahead[:n_read]
            self._read_ahead = self._read_ahead[n_read:]
            return n_read
        return self._receive(memoryview(buffer))

    def _receive(self, buffer: memoryview) -> int:
        buffer = buffer[: self._left]
        if not buffer:
            return 0
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the client took too long")
        self._connection.settimeout(left_s)
        try:
            n_read = self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_BODY_S)
        self._left -= n_read
        return n_read


class _Handler(WSGIRequestHandler):
    """Reads the head of a request within its limits, and logs to this module's logger."""

    timeout = _BODY_S

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.input = _Input(self.connection)
        self.rfile = io.BufferedReader(self.input, 4096)

    def handle_one_request(self) -> None:
        if not self.input.read_head():
            self.close_connection = True
            return
        super().handle_one_request()

    def make_environ(self) -> dict[str, Any]:
        return {**super().make_environ(), _HANDLER: self}

    def log(self, type: str, message: str, *args: Any) -> None:
        _log.debug("%s %s", self.address_string(), message % args if args else message)


def _body() -> bytes:
    if "Transfer-Encoding" in request.headers:
        raise Refusal(411, Code.MALFORMED, "send the body at once, with its Content-Length")
    length = request.content_length or 0
    if length > MAX_BODY_BYTES:
        raise Refusal(
            413, Code.TOO_LARGE, f"the body is longer than {MAX_BODY_BYTES / 2**20:g} MiB"
        )
    handler: _Handler = request.environ[_HANDLER]
    handler.server.note_verified(handler.connection)  # type: ignore[attr-defined]
    handler.input.allow_body(length)
    try:
        return request.get_data(cache=False)
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
