"""The base of communicating collectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

from easydict import EasyDict

from dmiddleware.classic.config import Option, whole
from dmiddleware.errors import ConfigError
from dmiddleware.flow_control import FairQueue
from dmiddleware.registry import Registry
from dmiddleware.worker.collector.parallel import BaseParallelCollector, create_parallel_collector
from dmiddleware.worker.comm.comm_worker import CommWorker, Handler, Job, get_comm_cls
from dmiddleware.worker.coordinator.conversation import WAIT_S, NextReports
from dmiddleware.worker.coordinator.messages import COLLECTOR
from dmiddleware.worker.errors import TaskFail

__all__ = ["COMM_COLLECTOR_REGISTRY", "BaseCommCollector", "create_comm_collector"]

_METADATA: Final = frozenset(
    {
        "data_id", "env_id", "policy_iter", "unroll_len", "compressor", "get_data_time",
        "eval_flag", "cur_episode", "cur_sample", "cur_step",
    }
)  # fmt: skip
_INFO: Final = frozenset(
    {"collector_done", "cur_episode", "cur_sample", "cur_step", "eval_flag", "get_info_time"}
)


class _CollectorJob(Job):
    """A collector task, whose queue has the reports that wait for the coordinator."""

    def __init__(
        self, task_info: Mapping[str, Any], attempt: int, queue: FairQueue[dict[str, Any]]
    ) -> None:
        super().__init__(task_info, attempt, queue)
        if "collector_cfg" not in task_info:
            raise ConfigError(f"a collector task needs collector_cfg, got {sorted(task_info)}")
        self.collector: BaseParallelCollector | None = None
        self.refs: dict[str, str] = {}
        self.have: dict[str, int] = {}
        self.n_reports = 0
        self.last_info: dict[str, Any] | None = None


class BaseCommCollector(CommWorker[_CollectorJob]):
    """Runs the collector tasks of a coordinator.

    A subclass connects it to a coordinator, and opens the store.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "port": 22339,
        "resource": {
            "gpu": Option(1, whole, "GPUs that a task may use"),
            "cpu": Option(20, whole, "CPUs that a task may use"),
        },
    }
    kind = COLLECTOR

    @property
    def collector_uid(self) -> str:
        """Identifies this worker in logs."""
        return self._uid

    def get_policy_update_info(self, path: str) -> dict[str, Any] | None:
        """Return the newest state of a policy.

        Args:
            path: the policy's id.

        Returns:
            ``{'model': …, 'iter': …}``, or None if there is none that is newer than the one that
            this task got before.
        """
        have = self._current().have
        newest = self.store.newest(path, have.get(path, -1))
        if newest is None:
            return None
        have[path], state = newest
        return dict(state)

    def send_stepdata(self, path: str, stepdata: Any) -> str | None:
        """Store step data, before its metadata is sent.

        Args:
            path: the data's id.
            stepdata: a tree of tensors, numbers and strings.

        Returns:
            The reference; None once the task is closed, when nothing is written anymore.
        """
        job = self._current()
        if job.closing:
            return None
        ref = job.refs[path] = self.store.put(path, stepdata)
        return ref

    def send_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Report step data, or progress; waits while ``queue_size`` reports wait.

        Args:
            metadata: ``data_id, env_id, policy_iter, unroll_len, compressor, get_data_time,
                eval_flag, cur_episode, cur_sample, cur_step`` and ``priority`` (default: 1.0), of
                step data that was stored; or ``collector_done, cur_episode, cur_sample, cur_step,
                eval_flag, get_info_time``.

        Raises:
            ConfigError: if it is neither; the message names the missing keys.
            TaskFail: if the coordinator takes nothing for ``timeout_s`` seconds.
        """
        job = self._current()
        report = _checked(metadata)
        if "data_id" in report:
            ref = job.refs.get(report["data_id"], report["data_id"])
            report = {"priority": 1.0, "object_ref": ref, **report}
        with self._changed:
            if job.queue.put(report, timeout_s=self._cfg.timeout_s):
                # The coordinator deletes it, since it has the report.
                job.refs.pop(report.get("data_id", ""), None)
            elif not job.closing:
                raise TaskFail(
                    job.ids,
                    f"the coordinator took none of {len(job.queue)} reports for "
                    f"{self._cfg.timeout_s:g} s; check that it is running",
                )

    def deal_with_collector_start(
        self, task_info: Mapping[str, Any], attempt: int = 0
    ) -> dict[str, Any]:
        """Start a task: create its collector, and let it run, both on a thread of its own.

        Args:
            task_info: ``task_id``, ``buffer_id`` and ``collector_cfg``.
            attempt: which attempt at the task this is.

        Returns:
            ``{'message': …}``.

        Raises:
            TaskFail: if the worker is busy.
            ConfigError: if ``task_info`` is incomplete.
        """
        queue = FairQueue[dict[str, Any]](capacity=self._cfg.queue_size, changed=self._changed)
        return self._begin(_CollectorJob(task_info, attempt, queue))

    def deal_with_collector_data(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Return the next metadata or info, with its number ``seq``, ``task_id`` and ``buffer_id``.

        Args:
            timeout_s: how long to wait for it.

        Returns:
            The report, or ``{'pending': True}`` with the ids if there is none in time.

        Raises:
            TaskFail: if the task has failed, with its traceback; or if the worker is idle.
        """
        job = self._current()
        with self._changed:
            self._wait(lambda: bool(job.queue or job.failure or job.closing), timeout_s)
            if job.queue:
                return {**self._next(job), **job.ids}
        if not job.closing:
            self._raise_failure(job)
        return {"pending": True, **job.ids}

    def deal_with_collector_close(self, timeout_s: float | None = None) -> dict[str, Any]:
        """End the task, and return its finish info with its ``task_id``.

        Step data that was not reported yet is deleted. Nothing is written after this returns.

        Args:
            timeout_s: how long to wait for its end; None: as long as the config's ``timeout_s``.

        Returns:
            The finish info, or ``{'pending': True}`` with the ids if it has not ended in time; call
            again then.

        Raises:
            TaskFail: if the task has failed, with its traceback; or if the worker is idle.
        """
        job = self._current()
        if not self._end(job, timeout_s):
            return {"pending": True, **job.ids}
        info = {} if job.collector is None else job.collector.get_finish_info()
        return {**info, "task_id": job.ids["task_id"]}

    def _handlers(self) -> dict[str, Handler]:
        return {
            "resource": self._stated,
            "collector_start_task": lambda asked: self.deal_with_collector_start(
                asked.task_info, asked.attempt
            ),
            "collector_data_task": self._next_reports,
            "collector_close_task": lambda asked: self.deal_with_collector_close(asked.timeout_s),
        }

    def _next_reports(self, request: NextReports) -> dict[str, Any]:
        """Return the next report, and up to ``most - 1`` others that are ready as ``more``."""
        job = self._current()
        answer = self.deal_with_collector_data(min(WAIT_S, request.timeout_s))
        with self._changed:
            n_more = 0 if "pending" in answer else min(len(job.queue), request.most - 1)
            more = [self._next(job) for _ in range(n_more)]
        return {**answer, "more": more} if more else answer

    @staticmethod
    def _next(job: _CollectorJob) -> dict[str, Any]:
        """Take the next report; it keeps its number if it was put back."""
        report = job.queue.take()
        assert report is not None
        if "seq" not in report:
            report = {**report, "seq": job.n_reports}
            job.n_reports += 1
        if "data_id" not in report:
            job.last_info = report
        return report

    def _repeat(self, job: _CollectorJob) -> None:
        last = job.last_info
        with self._changed:
            if last is not None and last not in job.queue:
                job.queue.put_back([last])

    def _put_back(self, name: str, job: _CollectorJob, result: dict[str, Any]) -> None:
        if name != "collector_data_task" or "pending" in result:
            return
        first = {key: value for key, value in result.items() if key not in ("more", *job.ids)}
        reports = [first, *result.get("more", ())]
        with self._changed:
            is_current = self._job is job
            if is_current:
                job.queue.put_back(reports)
        if not is_current:
            self._delete(reports)

    def _forget(self, job: _CollectorJob) -> None:
        """Delete the step data that was not reported, and be idle again."""
        super()._forget(job)
        unannounced = [{"object_ref": ref} for ref in job.refs.values()]
        self._delete([*job.queue.drain(), *unannounced])
        job.refs.clear()

    def _delete(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Delete the step data of reports."""
        refs = [one["object_ref"] for one in reports if "object_ref" in one]
        if refs:
            self.store.delete(refs)

    def _create_collector(self, task_info: Mapping[str, Any]) -> BaseParallelCollector:
        """Create the collector of a task, and connect it to this worker."""
        collector = create_parallel_collector(EasyDict(task_info["collector_cfg"]))
        collector.send_metadata = self.send_metadata
        collector.send_stepdata = self.send_stepdata
        collector.get_policy_update_info = self.get_policy_update_info
        return collector

    def _work(self, job: _CollectorJob) -> None:
        collector = self._create_collector(job.task_info)
        with self._changed:
            job.collector = collector
        if job.closing:
            collector.close()
        else:
            collector.start()

    def _stop_work(self, job: _CollectorJob) -> None:
        if job.collector is not None:
            job.collector.close()


def _checked(metadata: Mapping[str, Any]) -> dict[str, Any]:
    for wanted in (_METADATA, _INFO):
        if wanted <= metadata.keys():
            return dict(metadata)
    is_data = "data_id" in metadata
    missing = sorted((_METADATA if is_data else _INFO) - metadata.keys())
    raise ConfigError(
        f"{'the metadata' if is_data else 'the info'} of a collector lacks {', '.join(missing)}; "
        f"it has {', '.join(map(str, metadata)) or 'nothing'}"
    )


COMM_COLLECTOR_REGISTRY: Registry[Callable[..., BaseCommCollector]] = Registry("comm collector")
"""Registered communicating collectors."""


def create_comm_collector(cfg: Mapping[str, Any]) -> BaseCommCollector:
    """Build the communicating collector that ``cfg.type`` names: ``router`` or ``flask_fs``.

    Args:
        cfg: the worker's config, with ``type``.

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_comm_cls(COMM_COLLECTOR_REGISTRY, cfg, "a communicating collector")(cfg)
