"""The face of ``ding.interaction``: masters and slaves, with DI-engine's defaults and results.

All requests are signed here. Without a key a server listens on loopback only, so the address
``0.0.0.0``, which is DI-engine's default, becomes ``127.0.0.1``, with a line in the log.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Self

from dmiddleware import worker
from dmiddleware.ding.finder import NotHere
from dmiddleware.ding.interaction.base import ControllableContext
from dmiddleware.ding.interaction.exception import SlaveErrorCode, get_slave_exception_by_error
from dmiddleware.worker.comm.http import HttpTask
from dmiddleware.worker.comm.http import SlaveConnection as EdgeConnection
from dmiddleware.worker.errors import (
    ConnectionRefuse,
    DisconnectionRefuse,
    RequestFailed,
    TaskFail,
    TaskRefuse,
)

__all__ = [
    "DEFAULT_CHANNEL",
    "DEFAULT_HEARTBEAT_CHECK_SPAN",
    "DEFAULT_HEARTBEAT_SPAN",
    "DEFAULT_HEARTBEAT_TOLERANCE",
    "DEFAULT_MASTER_PORT",
    "DEFAULT_REQUEST_RETRIES",
    "DEFAULT_REQUEST_RETRY_WAITING",
    "DEFAULT_SLAVE_PORT",
    "GLOBAL_HOST",
    "LOCAL_HOST",
    "MIN_HEARTBEAT_CHECK_SPAN",
    "MIN_HEARTBEAT_SPAN",
    "ConnectionRefuse",
    "DisconnectionRefuse",
    "Master",
    "Slave",
    "SlaveConnection",
    "Task",
    "TaskFail",
    "TaskRefuse",
    "TaskStatus",
]

GLOBAL_HOST: Final = "0.0.0.0"
LOCAL_HOST: Final = "127.0.0.1"
DEFAULT_REQUEST_RETRIES: Final = 5
DEFAULT_REQUEST_RETRY_WAITING: Final = 1.0
MIN_HEARTBEAT_SPAN: Final = 0.2
DEFAULT_HEARTBEAT_SPAN: Final = 3.0
DEFAULT_SLAVE_PORT: Final = 7236
MIN_HEARTBEAT_CHECK_SPAN: Final = 0.1
DEFAULT_HEARTBEAT_CHECK_SPAN: Final = 1.0
DEFAULT_HEARTBEAT_TOLERANCE: Final = 17.0
DEFAULT_MASTER_PORT: Final = 7235
DEFAULT_CHANNEL: Final = 0

_log = logging.getLogger(__name__)

Callback = Callable[[Mapping[str, Any], Mapping[str, Any]], object]


def _local(host: str | None, options: Mapping[str, Any]) -> str:
    """Return the address to listen on."""
    if options.get("key") or host not in (None, GLOBAL_HOST, "::"):
        return host or LOCAL_HOST
    _log.warning(
        "without a key, this listens on %s instead of %s; with key=, other hosts can connect",
        LOCAL_HOST,
        host or GLOBAL_HOST,
    )
    return LOCAL_HOST


def _set_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None; the edge has the same defaults for the others."""
    return {key: value for key, value in options.items() if value is not None}


class Slave(worker.Slave):
    """Does the tasks of one master; None is DI-engine's default."""

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        heartbeat_span: float | None = None,
        request_retries: int | None = None,
        request_retry_waiting: float | None = None,
        channel: int | None = None,
        **options: Any,
    ) -> None:
        changes = _set_options(
            {
                "port": port,
                "heartbeat_span": heartbeat_span,
                "request_retries": request_retries,
                "request_retry_waiting": request_retry_waiting,
                "channel": channel,
            }
        )
        super().__init__(_local(host, options), **changes, **options)


class TaskStatus(enum.IntEnum):
    """The state of a task."""

    IDLE = 0x00
    STARTING = 0x11
    STARTED = 0x12
    START_FAILED = 0x13
    COMPLETED = 0x21
    FAILED = 0x22


