"""The base of communicating learners."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from easydict import EasyDict

from dmiddleware.classic import create_policy
from dmiddleware.classic.config import Option, count, mapping
from dmiddleware.classic.keywords import also_named
from dmiddleware.distributed import data_parallel
from dmiddleware.errors import ConfigError
from dmiddleware.flow_control import FairQueue
from dmiddleware.registry import Registry
from dmiddleware.worker.comm.comm_worker import CommWorker, Handler, Job, get_comm_cls
from dmiddleware.worker.comm.hooks import LearnInfos, SendLearnInfoHook, SendPolicyHook
from dmiddleware.worker.coordinator.conversation import WAIT_S, Learn
from dmiddleware.worker.coordinator.messages import LEARNER, DataDemand
from dmiddleware.worker.errors import StepDataLost, TaskFail
from dmiddleware.worker.learner import BaseLearner, LearnerHook, create_learner
from dmiddleware.worker.learner.prefetch import LoaderClosed
from dmiddleware.worker.ranks import rank_and_world_size

__all__ = ["COMM_LEARNER_REGISTRY", "BaseCommLearner", "create_comm_learner", "load_data_fn"]


class _LearnerJob(Job):
    """A learner task, whose queue has the answer to its demand."""

    def __init__(
        self,
        task_info: Mapping[str, Any],
        attempt: int,
        queue: FairQueue[Sequence[Mapping[str, Any]]],
    ) -> None:
        super().__init__(task_info, attempt, queue)
        missing = [key for key in ("policy_id", "learner_cfg", "policy") if key not in task_info]
        if missing:
            raise ConfigError(
                f"a learner task needs {' and '.join(missing)}, got {sorted(task_info)}"
            )
        self.learner: BaseLearner | None = None
        self.demand: DataDemand | None = None
        self.n_demands = 0
        self.infos = LearnInfos()
        self.last_info: dict[str, Any] | None = None

    def take_info(self) -> dict[str, Any]:
        """Return the progress that is to be reported."""
        self.last_info = self.infos.take()
        return self.last_info


class BaseCommLearner(CommWorker[_LearnerJob]):
    """Runs the learner tasks of a coordinator.

    A subclass connects it to a coordinator, and opens the store.

    Args:
        cfg: what differs from ``default_config()``.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "resource": Option({}, mapping, "what tasks may use; empty: a GPU for each rank"),
        "send_policy_freq": Option(1, count, "iterations from one sent policy to the next"),
    }
    kind = LEARNER

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        super().__init__(cfg)
        self._rank, self._world_size = rank_and_world_size()
        self._process_group = contextlib.ExitStack()
        self._learner_uid = self._uid
        self._multi_gpu: bool = self._cfg.multi_gpu

    @property
    def learner_uid(self) -> str:
        """Identifies this worker in logs."""
        return self._learner_uid

    @property
    def rank(self) -> int:
        """This process's rank; 0 unless ``multi_gpu``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks; 1 unless ``multi_gpu``."""
        return self._world_size

    def start(self) -> None:
        """Start to answer the coordinator; with ``multi_gpu``, join the process group first."""
        super().start()
        if self._multi_gpu and not torch.distributed.is_initialized():
            self._process_group.enter_context(data_parallel())
            self._rank, self._world_size = rank_and_world_size()

    def close(self) -> None:
        """Abandon the current task, leave the process group, and end; may be called twice."""
        try:
            super().close()
        finally:
            self._process_group.close()

    @property
    def hooks4call(self) -> list[LearnerHook]:
        """New hooks that send the policy and the progress; :meth:`_create_learner` adds them."""
        infos = LearnInfos()
        freq = {"send_policy_freq": self._cfg.send_policy_freq}
        return [
            SendPolicyHook("send_policy", 100, position="before_run", ext_args=freq),
            SendPolicyHook("send_policy", 100, position="after_iter", ext_args=freq),
            SendLearnInfoHook("send_learn_info", 100, position="after_iter", infos=infos),
            SendLearnInfoHook("send_learn_info", 100, position="after_run", infos=infos),
        ]

    def send_policy(self, state_dict: Mapping[str, Any]) -> None:
        """Publish the policy's state, a copy of its weights with their ``iter``."""
        job = self._current()
        # A later attempt begins with fewer iterations.
        version = (job.attempt << 40) + int(state_dict["iter"])
        self.store.publish(job.task_info["policy_id"], version, state_dict)

    @also_named(learn_info="info")
    def send_learn_info(self, info: Mapping[str, Any]) -> None:
        """Report progress; what the coordinator has not taken yet is merged with it."""
        job = self._current()
        with self._changed:
            job.infos.add(info)
            self._changed.notify_all()

    def get_data(self, batch_size: int) -> list[Callable[[], Any]]:
        """Demand samples from the coordinator, and wait for exactly as many.

        The samples are read here, because the coordinator may delete them once the next batch is
        demanded. Those that the store has lost are replaced.

        Args:
            batch_size: the number of samples.

        Returns:
            Partials of :func:`load_data_fn`, one for each sample.

        Raises:
            LoaderClosed: when the task is closed.
        """
        job = self._current()
        loads: list[Callable[[], Any]] = []
        lost: list[str] = []
        while len(loads) < batch_size:
            for meta in self._demand(job, batch_size - len(loads), tuple(lost)):
                ref = meta.get("object_ref", meta["data_id"])
                try:
                    read = {ref: self.store.get(ref)}
                except StepDataLost:
                    lost.append(meta["data_id"])
                else:
                    loads.append(partial(load_data_fn, ref, meta, read.__getitem__))
        return loads

    def _demand(
        self, job: _LearnerJob, batch_size: int, lost: tuple[str, ...]
    ) -> Sequence[Mapping[str, Any]]:
        # The loader begins before the learner is complete.
        train_iter = 0 if job.learner is None else job.learner.train_iter
        ids = job.ids
        with self._changed:
            job.demand = DataDemand(
                ids["task_id"], job.attempt, job.n_demands, ids["buffer_id"], batch_size,
                train_iter, lost,
            )  # fmt: skip
            job.n_demands += 1
            self._changed.notify_all()
            data: Sequence[Mapping[str, Any]] | None = job.queue.take(None)
            job.demand = None
            if data is None:
                raise LoaderClosed(f"the task {ids['task_id']} is closed")
        if len(data) != batch_size:
            raise ConfigError(
                f"the learner demanded {batch_size} samples and got {len(data)}; the coordinator "
                "has to send them together"
            )
        return data

    def deal_with_resource(self) -> dict[str, int]:
        """Return how many GPUs and CPUs the worker has: by default one GPU for each rank."""
        return {"gpu": self._world_size, "cpu": 0, **self._cfg.resource}

    def deal_with_learner_start(
        self, task_info: Mapping[str, Any], attempt: int = 0
    ) -> dict[str, Any]:
        """Start a task: create its learner, and let it run, both on a thread of its own.

        A later attempt continues from the newest checkpoint of the task's policy, if this worker
        can read the folder where the earlier attempt saved it.

        Args:
            task_info: ``task_id``, ``policy_id``, ``buffer_id``, ``learner_cfg`` and ``policy``.
            attempt: which attempt at the task this is.

        Returns:
            ``{'message': …}``.

        Raises:
            TaskFail: if the worker is busy.
            ConfigError: if ``task_info`` is incomplete.
        """
        queue = FairQueue[Sequence[Mapping[str, Any]]](capacity=1, changed=self._changed)
        return self._begin(_LearnerJob(task_info, attempt, queue))

    def deal_with_get_data(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Return the learner's open demand for data; until it is answered, the same again.

        Args:
            timeout_s: how long to wait for a demand.

        Returns:
            ``task_id, buffer_id, batch_size, cur_learner_iter``, ``seq`` and ``lost`` (see
            :class:`~dmiddleware.worker.coordinator.messages.DataDemand`); or ``{'pending': True}``
            with the ids if none comes in time. When the learner has reported progress, it
            returns at once, with that as ``info``.

        Raises:
            TaskFail: if the task has failed, with its traceback; or if the worker is idle.
        """
        job = self._current()
        with self._changed:
            self._wait(
                lambda: bool(job.demand or job.infos or job.failure or job.closing), timeout_s
            )
            answer: dict[str, Any] = {**job.ids}
            if job.infos:
                answer["info"] = job.take_info()
            demand = job.demand
        if demand is None:
            if "info" not in answer and not job.closing:
                self._raise_failure(job)
            return {"pending": True, **answer}
        return {
            "batch_size": demand.batch_size,
            "cur_learner_iter": demand.cur_learner_iter,
            "seq": demand.seq,
            "lost": list(demand.lost),
            **answer,
        }

    def deal_with_learner_learn(
        self, data: Sequence[Mapping[str, Any]], timeout_s: float = WAIT_S
    ) -> dict[str, Any]:
        """Hand the demanded samples over, and wait until the learner has something to report.

        Args:
            data: the metadata of each sample.
            timeout_s: how long to wait.

        Returns:
            ``{'info': …, 'task_id': …, 'buffer_id': …}``; ``info`` is None if the learner demands
            more data, or reports nothing in time.

        Raises:
            TaskFail: if the task has failed, with its traceback; or if the worker is idle, or the
                learner has not demanded data.
        """
        job = self._current()
        with self._changed:
            if job.demand is None:
                self._raise_failure(job)
                raise TaskFail(job.ids, "the learner has not demanded data; ask for its demand")
            job.queue.put(data)
            job.demand = None
            self._wait(
                lambda: bool(job.demand or job.infos or job.failure or job.closing), timeout_s
            )
            info = job.take_info() if job.infos else None
        if info is None and not job.closing:
            self._raise_failure(job)
        return {"info": info, **job.ids}

    def deal_with_learner_close(self, timeout_s: float | None = None) -> dict[str, Any]:
        """End the task after the update in hand, and return its ids.

        Args:
            timeout_s: how long to wait for its end; None: as long as the config's ``timeout_s``.

        Returns:
            ``task_id, buffer_id``, and ``info`` if the learner has reported since; or
            ``{'pending': True}`` with the ids if it has not ended in time; call again then.

        Raises:
            TaskFail: if the task has failed, with its traceback; or if the worker is idle.
        """
        job = self._current()
        if not self._end(job, timeout_s):
            return {"pending": True, **job.ids}
        answer: dict[str, Any] = {**job.ids}
        if job.infos:
            answer["info"] = job.take_info()
        return answer

    def _handlers(self) -> dict[str, Handler]:
        return {
            "resource": self._stated,
            "learner_start_task": lambda asked: self.deal_with_learner_start(
                asked.task_info, asked.attempt
            ),
            "learner_get_data_task": lambda asked: self.deal_with_get_data(
                min(WAIT_S, asked.timeout_s)
            ),
            "learner_learn_task": self._learn,
            "learner_close_task": lambda asked: self.deal_with_learner_close(asked.timeout_s),
        }

    def _learn(self, request: Learn) -> dict[str, Any]:
        job = self._current()
        demand = job.demand
        if request.seq is not None and (demand is None or request.seq != demand.seq):
            return {"info": None, **job.ids}  # for another demand
        return self.deal_with_learner_learn(request.data, min(WAIT_S, request.timeout_s))

    def _put_back(self, name: str, job: _LearnerJob, result: dict[str, Any]) -> None:
        self._report_again(job, result.get("info"))

    def _repeat(self, job: _LearnerJob) -> None:
        if job.last_info is not None and not job.infos:
            # Without the priorities, which may be newer by now.
            self._report_again(job, {**job.last_info, "priority_info": {}})

    def _report_again(self, job: _LearnerJob, info: Mapping[str, Any] | None) -> None:
        if info:
            with self._changed:
                job.infos.put_back(info)
                self._changed.notify_all()

    def _create_learner(self, task_info: Mapping[str, Any]) -> BaseLearner:
        """Create the learner of a task with its policy, connected to this worker, and its loader.

        Args:
            task_info: ``learner_cfg``, with ``exp_name``, and ``policy``; in a coordinator's task
                also ``policy_id``.
        """
        cfg = EasyDict(task_info["learner_cfg"])
        exp_name = cfg.pop("exp_name", "default_experiment")
        learner = create_learner(cfg, dist_info=(self._rank, self._world_size), exp_name=exp_name)
        for name in ("get_data", "send_policy", "send_learn_info"):
            setattr(learner, name, getattr(self, name))
        learner.policy_id = task_info.get("policy_id", "")
        learner.policy = create_policy(EasyDict(task_info["policy"]), enable_field=["learn"])
        learner.setup_dataloader()
        return learner

    def _work(self, job: _LearnerJob) -> None:
        learner = self._create_learner(job.task_info)
        if job.attempt and not learner.resume():
            learner.info("found no checkpoint of an earlier attempt; training starts from scratch")
        for hook in self.hooks4call:
            learner.register_hook(hook)
        with self._changed:
            job.learner = learner
        try:
            if not job.closing:
                learner.start()
        finally:
            learner.close()

    def _stop_work(self, job: _LearnerJob) -> None:
        if job.learner is not None:
            job.learner.close()


def load_data_fn(path: str, meta: Mapping[str, Any], decompressor: Callable[[str], Any]) -> Any:
    """Load one sample.

    Args:
        path: the reference of the step data.
        meta: its metadata, which is added to each of its steps. With ``unroll_split_begin``, only
            ``unroll_len`` steps from there on are taken.
        decompressor: reads and decompresses the data of a reference, as ``Store.get`` does.

    Returns:
        A step, a dictionary; or a list of them, if the data is one.

    Raises:
        StepDataLost: if the data is missing or damaged.
    """
    data = decompressor(path)
    if "unroll_split_begin" in meta:
        begin, length = meta["unroll_split_begin"], meta.get("unroll_len", 1)
        data = data[begin] if length == 1 else data[begin : begin + length]
    if isinstance(data, list):
        return [{**step, **meta} for step in data]
    return {**data, **meta}


COMM_LEARNER_REGISTRY: Registry[Callable[..., BaseCommLearner]] = Registry("comm learner")
"""Registered communicating learners."""


def create_comm_learner(cfg: Mapping[str, Any]) -> BaseCommLearner:
    """Build the communicating learner that ``cfg.type`` names: ``router`` or ``flask_fs``.

    Args:
        cfg: the worker's config, with ``type``.

    Raises:
        ConfigError: if ``cfg`` has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_comm_cls(COMM_LEARNER_REGISTRY, cfg, "a communicating learner")(cfg)
