"""A coordinator and scripted workers in one thread, on a fake clock."""

from __future__ import annotations

from typing import Any

from dmiddleware.testing import FakeClock
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.memory_link import MemoryNetwork
from dmiddleware.worker.commander import COMMANDER_REGISTRY, NaiveCommander
from dmiddleware.worker.coordinator.conversation import Answer, Ask
from dmiddleware.worker.coordinator.coordinator import Coordinator
from dmiddleware.worker.coordinator.messages import COLLECTOR, COORDINATOR, LEARNER
from dmiddleware.worker.errors import StepDataLost, TaskFail

STEP_S = 0.5


@COMMANDER_REGISTRY.register("scripted")
class ScriptedCommander(NaiveCommander):
    """A naive commander that notes the calls, and ends when a collector says so."""

    def __init__(self, cfg, **kwargs):
        super().__init__(cfg, **kwargs)
        self.tape = []

    def get_collector_task(self):
        task = super().get_collector_task() if self._n_learner_tasks else None
        if task is not None and "resource" in self._main:
            task["resource"] = dict(self._main["resource"])
        return task

    def finish_collector_task(self, task_id, result):
        self.tape.append(("finished", task_id))
        super().finish_collector_task(task_id, result)
        return bool(result.get("converged"))

    def finish_learner_task(self, task_id, result):
        self.tape.append(("finished", task_id))
        return super().finish_learner_task(task_id, result)

    def notify_fail_collector_task(self, task):
        self.tape.append(("failed", task["task_id"]))
        super().notify_fail_collector_task(task)

    def notify_fail_learner_task(self, task):
        self.tape.append(("failed", task["task_id"]))
        super().notify_fail_learner_task(task)

    def update_learner_info(self, task_id, info):
        self.tape.append(("info", task_id, info["learner_step"]))

    def increase_collector_task_space(self):
        self.tape.append("increase")
        super().increase_collector_task_space()

    def decrease_collector_task_space(self):
        self.tape.append("decrease")
        super().decrease_collector_task_space()


def config(*, main=None, commander=None, buffer=None, **coordinator) -> dict[str, Any]:
    """Return the config of a coordinator with the scripted commander and a naive buffer."""
    naive = {"type": "naive", "replay_buffer_size": 100, "periodic_thruput_seconds": 1e9}
    if "type" in (buffer or {}):
        naive = {}
    other = {
        "replay_buffer": {**naive, **(buffer or {})},
        "commander": {"type": "scripted", **(commander or {})},
    }
    return {
        "main": {"exp_name": "exp", "env": {}, "policy": {"other": other}, **(main or {})},
        "system": {"coordinator": coordinator},
    }


