"""Collectors and learners that talk HTTP to their coordinator, and share files with each other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from dmiddleware.classic.config import Option, at_least, text
from dmiddleware.errors import ConfigError
from dmiddleware.signals import HeldSignals
from dmiddleware.worker.collector.parallel import BaseParallelCollector
from dmiddleware.worker.comm.base_collector import COMM_COLLECTOR_REGISTRY, BaseCommCollector
from dmiddleware.worker.comm.base_learner import (
    COMM_LEARNER_REGISTRY,
    BaseCommLearner,
    load_data_fn,
)
from dmiddleware.worker.comm.comm_worker import WAIT_S, CommWorker
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.http import Slave, read_key
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.errors import TaskFail
from dmiddleware.worker.ranks import rank_and_world_size

__all__ = ["FlaskFileSystemCollector", "FlaskFileSystemLearner"]

_SIGNAL_CHECK_S: Final = 0.5

_log = logging.getLogger(__name__)


class _WorkerSlave(Slave):
    """Passes the coordinator's tasks to a worker."""

    def __init__(self, worker: _FlaskFileSystemWorker, **options: Any) -> None:
        super().__init__(**options)
        self._worker = worker

    def _process_task(self, task: dict[str, Any]) -> Mapping[str, Any]:
        return self._worker.process_task(task)

    def _before_connection(self, data: dict[str, Any]) -> None:
        self._worker.coordinator_came()

    def _before_disconnection(self, data: dict[str, Any]) -> None:
        self._worker.coordinator_released()

    def _lost_connection(self, address: str, error: Exception) -> None:
        self._worker.coordinator_lost()

    def _result_not_taken(self, task: dict[str, Any], result: Mapping[str, Any]) -> None:
        self._worker.result_not_taken(str(task.get("name")), result)


class _FlaskFileSystemWorker(CommWorker[Any]):
    """A worker that answers the tasks of a coordinator over HTTP.

    While the coordinator is away, the task keeps running, and its reports wait. If no coordinator
    connects within ``timeout_s``, the task is abandoned.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config, if other hosts can reach ``host`` and ``key_file`` is
            empty, or if Flask is not installed.
    """

    config: ClassVar[dict[str, Any]] = {
        "run_id": Option("run", text, "name of the run, also of its folder below path_data"),
        "channel": Option(0, at_least(0, whole=True), "coordinators of other channels are refused"),
        "heartbeat_span": Option(3.0, at_least(0.2), "seconds between two heartbeats"),
        "request_retries": Option(
            5, at_least(0, whole=True), "how often a request without an answer is sent again"
        ),
        "request_retry_waiting": Option(1.0, at_least(0), "seconds before that"),
    }

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        super().__init__(cfg)
        rank = rank_and_world_size()[0]
        options = (
            "run_id", "channel", "heartbeat_span", "request_retries", "request_retry_waiting",
        )  # fmt: skip
        self._slave = _WorkerSlave(
            self,
            host=_of_rank(self._cfg.host, rank, "host"),
            port=_of_rank(self._cfg.port, rank, "port"),
            key=read_key(self._cfg.key_file),
            **{name: self._cfg[name] for name in options},
        )
        self._over = threading.Event()
        self._n_connections = 0
        self._open_store()  # raises for an unusable config

    @property
    def port(self) -> int:
        """The port; if it was 0, the system chooses one when the worker starts."""
        return self._slave.port

    def start(self) -> None:
        """Start to listen; a second call does nothing.

        Raises:
            TransportError: if the address cannot be listened on, or the worker was closed.
        """
        super().start()
        self._slave.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the coordinator has released this worker, or is lost.

        Ctrl-C and SIGTERM end the wait with an exception, so that a ``with`` block closes the
        worker.

        Args:
            timeout_s: the most seconds to wait; None means no limit.

        Returns:
            Whether the coordinator has released the worker, or is lost.

        Raises:
            KeyboardInterrupt: after a SIGINT.
            SystemExit: after a SIGTERM, with exit code 143.
        """
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with HeldSignals() as signals, signals.interruptible():
            # In steps, because a signal that another thread receives does not end a wait.
            while not self._over.wait(min(_SIGNAL_CHECK_S, max(0.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return False
        return True

    def close(self) -> None:
        """Abandon the current task, and stop to listen; may be called twice."""
        self._slave.shutdown()
        with self._changed:
            self._over.set()
            self._changed.notify_all()
        try:
            super().close()
        finally:
            self._slave.close()

    def process_task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Do a task of the coordinator.

        Raises:
            TaskFail: if it has failed, or is unknown.
        """
        tasks = self._tasks()
        name = task.get("name")
        if name not in tasks:
            raise TaskFail({}, f"unknown task {name!r}; this worker does {', '.join(tasks)}")
        try:
            return tasks[name](task)
        except ConfigError as error:
            raise TaskFail({}, str(error)) from error

    def coordinator_came(self) -> None:
        """Note that a coordinator connects."""
        with self._changed:
            self._n_connections += 1
            self._changed.notify_all()

    def coordinator_released(self) -> None:
        """Note that the coordinator has released this worker."""
        self._over.set()

    def coordinator_lost(self) -> None:
        """Wait for another coordinator; abandon the task if none comes in time."""
        with self._changed:
            before = self._n_connections
            came = self._wait(
                lambda: self._n_connections != before or self._over.is_set(), self._cfg.timeout_s
            )
        if not came:
            _log.warning(
                "%s: no coordinator came within %g s, so the task is abandoned",
                self._uid, self._cfg.timeout_s,
            )  # fmt: skip
            CommWorker.close(self)
            self._over.set()

    def result_not_taken(self, name: str, result: Mapping[str, Any]) -> None:
        """Keep what the coordinator did not take, for the next one."""

    def _tasks(self) -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        """Return what does each task, by name."""
        return {"resource": lambda task: self._resource()}

    def _resource(self) -> dict[str, Any]:
        job = self.job
        running = {} if job is None else {**job.ids, "attempt": job.attempt}
        return {**self.deal_with_resource(), **running}

    def _open_store(self, compressor: str = "lz4") -> Store:
        return FileStore(
            self._cfg.path_data, self._cfg.path_policy, self._cfg.run_id, compressor=compressor
        )


