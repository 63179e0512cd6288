"""The conversation of the coordinator and its workers: it asks, and the worker answers.

The coordinator begins each exchange. Its requests are the tasks in :data:`TASKS`, whatever carries
them: HTTP, the router, or memory. A worker does one task at a time, so it is never sent more than
it takes. The answer to every task but ``resource`` also says that the answer before has arrived;
after ``resource``, which begins a conversation, the worker repeats it.

Nothing here owns a thread, a socket or a clock.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from dmiddleware.errors import DMiddlewareError, EncodeError
from dmiddleware.worker.coordinator.messages import (
    COLLECTOR,
    LEARNER,
    CollectorInfo,
    DataDemand,
    Joined,
    LearnData,
    LearnInfo,
    Left,
    Message,
    ResourceQuery,
    Resources,
    StepDataReady,
    TaskAlive,
    TaskClose,
    TaskDone,
    TaskFailed,
    TaskOffer,
    TaskRefused,
    TaskStarted,
)
from dmiddleware.worker.errors import TaskFail

__all__ = [
    "TASKS", "WAIT_S", "Answer", "Ask", "Conversation", "Conversations", "Learn", "Link",
    "NextReports", "Said", "read_task",
]  # fmt: skip

WAIT_S: Final = 30.0
"""How long a worker waits for something to report, in seconds, unless a request says otherwise."""

_POLL_S: Final = 1.0
"""How long the coordinator lets a worker wait, in seconds; the next request waits as long."""

_MOST_REPORTS: Final = 64
_MOST_MESSAGES: Final = 256
_AWAY_S: Final = 1.0
"""For this time, in seconds, a worker that was given up is not asked again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to a worker.

    Attributes:
        id: distinguishes it from all others; the answer has it too.
        name: the task, one of :data:`TASKS`.
        request: the fields of the task's request.
    """

    id: str
    name: str
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer to an :class:`Ask`.

    Attributes:
        id: that of the request.
        result: what the task has returned.
        failure: why the task has failed; empty if it has not.
    """

    id: str
    result: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""


Said: TypeAlias = Joined | Left | Ask | Answer
"""What a link delivers; it reports ``Joined`` and ``Left`` itself."""


class Link(Protocol):
    """Carries requests and answers between authenticated peers, reliably and in order.

    A peer that connects or disappears is reported by :meth:`receive`, as
    :class:`~dmiddleware.worker.coordinator.messages.Joined` and
    :class:`~dmiddleware.worker.coordinator.messages.Left` with the peer's uid.
    """

    @property
    def uid(self) -> str:
        """The name of this process among its peers."""
        ...

    def peers(self) -> Mapping[str, str]:
        """Return the role of each connected peer, by uid."""
        ...

    def send(self, peer: str, message: Ask | Answer) -> None:
        """Send to a peer; returns once the link has accepted it.

        Raises:
            DeliveryTimeout: if the peer is not connected, or the link is closed.
            EncodeError: if the content cannot be sent.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[str, Said] | None:
        """Return what has arrived next, and from whom; None after ``timeout_s`` seconds."""
        ...

    def close(self, deadline_s: float) -> None:
        """Deliver what was sent, within ``deadline_s`` seconds, and end; may be called twice."""
        ...


class StateResources(msgspec.Struct):
    """State the resources, and the task that runs."""


class StartTask(msgspec.Struct):
    """Start a task: the commander's task dictionary, and which attempt at it this is."""

    task_info: Mapping[str, Any]
    attempt: int = 0


class CloseTask(msgspec.Struct):
    """End the task in order; after ``timeout_s`` seconds, if any, answer that this is pending."""

    timeout_s: float | None = None


class NextReports(msgspec.Struct):
    """State up to ``most`` reports of a collector; wait ``timeout_s`` seconds for the first."""

    timeout_s: float = WAIT_S
    most: int = 1


class NextDemand(msgspec.Struct):
    """State a learner's open demand for data; wait ``timeout_s`` seconds for it."""

    timeout_s: float = WAIT_S


class Learn(msgspec.Struct):
    """Learn from samples, by their metadata, which were demanded with the number ``seq``."""

    data: list[dict[str, Any]]
    seq: int | None = None
    timeout_s: float = WAIT_S


class Stated(msgspec.Struct):
    """The resources, and the task that runs; an empty id if none does."""

    gpu: int = 0
    cpu: int = 0
    task_id: str = ""
    buffer_id: str = ""
    attempt: int = 0


