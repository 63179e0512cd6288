"""A master: gives tasks to slaves."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from dmiddleware.errors import ConfigError, WaitTimeout
from dmiddleware.process.closing import Closing
from dmiddleware.worker.comm.http.client import HttpClient
from dmiddleware.worker.comm.http.server import Code, HttpServer, Refusal, Route
from dmiddleware.worker.comm.http.signing import HttpNode, is_loopback
from dmiddleware.worker.comm.http.slave import (
    ask_own_server,
    check_retries,
    dict_of,
    local_address,
    nothing,
)
from dmiddleware.worker.errors import RequestFailed

__all__ = ["HttpTask", "Master", "SlaveConnection"]

_log = logging.getLogger(__name__)

IDLE: Final = "idle"
STARTING: Final = "starting"
STARTED: Final = "started"
START_FAILED: Final = "start_failed"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
_ENDED: Final = (START_FAILED, COMPLETED, FAILED)

Callback = Callable[[Mapping[str, Any]], object]


class HttpTask:
    """A task for a slave; :meth:`SlaveConnection.new_task` creates it."""

    def __init__(self, connection: SlaveConnection, data: Mapping[str, Any]) -> None:
        self._connection = connection
        self._data = data
        self._id = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._status = IDLE
        self._result: dict[str, Any] | None = None
        self._message = ""
        self._callbacks: dict[str, list[Callback]] = {COMPLETED: [], FAILED: []}

    @property
    def id(self) -> str:
        """The task's id."""
        return self._id

    @property
    def status(self) -> str:
        """One of idle, starting, started, start_failed, completed and failed."""
        return self._status

    @property
    def result(self) -> dict[str, Any] | None:
        """The slave's result, also of a failed task; None if there is none."""
        return self._result

    @property
    def message(self) -> str:
        """Why the task has failed."""
        return self._message

    def on_complete(self, callback: Callback) -> Self:
        """Call a function with the result once the task has completed, on a master's thread."""
        return self._on(COMPLETED, callback)

    def on_fail(self, callback: Callback) -> Self:
        """Call a function with the result once the task has failed, on a master's thread."""
        return self._on(FAILED, callback)

    def start(self) -> Self:
        """Send the task to the slave; blocks until the slave has accepted or refused it.

        Raises:
            ConfigError: if the task was started before.
            TypeError: if the task's data is not JSON.
        """
        with self._changed:
            if self._status is not IDLE:
                raise ConfigError(f"the task is {self._status}; create another one")
            self._status = STARTING
        self._connection.send_task(self, self._data)
        return self

    def join(self, timeout_s: float | None = None) -> Self:
        """Wait until the task has ended.

        Args:
            timeout_s: seconds to wait; None waits without a limit, as every task ends when its
                slave is lost.

        Raises:
            WaitTimeout: if it has not ended in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._status in _ENDED, timeout_s):
                raise WaitTimeout(
                    f"the task is {self._status} after {timeout_s:g} s; wait longer, or disconnect"
                )
        return self

    def begin(self) -> None:
        """Note that the slave has accepted the task."""
        with self._changed:
            if self._status is STARTING:  # a quick slave may have completed it already
                self._status = STARTED

    def end(self, status: str, result: Mapping[str, Any] | None = None, message: str = "") -> bool:
        """Note that the task has ended, and return whether that is new."""
        with self._changed:
            if self._status in _ENDED:
                return False
            self._status, self._message = status, message
            self._result = None if result is None else dict(result)
            callbacks = self._callbacks.get(status, [])
            self._changed.notify_all()
        for callback in callbacks:
            self._connection.master.call_later(callback, result or {})
        return True

    def _on(self, status: str, callback: Callback) -> Self:
        with self._changed:
            if self._status not in _ENDED:
                self._callbacks[status].append(callback)
                return self
        if self._status == status:
            self._connection.master.call_later(callback, self._result or {})
        return self


class SlaveConnection:
    """A master's connection to one slave; a context manager that connects and disconnects.

    :meth:`Master.new_connection` creates it.

    Attributes:
        last_beat: when the slave was last heard from, on the master's clock.
    """

    def __init__(
        self,
        master: Master,
        name: str,
        address: str,
        new_client: Callable[[str, str], HttpClient],
    ) -> None:
        self.master = master
        self.name = name
        self._address = address
        self._new_client = new_client
        self._client = new_client(address, "")
        self._changed = threading.Condition()
        self._uid = ""
        self._is_connected = False
        self.last_beat = 0.0
        self._task: HttpTask | None = None
        self._last_task_id = ""

    def __repr__(self) -> str:
        return f"SlaveConnection({self.name!r}, {self._address!r})"

    @property
    def is_connected(self) -> bool:
        """Whether the slave has accepted this master, and its heartbeats arrive."""
        return self._is_connected

    @property
    def uid(self) -> str:
        """The slave's uid; empty before it is connected."""
        return self._uid

    def connect(self, data: Mapping[str, Any] | None = None) -> Self:
        """Connect to the slave; on a connected slave this does nothing.

        Args:
            data: passed to the slave's ``_before_connection``.

        Raises:
            RequestFailed: if the slave does not answer, or refuses.
        """
        if self._is_connected:
            return self
        self.master.check_open()
        body = {"master": {"address": self.master.address}, "data": data or {}}
        reply = self.master.repeat(lambda: self._client.request("POST", "/connect", body))
        uid = str(dict_of(reply, "slave").get("uid", ""))
        with self._changed:
            self._uid = uid
            self._client = self._new_client(self._address, uid)
            self.last_beat = self.master.clock()
            self._is_connected = True
            self._last_task_id = ""
        return self

    def disconnect(self, data: Mapping[str, Any] | None = None) -> None:
        """Release the slave; a running task fails. A slave that is gone is only forgotten.

        Args:
            data: passed to the slave's ``_before_disconnection``.

        Raises:
            RequestFailed: if the slave refuses; it stays connected then.
        """
        if not self._is_connected:
            return
        try:
            self._client.request("DELETE", "/disconnect", {"data": data or {}})
        except RequestFailed as error:
            if error.code == Code.DISCONNECTION_REFUSED:
                raise
            _log.info("%s does not answer while it is released: %s", self, error)
        self.lose("it was disconnected")

    def new_task(self, data: Mapping[str, Any]) -> HttpTask:
        """Return a task for the slave, which :meth:`HttpTask.start` sends.

        Args:
            data: what the slave's ``_process_task`` gets; must be JSON.
        """
        return HttpTask(self, data)

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.disconnect()

    def send_task(self, task: HttpTask, data: Mapping[str, Any]) -> None:
        """Send a task to the slave; see :meth:`HttpTask.start`."""
        with self._changed:
            problem = (
                "the slave is not connected" if not self._is_connected
                else f"the slave does the task {self._task.id}" if self._task is not None
                else ""
            )  # fmt: skip
            if not problem:
                self._task = task
        if problem:
            task.end(START_FAILED, message=problem)
            return
        body = {"task": {"id": task.id}, "data": data}
        try:
            self.master.repeat(
                lambda: self._client.request("POST", "/task/new", body),
                until=lambda: not self._is_connected,
            )
        except RequestFailed as error:
            self._drop(task)
            task.end(START_FAILED, message=str(error))
            if error.code in (None, Code.NOT_CONNECTED, Code.SHUTTING_DOWN):
                self.lose(str(error))
        except BaseException as error:
            self._drop(task)
            task.end(START_FAILED, message=str(error))
            raise
        else:
            task.begin()

    def beat(self) -> None:
        """Note a heartbeat."""
        with self._changed:
            self.last_beat = self.master.clock()

    def end_task(
        self, task_id: str, status: str, result: Mapping[str, Any], message: str = ""
    ) -> None:
        """Note a task's result; the same one again is ignored.

        Raises:
            Refusal: for the result of another task.
        """
        with self._changed:
            task = self._task
            if task is None or task.id != task_id:
                if task_id != self._last_task_id:
                    raise Refusal(409, Code.UNKNOWN_TASK, "the master does not have this task")
                return
            self._task, self._last_task_id = None, task_id
        task.end(status, result, message)

    def check(self, tolerance_s: float) -> None:
        """Give the slave up if its last heartbeat is older than ``tolerance_s``."""
        silence = self.master.clock() - self.last_beat
        if self._is_connected and silence > tolerance_s:
            self.lose(f"no heartbeat for {silence:.1f} s")

    def lose(self, reason: str) -> None:
        """Forget the slave; its task fails."""
        with self._changed:
            if not self._is_connected:
                return
            self._is_connected = False
            self._client = self._new_client(self._address, "")
            task, self._task = self._task, None
        _log.info("%s has ended: %s", self, reason)
        if task is not None:
            task.end(FAILED, message=f"the connection has ended: {reason}")

    def _drop(self, task: HttpTask) -> None:
        with self._changed:
            if self._task is task:
                self._task = None


