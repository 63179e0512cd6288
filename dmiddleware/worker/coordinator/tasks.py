"""The coordinator's tasks, and the states that they go through."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from dmiddleware.worker.coordinator.messages import DataDemand, LearnData

__all__ = ["SeenNumbers", "Task", "TaskState"]

_MOST_GAPS: Final = 4096


class TaskState(StrEnum):
    """The state of a task.

    A task whose worker is lost has no state of its own: it is queued again, or it has failed.
    """

    QUEUED = "queued"
    """Waits for a worker, and a collector task also for its buffer."""
    OFFERED = "offered"
    """A worker has been asked to take it."""
    RUNNING = "running"
    """A worker has begun it."""
    FINISHING = "finishing"
    """The worker has been asked to end it."""
    FINISHED = "finished"
    """It has ended with a result."""
    FAILED = "failed"
    """It was lost as often as is allowed, or nobody needs it any more."""
    EXPIRED = "expired"
    """No worker took it in time."""


class SeenNumbers:
    """The message numbers that have arrived, in whatever order; counts from 0.

    The memory is bounded: once 4,096 numbers have arrived after a gap, the gap counts as seen.

    Args:
        upto: all numbers below it have arrived.
        beyond: numbers above it that have arrived.
    """

    def __init__(self, upto: int = 0, beyond: Iterable[int] = ()) -> None:
        self._upto = upto
        self._beyond = set(beyond)

    def add(self, number: int) -> bool:
        """Note a number; return whether it is new."""
        if number < self._upto or number in self._beyond:
            return False
        self._beyond.add(number)
        if len(self._beyond) > _MOST_GAPS:
            self._upto = min(self._beyond)
        while self._upto in self._beyond:
            self._beyond.remove(self._upto)
            self._upto += 1
        return True

    def state(self) -> list[int]:
        """Return the arguments that build an equal object, as one list."""
        return [self._upto, *sorted(self._beyond)]


@dataclass(slots=True)
class Task:
    """A task of the commander, and its worker.

    Attributes:
        origin: the commander's id.
        task_id: the id of this attempt, by which the worker knows the task.
        kind: ``collector`` or ``learner``.
        task_info: the commander's task dictionary.
        queued_at: when this attempt was queued first, in seconds.
        since: when the task entered its state, in seconds.
        heard_at: when the worker last sent something about the task, in seconds.
        attempt: counts from 1; a new one begins when the worker is lost.
        state: the state.
        worker: the worker's uid; empty if there is none.
        reason: why the task was lost, has failed or has expired.
        seen: the numbers of the data and reports that have arrived in this attempt.
        last_demand: the number of the learner's last demand.
        demand: the demand that waits for data.
        answer: what the last answered demand got, to be sent again if it is repeated.
        leased: the ids of the samples that the learner may still read.
    """

    origin: str
    task_id: str
    kind: str
    task_info: Mapping[str, Any]
    queued_at: float
    since: float
    heard_at: float = 0.0
    attempt: int = 1
    state: TaskState = TaskState.QUEUED
    worker: str = ""
    reason: str = ""
    seen: SeenNumbers = field(default_factory=SeenNumbers)
    last_demand: int = -1
    demand: DataDemand | None = None
    answer: LearnData | None = None
    leased: list[str] = field(default_factory=list)

    @property
    def buffer_id(self) -> str | None:
        """The buffer that the task writes or reads; None for a task without one."""
        return self.task_info.get("buffer_id")

    def enter(self, state: TaskState, now: float) -> None:
        """Enter a state."""
        self.state, self.since = state, now

    def renew(self, task_id: str) -> None:
        """Forget the worker, and what it has sent and received."""
        self.task_id, self.worker = task_id, ""
        self.seen, self.last_demand, self.demand, self.answer = SeenNumbers(), -1, None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the task as plain values, without times and without its worker."""
        return {
            "origin": self.origin,
            "task_id": self.task_id,
            "kind": self.kind,
            "task_info": dict(self.task_info),
            "attempt": self.attempt,
            "state": str(self.state),
            "reason": self.reason,
            "seen": self.seen.state(),
            "last_demand": self.last_demand,
            "demand": None if self.demand is None else dataclasses.asdict(self.demand),
            "answer": None if self.answer is None else dataclasses.asdict(self.answer),
            "leased": list(self.leased),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], now: float) -> Task:
        """Return the task that :meth:`state_dict` described; its times start now."""
        values = dict(state)
        upto, *beyond = values.pop("seen")
        demand, answer = values.pop("demand"), values.pop("answer")
        return cls(
            **{**values, "state": TaskState(values["state"])},
            queued_at=now,
            since=now,
            heard_at=now,
            seen=SeenNumbers(upto, beyond),
            demand=None if demand is None else DataDemand(**demand),
            answer=None if answer is None else LearnData(**answer),
        )
