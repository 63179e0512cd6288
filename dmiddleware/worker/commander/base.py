"""The interface of parallel commanders, which decide what the coordinator's workers do."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from easydict import EasyDict

from dmiddleware.classic.config import Configurable, Option, positive, whole
from dmiddleware.errors import ConfigError
from dmiddleware.registry import Registry
from dmiddleware.seeding import derive_seed
from dmiddleware.worker.serial_worker import get_worker_cls

__all__ = [
    "COMMANDER_REGISTRY",
    "BaseParallelCommander",
    "TaskSpace",
    "create_parallel_commander",
    "get_parallel_commander_cls",
]

Task = dict[str, Any]
"""A task dictionary, as :class:`BaseParallelCommander` describes."""


class TaskSpace:
    """Counts running tasks, up to a limit.

    Args:
        size: how many tasks may run at once.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._running = 0

    @property
    def is_full(self) -> bool:
        """Whether no further task may start."""
        return self._running >= self._size

    def take(self) -> None:
        """Count a task that starts."""
        self._running += 1

    def give_back(self) -> None:
        """Count a task that has ended."""
        self._running = max(0, self._running - 1)

    def resize(self, change: int) -> None:
        """Change the size, to 0 at least."""
        self._size = max(0, self._size + change)

    def state_dict(self) -> dict[str, int]:
        """Return both counts."""
        return {"size": self._size, "running": self._running}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._size, self._running = state["size"], state["running"]


