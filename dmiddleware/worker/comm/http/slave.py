"""A slave: does the tasks of one master, one at a time."""

from __future__ import annotations

import logging
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

from dmiddleware.errors import ConfigError
from dmiddleware.process.closing import Closing
from dmiddleware.worker.comm.http.client import HttpClient
from dmiddleware.worker.comm.http.server import Code, HttpServer, Refusal, Route
from dmiddleware.worker.comm.http.signing import HttpNode
from dmiddleware.worker.errors import (
    ConnectionRefuse,
    DisconnectionRefuse,
    RequestFailed,
    TaskFail,
    TaskRefuse,
)

__all__ = ["Slave"]

_MIN_HEARTBEAT_SPAN_S: Final = 0.2
HEARTBEAT_TIMEOUT_S: Final = 3.0
_HANDOVER_S: Final = 5.0
"""How long a new task waits until the reply to the last one's completion has arrived."""

_log = logging.getLogger(__name__)


class _Connection:
    """The master, as its slave knows it."""

    def __init__(self, uid: str, client: HttpClient) -> None:
        self.uid = uid
        self.client = client
        self.lost = threading.Event()
        self.task_id = ""
        """The task in hand; may be empty on loopback."""
        self.last_task_id = ""

    def has(self, task_id: str) -> bool:
        """Return whether this is the task in hand, or the last one."""
        return task_id in (self.task_id, self.last_task_id)


