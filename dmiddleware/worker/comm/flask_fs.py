"""Collectors and learners that talk HTTP to their coordinator, and share files with each other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from dmiddleware.classic.config import Option, at_least, text, whole
from dmiddleware.errors import ConfigError
from dmiddleware.process.signals import HeldSignals
from dmiddleware.worker.collector.parallel import BaseParallelCollector
from dmiddleware.worker.comm.base_collector import COMM_COLLECTOR_REGISTRY, BaseCommCollector
from dmiddleware.worker.comm.base_learner import (
    COMM_LEARNER_REGISTRY,
    BaseCommLearner,
    load_data_fn,
)
from dmiddleware.worker.comm.comm_worker import CommWorker
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.http import Slave, read_key
from dmiddleware.worker.comm.store import Store
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
        self._worker.take_back()


class _FlaskFileSystemWorker(CommWorker[Any]):
    """A worker that answers the tasks of a coordinator over HTTP.

    If the coordinator is away, and none connects within ``timeout_s``, the task is abandoned.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config, if other hosts can reach ``host`` and ``key_file`` is
            empty, or if Flask is not installed.
    """

    config: ClassVar[dict[str, Any]] = {
        "run_id": Option("run", text, "name of the run, also of its folder below path_data"),
        "channel": Option(0, whole, "coordinators of other channels are refused"),
        "heartbeat_span": Option(3.0, at_least(0.2), "seconds between two heartbeats"),
        "request_retries": Option(5, whole, "how often a request without an answer is sent again"),
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


def _of_rank(value: Any, rank: int, name: str) -> Any:
    """Return the host or port of a rank: of a list its entry, else the port counted up by rank."""
    if isinstance(value, list | tuple):
        if rank >= len(value):
            raise ConfigError(f"{name} has {len(value)} entries, but this is rank {rank}")
        return value[rank]
    return value + rank if isinstance(value, int) and value else value
