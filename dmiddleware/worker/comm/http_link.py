"""The coordinator's end of the HTTP connections to its workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from dmiddleware.errors import ConfigError, DeliveryTimeout
from dmiddleware.flow_control import FairQueue
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.http import Master, SlaveConnection, read_key
from dmiddleware.worker.comm.link import COORDINATOR_LINK_REGISTRY
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.conversation import Answer, Ask, Link, Said
from dmiddleware.worker.coordinator.messages import COLLECTOR, COORDINATOR, LEARNER, Joined, Left
from dmiddleware.worker.errors import RequestFailed

__all__ = ["HttpLink", "open_coordinator_link"]

_CHECK_S: Final = 0.1
_RECONNECT_S: Final = 1.0

_log = logging.getLogger(__name__)


class _Worker:
    """One worker: a thread that connects to it, and gives it each request as a task."""

    def __init__(
        self,
        uid: str,
        role: str,
        connection: SlaveConnection,
        queue: FairQueue[tuple[str, Said]],
        closing: threading.Event,
    ) -> None:
        self.uid, self.role = uid, role
        self.is_joined = False
        self._connection = connection
        self._queue = queue
        self._closing = closing
        self._asks: FairQueue[Ask] = FairQueue()
        self.thread = threading.Thread(target=self._run, name=f"http-link-{uid}", daemon=True)

    def put(self, ask: Ask) -> None:
        """Accept a request for the worker."""
        self._asks.put(ask)

    def _run(self) -> None:
        problem = ""
        while not self._closing.is_set():
            try:
                self._connection.connect()
            except RequestFailed as error:
                if error.status is not None and str(error) != problem:
                    problem = str(error)
                    _log.warning("%s %s cannot be connected: %s", self.role, self.uid, problem)
                self._closing.wait(_RECONNECT_S)
            else:
                self._while_connected()

    def _while_connected(self) -> None:
        self._asks = FairQueue()
        self.is_joined = True
        self._queue.put((self.uid, Joined(self.role)))
        while self._connection.is_connected:
            ask = self._asks.take(_CHECK_S)
            if ask is not None:
                answer = self._answer(ask)
                if not answer.failure or self._connection.is_connected:  # else it has left
                    self._queue.put((self.uid, answer))
            elif self._closing.is_set():
                break
        self.is_joined = False
        reason = "its connection has ended"
        self._queue.put((self.uid, Left(reason)))
        try:
            self._connection.disconnect()
        except RequestFailed as error:
            self._connection.lose(f"{reason}; {error}")

    def _answer(self, ask: Ask) -> Answer:
        task = self._connection.new_task({**ask.request, "name": ask.name})
        try:
            task.start().join()  # without a limit, as it ends with the connection
        except TypeError as error:  # it is not JSON
            return Answer(ask.id, failure=str(error))
        if task.status != "completed":
            return Answer(ask.id, failure=task.message or "the worker gives no reason")
        return Answer(ask.id, task.result or {})


class HttpLink:
    """A :class:`~dmiddleware.worker.comm.Link` from the coordinator to workers over HTTP.

    A request is a task of the worker's slave, and its result is the answer. A worker that is away
    is tried again every second, until it comes.

    Args:
        master: the end of the HTTP connections; started here, and closed with the link.
        workers: ``(role, host, port)`` of each worker, by its name.

    Raises:
        ConfigError: for an address that cannot be used.
        TransportError: if the master's address cannot be listened on.
    """

    def __init__(self, master: Master, workers: Mapping[str, tuple[str, str, int]]) -> None:
        self._master = master
        self._queue: FairQueue[tuple[str, Said]] = FairQueue()
        self._closing = threading.Event()
        self._workers = {
            uid: _Worker(
                uid, role, master.new_connection(uid, host, port), self._queue, self._closing
            )
            for uid, (role, host, port) in workers.items()
        }
        master.start()
        for worker in self._workers.values():
            worker.thread.start()

    @property
    def uid(self) -> str:
        """The coordinator's name, ``coordinator``."""
        return COORDINATOR

    def peers(self) -> dict[str, str]:
        """Return the role of each connected worker, by name."""
        return {uid: worker.role for uid, worker in self._workers.items() if worker.is_joined}

    def send(self, peer: str, message: Ask | Answer) -> None:
        """Send a request to a worker; returns at once.

        Raises:
            DeliveryTimeout: if the worker is not connected.
            TypeError: for an answer, which workers never get.
        """
        if not isinstance(message, Ask):
            raise TypeError(f"workers get requests only, not {type(message).__name__}")
        worker = self._workers.get(peer)
        if worker is None or not worker.is_joined or self._closing.is_set():
            raise DeliveryTimeout(f"the worker {peer!r} is not connected; nothing was sent")
        worker.put(message)

    def receive(self, timeout_s: float) -> tuple[str, Said] | None:
        """Return what has arrived next, and from whom; None after ``timeout_s`` seconds."""
        return self._queue.take(timeout_s)

    def close(self, deadline_s: float) -> None:
        """Deliver what was sent, within ``deadline_s`` seconds, and release the workers.

        May be called twice.
        """
        self._closing.set()
        deadline = time.monotonic() + deadline_s
        for worker in self._workers.values():
            if worker.is_joined:
                worker.thread.join(max(0.0, deadline - time.monotonic()))
        self._master.close()  # which ends the attempts to connect
        for worker in self._workers.values():
            worker.thread.join(max(0.0, deadline - time.monotonic()))


@COORDINATOR_LINK_REGISTRY.register("flask_fs")
def open_coordinator_link(cfg: Mapping[str, Any]) -> tuple[Link, Store]:
    """Open a coordinator's link over HTTP, and its store in files.

    Args:
        cfg: the coordinator's config. In ``system``: ``path_data``, ``path_policy``, and
            ``coordinator`` with ``host``, ``port``, ``collector`` and ``learner`` (both
            ``{name: [id, host, port]}``), ``key_file``, ``run_id``, ``channel`` and ``my_address``.

    Raises:
        ConfigError: for an unusable config.
        TransportError: if the address cannot be listened on.
    """
    system = cfg["system"]
    coordinator = system["coordinator"]
    run_id = coordinator.get("run_id", "run")
    workers: dict[str, tuple[str, str, int]] = {}
    for role in (COLLECTOR, LEARNER):
        for name, address in coordinator.get(role, {}).items():
            if name in workers:
                raise ConfigError(f"system.coordinator: two workers are named {name!r}; rename one")
            workers[name] = (role, *_host_and_port(address, f"system.coordinator.{role}.{name}"))
    store = FileStore(
        system.get("path_data", "./data"), system.get("path_policy", "./policy"), run_id
    )
    master = Master(
        coordinator.get("host", "127.0.0.1"),
        coordinator.get("port", 7235),
        channel=coordinator.get("channel", 0),
        my_address=coordinator.get("my_address"),
        key=read_key(coordinator.get("key_file", "")),
        run_id=run_id,
    )
    return HttpLink(master, workers), store


def _host_and_port(address: Any, path: str) -> tuple[str, int]:
    if (
        not isinstance(address, list | tuple)
        or len(address) != 3
        or not isinstance(address[1], str)
        or type(address[2]) is not int
    ):
        raise ConfigError(f"{path} must be [id, host, port], got {address!r}")
    return address[1], address[2]
