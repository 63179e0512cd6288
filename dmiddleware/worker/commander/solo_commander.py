"""The commander of a training with one learner and any number of collectors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from dmiddleware.classic import (
    CommandMode,
    as_command_mode,
    create_policy,
    get_policy_cls,
)
from dmiddleware.classic.logs import LazyWriter, TextLog, log_folder, table
from dmiddleware.worker.commander.base import COMMANDER_REGISTRY, BaseParallelCommander, Task

__all__ = ["SoloCommander"]

_LOGGED: Final = {
    "episode_count": "real_episode_count",
    "step_count": "step_count",
    "avg_step_per_episode": "avg_step_per_episode",
    "avg_time_per_step": "avg_time_per_step",
    "avg_time_per_episode": "avg_time_per_episode",
    "reward_mean": "reward_mean",
    "reward_std": "reward_std",
}
"""The values of a collector's result that are logged, with their keys."""


@COMMANDER_REGISTRY.register("solo")
class SoloCommander(BaseParallelCommander):
    """Trains one policy: a learner task, and collector tasks for its buffer.

    Collector tasks start when a learner task has set the buffer and the policy. One of them
    evaluates every ``eval_interval`` seconds, the first one at once. The training ends when an
    evaluation's mean return reaches ``stop_value`` of the env. A policy with a command mode decides
    from the progress how to collect.

    Args:
        cfg: the main config; see :class:`BaseParallelCommander`.
        clock: returns the time in seconds.

    Raises:
        ConfigError: for an unusable config, also of the policy.
    """

    def __init__(
        self, cfg: Mapping[str, Any], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(cfg, clock=clock)
        self._policy = self._command_mode()
        self._stop_value = self._main.env.get("stop_value")
        self._buffer_id: str | None = None
        self._policy_id: str | None = None
        self._learner_info: dict[str, Any] = {"learner_step": 0}
        self._eval_value: float | None = None
        self._last_eval_s: float | None = None
        self._envstep = 0
        self._end_flag = False
        self._logger = TextLog.of_worker(__name__, self._exp_name, "commander")
        self._writer = LazyWriter(None, log_folder(self._exp_name, "commander"))

    def _command_mode(self) -> CommandMode | None:
        if not hasattr(get_policy_cls(self._main.policy), "command_mode"):
            return None
        policy = create_policy(self._main.policy, enable_field=["command"])
        return as_command_mode(policy, user=type(self).__name__)

    @property
    def envstep(self) -> int:
        """Env steps of all collector tasks that have ended."""
        return self._envstep

    def get_collector_task(self) -> Task | None:
        """Return a task that collects, or evaluates if that is due."""
        if self._end_flag or self._collector_task_space.is_full:
            return None
        if self._buffer_id is None or self._policy_id is None:
            return None
        eval_flag = self._is_eval_due()
        return self._start_collector_task(
            task_id=f"collector_task_{_uid()}",
            buffer_id=self._buffer_id,
            policy_update_path=self._policy_id,
            collect_setting=self._setting(eval_flag),
            eval_flag=eval_flag,
        )

    def get_learner_task(self) -> Task | None:
        """Return a task for a new policy and a new buffer."""
        if self._end_flag or self._learner_task_space.is_full:
            return None
        self._policy_id, self._buffer_id = f"policy_{_uid()}", f"buffer_{_uid()}"
        return self._start_learner_task(
            task_id=f"learner_task_{_uid()}",
            policy_id=self._policy_id,
            buffer_id=self._buffer_id,
        )

    def finish_collector_task(self, task_id: str, result: Mapping[str, Any]) -> bool:
        """Log a result; return True if it is that of an evaluation which reaches ``stop_value``."""
        super().finish_collector_task(task_id, result)
        eval_flag = bool(result.get("eval_flag", False))
        if not eval_flag:
            self._envstep += int(result.get("step_count", 0))
        self._log("evaluator" if eval_flag else "collector", result)
        if eval_flag and result.get("reward_mean") is not None:
            self._eval_value = float(result["reward_mean"])
            self._end_flag = self._end_flag or self._has_converged(self._eval_value)
        return self._end_flag

    def _has_converged(self, eval_value: float) -> bool:
        if self._stop_value is None or eval_value < self._stop_value:
            return False
        self._logger.info(
            "the mean return %.6g has reached stop_value %.6g", eval_value, self._stop_value
        )
        return True

    def finish_learner_task(self, task_id: str, result: Mapping[str, Any]) -> str | None:
        """Forget the learner's ids and progress; return its buffer, to be closed."""
        super().finish_learner_task(task_id, result)
        buffer_id: str | None = result.get("buffer_id", self._buffer_id)
        self._forget_learner(buffer_id)
        return buffer_id

    def notify_fail_learner_task(self, task: Mapping[str, Any]) -> None:
        """Forget the ids and the progress of a learner that has failed for good."""
        super().notify_fail_learner_task(task)
        self._forget_learner(task.get("buffer_id"))

    def update_learner_info(self, task_id: str, info: Mapping[str, Any]) -> None:
        """Take a learner's progress, from which the policy decides how to collect."""
        self._learner_info = {
            key: value for key, value in info.items() if key not in ("priority_info", "envstep")
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that a commander in another process needs to continue, as plain values."""
        last = self._last_eval_s
        return {
            **super().state_dict(),
            "buffer_id": self._buffer_id,
            "policy_id": self._policy_id,
            "learner_info": dict(self._learner_info),
            "eval_value": self._eval_value,
            "since_last_eval_s": None if last is None else self._clock() - last,
            "envstep": self._envstep,
            "end_flag": self._end_flag,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._buffer_id, self._policy_id = state["buffer_id"], state["policy_id"]
        self._learner_info = dict(state["learner_info"])
        self._eval_value = state["eval_value"]
        since = state["since_last_eval_s"]
        self._last_eval_s = None if since is None else self._clock() - since
        self._envstep = state["envstep"]
        self._end_flag = state["end_flag"]

    def close(self) -> None:
        """Close the TensorBoard writer; may be called twice."""
        self._writer.close()

    def _is_eval_due(self) -> bool:
        now = self._clock()
        if self._last_eval_s is not None and now - self._last_eval_s < self._cfg.eval_interval:
            return False
        self._last_eval_s = now
        return True

    def _setting(self, eval_flag: bool) -> dict[str, Any]:
        """Return the keyword arguments of the next forwards, by the policy's command mode."""
        if self._policy is None:
            return {}
        info = {
            **self._learner_info,
            "train_iter": self._learner_info.get("learner_step", 0),
            "envstep": self._envstep,
            "eval_value": self._eval_value,
        }
        mode = self._policy
        return mode.get_setting_eval(info) if eval_flag else mode.get_setting_collect(info)

    def _forget_learner(self, buffer_id: str | None) -> None:
        if buffer_id != self._buffer_id:
            return
        self._buffer_id = self._policy_id = self._last_eval_s = self._eval_value = None
        self._learner_info = {"learner_step": 0}

    def _log(self, kind: str, result: Mapping[str, Any]) -> None:
        values = {name: result[key] for name, key in _LOGGED.items() if result.get(key) is not None}
        train_iter = result.get("train_iter", 0)
        if isinstance(train_iter, list):  # one for each policy; the first one is the player's
            train_iter = train_iter[0]
        self._logger.info(
            "%s: iteration %s, env step %d\n%s", kind, train_iter, self._envstep, table(values)
        )
        for axis, at in (("iter", train_iter), ("step", self._envstep)):
            for name, value in values.items():
                self._writer.get().add_scalar(f"{kind}_{axis}/{name}", value, at)


def _uid() -> str:
    return uuid.uuid4().hex
