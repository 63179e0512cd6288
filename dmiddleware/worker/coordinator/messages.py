"""What the coordinator's core and its workers tell each other.

All messages are plain values. Those about a task name the task and the attempt. Those of a worker
are also numbered: the core ignores a number that it has already seen, so a report may be repeated.
:mod:`dmiddleware.worker.coordinator.conversation` turns them into questions and answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = [
    "COLLECTOR",
    "LEARNER",
    "COORDINATOR",
    "Joined",
    "Left",
    "ResourceQuery",
    "Resources",
    "TaskOffer",
    "TaskStarted",
    "TaskRefused",
    "TaskClose",
    "TaskAlive",
    "TaskDone",
    "TaskFailed",
    "StepDataReady",
    "CollectorInfo",
    "DataDemand",
    "LearnData",
    "LearnInfo",
    "Message",
]

COLLECTOR, LEARNER, COORDINATOR = "collector", "learner", "coordinator"
"""The kinds of workers, which are also the kinds of tasks."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer has connected; the link reports it.

    Attributes:
        role: what the peer is: ``collector``, ``learner`` or ``coordinator``.
    """

    role: str


@dataclass(frozen=True, slots=True)
class Left:
    """A peer is gone; the link reports it.

    Attributes:
        reason: why, for the log.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class ResourceQuery:
    """The coordinator asks a worker for its resources and its task."""


@dataclass(frozen=True, slots=True)
class Resources:
    """A worker's reply to :class:`ResourceQuery`.

    Attributes:
        resource: how many of each the worker has: ``{'gpu': 1, 'cpu': 20}``.
        task_id: the task that it runs; empty if it runs none.
        attempt: the attempt of that task.
    """

    resource: Mapping[str, int]
    task_id: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class TaskOffer:
    """The coordinator offers a task to an idle worker.

    Attributes:
        kind: ``collector`` or ``learner``.
        task_info: the commander's task dictionary.
    """

    task_id: str
    attempt: int
    kind: str
    task_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """The worker has started the task."""

    task_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskRefused:
    """The worker does not take the task.

    Attributes:
        reason: why, for the log.
    """

    task_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class TaskClose:
    """The coordinator asks the worker to end the task in order."""

    task_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskAlive:
    """The worker still runs the task; sent when it has had nothing else to send for a while."""

    task_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskDone:
    """The task has ended in order.

    Attributes:
        result: the finish info of a collector or a learner.
    """

    task_id: str
    attempt: int
    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task has failed.

    Attributes:
        message: the traceback of the worker's error.
    """

    task_id: str
    attempt: int
    message: str


@dataclass(frozen=True, slots=True)
class StepDataReady:
    """A collector has stored step data.

    Attributes:
        seq: counts what this attempt has sent, from 0; -1 if the worker does not number it.
        data_id: the id of the data, which is also its name in the store.
        data: the metadata; ``object_ref`` is the reference in the store.
    """

    task_id: str
    attempt: int
    seq: int
    buffer_id: str
    data_id: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CollectorInfo:
    """A collector reports its progress.

    Attributes:
        seq: counts what this attempt has sent, from 0; -1 if the worker does not number it.
        info: counts and ``collector_done``.
    """

    task_id: str
    attempt: int
    seq: int
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataDemand:
    """A learner asks for a batch; demand ``n + 1`` also says that batch ``n`` is no longer needed.

    A demand with ``lost`` samples asks for others in their place: the coordinator forgets the lost
    ones, and the rest of the batch is needed until the next demand without ``lost``.

    Attributes:
        seq: counts the demands of this attempt, from 0.
        batch_size: number of samples, which arrive together.
        lost: ids of samples of the last batch that the store no longer has.
    """

    task_id: str
    attempt: int
    seq: int
    buffer_id: str
    batch_size: int
    cur_learner_iter: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LearnData:
    """The coordinator answers a :class:`DataDemand` of the same number.

    Attributes:
        data: the metadata of each sample.
    """

    task_id: str
    attempt: int
    seq: int
    data: tuple[Mapping[str, Any], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class LearnInfo:
    """A learner reports its progress.

    Attributes:
        seq: counts the reports of this attempt, from 0; -1 if the number is not known.
        info: ``learner_step``, ``priority_info``, ``learner_done``, …
    """

    task_id: str
    attempt: int
    seq: int
    buffer_id: str
    info: Mapping[str, Any]


Message: TypeAlias = (
    Joined
    | Left
    | ResourceQuery
    | Resources
    | TaskOffer
    | TaskStarted
    | TaskRefused
    | TaskClose
    | TaskAlive
    | TaskDone
    | TaskFailed
    | StepDataReady
    | CollectorInfo
    | DataDemand
    | LearnData
    | LearnInfo
)