class Told(msgspec.Struct):
    """An answer: whether the request is pending, and the progress of a learner, if any."""

    pending: bool = False
    info: dict[str, Any] | None = None


class Reports(Told):
    """A report of a collector, and those that came after it."""

    more: list[dict[str, Any]] = []


class Demand(Told):
    """A learner's demand for data."""

    batch_size: int | None = None
    cur_learner_iter: int = 0
    seq: int | None = None
    lost: tuple[str, ...] = ()


TASKS: Final[Mapping[str, tuple[type, type]]] = {
    "resource": (StateResources, Stated),
    "collector_start_task": (StartTask, Told),
    "collector_data_task": (NextReports, Reports),
    "collector_close_task": (CloseTask, Told),
    "learner_start_task": (StartTask, Told),
    "learner_get_data_task": (NextDemand, Demand),
    "learner_learn_task": (Learn, Told),
    "learner_close_task": (CloseTask, Told),
}
"""The tasks that workers do for the coordinator: the request and the answer of each, as far as they
are read; the result of a closed task and reports may have anything else."""


def read_task(task: Mapping[str, Any], known: Collection[str]) -> tuple[str, Any]:
    """Return the name and the request of a task.

    Args:
        task: ``name``, and the fields of the request.
        known: the tasks that the worker does.

    Raises:
        TaskFail: if the worker does not do it, or a field is missing or has a wrong type.
    """
    name = task.get("name")
    if not isinstance(name, str) or name not in known:
        raise TaskFail({}, f"unknown task {name!r}; this worker does {', '.join(known)}")
    try:
        return name, msgspec.convert(task, TASKS[name][0], strict=False)
    except msgspec.ValidationError as error:
        raise TaskFail({}, f"the task {name} cannot be read: {error}") from error


@dataclass(slots=True)
class _Running:
    """The task that a worker runs.

    Attributes:
        n_sent: the number of the next report; -1: unknown, as an earlier coordinator counted.
        last_demand: the number of the learner's last demand.
        is_numbered: whether the learner numbers its demands.
        is_waiting: whether the learner waits for data.
    """

    task_id: str
    attempt: int
    buffer_id: str
    n_sent: int = 0
    last_demand: int = -1
    is_numbered: bool = True
    is_waiting: bool = False

    @property
    def name(self) -> tuple[str, int]:
        return self.task_id, self.attempt

    def waits_for(self, seq: int) -> bool:
        """Return whether the learner waits for the data of a demand."""
        return self.is_waiting and seq == self.last_demand

    def number(self, report: dict[str, Any]) -> int:
        """Return the number of a report, which the worker states, or which is counted here."""
        counted = self.n_sent
        if counted >= 0:
            self.n_sent += 1
        return int(report.pop("seq", counted))


