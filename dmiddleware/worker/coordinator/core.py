"""The coordinator's decisions: which worker runs which task, and when a task is lost.

The core is pure: it has no thread, socket, file or clock. It is given messages and the time, and
returns actions for its owner to carry out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from dmiddleware.worker.coordinator.actions import (
    Action,
    CloseBuffer,
    Collected,
    CollectorReported,
    Demanded,
    Discard,
    Ended,
    LearnerReported,
    Note,
    OpenBuffer,
    Release,
    Remove,
    Send,
    WorkersChanged,
)
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
from dmiddleware.worker.coordinator.tasks import Task, TaskState
from dmiddleware.worker.coordinator.workers import Worker, WorkerState
from dmiddleware.worker.errors import CoordinatorError

__all__ = ["CoordinatorCore"]

_ANSWER_S: Final = 10.0
"""Within this time, in seconds, a worker must answer an offer or a question."""

_PAUSE_S: Final = 1.0
"""For this time, in seconds, a worker that has refused or failed a task gets no other one."""

_MOST_IDS: Final = 10_000


TaskMessage: TypeAlias = (
    TaskStarted
    | TaskRefused
    | TaskAlive
    | TaskDone
    | TaskFailed
    | StepDataReady
    | CollectorInfo
    | DataDemand
    | LearnInfo
)
"""What a worker sends about its task."""


class CoordinatorCore:
    """Assigns tasks to workers, follows them to their ends, and keeps account of leases.

    Every method returns actions, to be carried out in order. Times are in seconds of any clock that
    never goes back.

    A task that the commander has given ends exactly once, as ``Ended`` reports. It is offered to
    the worker that has been idle the longest and has the resources in the task's ``resource``, if
    it names any. Before a task is offered again, the worker that had it has left, has given it up,
    or has been asked to end it; what that worker still sends about it is ignored.

    Args:
        task_timeout_s: by kind, how long a task may wait for a worker, and how long it may take to
            end once it was asked to.
        task_silence_s: a task whose worker sends nothing for this long is lost.
        max_attempts: how often a task is started at most.
        n_historical: how many ended tasks are remembered.
    """

    def __init__(
        self,
        *,
        task_timeout_s: Mapping[str, float],
        task_silence_s: float = 30.0,
        max_attempts: int = 3,
        n_historical: int = 1000,
    ) -> None:
        self._task_timeout_s = dict(task_timeout_s)
        self._task_silence_s = task_silence_s
        self._max_attempts = max_attempts
        self._tasks: dict[str, Task] = {}
        self._historical: deque[Task] = deque(maxlen=n_historical)
        self._workers: dict[str, Worker] = {}
        self._buffers: set[str] = set()
        self._issued: dict[str, int] = {}
        self._is_draining = False
        self.counters: Counter[str] = Counter()

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks that have not ended, by id."""
        return self._tasks

    @property
    def historical(self) -> Sequence[Task]:
        """The tasks that ended last, oldest first."""
        return self._historical

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The connected workers, by uid."""
        return self._workers

    @property
    def buffers(self) -> frozenset[str]:
        """The ids of the open buffers."""
        return frozenset(self._buffers)

    @property
    def is_draining(self) -> bool:
        """Whether :meth:`drain` was called: tasks are only ended, never started."""
        return self._is_draining

    def parked_demands(self) -> list[str]:
        """Return the learner tasks whose demand waits for data."""
        return [
            task.task_id for task in self._tasks.values() if task.demand is not None and task.worker
        ]

    # What the owner asks.

    def submit(self, kind: str, task_info: Mapping[str, Any], now: float) -> list[Action]:
        """Take a task of the commander.

        Raises:
            CoordinatorError: if ``task_info`` has no ``task_id``, a task of this id has not ended
                yet, or the core is draining.
        """
        origin = task_info.get("task_id")
        if not isinstance(origin, str) or not origin:
            raise CoordinatorError(f"the commander gave a {kind} task without task_id: add one")
        if any(task.origin == origin for task in self._tasks.values()):
            raise CoordinatorError(
                f"the commander gave the {kind} task {origin!r}, but the one before of this id has "
                "not ended; give each task an id of its own"
            )
        if self._is_draining:
            raise CoordinatorError(f"no {kind} task can be started while the coordinator drains")
        task = Task(origin, self._new_id(origin), kind, task_info, queued_at=now, since=now)
        self._tasks[task.task_id] = task
        return list(self._assign(now))

    def finish(self, task_id: str, now: float) -> list[Action]:
        """Ask a task's worker to end it in order; does nothing for a task that is not running."""
        task = self._tasks.get(task_id)
        return [] if task is None else [*self._finish(task, now), *self._assign(now)]

    def conclude(self, task_id: str, result: Mapping[str, Any], now: float) -> list[Action]:
        """End a task with its result; does nothing for a task that has ended."""
        task = self._tasks.get(task_id)
        if task is None:
            return []
        return [*self._end(task, TaskState.FINISHED, now, result=result), *self._assign(now)]

    def demand(self, task_id: str, batch_size: int, cur_iter: int, now: float) -> list[Action]:
        """Take a demand that did not come as a message, and end the leases of the last batch."""
        task = self._tasks[task_id]
        message = DataDemand(
            task_id,
            task.attempt,
            task.last_demand + 1,
            task.buffer_id or "",
            batch_size,
            cur_iter,
        )
        return list(self._park(task, message, now))

    def answer(
        self,
        task_id: str,
        seq: int,
        data: Sequence[Mapping[str, Any]],
        data_ids: Sequence[str],
        *,
        buffer_id: str,
        is_sent: bool = True,
    ) -> list[Action]:
        """Answer a parked demand with samples, which are leased from now on.

        Args:
            task_id: the learner task.
            seq: the number of the demand.
            data: the metadata of each sample.
            data_ids: the ids under which the buffer has leased them.
            buffer_id: the buffer.
            is_sent: whether to send the data; False if the owner hands it over in another way.
        """
        task = self._tasks.get(task_id)
        if task is None or task.demand is None or task.demand.seq != seq:
            return [Release(buffer_id, tuple(data_ids))]
        task.leased.extend(data_ids)
        task.demand, task.answer = None, LearnData(task_id, task.attempt, seq, tuple(data))
        return [Send(task.worker, task.answer)] if is_sent and task.worker else []

    def close_buffer(self, buffer_id: str, now: float) -> list[Action]:
        """Close a buffer; its collector tasks end."""
        return [*self._close_buffer(buffer_id, now), *self._assign(now)]

    def drain(self, now: float) -> list[Action]:
        """End all tasks in order, and start none from now on."""
        self._is_draining = True
        return [action for task in list(self._tasks.values()) for action in self._stop(task, now)]

    # What arrives.

    def handle(self, peer: str, message: Message, now: float) -> list[Action]:
        """Take a message of a worker, or the link's report about it."""
        return [*self._handle(peer, message, now), *self._assign(now)]

    def tick(self, now: float) -> list[Action]:
        """Look at the deadlines; call it every second or more often."""
        actions: list[Action] = []
        for task in list(self._tasks.values()):
            # The end of a learner task can end others.
            if self._tasks.get(task.task_id) is task:
                actions.extend(self._check_deadlines(task, now))
        for worker in self._workers.values():
            if worker.state is WorkerState.JOINING and now - worker.asked_at >= _ANSWER_S:
                actions.extend(self._ask(worker, now))
        return [*actions, *self._assign(now)]

    # The state.

    def state_dict(self) -> dict[str, Any]:
        """Return tasks, buffers and counters as plain values; the workers report themselves."""
        return {
            "tasks": [task.state_dict() for task in self._tasks.values()],
            "historical": [_summary(task) for task in self._historical],
            "buffers": sorted(self._buffers),
            "issued": dict(self._issued),
            "is_draining": self._is_draining,
            "counters": dict(self.counters),
        }

    def load_state_dict(self, state: Mapping[str, Any], now: float) -> None:
        """Continue from what :meth:`state_dict` returned, perhaps in another process.

        A task that was running is adopted when a worker reports that it runs it. If none does, it
        is lost after ``task_silence_s`` seconds.
        """
        tasks = [Task.from_state(entry, now) for entry in state["tasks"]]
        self._tasks = {task.task_id: task for task in tasks}
        self._historical.clear()
        self._historical.extend(Task.from_state(entry, now) for entry in state["historical"])
        self._buffers = set(state["buffers"])
        self._issued = dict(state["issued"])
        self._is_draining = state["is_draining"]
        self.counters = Counter(state["counters"])

    # Workers.

    def _handle(self, peer: str, message: Message, now: float) -> Iterator[Action]:
        if isinstance(message, Joined):
            yield from self._joined(peer, message, now)
        elif isinstance(message, Left):
            yield from self._left(peer, message.reason, now)
        elif isinstance(message, Resources):
            if peer in self._workers:
                yield from self._resources(self._workers[peer], message, now)
        elif isinstance(message, TaskMessage):
            task = self._adoptable(peer, message)
            if task is not None:
                yield from self._adopt(task, self._workers[peer], now)
            task = self._tasks.get(message.task_id)
            if task is None or (task.worker, task.attempt) != (peer, message.attempt):
                yield from self._late(peer, message, now)
            else:
                task.heard_at = now
                yield from self._about(task, message, now)

    def _joined(self, peer: str, message: Joined, now: float) -> Iterator[Action]:
        if message.role not in (COLLECTOR, LEARNER):
            return
        if peer in self._workers:
            yield from self._left(peer, "it has joined again", now)
        worker = self._workers[peer] = Worker(peer, message.role, since=now, asked_at=now)
        yield Note(f"{message.role} {peer} has joined")
        yield from self._collectors_changed(worker)
        yield from self._ask(worker, now)

    def _left(self, peer: str, reason: str, now: float) -> Iterator[Action]:
        worker = self._workers.pop(peer, None)
        if worker is None:
            return
        yield Note(f"{worker.kind} {peer} has left: {reason}")
        yield from self._collectors_changed(worker)
        if task := self._tasks.get(worker.task_id):
            yield from self._lose(task, f"its worker {peer} has left: {reason}", now)

    def _collectors_changed(self, worker: Worker) -> Iterator[Action]:
        if worker.kind == COLLECTOR:
            yield WorkersChanged(sum(one.kind == COLLECTOR for one in self._workers.values()))

    def _ask(self, worker: Worker, now: float) -> Iterator[Action]:
        worker.asked_at = now
        yield Send(worker.uid, ResourceQuery())

    def _resources(self, worker: Worker, message: Resources, now: float) -> Iterator[Action]:
        worker.resource = dict(message.resource)
        if worker.state is not WorkerState.JOINING:
            return
        if not message.task_id:
            worker.enter(WorkerState.IDLE, now)
            return
        task = self._adoptable(worker.uid, message)
        if task is None:
            yield from self._tell_to_close(worker, message.task_id, message.attempt, now)
        else:
            yield from self._adopt(task, worker, now)

    def _adoptable(self, peer: str, message: TaskMessage | Resources) -> Task | None:
        """Return the task that a worker runs for an earlier process of the coordinator."""
        task, worker = self._tasks.get(message.task_id), self._workers.get(peer)
        if task is None or worker is None or worker.state is not WorkerState.JOINING:
            return None
        is_same = (task.kind, task.attempt) == (worker.kind, message.attempt)
        return task if is_same and not task.worker and task.state is not TaskState.QUEUED else None

    def _adopt(self, task: Task, worker: Worker, now: float) -> Iterator[Action]:
        task.worker, task.heard_at = worker.uid, now
        worker.enter(WorkerState.BUSY, now, task.task_id)
        yield Note(f"{worker.kind} {worker.uid} still runs {task.task_id}, which continues")
        self.counters["adopted"] += 1
        if task.state is TaskState.FINISHING:
            yield Send(worker.uid, TaskClose(task.task_id, task.attempt))
        else:
            yield from self._begin(task, now)

    def _tell_to_close(
        self, worker: Worker, task_id: str, attempt: int, now: float
    ) -> Iterator[Action]:
        """Tell a worker to end a task that is not its own any more, not more often than needed."""
        told, at = worker.told_to_close
        if told != task_id or now - at >= _ANSWER_S:
            worker.told_to_close = (task_id, now)
            yield Send(worker.uid, TaskClose(task_id, attempt))

    def _doubt(self, worker: Worker, task: Task, now: float) -> Iterator[Action]:
        """Take a task from a worker that does not answer, and ask what it does."""
        worker.enter(WorkerState.JOINING, now)
        worker.told_to_close = ("", 0.0)
        yield from self._tell_to_close(worker, task.task_id, task.attempt, now)
        yield from self._ask(worker, now)

    def _late(self, peer: str, message: TaskMessage, now: float) -> Iterator[Action]:
        """Take a message about a task that is not, or no longer, the sender's."""
        self.counters["late_messages"] += 1
        if isinstance(message, StepDataReady):
            yield Discard(message)
        worker = self._workers.get(peer)
        if worker is None:
            return
        if isinstance(message, TaskDone | TaskFailed | TaskRefused):
            if worker.state is WorkerState.JOINING:
                yield from self._ask(worker, now)
            return
        if worker.state is WorkerState.IDLE:
            worker.enter(WorkerState.JOINING, now)
            yield from self._ask(worker, now)
        yield from self._tell_to_close(worker, message.task_id, message.attempt, now)

    # Messages about tasks, from the workers that have them.

    def _about(self, task: Task, message: TaskMessage, now: float) -> Iterator[Action]:
        if isinstance(message, TaskRefused):
            yield from self._refused(task, message.reason, now)
        elif isinstance(message, TaskFailed):
            yield Note(f"{task.kind} task {task.task_id} has failed:\n{message.message}", True)
            yield from self._lose(task, message.message, now)
        elif isinstance(message, TaskDone):
            yield from self._end(task, TaskState.FINISHED, now, result=message.result)
        else:
            # Each of the others says that the task has begun, if TaskStarted was lost.
            yield from self._begin(task, now)
            if isinstance(message, DataDemand):
                yield from self._demanded(task, message, now)
            elif isinstance(message, StepDataReady | CollectorInfo | LearnInfo):
                yield from self._reported(task, message)

    def _reported(
        self, task: Task, message: StepDataReady | CollectorInfo | LearnInfo
    ) -> Iterator[Action]:
        if message.seq >= 0 and not task.seen.add(message.seq):
            self.counters["duplicates"] += 1
            if isinstance(message, StepDataReady):
                yield Discard(message)
        elif isinstance(message, StepDataReady):
            yield Collected(message)
        elif isinstance(message, LearnInfo):
            yield LearnerReported(message)
        else:
            yield CollectorReported(task.task_id, message.info)

    def _refused(self, task: Task, reason: str, now: float) -> Iterator[Action]:
        self.counters["refused"] += 1
        yield Note(f"{task.kind} {task.worker} refuses {task.task_id}: {reason}")
        self._let_go(task, now, pause_s=_PAUSE_S)
        if task.state is TaskState.OFFERED:
            self._queue(task, now)
        else:
            yield from self._lose(task, f"its worker does not run it: {reason}", now)

    def _begin(self, task: Task, now: float) -> Iterator[Action]:
        if task.state is not TaskState.OFFERED:
            return
        task.enter(TaskState.RUNNING, now)
        yield Note(f"{task.kind} task {task.task_id} runs on {task.worker}")
        if task.kind == LEARNER and task.buffer_id is not None:
            self._buffers.add(task.buffer_id)
            yield OpenBuffer(task.buffer_id, task)

    def _demanded(self, task: Task, message: DataDemand, now: float) -> Iterator[Action]:
        if message.seq > task.last_demand:
            yield from self._park(task, message, now)
            return
        self.counters["duplicates"] += 1
        if task.answer is not None and task.answer.seq == message.seq:
            yield Send(task.worker, task.answer)

    def _park(self, task: Task, message: DataDemand, now: float) -> Iterator[Action]:
        task.last_demand, task.heard_at = message.seq, now
        if message.lost:
            lost = set(message.lost)
            yield from self._release(task, [one for one in task.leased if one in lost])
            if task.buffer_id is not None:
                yield Remove(task.buffer_id, message.lost)
        else:
            yield from self._release(task, task.leased)
        if task.state is TaskState.RUNNING:
            task.demand = message
            yield Demanded(task.task_id)

    def _release(self, task: Task, data_ids: Sequence[str]) -> Iterator[Action]:
        ended = Counter(data_ids)
        if ended and task.buffer_id is not None:
            yield Release(task.buffer_id, tuple(data_ids))
        kept = Counter(task.leased) - ended
        task.leased = list(kept.elements())

    # The ways of a task.

    def _assign(self, now: float) -> Iterator[Action]:
        """Offer queued tasks to idle workers, oldest task and longest idle worker first."""
        for task in list(self._tasks.values()):
            if task.state is not TaskState.QUEUED or not self._has_buffer(task):
                continue
            fitting = [worker for worker in self._workers.values() if _fits(worker, task, now)]
            if fitting:
                worker = min(fitting, key=lambda one: one.since)
                worker.enter(WorkerState.BUSY, now, task.task_id)
                task.worker, task.heard_at = worker.uid, now
                task.enter(TaskState.OFFERED, now)
                info = {**task.task_info, "task_id": task.task_id}
                yield Send(worker.uid, TaskOffer(task.task_id, task.attempt, task.kind, info))

    def _has_buffer(self, task: Task) -> bool:
        return task.kind == LEARNER or task.buffer_id is None or task.buffer_id in self._buffers

    def _check_deadlines(self, task: Task, now: float) -> Iterator[Action]:
        timeout_s = self._task_timeout_s[task.kind]
        if task.state is TaskState.QUEUED:
            if now - task.queued_at >= timeout_s:
                reason = f"no worker took it within {timeout_s:g} s"
                yield from self._end(task, TaskState.EXPIRED, now, reason=reason)
        elif task.state is TaskState.OFFERED and task.worker:
            if now - task.since >= _ANSWER_S:
                yield Note(f"{task.kind} {task.worker} does not answer the offer of {task.task_id}")
                yield from self._doubt(self._workers[task.worker], task, now)
                self._queue(task, now)
        elif now - task.heard_at >= self._task_silence_s:
            yield from self._lose_in_doubt(
                task, f"its worker was silent for {self._task_silence_s:g} s", now
            )
        elif task.state is TaskState.FINISHING and now - task.since >= timeout_s:
            yield from self._lose_in_doubt(task, f"it did not end within {timeout_s:g} s", now)

    def _lose_in_doubt(self, task: Task, reason: str, now: float) -> Iterator[Action]:
        if task.worker:
            yield from self._doubt(self._workers[task.worker], task, now)
        yield from self._lose(task, reason, now)

    def _lose(self, task: Task, reason: str, now: float) -> Iterator[Action]:
        """Queue a lost task again, or let it fail."""
        self.counters["lost"] += 1
        task.reason = reason
        self._let_go(task, now, pause_s=_PAUSE_S)
        yield from self._release(task, task.leased)
        if self._is_draining:
            yield from self._end(task, TaskState.FAILED, now, reason=reason)
        elif not self._has_buffer(task):
            yield from self._end(
                task, TaskState.FAILED, now, reason=f"{reason}; its buffer is gone"
            )
        elif task.attempt >= self._max_attempts:
            reason = f"{reason}; that was attempt {task.attempt} of {self._max_attempts}"
            yield from self._end(task, TaskState.FAILED, now, reason=reason)
        else:
            first_line = reason.strip().splitlines()[-1] if reason.strip() else "no reason given"
            yield Note(f"{task.kind} task {task.task_id} is lost: {first_line}")
            task.attempt += 1
            task.queued_at = now
            self._queue(task, now)

    def _queue(self, task: Task, now: float) -> None:
        """Queue a task under a new id, so that nobody takes the old worker for the new one."""
        del self._tasks[task.task_id]
        task.renew(self._new_id(task.origin))
        task.enter(TaskState.QUEUED, now)
        self._tasks[task.task_id] = task

    def _new_id(self, origin: str) -> str:
        number = self._issued.pop(origin, 0) + 1
        self._issued[origin] = number
        if len(self._issued) > _MOST_IDS:
            del self._issued[next(iter(self._issued))]
        return origin if number == 1 else f"{origin}-{number}"

    def _let_go(self, task: Task, now: float, *, pause_s: float = 0.0) -> None:
        """Take a task from its worker, which is idle from now on."""
        worker = self._workers.get(task.worker)
        if worker is not None and worker.task_id == task.task_id:
            worker.enter(WorkerState.IDLE, now)
            worker.not_before = now + pause_s

    def _finish(self, task: Task, now: float) -> Iterator[Action]:
        if task.state in (TaskState.OFFERED, TaskState.RUNNING):
            task.enter(TaskState.FINISHING, now)
            task.demand = None
            if task.worker:
                yield Send(task.worker, TaskClose(task.task_id, task.attempt))

    def _stop(self, task: Task, now: float) -> Iterator[Action]:
        """End a task that nobody needs any more."""
        if task.state is TaskState.QUEUED:
            yield from self._end(task, TaskState.EXPIRED, now, reason="it is no longer needed")
        else:
            yield from self._finish(task, now)

    def _end(
        self,
        task: Task,
        state: TaskState,
        now: float,
        *,
        result: Mapping[str, Any] | None = None,
        reason: str = "",
    ) -> Iterator[Action]:
        self._let_go(task, now)
        yield from self._release(task, task.leased)
        del self._tasks[task.task_id]
        task.enter(state, now)
        task.demand, task.answer, task.reason = None, None, reason
        self._historical.append(task)
        self.counters[str(state)] += 1
        if state is not TaskState.FINISHED:
            yield Note(
                f"{task.kind} task {task.task_id} has {state}: {reason}", not self._is_draining
            )
        yield Ended(task, result)
        if state is not TaskState.FINISHED and task.kind == LEARNER and task.buffer_id is not None:
            yield from self._close_buffer(task.buffer_id, now)

    def _close_buffer(self, buffer_id: str, now: float) -> Iterator[Action]:
        tasks = [task for task in self._tasks.values() if task.buffer_id == buffer_id]
        if any(task.kind == LEARNER for task in tasks):
            return
        if buffer_id in self._buffers:
            self._buffers.remove(buffer_id)
            yield CloseBuffer(buffer_id)
        for task in tasks:
            yield from self._stop(task, now)


def _fits(worker: Worker, task: Task, now: float) -> bool:
    """Return whether a worker can take a task now."""
    if worker.state is not WorkerState.IDLE or worker.kind != task.kind or now < worker.not_before:
        return False
    needed: Mapping[str, int] = task.task_info.get("resource", {})
    return all(worker.resource.get(name, 0) >= n for name, n in needed.items())


def _summary(task: Task) -> dict[str, Any]:
    """Return the state of an ended task, of which nobody needs the configs any more."""
    names = ("task_id", "buffer_id", "policy_id")
    info = {name: task.task_info[name] for name in names if name in task.task_info}
    return {**task.state_dict(), "task_info": info}
