"""The base of communicating workers: one task at a time, each on a thread of its own."""

from __future__ import annotations

import logging
import secrets
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from easydict import EasyDict

from dmiddleware.classic.config import (
    Configurable,
    Option,
    Range,
    at_least,
    count,
    positive,
    switch,
    text,
)
from dmiddleware.closing import Closing
from dmiddleware.errors import ConfigError
from dmiddleware.inbox import Inbox
from dmiddleware.registry import Registry
from dmiddleware.worker.classic_functions import EasyTimer
from dmiddleware.worker.comm.link import import_worker_entry_point
from dmiddleware.worker.comm.received import check_imports
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.messages import LearnData, Message
from dmiddleware.worker.errors import TaskFail
from dmiddleware.worker.serial_worker import get_worker_cls

__all__ = ["WAIT_S", "CommWorker", "Job", "get_comm_cls"]

T = TypeVar("T")
J = TypeVar("J", bound="Job")

WAIT_S: Final = 30.0
"""How long a callback waits for something to report, in seconds."""

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
        inbox: what waits between the task's thread and the coordinator; closed with the task.
    """

    def __init__(self, task_info: Mapping[str, Any], attempt: int, inbox: Inbox[Any]) -> None:
        missing = [key for key in ("task_id", "buffer_id") if key not in task_info]
        if missing:
            raise ConfigError(f"a task needs {' and '.join(missing)}, got {sorted(task_info)}")
        self.task_info = task_info
        self.attempt = attempt
        self.inbox = inbox
        self.thread: threading.Thread | None = None
        self.closing = False
        self.ended = False
        self.failure = ""
        """The traceback of the error that has ended the task."""

    @property
    def ids(self) -> dict[str, str]:
        """The ids of the task and of its buffer."""
        return {"task_id": self.task_info["task_id"], "buffer_id": self.task_info["buffer_id"]}


class CommWorker(Closing, Configurable, ABC, Generic[J]):
    """Runs the tasks of a coordinator, one at a time.

    The callbacks ``deal_with_*`` are called by a transport: by the HTTP server, or by a
    :class:`~dmiddleware.worker.comm.pump.WorkerPump` over a
    :class:`~dmiddleware.worker.comm.link.Link`.

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
        "gpu_num": Option(1, at_least(0, whole=True), "number of GPUs"),
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

    @abstractmethod
    def start_task(self, task_info: Mapping[str, Any], attempt: int) -> dict[str, Any]:
        """Start a task.

        Raises:
            TaskFail: if the worker is busy, or ``task_info`` is incomplete.
        """

    @abstractmethod
    def close_task(self) -> Sequence[Message]:
        """End the current task in order, and return its last messages, ``TaskDone`` at the end.

        Raises:
            TaskFail: if the task has failed, or does not end in time.
        """

    @abstractmethod
    def report(self, timeout_s: float) -> Sequence[Message]:
        """Return what the coordinator has to know, or nothing after ``timeout_s`` seconds.

        Raises:
            TaskFail: if the task has failed.
        """

    @abstractmethod
    def repeat_reports(self) -> Sequence[Message]:
        """Return what a coordinator that was restarted may have missed."""

    def take_data(self, message: LearnData) -> None:
        """Accept a batch; collectors never get one."""

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
            if current is not None and not (current.closing and current.ended):
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

    def _end(self, job: J) -> None:
        """End the work of a task; the worker is idle afterwards.

        Raises:
            TaskFail: if the work has failed, or does not end in time.
        """
        with self._changed:
            job.closing = True
            job.inbox.close()
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
        finally:
            self._forget(job)

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
