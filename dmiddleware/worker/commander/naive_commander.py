"""A commander with fixed tasks, for trying a coordinator and its workers."""

from __future__ import annotations

from dmiddleware.worker.commander.base import COMMANDER_REGISTRY, BaseParallelCommander, Task

__all__ = ["NaiveCommander"]

_BUFFER_ID = "buffer_naive"
_POLICY_ID = "policy_naive"


@COMMANDER_REGISTRY.register("naive")
class NaiveCommander(BaseParallelCommander):
    """Hands out the same tasks again and again, and never ends the training.

    All tasks share one buffer and one policy. Collectors explore with ``eps`` 0.9.

    Args:
        cfg: the main config; see :class:`BaseParallelCommander`.
        clock: returns the time in seconds.
    """

    def get_collector_task(self) -> Task | None:
        """Return a task that collects with ``eps`` 0.9, while there is space."""
        if self._collector_task_space.is_full:
            return None
        return self._start_collector_task(
            task_id=f"collector_task_{self._n_collector_tasks}",
            buffer_id=_BUFFER_ID,
            policy_update_path=_POLICY_ID,
            collect_setting={"eps": 0.9},
            eval_flag=False,
        )

    def get_learner_task(self) -> Task | None:
        """Return a task for the one policy, while there is space."""
        if self._learner_task_space.is_full:
            return None
        return self._start_learner_task(
            task_id=f"learner_task_{self._n_learner_tasks}",
            policy_id=_POLICY_ID,
            buffer_id=_BUFFER_ID,
        )
