"""The base of communicating workers: one task at a time, each on a thread of its own."""

from __future__ import annotations

import logging
import secrets
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

from easydict import EasyDict

from dmiddleware.classic.config import (
    Configurable,
    Option,
    Range,
    count,
    positive,
    switch,
    text,
    whole,
)
from dmiddleware.errors import ConfigError
from dmiddleware.flow_control import FairQueue
from dmiddleware.process.closing import Closing
from dmiddleware.registry import Registry
from dmiddleware.worker.classic_functions import EasyTimer
from dmiddleware.worker.comm.link import import_worker_entry_point
from dmiddleware.worker.comm.received import check_imports
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.conversation import Answer, Ask, read_task
from dmiddleware.worker.errors import TaskFail
from dmiddleware.worker.serial_worker import get_worker_cls

__all__ = ["CommWorker", "Handler", "Job", "get_comm_cls"]

T = TypeVar("T")
J = TypeVar("J", bound="Job")

Handler: TypeAlias = Callable[[Any], dict[str, Any]]
"""Does a task of the coordinator: takes the request, and returns the result."""

_log = logging.getLogger(__name__)

_hosts = Range(
    "a string, or a list with one for each rank",
    lambda value: isinstance(value, str) or _is_list_of(str, value),
)
_ports = Range(
    "a port, from which each rank counts up, or a list with one for each rank",
    lambda value: _is_port(value) or (_is_list_of(int, value) and all(map(_is_port, value))),
)


_modules = Range(
    "a list of names",
    lambda value: isinstance(value, list | tuple) and all(isinstance(v, str) for v in value),
)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(v) is kind for v in value)


