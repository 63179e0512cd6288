"""Random joins, leaves, losses, duplicates and reorderings around a CoordinatorCore."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dmiddleware.worker.coordinator.actions import (
    CloseBuffer,
    Ended,
    OpenBuffer,
    Release,
    Send,
)
from dmiddleware.worker.coordinator.core import CoordinatorCore
from dmiddleware.worker.coordinator.messages import (
    COLLECTOR,
    LEARNER,
    CollectorInfo,
    DataDemand,
    Joined,
    LearnInfo,
    Left,
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
from dmiddleware.worker.coordinator.tasks import TaskState
from dmiddleware.worker.coordinator.workers import WorkerState

TIMEOUT_S = {COLLECTOR: 30.0, LEARNER: 60.0}


@dataclass
class SimulatedWorker:
    """A worker that runs at most one task, and the two directions of its link."""

    uid: str
    kind: str
    to_core: list = field(default_factory=list)
    to_worker: list = field(default_factory=list)
    is_hung: bool = False
    task: TaskOffer | None = None
    seq: int = 0
    n_demands: int = 0

    def take(self, message) -> None:
        if isinstance(message, ResourceQuery):
            running = self.task
            self.to_core.append(
                Resources(
                    {"gpu": 1, "cpu": 4},
                    running.task_id if running else "",
                    running.attempt if running else 0,
                )
            )
        elif isinstance(message, TaskOffer):
            if self.task is not None:
                self.to_core.append(TaskRefused(message.task_id, message.attempt, "busy"))
            else:
                self.task, self.seq, self.n_demands = message, 0, 0
                self.to_core.append(TaskStarted(message.task_id, message.attempt))
        elif isinstance(message, TaskClose) and self._runs(message):
            self.end(TaskDone(message.task_id, message.attempt, {}))

    def end(self, message) -> None:
        self.task = None
        self.to_core.append(message)

    def work(self) -> None:
        task = self.task
        name = task.task_id, task.attempt
        buffer_id = task.task_info["buffer_id"]
        if self.kind == COLLECTOR:
            data_id = f"{task.task_id}.{self.seq}"
            self.to_core.append(StepDataReady(*name, self.seq, buffer_id, data_id, {}))
            self.to_core.append(CollectorInfo(*name, self.seq + 1, {}))
            self.seq += 2
        else:
            self.to_core.append(DataDemand(*name, self.n_demands, buffer_id, 2, self.seq))
            self.to_core.append(LearnInfo(*name, self.seq, buffer_id, {}))
            self.n_demands += 1
            self.seq += 1
        self.to_core.append(TaskAlive(*name))

    def _runs(self, message: TaskClose) -> bool:
        return self.task is not None and (self.task.task_id, self.task.attempt) == (
            message.task_id,
            message.attempt,
        )


class CoreMachine(RuleBasedStateMachine):
    """Drives a core, mirrors what it promises, and checks both after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.core = self.new_core()
        self.workers: dict[str, SimulatedWorker] = {}
        self.names = 0
        self.submitted: dict[str, str] = {}
        self.ended: Counter[str] = Counter()
        self.holder: dict[str, tuple[str, str]] = {}
        self.given_up: set[tuple[str, str]] = set()
        self.leases: Counter[tuple[str, str]] = Counter()
        self.samples = 0

    @staticmethod
    def new_core() -> CoordinatorCore:
        return CoordinatorCore(task_timeout_s=TIMEOUT_S, task_silence_s=30.0, max_attempts=3)

    # What the owner of a core does with its actions.

    def perform(self, actions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.send(action.peer, action.message)
            elif isinstance(action, Release):
                for data_id in action.data_ids:
                    self.leases[action.buffer_id, data_id] -= 1
                    assert self.leases[action.buffer_id, data_id] >= 0, "released without a lease"
            elif isinstance(action, Ended):
                self.ended[action.task.origin] += 1
                assert self.ended[action.task.origin] == 1, "a task ended twice"
                if action.task.state is TaskState.FINISHED and action.task.kind == LEARNER:
                    self.perform(self.core.close_buffer(action.task.buffer_id, self.now))
            elif isinstance(action, CloseBuffer):
                held = [key for key in +self.leases if key[0] == action.buffer_id]
                assert not held, "a buffer was closed while its samples were leased"
            elif isinstance(action, OpenBuffer):
                assert action.buffer_id in self.core.buffers

    def send(self, peer, message) -> None:
        worker = self.workers[peer]  # a worker that has left gets nothing
        worker.to_worker.append(message)
        if isinstance(message, TaskClose):
            self.given_up.add((peer, message.task_id))
        elif isinstance(message, TaskOffer):
            origin = message.task_id.partition("-")[0]
            uid, task_id = self.holder.get(origin, ("", ""))
            is_free = uid not in self.workers or (uid, task_id) in self.given_up
            assert is_free, f"{origin} runs on {uid} and is offered to {peer}"
            self.holder[origin] = (peer, message.task_id)

    def to_core(self, uid, message) -> None:
        if isinstance(message, TaskDone | TaskFailed | TaskRefused):
            self.given_up.add((uid, message.task_id))
        self.perform(self.core.handle(uid, message, self.now))

    # What happens to it.

    @initialize()
    def begin(self) -> None:
        for kind in (LEARNER, COLLECTOR, COLLECTOR):
            self.join(kind)
        self.submit(LEARNER, 0)
        self.work_goes_well(1)

    @rule(
        kind=st.sampled_from([COLLECTOR, COLLECTOR, LEARNER]),
        buffer=st.integers(0, 1),
        is_offered=st.booleans(),
    )
    def submit(self, kind, buffer, is_offered=True) -> None:
        if self.core.is_draining:
            return
        self.names += 1
        origin = f"{kind}{self.names}"
        self.submitted[origin] = kind
        info = {"task_id": origin, "buffer_id": f"buffer{buffer}"}
        self.perform(self.core.submit(kind, info, self.now))
        if is_offered:
            for worker in list(self.workers.values()):
                self.exchange(worker)

    @rule(kind=st.sampled_from([COLLECTOR, COLLECTOR, LEARNER]))
    def join(self, kind) -> None:
        if len(self.workers) >= 5:
            return
        self.names += 1
        uid = f"w{self.names}"
        self.workers[uid] = SimulatedWorker(uid, kind)
        self.to_core(uid, Joined(kind))
        self.exchange(self.workers[uid])

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data) -> None:
        uid = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[uid]
        self.to_core(uid, Left("killed"))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), is_hung=st.booleans())
    def hang(self, data, is_hung) -> None:
        self.workers[data.draw(st.sampled_from(sorted(self.workers)))].is_hung = is_hung

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), n=st.integers(1, 3))
    def work(self, data, n) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        for _ in range(n):
            if worker.task is not None and not worker.is_hung:
                worker.work()

    @precondition(lambda self: any(w.task for w in self.workers.values()))
    @rule(data=st.data(), is_done=st.booleans())
    def end_by_itself(self, data, is_done) -> None:
        busy = sorted(uid for uid, worker in self.workers.items() if worker.task)
        worker = self.workers[data.draw(st.sampled_from(busy))]
        name = worker.task.task_id, worker.task.attempt
        worker.end(TaskDone(*name, {}) if is_done else TaskFailed(*name, "a traceback"))

    @rule(seed=st.integers(0, 2**32), n=st.integers(1, 3))
    def messages_arrive_with_faults(self, seed, n) -> None:
        """Deliver messages; one in five is lost, repeated, or overtaken by a later one."""
        random = Random(seed)
        for _ in range(n):
            for worker in list(self.workers.values()):
                for message in self.faulty(random, worker.to_worker, worker.is_hung):
                    worker.take(message)
                for message in self.faulty(random, worker.to_core, False):
                    self.to_core(worker.uid, message)

    @rule(n=st.integers(1, 3))
    def work_goes_well(self, n) -> None:
        for _ in range(n):
            for worker in list(self.workers.values()):
                self.exchange(worker)
                if worker.task is not None and not worker.is_hung:
                    worker.work()
                    self.exchange(worker)
            for task_id in self.core.parked_demands():
                self.answer(task_id)
            self.time_passes(1.0)

    @rule()
    def answer_demands(self) -> None:
        for task_id in self.core.parked_demands():
            self.answer(task_id)

    @precondition(lambda self: self.core.tasks)
    @rule(data=st.data())
    def finish(self, data) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.core.tasks)))
        self.perform(self.core.finish(task_id, self.now))

    @rule(seconds=st.sampled_from([1.0, 11.0, 31.0]))
    def time_passes(self, seconds) -> None:
        self.now += seconds
        self.perform(self.core.tick(self.now))

    @rule()
    def restart(self) -> None:
        state = msgspec.json.decode(msgspec.json.encode(self.core.state_dict()))
        self.core = self.new_core()
        self.core.load_state_dict(state, self.now)
        self.holder.clear()  # a hung worker is asked when it answers again
        for worker in self.workers.values():
            worker.to_core.clear()
            worker.to_worker.clear()
            self.to_core(worker.uid, Joined(worker.kind))

    @precondition(lambda self: len(self.submitted) > 6)
    @rule()
    def drain(self) -> None:
        self.perform(self.core.drain(self.now))

    # What always holds.

    @invariant()
    def no_task_runs_twice(self) -> None:
        origins = Counter(task.origin for task in self.core.tasks.values())
        assert all(n == 1 for n in origins.values())
        held = Counter(task.worker for task in self.core.tasks.values() if task.worker)
        assert all(n == 1 for n in held.values())

    @invariant()
    def a_worker_and_its_task_agree(self) -> None:
        assert self.core.workers.keys() == self.workers.keys()
        for worker in self.core.workers.values():
            assert (worker.state is WorkerState.BUSY) == bool(worker.task_id)
            if worker.task_id:
                assert self.core.tasks[worker.task_id].worker == worker.uid
        for task in self.core.tasks.values():
            if task.worker:
                assert self.core.workers[task.worker].task_id == task.task_id
            assert task.state is not TaskState.QUEUED or not task.worker

    @invariant()
    def every_task_is_live_or_has_ended(self) -> None:
        live = {task.origin for task in self.core.tasks.values()}
        assert live | self.ended.keys() == self.submitted.keys()
        assert not live & self.ended.keys()

    @invariant()
    def leases_are_those_of_live_tasks(self) -> None:
        leased = Counter(
            (task.buffer_id, one) for task in self.core.tasks.values() for one in task.leased
        )
        assert leased == +self.leases

    def teardown(self) -> None:
        """Let the faults stop: then every task ends, and with it every lease."""
        for worker in self.workers.values():
            worker.is_hung = False
        for _ in range(400):
            for worker in list(self.workers.values()):
                self.exchange(worker)
                if worker.task is not None:
                    worker.work()
            for task_id in self.core.parked_demands():
                self.answer(task_id)
            for task_id in list(self.core.tasks):
                self.perform(self.core.finish(task_id, self.now))
            self.time_passes(1.0)
            self.leases_are_those_of_live_tasks()
            if not self.core.tasks:
                break
        assert not self.core.tasks, f"still live: {self.core.tasks}"
        assert self.ended.keys() == self.submitted.keys()
        assert not +self.leases, f"still leased: {+self.leases}"
        for worker in self.workers.values():
            self.exchange(worker)
            assert worker.task is None or self.has_been_told(worker)

    # Helpers.

    def has_been_told(self, worker) -> bool:
        worker.work()
        for _ in range(12):
            self.exchange(worker)
            self.time_passes(1.0)
        return worker.task is None

    @staticmethod
    def faulty(random, messages, is_stuck) -> list:
        arrived, kept = [], []
        while messages and not is_stuck:
            message = messages.pop(0)
            fate = random.random()
            if fate < 0.8:
                arrived.append(message)
            elif fate < 0.87:
                arrived += [message, message]
            elif fate < 0.93:
                kept.append(message)
        messages[:0] = kept
        return arrived

    def exchange(self, worker) -> None:
        while worker.to_worker or worker.to_core:
            while worker.to_worker and not worker.is_hung:
                worker.take(worker.to_worker.pop(0))
            if not worker.to_core:
                return
            self.to_core(worker.uid, worker.to_core.pop(0))

    def answer(self, task_id) -> None:
        task = self.core.tasks[task_id]
        ids = [f"s{self.samples}", f"s{self.samples + 1}"]
        self.samples += 1  # the second one is leased twice
        self.leases.update((task.buffer_id, one) for one in ids)
        actions = self.core.answer(
            task_id, task.demand.seq, [{}, {}], ids, buffer_id=task.buffer_id
        )
        self.perform(actions)
