"""What the core asks the coordinator to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dmiddleware.worker.coordinator.messages import LearnInfo, Message, StepDataReady
from dmiddleware.worker.coordinator.tasks import Task

__all__ = [
    "Action",
    "CloseBuffer",
    "Collected",
    "CollectorReported",
    "Demanded",
    "Discard",
    "Ended",
    "LearnerReported",
    "Note",
    "OpenBuffer",
    "Release",
    "Remove",
    "Send",
    "WorkersChanged",
]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a worker."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class OpenBuffer:
    """Create the buffer of a learner task, unless it exists."""

    buffer_id: str
    task: Task


@dataclass(frozen=True, slots=True)
class CloseBuffer:
    """Close a buffer; no task uses it any more."""

    buffer_id: str


@dataclass(frozen=True, slots=True)
class Collected:
    """Push the step data that a collector has announced."""

    message: StepDataReady


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete step data that came too late or twice, unless a buffer refers to it."""

    message: StepDataReady


@dataclass(frozen=True, slots=True)
class CollectorReported:
    """Judge a collector task by its progress."""

    task_id: str
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LearnerReported:
    """Update the buffer and judge a learner task by its progress."""

    message: LearnInfo


@dataclass(frozen=True, slots=True)
class Demanded:
    """Draw a batch for a learner; if there is too little data, the demand stays parked."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """End the leases of samples that a learner no longer reads."""

    buffer_id: str
    data_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove samples from a buffer, because the store has lost them."""

    buffer_id: str
    data_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Report a task's end to the commander; ``task.state`` says which.

    Attributes:
        task: the task.
        result: the finish info of a finished task.
    """

    task: Task
    result: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """The number of collectors has changed."""

    n_collectors: int


@dataclass(frozen=True, slots=True)
class Note:
    """Write a line to the log."""

    text: str
    is_error: bool = False


Action: TypeAlias = (
    Send
    | OpenBuffer
    | CloseBuffer
    | Collected
    | Discard
    | CollectorReported
    | LearnerReported
    | Demanded
    | Release
    | Remove
    | Ended
    | WorkersChanged
    | Note
)