class Slave(Closing):
    """Does the tasks of one master at a time, which connects to it over HTTP.

    Subclasses override :meth:`_process_task`, and may override the other hooks. All hooks are
    called on threads of the slave.

    Args:
        host: the address to listen on; without a key it must be loopback.
        port: the port to listen on; 0 lets the system choose one.
        heartbeat_span: seconds between two heartbeats, at least 0.2.
        request_retries: how often a request that was not answered is sent again.
        request_retry_waiting: seconds before that.
        channel: masters of other channels are refused.
        key: the run's key; may be empty on loopback.
        run_id: masters of other runs are refused.

    Raises:
        ConfigError: for an impossible value, if other hosts can reach the address and the key is
            empty, or if Flask is not installed.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 7236,
        heartbeat_span: float = 3.0,
        request_retries: int = 5,
        request_retry_waiting: float = 1.0,
        channel: int = 0,
        *,
        key: bytes = b"",
        run_id: str = "run",
    ) -> None:
        if heartbeat_span < _MIN_HEARTBEAT_SPAN_S:
            raise ConfigError(
                f"heartbeat_span must be at least {_MIN_HEARTBEAT_SPAN_S:g} s, got "
                f"{heartbeat_span!r}"
            )
        check_retries(request_retries, request_retry_waiting)
        self._heartbeat_span = heartbeat_span
        self._retries, self._retry_waiting = request_retries, request_retry_waiting
        self._host, self._key = host, key
        self._node = HttpNode(run_id, channel, secrets.token_hex(8))
        self._changed = threading.Condition()
        self._connection: _Connection | None = None
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._server = HttpServer(
            self._node, host, port,
            {
                ("POST", "/connect"): Route(self._handle_connect, to_anyone=True),
                ("DELETE", "/disconnect"): Route(self._handle_disconnect),
                ("POST", "/task/new"): Route(self._handle_task),
                ("GET", "/ping"): Route(nothing, own_token=True),
                ("DELETE", "/shutdown"): Route(self._handle_shutdown, own_token=True),
            },
            key=key,
            is_open=lambda: not self._closing.is_set(),
        )  # fmt: skip

    @property
    def port(self) -> int:
        """The port; if it was 0, the system chooses one when the slave starts."""
        return self._server.port

    @property
    def address(self) -> str:
        """The address at which this host reaches the slave."""
        return local_address(self._host, self.port)

    @property
    def is_connected(self) -> bool:
        """Whether the slave has a master."""
        return self._connection is not None

    def start(self) -> None:
        """Start to listen; a second call does nothing.

        Raises:
            TransportError: if the address cannot be listened on, or the slave was closed.
        """
        self._server.open()

    def ping(self) -> bool:
        """Return whether the server answers."""
        return ask_own_server(self._server, self._node, self.address, "GET", "/ping")

    def shutdown(self) -> None:
        """Begin to end: all further requests are answered with 409, and the heartbeats stop."""
        self._closing.set()
        with self._changed:
            if self._connection is not None:
                self._connection.lost.set()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the slave has ended; :meth:`shutdown` makes it end.

        A task that is being processed is waited for.
        """
        self._closing.wait()
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join()
        self._server.close()

    def close(self) -> None:
        """Shut down and wait until the slave has ended; may be called twice."""
        self.shutdown()
        self.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def _process_task(self, task: dict[str, Any]) -> Mapping[str, Any]:
        """Do a task; subclasses override it.

        Args:
            task: the data that the master sent with the task.

        Returns:
            The result, which must be JSON.

        Raises:
            TaskFail: if the task has failed; its result is sent to the master. Any other exception
                is reported with its traceback.
        """
        raise NotImplementedError

    def _before_connection(self, data: dict[str, Any]) -> None:
        """Called before a master is accepted; may raise ``ConnectionRefuse``."""

    def _before_disconnection(self, data: dict[str, Any]) -> None:
        """Called before a master is released; may raise ``DisconnectionRefuse``."""

    def _before_task(self, data: dict[str, Any]) -> None:
        """Called before a task is accepted; may raise ``TaskRefuse``."""

    def _lost_connection(self, address: str, error: Exception) -> None:
        """Called after the master has stopped to answer; the slave accepts another one then."""

    def _result_not_taken(self, task: dict[str, Any], result: Mapping[str, Any]) -> None:
        """Called with the result of a task that no master has acknowledged."""

    def _handle_connect(self, sender: HttpNode, body: dict[str, Any]) -> dict[str, Any]:
        master = body.get("master")
        address = master.get("address") if isinstance(master, dict) else None
        data = dict_of(body, "data")
        if not isinstance(address, str):
            raise Refusal(400, Code.MALFORMED, "the body must have master.address, a string")
        try:
            client = HttpClient(address, self._node, key=self._key, to=sender.uid)
        except ConfigError as error:
            raise Refusal(400, Code.MALFORMED, str(error)) from error
        with self._changed:
            if self._connection is not None and self._connection.uid == sender.uid:
                return {"slave": {"uid": self._node.uid}}
            if self._connection is not None:
                raise Refusal(409, Code.ALREADY_CONNECTED, "the slave has another master")
            try:
                self._before_connection(data)
            except ConnectionRefuse as refusal:
                raise Refusal(403, Code.CONNECTION_REFUSED, str(refusal)) from refusal
            self._connection = connection = _Connection(sender.uid, client)
            self._spawn(lambda: self._beat(connection), "slave-heartbeat")
        return {"slave": {"uid": self._node.uid}}

    def _handle_disconnect(self, sender: HttpNode, body: dict[str, Any]) -> None:
        with self._changed:
            connection = self._connection_of(sender)
            try:
                self._before_disconnection(dict_of(body, "data"))
            except DisconnectionRefuse as refusal:
                raise Refusal(403, Code.DISCONNECTION_REFUSED, str(refusal)) from refusal
            self._forget(connection)

    def _handle_task(self, sender: HttpNode, body: dict[str, Any]) -> dict[str, Any]:
        task = body.get("task")
        task_id = task.get("id") if isinstance(task, dict) else None
        if not isinstance(task_id, str) or not task_id:
            raise Refusal(400, Code.MALFORMED, "the body must have task.id, a string")
        data = dict_of(body, "data")
        with self._changed:
            connection = self._connection_of(sender)
            self._accept(connection, task_id, data)
        return {"task": {"id": task_id}}

    def _accept(self, connection: _Connection, task_id: str, data: dict[str, Any]) -> None:
        # The master may have the last task's result, though the slave does not know it yet.
        self._changed.wait_for(
            lambda: not connection.task_id or self._connection is not connection,
            _HANDOVER_S if connection.last_task_id == connection.task_id else 0,
        )
        if self._connection is not connection:
            raise Refusal(409, Code.NOT_CONNECTED, "the connection has ended")
        if connection.has(task_id):
            return
        if connection.task_id:
            raise Refusal(409, Code.BUSY, f"the slave does the task {connection.task_id}")
        try:
            self._before_task(data)
        except TaskRefuse as refusal:
            raise Refusal(403, Code.TASK_REFUSED, str(refusal)) from refusal
        connection.task_id = task_id
        self._spawn(lambda: self._do(connection, task_id, data), "slave-task")

    def _handle_shutdown(self, sender: HttpNode, body: dict[str, Any]) -> None:
        self.shutdown()

    def _connection_of(self, sender: HttpNode) -> _Connection:
        if self._connection is None or self._connection.uid != sender.uid:
            raise Refusal(409, Code.NOT_CONNECTED, "the slave is not connected to this master")
        return self._connection

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _forget(self, connection: _Connection) -> bool:
        with self._changed:
            is_current = self._connection is connection
            if is_current:
                self._connection = None
            connection.lost.set()
            self._changed.notify_all()
            return is_current

    def _beat(self, connection: _Connection) -> None:
        failures, is_known = 0, False
        pause = self._heartbeat_span
        while not connection.lost.wait(pause):
            try:
                connection.client.request("GET", "/slave/heartbeat", timeout_s=HEARTBEAT_TIMEOUT_S)
            except RequestFailed as error:
                failures += 1
                pause = self._retry_waiting
                # Before the first reply the master may not have noted the connection yet.
                if (is_known and error.code is not None) or failures > self._retries:
                    self._lose(connection, error)
            else:
                failures, is_known, pause = 0, True, self._heartbeat_span

    def _lose(self, connection: _Connection, error: RequestFailed) -> None:
        if not self._closing.is_set() and self._forget(connection):
            _log.warning("the master at %s is lost: %s", connection.client.address, error)
            self._lost_connection(connection.client.address, error)

    def _do(self, connection: _Connection, task_id: str, data: dict[str, Any]) -> None:
        body: dict[str, Any] = {"task": {"id": task_id}}
        path = "/slave/task/complete"
        try:
            body["result"] = dict(self._process_task(data))
        except TaskFail as failure:
            path = "/slave/task/fail"
            body.update(result=failure.result, message=failure.message)
        except Exception:  # noqa: BLE001 (logged, and reported to the master)
            _log.exception("a task has failed")
            path = "/slave/task/fail"
            body.update(result={}, message=traceback.format_exc())
        with self._changed:
            connection.last_task_id = task_id
        is_taken = self._send_result(connection, path, body)
        with self._changed:
            connection.task_id = ""
            self._changed.notify_all()
        if not is_taken:
            self._result_not_taken(data, body["result"])

    def _send_result(self, connection: _Connection, path: str, body: dict[str, Any]) -> bool:
        """Send a result until the master acknowledges it, refuses it, or is lost."""
        pause = 0.0
        while not connection.lost.wait(pause):
            try:
                connection.client.request("PUT", path, body)
                return True
            except RequestFailed as error:
                if error.code is not None:
                    _log.warning("the master did not take a result: %s", error)
                    return False
                pause = self._retry_waiting
            except (TypeError, ValueError) as error:
                path = "/slave/task/fail"
                body.update(result={}, message=f"the result cannot be sent: {error}")
        return False


def check_retries(retries: int, waiting: float) -> None:
    """Check how requests are repeated.

    Raises:
        ConfigError: for a negative number.
    """
    if type(retries) is not int or retries < 0 or waiting < 0:
        raise ConfigError(
            "request_retries must be an integer ≥ 0 and request_retry_waiting a number ≥ 0, got "
            f"{retries!r} and {waiting!r}"
        )


def local_address(host: str, port: int) -> str:
    """Return the address at which this host reaches a server that listens on ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ask_own_server(
    server: HttpServer, node: HttpNode, address: str, method: str, path: str
) -> bool:
    """Send a request to an own server, and return whether it was answered."""
    client = HttpClient(address, node, key=server.own_token, to=node.uid)
    try:
        client.request(method, path)
    except RequestFailed:
        return False
    return True


def dict_of(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an entry of a body that is an object, or is missing.

    Raises:
        Refusal: if it is something else.
    """
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise Refusal(400, Code.MALFORMED, f"{name} must be an object")
    return value


def nothing(sender: HttpNode, body: dict[str, Any]) -> None:
    """Answer with nothing."""