class Conversation:
    """The conversation with one worker: the core's messages, in turn, and requests for reports.

    Args:
        role: the worker's: ``collector`` or ``learner``.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._to_say: deque[Message] = deque()
        self._open: tuple[Ask, Message | None] | None = None
        self._asked_at = 0.0
        self._poll_at = float("-inf")
        self._running: _Running | None = None

    def say(self, message: Message) -> None:
        """Take a message for the worker."""
        self._to_say.append(message)

    def waits_for_s(self, now: float) -> float:
        """Return how long the last request has been without an answer, in seconds."""
        return 0.0 if self._open is None else now - self._asked_at

    def next(self, now: float) -> Ask | Message | None:
        """Return the next request; or a message to the core, where nothing needs to be asked.

        None means that the worker has not answered yet, or has nothing to do.
        """
        while self._open is None and self._to_say:
            message = self._to_say.popleft()
            match message:
                case ResourceQuery():
                    return self._ask(now, message, "resource")
                case TaskOffer():
                    if self._runs(message):
                        return TaskStarted(message.task_id, message.attempt)
                    info = {**message.task_info, "task_id": message.task_id}
                    return self._ask(
                        now, message, f"{message.kind}_start_task",
                        task_info=info, attempt=message.attempt,
                    )  # fmt: skip
                case TaskClose():
                    if not self._runs(message):
                        why = "this worker does not run the task"
                        return TaskFailed(message.task_id, message.attempt, why)
                    return self._ask(now, message, f"{self.role}_close_task", timeout_s=_POLL_S)
                case LearnData():
                    running = self._running
                    if running and self._runs(message) and running.waits_for(message.seq):
                        running.is_waiting = False
                        return self._ask(
                            now, message, "learner_learn_task",
                            data=list(message.data), seq=message.seq, timeout_s=_POLL_S,
                        )  # fmt: skip
                case _:
                    _log.warning("%s is not for a worker", type(message).__name__)
        if self._open is None and self._running is not None:
            return self._poll(self._running, now)
        return None

    def hear(self, answer: Answer, now: float) -> Iterator[Message]:
        """Return what an answer tells the core; one to an earlier request tells nothing.

        Raises:
            ValueError: if the answer cannot be used.
        """
        if self._open is None or self._open[0].id != answer.id:
            return
        (ask, message), self._open = self._open, None
        if answer.failure:
            yield from self._failed(message, answer.failure)
            return
        result = dict(answer.result)
        answered: Any = msgspec.convert(result, TASKS[ask.name][1], strict=False)
        if isinstance(message, ResourceQuery):
            yield self._stated(answered)
        elif isinstance(message, TaskOffer):
            buffer_id = str(message.task_info.get("buffer_id", ""))
            self._running = _Running(message.task_id, message.attempt, buffer_id)
            yield TaskStarted(message.task_id, message.attempt)
        elif self._running is not None:
            yield from self._about(self._running, message, result, answered, now)

    def _runs(self, message: TaskOffer | TaskClose | LearnData) -> bool:
        running = self._running
        return running is not None and running.name == (message.task_id, message.attempt)

    def _ask(self, now: float, message: Message | None, name: str, **request: Any) -> Ask:
        ask = Ask(secrets.token_hex(8), name, request)
        self._open, self._asked_at = (ask, message), now
        return ask

    def _poll(self, running: _Running, now: float) -> Ask | Message | None:
        if self.role == COLLECTOR:
            return self._ask(
                now, None, "collector_data_task", timeout_s=_POLL_S, most=_MOST_REPORTS
            )
        if running.is_waiting:
            if now < self._poll_at:
                return None
            self._poll_at = now + _POLL_S
            if not running.is_numbered:  # it would take this for the next demand
                return TaskAlive(*running.name)
        return self._ask(now, None, "learner_get_data_task", timeout_s=_POLL_S)

    def _failed(self, message: Message | None, failure: str) -> Iterator[Message]:
        running = self._running
        if isinstance(message, TaskOffer):
            yield TaskRefused(message.task_id, message.attempt, failure)
        elif isinstance(message, ResourceQuery):
            _log.warning("a %s does not state its resources: %s", self.role, failure)
        elif running is not None:
            self._running = None
            yield TaskFailed(*running.name, failure)

    def _stated(self, stated: Stated) -> Resources:
        if stated.task_id and self._running is None:
            self._running = _Running(stated.task_id, stated.attempt, stated.buffer_id, n_sent=-1)
        resource = {"gpu": stated.gpu, "cpu": stated.cpu}
        return Resources(resource, stated.task_id, stated.attempt)

    def _about(
        self,
        running: _Running,
        message: Message | None,
        result: dict[str, Any],
        answered: Any,
        now: float,
    ) -> Iterator[Message]:
        if isinstance(answered, Reports):
            yield from self._reports(running, result, answered)
            return
        buffer_id = str(result.get("buffer_id", running.buffer_id))
        if answered.info:
            result.pop("info")
            yield LearnInfo(*running.name, running.number({}), buffer_id, answered.info)
        if isinstance(answered, Demand):
            yield self._demand(running, buffer_id, answered, now)
        elif isinstance(message, TaskClose):
            if answered.pending:
                self._to_say.appendleft(message)
                yield TaskAlive(*running.name)
            else:
                self._running = None
                yield TaskDone(*running.name, result)

    def _reports(
        self, running: _Running, first: dict[str, Any], answered: Reports
    ) -> Iterator[Message]:
        if answered.pending:
            yield TaskAlive(*running.name)
            return
        first.pop("more", None)
        for report in (first, *answered.more):
            report.pop("task_id", None)
            buffer_id = str(report.pop("buffer_id", running.buffer_id))
            number = running.number(report)
            if "data_id" in report:
                data_id = str(report["data_id"])
                yield StepDataReady(*running.name, number, buffer_id, data_id, report)
            else:
                yield CollectorInfo(*running.name, number, report)

    def _demand(self, running: _Running, buffer_id: str, demand: Demand, now: float) -> Message:
        if demand.batch_size is None:
            return TaskAlive(*running.name)
        running.is_numbered = demand.seq is not None
        running.is_waiting, self._poll_at = True, now + _POLL_S
        number = running.last_demand + 1 if demand.seq is None else demand.seq
        if number == running.last_demand:
            return TaskAlive(*running.name)
        running.last_demand = number
        return DataDemand(
            *running.name, number, buffer_id, demand.batch_size, demand.cur_learner_iter,
            demand.lost,
        )  # fmt: skip


class Conversations:
    """The coordinator's conversations with all workers of a link.

    A worker that cannot be reached, does not answer, or answers what cannot be used has left, as
    far as the core knows. If it is still connected a second later, it has joined again.

    Args:
        link: carries the requests and answers.
        clock: returns the time in seconds.
        answer_timeout_s: how long a worker may take to answer.
    """

    def __init__(
        self, link: Link, *, clock: Callable[[], float], answer_timeout_s: float = 150.0
    ) -> None:
        self._link = link
        self._clock = clock
        self._answer_timeout_s = answer_timeout_s
        self._of: dict[str, Conversation] = {}
        self._away: dict[str, float] = {}

    def say(self, peer: str, message: Message) -> None:
        """Take a message for a worker; :meth:`ask` sends it. One that has left gets nothing."""
        if peer in self._of:
            self._of[peer].say(message)

    def ask(self) -> list[tuple[str, Message]]:
        """Send its next request to every worker that has answered.

        Returns:
            For the core: answers that need no request, and the workers that cannot be reached.
        """
        told: list[tuple[str, Message]] = []
        now = self._clock()
        for peer, conversation in list(self._of.items()):
            step = conversation.next(now)
            while step is not None and not isinstance(step, Ask):
                told.append((peer, step))
                step = conversation.next(now)
            if step is None:
                continue
            try:
                self._link.send(peer, step)
            except EncodeError as error:
                unsent = conversation.hear(Answer(step.id, failure=str(error)), now)
                told.extend((peer, message) for message in unsent)
            except (DMiddlewareError, OSError) as error:
                told.append(self._give_up(peer, f"it cannot be reached: {error}"))
        return told

    def receive(self, timeout_s: float) -> list[tuple[str, Message]]:
        """Return what has arrived for the core; wait ``timeout_s`` seconds for the first of it."""
        told = self._overdue()
        received = self._link.receive(0.0 if told else timeout_s)
        while received is not None:
            told.extend(self._hear(*received))
            received = self._link.receive(0.0) if len(told) < _MOST_MESSAGES else None
        return told

    def _hear(self, peer: str, said: Said) -> Iterator[tuple[str, Message]]:
        if isinstance(said, Joined):
            yield self._join(peer, said.role)
        elif isinstance(said, Left):
            self._away.pop(peer, None)
            if self._of.pop(peer, None) is not None:
                yield peer, said
        elif isinstance(said, Answer) and peer in self._of:
            try:
                for message in self._of[peer].hear(said, self._clock()):
                    yield peer, message
            except (ValueError, TypeError) as error:
                _log.exception("%s has answered with something unusable", peer)
                yield self._give_up(peer, f"{type(error).__name__}: {error}")

    def _overdue(self) -> list[tuple[str, Message]]:
        """Give up workers that do not answer, and accept those again that are still there."""
        now = self._clock()
        told = [
            self._give_up(peer, f"it has not answered for {self._answer_timeout_s:g} s")
            for peer, conversation in list(self._of.items())
            if conversation.waits_for_s(now) >= self._answer_timeout_s
        ]
        for peer in [peer for peer, until in self._away.items() if now >= until]:
            del self._away[peer]
            role = self._link.peers().get(peer)
            if role is not None:
                told.append(self._join(peer, role))
        return told

    def _join(self, peer: str, role: str) -> tuple[str, Message]:
        self._away.pop(peer, None)
        if role in (COLLECTOR, LEARNER):
            self._of[peer] = Conversation(role)
        return peer, Joined(role)

    def _give_up(self, peer: str, reason: str) -> tuple[str, Message]:
        del self._of[peer]
        self._away[peer] = self._clock() + _AWAY_S
        return peer, Left(reason)