class Task:
    """A task for a slave; its callbacks get the task's data and the result."""

    def __init__(self, task: HttpTask, data: Mapping[str, Any], master: worker.Master) -> None:
        self._task, self._data, self._master = task, data, master

    @property
    def status(self) -> TaskStatus:
        """Its state."""
        return TaskStatus[self._task.status.upper()]

    @property
    def task(self) -> Mapping[str, Any]:
        """The data that the slave gets."""
        return self._data

    @property
    def result(self) -> dict[str, Any] | None:
        """The slave's result."""
        return self._task.result

    def on_complete(self, callback: Callback) -> Self:
        """Call a function once the task has completed."""
        self._task.on_complete(lambda result: callback(self._data, result))
        return self

    def on_fail(self, callback: Callback) -> Self:
        """Call a function once the task has failed."""
        self._task.on_fail(lambda result: callback(self._data, result))
        return self

    def start(self) -> Self:
        """Send the task to the slave."""
        self._task.start()
        return self

    def join(self) -> Self:
        """Wait until the task has ended and its callbacks have run."""
        self._task.join()
        called = threading.Event()
        self._master.call_later(lambda result: called.set(), {})
        called.wait()
        return self


class SlaveConnection(ControllableContext):
    """A master's connection to one slave."""

    def __init__(self, master: Master, edge: EdgeConnection) -> None:
        self._master, self._edge = master, edge

    @property
    def is_connected(self) -> bool:
        """Whether the slave has accepted this master."""
        return self._edge.is_connected

    def connect(self) -> None:
        """Connect to the slave.

        Raises:
            SlaveResponseException: if the slave refuses.
            RequestFailed: if it does not answer.
        """
        self._ask(self._edge.connect, self._master._before_connect())

    def disconnect(self) -> None:
        """Release the slave.

        Raises:
            SlaveResponseException: if the slave refuses.
        """
        self._ask(self._edge.disconnect, self._master._before_disconnect())

    start, close = connect, disconnect

    def new_task(self, data: Mapping[str, Any] | None = None) -> Task:
        """Return a task for the slave."""
        data = self._master._before_new_task(data) or {}
        return Task(self._edge.new_task(data), data, self._master)

    def _ask(self, request: Callable[..., object], data: Mapping[str, Any] | None) -> None:
        try:
            request(data)
        except RequestFailed as error:
            if error.code not in set(SlaveErrorCode):
                raise
            raise get_slave_exception_by_error(error) from error


class Master(worker.Master):
    """Connects to slaves by names, and gives them tasks; None is DI-engine's default."""

    _NEVER_CALLED: ClassVar = frozenset(
        f"_{when}_{what}"
        for when in ("after", "error")
        for what in ("connect", "disconnect", "new_task")
    )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = sorted(cls._NEVER_CALLED & set(vars(cls)))
        if hooks:
            raise NotHere(
                f"a Master calls no {', '.join(hooks)} here: connect(), disconnect() and start() "
                "return when the slave has answered, and raise if it refuses"
            )

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        heartbeat_tolerance: float | None = None,
        heartbeat_check_span: float | None = None,
        request_retries: int | None = None,
        request_retry_waiting: float | None = None,
        channel: int | None = None,
        my_address: str | None = None,
        **options: Any,
    ) -> None:
        changes = _set_options(
            {
                "port": port,
                "heartbeat_tolerance": heartbeat_tolerance,
                "heartbeat_check_span": heartbeat_check_span,
                "request_retries": request_retries,
                "request_retry_waiting": request_retry_waiting,
                "channel": channel,
                "my_address": my_address,
            }
        )
        super().__init__(_local(host, options), **changes, **options)
        self._named: dict[str, SlaveConnection] = {}

    def new_connection(  # type: ignore[override]
        self, name: str, host: str, port: int | None = None, https: bool = False
    ) -> SlaveConnection:
        """Return a connection to a slave, which is not connected yet."""
        if https:
            raise NotHere("https=True is not here: requests are signed, and the address is http")
        host = LOCAL_HOST if host == GLOBAL_HOST else host
        edge = super().new_connection(name, host, port or DEFAULT_SLAVE_PORT)
        self._named[name] = SlaveConnection(self, edge)
        return self._named[name]

    def __contains__(self, name: str) -> bool:
        return name in self._named and self._named[name].is_connected

    def __getitem__(self, name: str) -> SlaveConnection:
        if name not in self:
            raise KeyError(f"no slave {name!r} is connected")
        return self._named[name]

    def __delitem__(self, name: str) -> None:
        self[name].disconnect()

    def _before_connect(self) -> Mapping[str, Any] | None:
        """Return what the slave's ``_before_connection`` gets."""
        return None

    def _before_disconnect(self) -> Mapping[str, Any] | None:
        """Return what the slave's ``_before_disconnection`` gets."""
        return None

    def _before_new_task(self, data: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
        """Return the data of a task, given what the program passes."""
        return data
