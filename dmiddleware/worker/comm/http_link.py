"""The coordinator's end of the HTTP connections to its workers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dmiddleware.errors import ConfigError, DeliveryTimeout, WaitTimeout
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.http import Master, SlaveConnection, read_key
from dmiddleware.worker.comm.link import COORDINATOR_LINK_REGISTRY, Link
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.messages import (
    COLLECTOR,
    COORDINATOR,
    LEARNER,
    CollectorInfo,
    DataDemand,
    Joined,
    LearnData,
    LearnInfo,
    Left,
    Message,
    ResourceQuery,
    Resources,
    StepDataReady,
    TaskAlive,
    TaskClose,
    TaskDone,
    TaskFailed,
    TaskOffer,
    TaskRefused,
    TaskStarted,
)
from dmiddleware.worker.errors import RequestFailed, TaskFail

__all__ = ["HttpLink", "open_coordinator_link"]

_POLL_S: Final = 1.0
"""How long a worker waits for something to report, in seconds; messages to it wait as long."""

_IDLE_S: Final = 0.1
_RECONNECT_S: Final = 1.0
_MOST_REPORTS: Final = 64

_log = logging.getLogger(__name__)


@dataclass
class _Running:
    """The task that a worker runs."""

    task_id: str
    attempt: int
    buffer_id: str
    n_sent: int
    """The number of the next report."""
    last_demand: int = -1
    is_numbered: bool = True
    """Whether the learner numbers its demands."""
    is_waiting: bool = False
    """Whether the learner waits for data."""

    def is_for(self, message: TaskOffer | TaskClose | LearnData) -> bool:
        return (self.task_id, self.attempt) == (message.task_id, message.attempt)

    def next_number(self) -> int:
        number, self.n_sent = self.n_sent, self.n_sent + 1
        return number


class _Worker:
    """One worker: a thread that connects to it, passes messages to it, and polls its reports."""

    def __init__(
        self,
        uid: str,
        role: str,
        connection: SlaveConnection,
        inbox: queue.SimpleQueue[tuple[str, Message]],
        closing: threading.Event,
        answer_timeout_s: float,
    ) -> None:
        self.uid, self.role = uid, role
        self.is_joined = False
        self._connection = connection
        self._inbox = inbox
        self._closing = closing
        self._answer_timeout_s = answer_timeout_s
        self._outbox: queue.Queue[Message] = queue.Queue()
        self._running: _Running | None = None
        self.thread = threading.Thread(target=self._run, name=f"http-link-{uid}", daemon=True)

    def put(self, message: Message) -> None:
        """Accept a message for the worker."""
        self._outbox.put(message)

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

    def _join(self) -> None:
        self._running, self._outbox = None, queue.Queue()
        self.is_joined = True
        self._inbox.put((self.uid, Joined(self.role)))

    def _while_connected(self) -> None:
        self._join()
        reason = "its connection has ended"
        try:
            while self._connection.is_connected:
                message = self._next_message()
                if message is not None:
                    self._receive(self._handle(message))
                elif self._closing.is_set():
                    break
                elif self._running is not None:
                    self._receive(self._poll(self._running))
        except Exception as error:  # noqa: BLE001 (reported as the reason)
            _log.exception("%s %s has sent something unusable", self.role, self.uid)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.is_joined = False
            self._inbox.put((self.uid, Left(reason)))
            self._disconnect(reason)

    def _disconnect(self, reason: str) -> None:
        try:
            self._connection.disconnect()
        except RequestFailed as error:
            self._connection.lose(f"{reason}; {error}")

    def _next_message(self) -> Message | None:
        running = self._running
        can_poll = running is not None and not running.is_waiting
        try:
            if can_poll or self._closing.is_set():
                return self._outbox.get_nowait()
            return self._outbox.get(timeout=_IDLE_S if running is None else _POLL_S)
        except queue.Empty:
            return None

    def _receive(self, messages: Iterator[Message]) -> None:
        for message in messages:
            self._inbox.put((self.uid, message))

    def _ask(self, name: str, **data: Any) -> dict[str, Any]:
        """Give the worker a task, and return its result.

        Raises:
            TaskFail: if the task has failed.
        """
        task = self._connection.new_task({"name": name, **data})
        try:
            task.start().join(self._answer_timeout_s)
        except WaitTimeout as error:
            self._connection.lose(f"it does not answer {name}: {error}")
        except TypeError as error:
            raise TaskFail({}, str(error)) from error
        if task.status != "completed":
            raise TaskFail(task.result, task.message)
        return task.result or {}

    def _handle(self, message: Message) -> Iterator[Message]:
        try:
            match message:
                case ResourceQuery():
                    yield self._resources()
                case TaskOffer():
                    yield self._start(message)
                case TaskClose():
                    yield from self._close(message)
                case LearnData():
                    yield from self._learn(message)
                case _:
                    _log.warning("%s is not for a worker", type(message).__name__)
        except TaskFail as failure:
            if self._connection.is_connected:
                yield from self._failed(message, failure)

    def _failed(self, message: Message, failure: TaskFail) -> Iterator[Message]:
        match message:
            case TaskOffer():
                yield TaskRefused(message.task_id, message.attempt, failure.message)
            case TaskClose() | LearnData():
                self._running = None
                yield TaskFailed(message.task_id, message.attempt, failure.message)
            case _:
                _log.warning("%s %s has failed: %s", self.role, self.uid, failure)

    def _resources(self) -> Resources:
        answer = self._ask("resource")
        resource = {name: int(answer.get(name, 0)) for name in ("gpu", "cpu")}
        task_id, attempt = str(answer.get("task_id", "")), int(answer.get("attempt", 0))
        if task_id and self._running is None:
            # Reports of an earlier coordinator had smaller numbers.
            first = int(time.time() * 1000)
            self._running = _Running(task_id, attempt, str(answer.get("buffer_id", "")), first)
        return Resources(resource, task_id, attempt)

    def _start(self, offer: TaskOffer) -> Message:
        if self._running is not None and self._running.is_for(offer):
            return TaskStarted(offer.task_id, offer.attempt)
        info = {**offer.task_info, "task_id": offer.task_id}
        self._ask(f"{offer.kind}_start_task", task_info=info, attempt=offer.attempt)
        buffer_id = str(offer.task_info.get("buffer_id", ""))
        self._running = _Running(offer.task_id, offer.attempt, buffer_id, 0)
        return TaskStarted(offer.task_id, offer.attempt)

    def _close(self, close: TaskClose) -> Iterator[Message]:
        running = self._running
        if running is None or not running.is_for(close):
            yield TaskFailed(close.task_id, close.attempt, "this worker does not run the task")
            return
        result = self._ask(f"{self.role}_close_task")
        yield from self._learn_info(running, result)
        self._running = None
        yield TaskDone(running.task_id, running.attempt, result)

    def _learn(self, data: LearnData) -> Iterator[Message]:
        running = self._running
        if running is None or not running.is_for(data) or not running.is_waiting:
            return
        running.is_waiting = False
        answer = self._ask("learner_learn_task", data=list(data.data), timeout_s=_POLL_S)
        yield from self._learn_info(running, answer)

    def _poll(self, running: _Running) -> Iterator[Message]:
        try:
            if self.role == COLLECTOR:
                yield from self._poll_collector(running)
            else:
                yield from self._poll_learner(running)
        except TaskFail as failure:
            if self._connection.is_connected:
                self._running = None
                yield TaskFailed(running.task_id, running.attempt, failure.message)

    def _poll_collector(self, running: _Running) -> Iterator[Message]:
        answer = self._ask("collector_data_task", timeout_s=_POLL_S, most=_MOST_REPORTS)
        if answer.get("pending"):
            yield TaskAlive(running.task_id, running.attempt)
            return
        more = answer.pop("more", [])
        for report in (answer, *more):
            report.pop("task_id", None)
            buffer_id = str(report.pop("buffer_id", running.buffer_id))
            number = running.next_number()
            if "data_id" in report:
                yield StepDataReady(
                    running.task_id, running.attempt, number, buffer_id,
                    str(report["data_id"]), report,
                )  # fmt: skip
            else:
                yield CollectorInfo(running.task_id, running.attempt, number, report)

    def _poll_learner(self, running: _Running) -> Iterator[Message]:
        if running.is_waiting and not running.is_numbered:
            yield TaskAlive(running.task_id, running.attempt)
            return
        answer = self._ask("learner_get_data_task", timeout_s=_POLL_S)
        yield from self._learn_info(running, answer)
        if "batch_size" not in answer:
            yield TaskAlive(running.task_id, running.attempt)
            return
        running.is_numbered = "seq" in answer
        number = int(answer.get("seq", running.last_demand + 1))
        running.is_waiting = True
        if number == running.last_demand:
            yield TaskAlive(running.task_id, running.attempt)
            return
        running.last_demand = number
        yield DataDemand(
            running.task_id,
            running.attempt,
            number,
            str(answer.get("buffer_id", running.buffer_id)),
            int(answer["batch_size"]),
            int(answer.get("cur_learner_iter", 0)),
            tuple(answer.get("lost", ())),
        )

    def _learn_info(self, running: _Running, answer: dict[str, Any]) -> Iterator[Message]:
        info = answer.pop("info", None)
        if info:
            buffer_id = str(answer.get("buffer_id", running.buffer_id))
            yield LearnInfo(
                running.task_id, running.attempt, running.next_number(), buffer_id, info
            )


class HttpLink:
    """A :class:`~dmiddleware.worker.comm.link.Link` from the coordinator to workers over HTTP.

    Workers never call the coordinator on their own: this link polls them, and turns their answers
    into messages. A worker that is away is tried again every second, until it comes.

    Args:
        master: the end of the HTTP connections; started here, and closed with the link.
        workers: ``(role, host, port)`` of each worker, by its name.
        answer_timeout_s: seconds after which a worker that does not answer is lost. Starting and
            ending a task must be faster.

    Raises:
        ConfigError: for an address that cannot be used.
        TransportError: if the master's address cannot be listened on.
    """

    def __init__(
        self,
        master: Master,
        workers: Mapping[str, tuple[str, str, int]],
        *,
        answer_timeout_s: float = 150.0,
    ) -> None:
        self._master = master
        self._inbox: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._workers = {
            uid: _Worker(
                uid, role, master.new_connection(uid, host, port), self._inbox, self._closing,
                answer_timeout_s,
            )
            for uid, (role, host, port) in workers.items()
        }  # fmt: skip
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

    def send(self, peer: str, message: Message) -> None:
        """Send a message to a worker; returns at once.

        Raises:
            DeliveryTimeout: if the worker is not connected.
        """
        worker = self._workers.get(peer)
        if worker is None or not worker.is_joined or self._closing.is_set():
            raise DeliveryTimeout(f"the worker {peer!r} is not connected; nothing was sent")
        worker.put(message)

    def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        """Return the next message and its sender, or None after ``timeout_s`` seconds."""
        try:
            return self._inbox.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

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
