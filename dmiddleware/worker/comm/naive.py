"""Workers that make everything up, for trying a coordinator without envs and networks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.http import Slave
from dmiddleware.worker.errors import TaskFail

__all__ = ["NaiveCollector", "NaiveLearner"]

_REQUESTS_PER_TASK: Final = 20
_STEPS_PER_TASK: Final = 314
_BATCH_SIZE: Final = 2
_STEPS_BEFORE_DONE: Final = 5
_BUFFER_KEYS: Final = ("replay_buffer_idx", "replay_unique_id")


class _NaiveWorker(Slave):
    """Answers the tasks of a coordinator with made-up results.

    Args:
        host: the address to listen on; without a key it must be loopback.
        port: the port; 0 lets the system choose one.
        prefix: the coordinator's ``path_data``; empty means the working directory.
        key: the run's key; may be empty on loopback.
        run_id: the run, which is also the folder below ``prefix``.
    """

    def __init__(
        self, host: str, port: int, prefix: str = "", *, key: bytes = b"", run_id: str = "run"
    ) -> None:
        super().__init__(host, port, key=key, run_id=run_id)
        self._store = FileStore(prefix or ".", prefix or ".", run_id, compressor="none")
        self._task_info: Mapping[str, Any] = {}
        self._n_requests = 0

    def _process_task(self, task: dict[str, Any]) -> Mapping[str, Any]:
        tasks = self._tasks()
        name = task.get("name")
        if name not in tasks:
            raise TaskFail({}, f"unknown task {name!r}; this worker does {', '.join(tasks)}")
        return tasks[name](task)

    def _tasks(self) -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        """Return what does each task, by name."""
        return {"resource": lambda task: {"gpu": 1, "cpu": 20}}

    def _start_task(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self._task_info = task.get("task_info") or {}
        self._n_requests = 0
        return {"message": f"the task {self._ids()['task_id']} has started"}

    def _ids(self) -> dict[str, Any]:
        if not self._task_info:
            raise TaskFail({}, "this worker runs no task; start one with its task_info first")
        return {key: self._task_info.get(key, "") for key in ("task_id", "buffer_id")}


class NaiveCollector(_NaiveWorker):
    """Stores a made-up transition at each request for data, and is done at the twentieth.

    Args:
        host: the address to listen on; without a key it must be loopback.
        port: the port; 0 lets the system choose one.
        prefix: the coordinator's ``path_data``; empty means the working directory.
        key: the run's key; may be empty on loopback.
        run_id: the run, which is also the folder below ``prefix``.
    """

    def _tasks(self) -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        return {
            **super()._tasks(),
            "collector_start_task": self._start_task,
            "collector_data_task": lambda task: self._report(),
            "collector_close_task": lambda task: self._finish_info(),
        }

    def _report(self) -> dict[str, Any]:
        ids = self._ids()
        self._n_requests += 1
        if self._n_requests >= _REQUESTS_PER_TASK:
            return {
                **ids, "collector_done": True, "cur_episode": 1, "cur_sample": _STEPS_PER_TASK,
                "cur_step": _STEPS_PER_TASK, "eval_flag": False, "get_info_time": time.time(),
            }  # fmt: skip
        data_id = f"env_0_{uuid.uuid4()}"
        ref = self._store.put(data_id, [self._get_timestep()])
        return {
            **ids, "data_id": data_id, "object_ref": ref, "env_id": 0, "policy_iter": 0,
            "unroll_len": 1, "compressor": "none", "get_data_time": time.time(), "priority": 1.0,
            "eval_flag": False, "cur_episode": 0, "cur_sample": self._n_requests,
            "cur_step": self._n_requests,
        }  # fmt: skip

    def _get_timestep(self) -> dict[str, Any]:
        """Return a made-up transition: ``obs, next_obs`` ``[4]``, ``action, reward`` ``[1]``."""
        return {
            "obs": torch.randn(4),
            "next_obs": torch.randn(4),
            "action": torch.randint(0, 2, (1,)),
            "reward": torch.randn(1),
            "done": False,
        }

    def _finish_info(self) -> dict[str, Any]:
        ids = self._ids()
        setting = self._task_info.get("collector_cfg", {}).get("collect_setting", {})
        self._task_info = {}
        return {
            "task_id": ids["task_id"], "eval_flag": False, "env_num": 1, "duration": 1.0,
            "train_iter": 0, "collector_done": True, "predefined_episode_count": 1,
            "real_episode_count": 1, "step_count": _STEPS_PER_TASK,
            "sample_count": _STEPS_PER_TASK, "avg_time_per_episode": 1.0,
            "avg_time_per_step": 1.0 / _STEPS_PER_TASK,
            "avg_time_per_train_sample": 1.0 / _STEPS_PER_TASK,
            "avg_step_per_episode": float(_STEPS_PER_TASK),
            "avg_sample_per_episode": float(_STEPS_PER_TASK), "reward_mean": 0.0,
            "reward_std": 0.0, "reward_raw": [0.0], "finish_time": time.time(),
            "collect_setting": setting,
        }  # fmt: skip


class NaiveLearner(_NaiveWorker):
    """Demands two samples at a time, counts, and is done after more than five steps.

    Args:
        host: the address to listen on; without a key it must be loopback.
        port: the port; 0 lets the system choose one.
        prefix: the coordinator's ``path_data``; empty means the working directory.
        key: the run's key; may be empty on loopback.
        run_id: the run, which is also the folder below ``prefix``.
    """

    def _tasks(self) -> dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]:
        return {
            **super()._tasks(),
            "learner_start_task": self._start_task,
            "learner_get_data_task": lambda task: self._demand(),
            "learner_learn_task": lambda task: self._learn(task.get("data", [])),
            "learner_close_task": lambda task: self._close(),
        }

    def _demand(self) -> dict[str, Any]:
        return {**self._ids(), "batch_size": _BATCH_SIZE, "cur_learner_iter": self._n_requests}

    def _learn(self, data: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        ids = self._ids()
        self._n_requests += 1
        known = [key for key in _BUFFER_KEYS if all(key in meta for meta in data)]
        info = {
            "learner_step": self._n_requests,
            "learner_done": self._n_requests > _STEPS_BEFORE_DONE,
            "priority_info": {
                **{key: [meta[key] for meta in data] for key in known},
                "priority": [meta.get("priority", 1.0) for meta in data],
            },
            **ids,
        }
        return {"info": info, **ids}

    def _close(self) -> dict[str, Any]:
        ids = self._ids()
        self._task_info = {}
        return ids