class ScriptedWorker:
    """A worker that does one thing each time it is stepped, and then answers.

    Attributes:
        is_hung: whether it does nothing at all.
        refuses: whether it refuses offers.
        ignores_close: whether it does not end a task when it is asked to.
        n_data: how many samples its collector tasks collect.
        n_learn: how many batches its learner tasks learn from.
    """

    def __init__(self, network, store, uid, kind, **options):
        self.uid, self.kind = uid, kind
        self.network, self.store = network, store
        self.link = network.connect(uid, kind)
        self.is_hung = self.refuses = self.ignores_close = False
        self.n_data, self.n_learn, self.batch_size = 4, 3, 2
        self.result: dict[str, Any] = {}
        self.priority_info: dict[str, Any] = {}
        self.resource = {"gpu": 0, "cpu": 1}
        vars(self).update(options)
        self.task: dict[str, Any] | None = None
        self.attempt = 0
        self.failure = ""
        self.taken: list[str] = []
        self.lost: list[str] = []
        self.asked: list[Ask] = []
        self.reports: list[dict[str, Any]] = []
        self.seq = self.n_demands = self.n_learned = 0
        self.is_waiting = False
        self.demanded: dict[str, Any] = {}
        self.info: dict[str, Any] | None = None

    @property
    def task_id(self) -> str:
        return "" if self.task is None else self.task["task_id"]

    def batches(self) -> list[Any]:
        """Return the batches that it was sent."""
        return [ask.request["data"] for ask in self.asked if ask.name == "learner_learn_task"]

    def step(self) -> None:
        if self.is_hung:
            return
        if self.task is not None and not self.failure:
            self.collect() if self.kind == COLLECTOR else self.learn()
        while (received := self.link.receive(0)) is not None:
            if isinstance(received[1], Ask):
                self.asked.append(received[1])
                self.answer(received[1])

    def answer(self, ask) -> None:
        try:
            answer = Answer(ask.id, self.do(ask.name.removeprefix(f"{self.kind}_"), ask.request))
        except TaskFail as failure:
            answer = Answer(ask.id, failure=failure.message)
        if "coordinator" in self.link.peers():
            self.link.send("coordinator", answer)

    def do(self, name, request) -> dict[str, Any]:
        if name == "resource":
            running = {"task_id": self.task_id, "attempt": self.attempt} if self.task else {}
            return {**self.resource, **running}
        if name == "start_task":
            if self.refuses or self.task:
                raise TaskFail({}, "no")
            self.begin(request)
            return {"message": "started"}
        if self.failure or not self.task:
            failure, self.failure, self.task = self.failure, "", None
            raise TaskFail({}, failure or "this worker runs no task")
        if name == "close_task":
            if self.ignores_close:
                return {"pending": True}
            result, self.task = {**self.result, "task_id": self.task_id}, None
            return result
        if name == "learn_task":
            self.take_data(request["data"])
            info, self.info = self.info, None
            return {"info": info}
        if name == "get_data_task":
            return dict(self.demanded) if self.is_waiting else {"pending": True}
        reports, self.reports = self.reports, []
        return {**reports[0], "more": reports[1:]} if reports else {"pending": True}

    def begin(self, request) -> None:
        self.task, self.attempt = dict(request["task_info"]), request["attempt"]
        self.taken.append(self.task_id)
        self.seq = self.n_demands = self.n_learned = 0
        self.reports, self.is_waiting = [], False

    def fail(self) -> None:
        self.failure = "Traceback\nValueError: it broke"

    def kill(self) -> None:
        self.network.disconnect(self.uid, "killed")
        self.is_hung = True

    def report(self, **report) -> None:
        self.reports.append({"buffer_id": self.task["buffer_id"], "seq": self.seq, **report})
        self.seq += 1

    def collect(self) -> None:
        if self.seq < self.n_data:
            data_id = f"{self.uid}_{self.task_id}_{self.seq}"
            ref = self.store.put(data_id, {"obs": [1.0, 2.0], "done": False})
            self.report(data_id=data_id, object_ref=ref, env_id=0)
        else:
            self.report(collector_done=self.seq == self.n_data)

    def learn(self) -> None:
        if not self.is_waiting:
            self.demand()

    def demand(self, lost=()) -> None:
        self.is_waiting = True
        self.demanded = {
            "batch_size": self.batch_size, "cur_learner_iter": 0, "seq": self.n_demands,
            "lost": list(lost), "buffer_id": self.task["buffer_id"],
        }  # fmt: skip
        self.n_demands += 1

    def take_data(self, data) -> None:
        self.is_waiting = False
        lost = []
        for meta in data:
            try:
                self.store.get(meta["object_ref"])
            except StepDataLost:
                lost.append(meta["data_id"])
        self.lost += lost
        if lost:
            self.demand(lost)
            return
        self.n_learned += 1
        self.info = {
            "learner_step": self.n_learned,
            "learner_done": self.n_learned == self.n_learn,
            "priority_info": self.priority_info,
        }


class LocalCluster:
    """Runs a coordinator and its workers in turn; each turn takes half a second.

    With ``threaded`` the coordinator has a thread of its own, and waits in real time.
    """

    def __init__(self, folder, *, threaded=False, **options):
        self.folder = folder
        self.clock = FakeClock()
        self.network = MemoryNetwork(idle=None if threaded else self.others_work)
        self.store = FileStore(folder / "data", folder / "policy", "run", compressor="none")
        self.workers: dict[str, ScriptedWorker] = {}
        self.coordinator = self.new_coordinator(config(**options))

    def new_coordinator(self, cfg) -> Coordinator:
        """Connect a coordinator; the one before must be closed or dead."""
        self.cfg = cfg
        self.link = self.network.connect("coordinator", COORDINATOR)
        return Coordinator(
            cfg,
            link=self.link,
            store=self.store,
            clock=self.clock.now,
        )

    @property
    def commander(self) -> ScriptedCommander:
        return self.coordinator.commander

    @property
    def tape(self):
        return self.commander.tape

    def start(self) -> Coordinator:
        self.coordinator.start(in_thread=False)
        return self.coordinator

    def add(self, uid, kind, **options) -> ScriptedWorker:
        self.workers[uid] = ScriptedWorker(self.network, self.store, uid, kind, **options)
        return self.workers[uid]

    def collector(self, uid="c0", **options) -> ScriptedWorker:
        return self.add(uid, COLLECTOR, **options)

    def learner(self, uid="l0", **options) -> ScriptedWorker:
        return self.add(uid, LEARNER, **options)

    def others_work(self, timeout_s) -> None:
        self.clock.advance(max(timeout_s, STEP_S))
        for worker in self.workers.values():
            worker.step()

    def run(self, until, *, most_s=300.0) -> float:
        """Run until a condition holds; return the seconds of the fake clock that it took."""
        began = self.clock.now()
        while not until():
            assert self.clock.now() - began < most_s, f"after {most_s:g} s it is not so"
            self.coordinator.run_once(0.0)
            self.others_work(STEP_S)
        return self.clock.now() - began

    def run_for(self, seconds) -> None:
        end = self.clock.now() + seconds
        self.run(lambda: self.clock.now() >= end, most_s=2 * seconds + 1)

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "data").rglob("*") if path.is_file())

    def crash(self) -> None:
        """Kill the coordinator's process, and connect a new one with the same config."""
        self.network.disconnect("coordinator", "killed")
        self.coordinator = self.new_coordinator(self.cfg)
