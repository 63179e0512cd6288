"""The workers that a coordinator knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Worker", "WorkerState"]


class WorkerState(StrEnum):
    """The state of a worker; one that is gone is forgotten."""

    JOINING = "joining"
    """It has been asked for its resources and its task."""
    IDLE = "idle"
    """It can take a task."""
    BUSY = "busy"
    """It has a task, at least as an offer."""


@dataclass(slots=True)
class Worker:
    """A connected worker.

    Attributes:
        uid: its name on the link.
        kind: ``collector`` or ``learner``: the kind of tasks that it takes.
        since: when it entered its state, in seconds.
        asked_at: when it was last asked for its resources, in seconds.
        not_before: when it can be offered a task again, in seconds.
        state: the state.
        resource: how many of each resource it has.
        task_id: the task that it has.
        told_to_close: the unknown task that it was last asked to end, and when.
    """

    uid: str
    kind: str
    since: float
    asked_at: float
    not_before: float = 0.0
    state: WorkerState = WorkerState.JOINING
    resource: Mapping[str, int] = field(default_factory=dict)
    task_id: str = ""
    told_to_close: tuple[str, float] = ("", 0.0)

    def enter(self, state: WorkerState, now: float, task_id: str = "") -> None:
        """Enter a state."""
        self.state, self.since, self.task_id = state, now, task_id