@COMM_COLLECTOR_REGISTRY.register("flask_fs")
class FlaskFileSystemCollector(_FlaskFileSystemWorker, BaseCommCollector):
    """Runs the collector tasks of a coordinator that is reached over HTTP.

    Step data is written to ``path_data``, in the way that the task's ``compressor`` says.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config, if other hosts can reach ``host`` and ``key_file`` is
            empty, or if Flask is not installed.
    """

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        super().__init__(cfg)
        self._not_taken: deque[dict[str, Any]] = deque()
        self._failure: TaskFail | None = None

    def close(self) -> None:
        """Abandon the current task with its data, and stop to listen; may be called twice."""
        try:
            super().close()
        finally:
            self._drop()

    def result_not_taken(self, name: str, result: Mapping[str, Any]) -> None:
        """Keep reports for the next request; delete their data if their task is gone."""
        if name != "collector_data_task" or "pending" in result or "task_id" not in result:
            return
        first = dict(result)
        more = first.pop("more", [])
        reports = [first, *({**one, "task_id": first["task_id"]} for one in more)]
        job = self.job
        if job is not None and job.ids["task_id"] == first["task_id"]:
            self._not_taken.extend(reports)
        else:
            self._delete(reports)

    def _tasks(self) -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        return {
            **super()._tasks(),
            "collector_start_task": self._start_task,
            "collector_data_task": self._next_reports,
            "collector_close_task": self._close_task,
        }

    def _start_task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self._drop()
        return self.deal_with_collector_start(_info_of(task), int(task.get("attempt", 0)))

    def _close_task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._raise_kept_failure()
            return self.deal_with_collector_close()
        finally:
            self._drop()

    def _next_reports(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the next report, and up to ``most - 1`` others that are ready as ``more``."""
        first = self._next_report(_timeout_of(task))
        more: list[dict[str, Any]] = []
        while "pending" not in first and len(more) + 1 < int(task.get("most", 1)):
            try:
                report = self._next_report(0.0)
            except TaskFail as failure:
                self._failure = failure  # after the reports that came before
                break
            if "pending" in report:
                break
            more.append(report)
        return {**first, "more": more} if more else first

    def _next_report(self, timeout_s: float) -> dict[str, Any]:
        if self._not_taken:
            return self._not_taken.popleft()
        self._raise_kept_failure()
        return self.deal_with_collector_data(timeout_s)

    def _raise_kept_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _drop(self) -> None:
        """Forget what is left of an earlier task."""
        self._failure = None
        reports = list(self._not_taken)
        self._not_taken.clear()
        self._delete(reports)

    def _delete(self, reports: list[dict[str, Any]]) -> None:
        self.store.delete([one["object_ref"] for one in reports if "object_ref" in one])

    def _create_collector(self, task_info: Mapping[str, Any]) -> BaseParallelCollector:
        collector = super()._create_collector(task_info)
        compressor = task_info["collector_cfg"].get("compressor", "lz4")
        self._opened_store = self._open_store(compressor)
        return collector


@COMM_LEARNER_REGISTRY.register("flask_fs")
class FlaskFileSystemLearner(_FlaskFileSystemWorker, BaseCommLearner):
    """Runs the learner tasks of a coordinator that is reached over HTTP.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config, if other hosts can reach ``host`` and ``key_file`` is
            empty, or if Flask is not installed.
    """

    load_data_fn = staticmethod(load_data_fn)

    def result_not_taken(self, name: str, result: Mapping[str, Any]) -> None:
        """Report progress again that the coordinator did not take."""
        job = self.job
        if result.get("info") and job is not None and job.ids["task_id"] == result.get("task_id"):
            self.send_learn_info(result["info"])

    def _tasks(self) -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        return {
            **super()._tasks(),
            "learner_start_task": lambda task: self.deal_with_learner_start(
                _info_of(task), int(task.get("attempt", 0))
            ),
            "learner_get_data_task": lambda task: self.deal_with_get_data(_timeout_of(task)),
            "learner_learn_task": lambda task: self.deal_with_learner_learn(
                task.get("data", []), _timeout_of(task)
            ),
            "learner_close_task": lambda task: self.deal_with_learner_close(),
        }


def _info_of(task: Mapping[str, Any]) -> Mapping[str, Any]:
    info = task.get("task_info")
    if not isinstance(info, Mapping):
        raise ConfigError(f"the task must have task_info, a dictionary, got {info!r:.100}")
    return info


def _timeout_of(task: Mapping[str, Any]) -> float:
    return min(WAIT_S, float(task.get("timeout_s", WAIT_S)))


def _of_rank(value: Any, rank: int, name: str) -> Any:
    """Return the host or port of a rank: of a list its entry, else the port counted up by rank."""
    if isinstance(value, list | tuple):
        if rank >= len(value):
            raise ConfigError(f"{name} has {len(value)} entries, but this is rank {rank}")
        return value[rank]
    return value + rank if isinstance(value, int) and value else value