class BaseParallelCommander(Configurable, ABC):
    """Decides which tasks the coordinator's workers run, and when the training ends.

    The coordinator asks for tasks, and reports how they progress and end. It calls all methods
    under its lock. Each task takes one place in the task space of its kind; finishing or failing
    gives it back. A task that the coordinator starts again, after a worker was lost, keeps its
    place, and is reported under the id that the commander gave it.

    Task dictionaries are plain. A collector's is ``{task_id, buffer_id, collector_cfg}``, where
    ``collector_cfg`` is the configured collector with ``collect_setting``, ``eval_flag``,
    ``policy``, ``policy_update_path``, ``env`` and ``exp_name``. A learner's is ``{task_id,
    policy_id, buffer_id, learner_cfg, replay_buffer_cfg, policy}``.

    Args:
        cfg: the main config: ``exp_name``, ``env`` and ``policy``. What differs from
            ``default_config()`` is in ``policy.other.commander``.
        clock: returns the time in seconds; it measures ``eval_interval``.

    Raises:
        ConfigError: for an unusable config.
    """

    config: ClassVar[dict[str, Any]] = {
        "collector_task_space": Option(1, whole, "collector tasks that may run at once"),
        "learner_task_space": Option(1, whole, "learner tasks that may run at once"),
        "eval_interval": Option(60.0, positive, "seconds between evaluations"),
    }

    def __init__(
        self, cfg: Mapping[str, Any], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._main = _checked_main(cfg)
        self._cfg = self.merged_config(_at(self._main, "policy.other.commander"))
        self._exp_name: str = self._main.exp_name
        self._clock = clock
        self._collector_task_space = TaskSpace(int(self._cfg.collector_task_space))
        self._learner_task_space = TaskSpace(int(self._cfg.learner_task_space))
        self._n_collector_tasks = 0
        self._n_learner_tasks = 0

    @abstractmethod
    def get_collector_task(self) -> Task | None:
        """Return a task for a collector; None: there is none now."""

    @abstractmethod
    def get_learner_task(self) -> Task | None:
        """Return a task for a learner; None: there is none now."""

    def judge_collector_finish(self, task_id: str, info: Mapping[str, Any]) -> bool:
        """Return whether a collector task is done, by the collector's progress."""
        return bool(info.get("collector_done", False))

    def judge_learner_finish(self, task_id: str, info: Mapping[str, Any]) -> bool:
        """Return whether a learner task is done, by the learner's progress."""
        return bool(info.get("learner_done", False))

    def finish_collector_task(self, task_id: str, result: Mapping[str, Any]) -> bool:
        """Take the result of a collector task; return True to end the training."""
        self._collector_task_space.give_back()
        return False

    def finish_learner_task(self, task_id: str, result: Mapping[str, Any]) -> str | None:
        """Take the result of a learner task; return the id of the buffer to close, or None."""
        self._learner_task_space.give_back()
        return result.get("buffer_id")

    def notify_fail_collector_task(self, task: Mapping[str, Any]) -> None:
        """Take note that a collector task has failed or expired for good."""
        self._collector_task_space.give_back()

    def notify_fail_learner_task(self, task: Mapping[str, Any]) -> None:
        """Take note that a learner task has failed or expired for good."""
        self._learner_task_space.give_back()

    def update_learner_info(self, task_id: str, info: Mapping[str, Any]) -> None:
        """Take a learner's progress: ``learner_step``, ``priority_info`` and more."""

    def increase_collector_task_space(self) -> None:
        """Let one more collector task run; a collector has joined."""
        self._collector_task_space.resize(1)

    def decrease_collector_task_space(self) -> None:
        """Let one collector task fewer run, from when enough have ended; a collector has left."""
        self._collector_task_space.resize(-1)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a commander in another process needs to continue, as plain values."""
        return {
            "collector_task_space": self._collector_task_space.state_dict(),
            "learner_task_space": self._learner_task_space.state_dict(),
            "n_collector_tasks": self._n_collector_tasks,
            "n_learner_tasks": self._n_learner_tasks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._collector_task_space.load_state_dict(state["collector_task_space"])
        self._learner_task_space.load_state_dict(state["learner_task_space"])
        self._n_collector_tasks = state["n_collector_tasks"]
        self._n_learner_tasks = state["n_learner_tasks"]

    def close(self) -> None:
        """Close what the commander has opened; may be called twice."""

    def _start_collector_task(
        self,
        *,
        task_id: str,
        buffer_id: str,
        policy_update_path: Any,
        collect_setting: Any,
        eval_flag: bool,
    ) -> Task:
        """Take a place, and return the collector's task."""
        self._collector_task_space.take()
        self._n_collector_tasks += 1
        return {
            "task_id": task_id,
            "buffer_id": buffer_id,
            "collector_cfg": {
                **_plain(_at(self._main, "policy.collect.collector")),
                "collect_setting": collect_setting,
                "eval_flag": eval_flag,
                "policy": _plain(self._main.policy),
                "policy_update_path": policy_update_path,
                "env": self._env_cfg(eval_flag),
                "exp_name": self._exp_name,
            },
        }

    def _start_learner_task(self, *, task_id: str, policy_id: str, buffer_id: str) -> Task:
        """Take a place, and return the learner's task."""
        self._learner_task_space.take()
        self._n_learner_tasks += 1
        learner_cfg = _plain(_at(self._main, "policy.learn.learner"))
        return {
            "task_id": task_id,
            "policy_id": policy_id,
            "buffer_id": buffer_id,
            "learner_cfg": {**learner_cfg, "exp_name": self._exp_name},
            "replay_buffer_cfg": _plain(_at(self._main, "policy.other.replay_buffer")),
            "policy": _plain(self._main.policy),
        }

    def _env_cfg(self, eval_flag: bool) -> dict[str, Any]:
        """Return the env's config with ``env_num``, ``manager.episode_num`` and a seed of its own.

        ``collector_env_num`` and ``collector_episode_num`` hold for collectors,
        ``evaluator_env_num`` and ``evaluator_episode_num`` (or ``n_evaluator_episode``, of all
        envs) for evaluators; likewise ``collector_id`` and ``evaluator_id``, if they play in
        different envs. Without them, ``env_num``, ``manager.episode_num`` and ``id`` stay.
        """
        env: dict[str, Any] = _plain(self._main.env)
        kind = "evaluator" if eval_flag else "collector"
        env["env_num"] = int(env.get(f"{kind}_env_num", env.get("env_num", 1)))
        if f"{kind}_id" in env:
            env["id"] = env[f"{kind}_id"]
        manager = env["manager"] = dict(env.get("manager", {}))
        if f"{kind}_episode_num" in env:
            manager["episode_num"] = env[f"{kind}_episode_num"]
        elif eval_flag and "n_evaluator_episode" in env:
            manager["episode_num"] = math.ceil(env["n_evaluator_episode"] / env["env_num"])
        if env.get("seed") is not None:
            # Otherwise all collectors would play the same episodes, again in each task.
            env["seed"] = derive_seed(env["seed"], kind, self._n_collector_tasks)
        return env


COMMANDER_REGISTRY: Registry[Callable[..., BaseParallelCommander]] = Registry("parallel commander")
"""Registered commanders; ``@COMMANDER_REGISTRY.register("mine")`` adds one."""


def get_parallel_commander_cls(cfg: Mapping[str, Any]) -> Callable[..., BaseParallelCommander]:
    """Return the class that ``cfg.policy.other.commander.type`` names.

    The modules of ``cfg.policy.other.commander.import_names`` are imported first.

    Args:
        cfg: the main config.

    Raises:
        ConfigError: if the commander has no ``type``.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    commander_cfg = _at(_checked_main(cfg), "policy.other.commander")
    return get_worker_cls(COMMANDER_REGISTRY, commander_cfg, "a parallel commander")


def create_parallel_commander(cfg: Mapping[str, Any], **kwargs: Any) -> BaseParallelCommander:
    """Build the commander that ``cfg.policy.other.commander.type`` names.

    Args:
        cfg: the main config: ``exp_name``, ``env`` and ``policy``.
        kwargs: passed to the class's constructor (``clock``).

    Raises:
        ConfigError: if the commander has no ``type``, or if the class rejects the config.
        RegistryError: if the name is not registered; the nearest names are listed.
    """
    return get_parallel_commander_cls(cfg)(cfg, **kwargs)


def _checked_main(cfg: Mapping[str, Any]) -> EasyDict:
    """Return a copy of the main config.

    Raises:
        ConfigError: if it is something else, such as the commander's own config.
    """
    if not isinstance(cfg, Mapping) or not isinstance(cfg.get("policy"), Mapping):
        raise ConfigError(
            "a parallel commander takes the main config, with the keys exp_name, env and policy; "
            f"its own settings are in policy.other.commander; got {cfg!r:.100}"
        )
    return EasyDict({"exp_name": "default_experiment", "env": {}, **_plain(cfg)})


def _at(cfg: Mapping[str, Any], path: str) -> Any:
    """Return the dictionary at a dotted path, empty if it is missing."""
    found: Any = cfg
    for key in path.split("."):
        found = found.get(key, {})
    return found


def _plain(value: Any) -> Any:
    """Return a deep copy of the dictionaries and lists of a config, without EasyDict."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