def _is_port(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**16


class Job:
    """A task that a worker has been given.

    Args:
        task_info: the commander's task dictionary.
        attempt: which attempt at the task this is, from 0.
        queue: what waits between the task's thread and the coordinator; closed with the task.
    """

    def __init__(self, task_info: Mapping[str, Any], attempt: int, queue: FairQueue[Any]) -> None:
        missing = [key for key in ("task_id", "buffer_id") if key not in task_info]
        if missing:
            raise ConfigError(f"a task needs {' and '.join(missing)}, got {sorted(task_info)}")
        self.task_info = task_info
        self.attempt = attempt
        self.queue = queue
        self.thread: threading.Thread | None = None
        self.closing = False
        self.ended = False
        self.end: Future[None] | None = None
        """Ends, with its failure if there is one, once the task was closed."""
        self.failure = ""
        """The traceback of the error that has ended the task."""

    @property
    def ids(self) -> dict[str, str]:
        """The ids of the task and of its buffer."""
        return {"task_id": self.task_info["task_id"], "buffer_id": self.task_info["buffer_id"]}


class CommWorker(Closing, Configurable, ABC, Generic[J]):
    """Runs the tasks of a coordinator, one at a time.

    The coordinator's requests come to :meth:`process_task`, which calls the ``deal_with_*``: from
    the HTTP server, or from a :class:`~dmiddleware.worker.comm.LinkServer`. A task keeps running
    while the coordinator is away, and its reports wait.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "host": Option("127.0.0.1", _hosts, "address to listen on (HTTP)"),
        "port": Option(22333, _ports, "port to listen on (HTTP)"),
        "path_data": Option("./data", text, "folder of the step data (HTTP)"),
        "path_policy": Option("./policy", text, "folder of the policies (HTTP)"),
        "key_file": Option("", text, "file with the run's secret key (HTTP); empty: none"),
        "multi_gpu": Option(False, switch, "whether this is one rank of several"),
        "gpu_num": Option(1, whole, "number of GPUs"),
        "import_names": Option([], _modules, "modules that tasks may import"),
        "queue_size": Option(8, count, "reports that may wait for the coordinator"),
        "timeout_s": Option(120.0, positive, "seconds to wait for the coordinator"),
    }
    config_open: ClassVar[tuple[str, ...]] = ("resource",)

    kind: ClassVar[str]
    """``collector`` or ``learner``."""

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        self._cfg: EasyDict = self.merged_config(cfg)
        self._uid = f"{self.kind}_{secrets.token_hex(6)}"
        self._changed = threading.Condition()
        self._job: J | None = None
        self._opened_store: Store | None = None
        self._answered: tuple[str, J, dict[str, Any]] | None = None
        """The last answer about a task, until another request shows that it has arrived."""
        self._timer = EasyTimer()
        self._end_flag = True
        """Whether the worker is closed, or was not started."""

    @property
    def store(self) -> Store:
        """Where step data and policies are kept; opened on first use."""
        if self._opened_store is None:
            self._opened_store = self._open_store()
        return self._opened_store

    def _open_store(self) -> Store:
        """Return the store of this transport."""
        raise NotImplementedError(
            f"{type(self).__name__} has no store; override _open_store(), or all methods that use "
            "the store"
        )

    @property
    def job(self) -> J | None:
        """The current task; None if the worker is idle."""
        return self._job

    def start(self) -> None:
        """Start to answer the coordinator; a second call does nothing."""
        self._end_flag = False

    def close(self) -> None:
        """Abandon the current task, and end; may be called twice."""
        self._end_flag = True
        job = self._job
        if job is not None:
            try:
                self._end(job)
            except TaskFail as failure:
                _log.warning("%s: the task failed while it was closed: %s", self._uid, failure)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._uid!r})"

    def deal_with_resource(self) -> dict[str, int]:
        """Return how many GPUs and CPUs the worker has."""
        return {"gpu": 0, "cpu": 0, **self._cfg.resource}

    def answer(self, ask: Ask) -> Answer:
        """Do a task of the coordinator, and return its result, or why it has failed."""
        try:
            return Answer(ask.id, self.process_task({**ask.request, "name": ask.name}))
        except TaskFail as failure:
            return Answer(ask.id, failure=failure.message)
        except Exception as error:  # noqa: BLE001 - reported
            return Answer(ask.id, failure="".join(traceback.format_exception(error)))

    def process_task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Do a task of the coordinator: one at a time.

        Args:
            task: its ``name``, and the fields of its request; see
                :data:`~dmiddleware.worker.coordinator.conversation.TASKS`.

        Raises:
            TaskFail: if it has failed, is unknown, or lacks a field.
        """
        handlers = self._handlers()
        name, request = read_task(task, handlers)
        job = self._job
        if name == "resource":  # a coordinator that begins may have missed what was reported
            self.take_back()
            if job is not None:
                self._repeat(job)
        self._answered = None
        try:
            result = handlers[name](request)
        except ConfigError as error:
            raise TaskFail({}, str(error)) from error
        if job is not None:
            self._answered = name, job, result
        return result

    def take_back(self) -> None:
        """Report again what the last answer has reported, as it has not arrived."""
        answered, self._answered = self._answered, None
        if answered is not None:
            self._put_back(*answered)

    @abstractmethod
    def _handlers(self) -> dict[str, Handler]:
        """Return what does each task, by name."""

    def _stated(self, _: object) -> dict[str, Any]:
        job = self.job
        running = {} if job is None else {**job.ids, "attempt": job.attempt}
        return {**self.deal_with_resource(), **running}

    @abstractmethod
    def _put_back(self, name: str, job: J, result: dict[str, Any]) -> None:
        """Report again what the result of a task has reported."""

    @abstractmethod
    def _repeat(self, job: J) -> None:
        """Report the last progress of a task again, as the coordinator may have been restarted."""

    @abstractmethod
    def _work(self, job: J) -> None:
        """Create what the task needs, and run it; called on the task's thread."""

    @abstractmethod
    def _stop_work(self, job: J) -> None:
        """Ask the running work to end."""

    def _begin(self, job: J) -> dict[str, Any]:
        # The only way in for the config of a task, over whichever transport it came.
        check_imports(job.task_info, self._cfg.import_names)
        with self._changed:
            current = self._job
            if current is not None and current.closing:
                self._forget(current)
            if self._job is not None and current is not None:
                raise TaskFail(
                    job.ids,
                    f"{self._uid} already runs the task {current.ids['task_id']}; close it first",
                )
            self._job = job
        name = f"{self.kind}-task"
        job.thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
        job.thread.start()
        return {"message": f"{self.kind} task {job.ids['task_id']} has started"}

    def _run(self, job: J) -> None:
        failure = ""
        try:
            self._work(job)
        except BaseException as error:  # noqa: BLE001 - reported by the next callback
            failure = "".join(traceback.format_exception(error))
        with self._changed:
            job.failure, job.ended = failure, True
            self._changed.notify_all()

    def _end(self, job: J, timeout_s: float | None = None) -> bool:
        """End the work of a task; the worker is idle afterwards.

        Args:
            job: the task.
            timeout_s: how long to wait; None: until it has ended, or has failed to.

        Returns:
            Whether it has ended.

        Raises:
            TaskFail: if the work has failed, or does not end within the config's ``timeout_s``.
        """
        with self._changed:
            if job.end is None:
                job.end = Future()
                name = f"{self.kind}-task-end"
                threading.Thread(
                    target=self._end_work, args=(job, job.end), name=name, daemon=True
                ).start()
            end = job.end
        if not wait([end], timeout_s).done:
            return False
        job.end = None  # so that another close tries again
        self._forget(job)
        end.result()
        return True

    def _end_work(self, job: J, end: Future[None]) -> None:
        with self._changed:
            job.closing = True
            job.queue.close()
            self._changed.notify_all()
        try:
            self._stop_work(job)
            assert job.thread is not None
            job.thread.join(self._cfg.timeout_s)
            if not job.ended:
                raise TaskFail(
                    job.ids,
                    f"the task did not end within {self._cfg.timeout_s:g} s; the worker takes no "
                    "other task until it does",
                )
            if job.failure:
                raise TaskFail(job.ids, job.failure)
        except Exception as error:  # noqa: BLE001 - raised by _end
            end.set_exception(error)
        else:
            end.set_result(None)

    def _current(self) -> J:
        job = self._job
        if job is None:
            raise TaskFail({}, f"{self._uid} runs no task; start one first")
        return job

    def _raise_failure(self, job: J) -> None:
        """Raise the error that has ended the task, if any; the worker is idle afterwards."""
        if job.failure:
            self._forget(job)
            raise TaskFail(job.ids, job.failure)

    def _forget(self, job: J) -> None:
        """Be idle again, if the task's thread has ended."""
        if job.ended and self._job is job:
            self._job = None

    def _wait(self, predicate: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait, with the lock held, until the predicate is true; return whether it is."""
        return self._changed.wait_for(predicate, timeout_s)


def get_comm_cls(
    registry: Registry[Callable[..., T]], cfg: Mapping[str, Any], kind: str
) -> Callable[..., T]:
    """Return what ``cfg.type`` names, after importing ``cfg.import_names``.

    Names that installed packages provide are found without an import; see
    :func:`~dmiddleware.worker.comm.link.import_worker_entry_point`.

    Raises:
        ConfigError: if ``cfg`` has no ``type``.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    if "type" in cfg and cfg["type"] not in registry:
        import_worker_entry_point(str(cfg["type"]))
    return get_worker_cls(registry, cfg, kind)