class Master(Closing):
    """Connects to slaves over HTTP and gives them tasks.

    Args:
        host: the address to listen on for the slaves' replies; without a key it must be loopback.
        port: the port to listen on; 0 lets the system choose one.
        heartbeat_tolerance: seconds without a heartbeat after which a slave is lost.
        heartbeat_check_span: seconds between two checks of that.
        request_retries: how often a request that was not answered is sent again.
        request_retry_waiting: seconds before that.
        channel: slaves of other channels refuse this master.
        my_address: the address at which slaves reach this master, such as
            ``http://10.0.0.1:7235``; None takes host and port.
        key: the run's key; may be empty on loopback.
        run_id: slaves of other runs refuse this master.
        clock: returns seconds that never go back.

    Raises:
        ConfigError: for an impossible value, if other hosts can reach the address and the key is
            empty, or if Flask is not installed.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 7235,
        heartbeat_tolerance: float = 17.0,
        heartbeat_check_span: float = 1.0,
        request_retries: int = 5,
        request_retry_waiting: float = 1.0,
        channel: int = 0,
        my_address: str | None = None,
        *,
        key: bytes = b"",
        run_id: str = "run",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if heartbeat_tolerance <= 0 or heartbeat_check_span <= 0:
            raise ConfigError(
                "heartbeat_tolerance and heartbeat_check_span must be positive, got "
                f"{heartbeat_tolerance!r} and {heartbeat_check_span!r}"
            )
        check_retries(request_retries, request_retry_waiting)
        if my_address is None and host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"slaves cannot reach {host}; pass my_address, such as http://10.0.0.1:{port}"
            )
        self.clock = clock
        self._tolerance_s, self._check_span = heartbeat_tolerance, heartbeat_check_span
        self._retries, self._retry_waiting = request_retries, request_retry_waiting
        self._host, self._my_address, self._key = host, my_address, key
        self._node = HttpNode(run_id, channel, secrets.token_hex(8))
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._connections: list[SlaveConnection] = []
        self._threads: list[threading.Thread] = []
        self._callbacks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._server = HttpServer(
            self._node, host, port,
            {
                ("GET", "/slave/heartbeat"): Route(self._handle_heartbeat),
                ("PUT", "/slave/task/complete"): Route(self._handle_complete),
                ("PUT", "/slave/task/fail"): Route(self._handle_fail),
                ("GET", "/ping"): Route(nothing, own_token=True),
                ("DELETE", "/shutdown"): Route(self._handle_shutdown, own_token=True),
            },
            key=key,
            is_open=lambda: not self._closing.is_set(),
        )  # fmt: skip

    @property
    def port(self) -> int:
        """The port; if it was 0, the system chooses one when the master starts."""
        return self._server.port

    @property
    def address(self) -> str:
        """The address at which slaves reach this master."""
        return self._my_address or local_address(self._host, self.port)

    def start(self) -> None:
        """Start to listen, and to check heartbeats; a second call does nothing.

        Raises:
            TransportError: if the address cannot be listened on, or the master was closed.
        """
        self._server.open()
        with self._lock:
            if self._threads:
                return
            for name, run in (("heartbeats", self._check), ("callbacks", self._call)):
                thread = threading.Thread(target=run, name=f"master-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)

    def ping(self) -> bool:
        """Return whether the server answers."""
        local = local_address(self._host, self.port)
        return ask_own_server(self._server, self._node, local, "GET", "/ping")

    def new_connection(self, name: str, host: str, port: int) -> SlaveConnection:
        """Return a connection to a slave, which is not connected yet.

        Args:
            name: names the slave in logs.
            host: the slave's address; without a key it must be loopback.
            port: its port.

        Raises:
            ConfigError: if the address cannot be used, or the slave could not reach this master.
        """
        if not is_loopback(host) and is_loopback(self._host) and self._my_address is None:
            raise ConfigError(
                f"the slave at {host} cannot reach this master at {self._host}; listen on "
                "another address, or pass my_address"
            )

        def new_client(address: str, uid: str) -> HttpClient:
            return HttpClient(address, self._node, key=self._key, to=uid)

        connection = SlaveConnection(self, name, local_address(host, port), new_client)
        with self._lock:
            self._connections.append(connection)
        return connection

    def shutdown(self) -> None:
        """Begin to end: connected slaves are released, and the tasks of all others fail."""
        self._closing.set()

    def join(self) -> None:
        """Wait until the master has ended; :meth:`shutdown` makes it end."""
        self._closing.wait()
        for connection in self._connections:
            try:
                connection.disconnect()
            except RequestFailed as error:
                connection.lose(str(error))
        self._callbacks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._server.close()

    def close(self) -> None:
        """Shut down and wait until the master has ended; may be called twice."""
        self.shutdown()
        self.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def check_open(self) -> None:
        """Check that slaves can reach this master.

        Raises:
            RequestFailed: if it has not started, or is closing.
        """
        if not self._threads or self._closing.is_set():
            raise RequestFailed("the master does not listen; call start() before connecting")

    def call_later(self, callback: Callback, result: Mapping[str, Any]) -> None:
        """Call a function on the thread for callbacks."""
        self._callbacks.put(lambda: callback(result))

    def repeat(
        self,
        request: Callable[[], dict[str, Any]],
        until: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Send a request, up to ``request_retries`` times more while it is not answered.

        Raises:
            RequestFailed: if it is refused, was not answered, or ``until`` returns True.
        """
        for _ in range(self._retries):
            try:
                return request()
            except RequestFailed as error:
                if error.code is not None or until() or self._closing.wait(self._retry_waiting):
                    raise
        return request()

    def _check(self) -> None:
        while not self._closing.wait(self._check_span):
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                connection.check(self._tolerance_s)

    def _call(self) -> None:
        while (callback := self._callbacks.get()) is not None:
            try:
                callback()
            except Exception:  # noqa: BLE001 (the next one runs all the same)
                _log.exception("a callback of a task has failed")

    def _connection_of(self, sender: HttpNode) -> SlaveConnection:
        with self._lock:
            for connection in self._connections:
                if connection.is_connected and connection.uid == sender.uid:
                    return connection
        raise Refusal(409, Code.NOT_CONNECTED, "this master is not connected to the slave")

    def _handle_heartbeat(self, sender: HttpNode, body: dict[str, Any]) -> None:
        self._connection_of(sender).beat()

    def _handle_complete(self, sender: HttpNode, body: dict[str, Any]) -> None:
        self._end_task(sender, body, COMPLETED)

    def _handle_fail(self, sender: HttpNode, body: dict[str, Any]) -> None:
        self._end_task(sender, body, FAILED)

    def _end_task(self, sender: HttpNode, body: dict[str, Any], status: str) -> None:
        task_id = dict_of(body, "task").get("id")
        message = body.get("message", "")
        if not isinstance(task_id, str) or not isinstance(message, str):
            raise Refusal(400, Code.MALFORMED, "the body must have task.id, a string")
        result = dict_of(body, "result")
        self._connection_of(sender).end_task(task_id, status, result, message)

    def _handle_shutdown(self, sender: HttpNode, body: dict[str, Any]) -> None:
        self.shutdown()
