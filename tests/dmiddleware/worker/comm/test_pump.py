"""Workers that answer a coordinator over a link."""

from __future__ import annotations

import contextlib
import threading

import pytest

from dmiddleware.worker.comm.memory_link import MemoryNetwork
from dmiddleware.worker.comm.pump import WorkerPump
from dmiddleware.worker.coordinator.messages import (
    CollectorInfo,
    DataDemand,
    Joined,
    LearnData,
    LearnInfo,
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
from tests.dmiddleware.worker.comm.comm_workers import (
    DEADLINE_S,
    Collector,
    Learner,
    collector_task,
    info,
    learner_task,
    metadata,
    put_samples,
)


class Coordinator:
    """The coordinator's end of a link, driven by a test."""

    def __init__(self, network):
        self.network = network
        self.link = network.connect("main", "coordinator")

    def ask(self, message):
        self.link.send("worker", message)
        return self.next()

    def next(self, *, alive=False):
        while True:
            found = self.link.receive(DEADLINE_S)
            assert found is not None, "the worker says nothing"
            if alive or not isinstance(found[1], Joined | TaskAlive):
                return found[1]


@contextlib.contextmanager
def connected(worker, alive_s=60.0):
    network = MemoryNetwork()
    coordinator = Coordinator(network)
    with WorkerPump(worker, network.connect("worker", worker.kind), alive_s=alive_s), worker:
        yield coordinator


def offer(task, kind, attempt=0):
    return TaskOffer(task["task_id"], attempt, kind, task)


def wait(collector):
    assert collector.end.wait(DEADLINE_S)


def play_one(collector):
    collector.send_stepdata("d", 1)
    collector.send_metadata(metadata("d"))
    collector.send_metadata(info(collector_done=True))
    wait(collector)


def test_a_collector_task_from_its_offer_to_its_result():
    with connected(Collector(play_one)) as coordinator:
        assert coordinator.ask(ResourceQuery()) == Resources({"gpu": 1, "cpu": 20})
        task = collector_task()
        assert coordinator.ask(offer(task, "collector", 2)) == TaskStarted("c", 2)
        ready, progress = coordinator.next(), coordinator.next()
        assert isinstance(ready, StepDataReady) and isinstance(progress, CollectorInfo)
        assert (ready.task_id, ready.attempt, ready.seq, ready.data_id) == ("c", 2, 0, "d")
        assert ready.data["object_ref"] == "d" and "task_id" not in ready.data
        assert progress.seq == 1 and progress.info["collector_done"]
        done = coordinator.ask(TaskClose("c", 2))
        assert isinstance(done, TaskDone) and done.result["step_count"] == 9
        assert coordinator.ask(TaskClose("c", 2)) == done, "an answer may have been lost"
        assert coordinator.ask(ResourceQuery()).task_id == ""


def test_a_learner_task_gets_its_data_and_ends_in_order():
    worker = Learner()
    with connected(worker) as coordinator:
        task = learner_task(train_iterations=2)
        assert coordinator.ask(offer(task, "learner")) == TaskStarted("l", 0)
        data = tuple(put_samples(worker.memory, 4))
        for seq in range(2):
            assert coordinator.next() == DataDemand("l", 0, seq, "b", 4, seq)
            coordinator.link.send("worker", LearnData("l", 0, seq, data))
        learned = coordinator.next()
        while not (isinstance(learned, LearnInfo) and learned.info["learner_done"]):
            learned = coordinator.next()
        assert learned.info["learner_step"] == 2
        done = coordinator.ask(TaskClose("l", 0))
        assert done == TaskDone("l", 0, {"task_id": "l", "buffer_id": "b"})


def test_a_learner_that_is_closed_early_reports_what_it_has_learned_first():
    with connected(Learner()) as coordinator:
        coordinator.ask(offer(learner_task(), "learner"))
        assert isinstance(coordinator.next(), DataDemand)
        learned = coordinator.ask(TaskClose("l", 0))
        assert isinstance(learned, LearnInfo) and learned.info["learner_done"]
        assert isinstance(coordinator.next(), TaskDone)


def test_a_silent_task_is_reported_alive():
    with connected(Collector(wait), alive_s=0.01) as coordinator:
        coordinator.ask(offer(collector_task(), "collector"))
        assert coordinator.next(alive=True) == TaskAlive("c", 0)
        assert coordinator.next(alive=True) == TaskAlive("c", 0)


def test_a_task_that_takes_long_to_end_is_reported_alive():
    go_on = threading.Event()

    def slow(collector):
        assert go_on.wait(DEADLINE_S)

    with connected(Collector(slow), alive_s=0.01) as coordinator:
        coordinator.ask(offer(collector_task(), "collector"))
        coordinator.link.send("worker", TaskClose("c", 0))
        for _ in range(20):
            assert coordinator.next(alive=True) == TaskAlive("c", 0)
        go_on.set()
        assert isinstance(coordinator.next(), TaskDone)


def test_a_task_that_dies_is_reported_with_its_traceback_and_the_worker_takes_another():
    def crash(collector):
        raise ValueError("the env broke")

    worker = Collector(crash)
    with connected(worker) as coordinator:
        coordinator.ask(offer(collector_task(), "collector"))
        failed = coordinator.next()
        assert isinstance(failed, TaskFailed) and failed.task_id == "c"
        assert "Traceback" in failed.message and "the env broke" in failed.message
        worker.work = wait
        assert isinstance(coordinator.ask(offer(collector_task("n"), "collector")), TaskStarted)


def test_a_task_that_fails_while_it_is_closed_is_reported():
    def crash(collector):
        wait(collector)
        raise ValueError("the env broke")

    with connected(Collector(crash)) as coordinator:
        coordinator.ask(offer(collector_task(), "collector"))
        failed = coordinator.ask(TaskClose("c", 0))
        assert isinstance(failed, TaskFailed) and "the env broke" in failed.message


def test_offers_that_a_worker_cannot_take_are_refused_and_repeated_ones_confirmed():
    with connected(Collector(wait)) as coordinator:
        refused = coordinator.ask(offer(learner_task(), "learner"))
        assert isinstance(refused, TaskRefused) and "is a collector" in refused.reason
        refused = coordinator.ask(TaskOffer("c", 0, "collector", {"task_id": "c"}))
        assert "buffer_id" in refused.reason
        task = collector_task()
        assert coordinator.ask(offer(task, "collector")) == TaskStarted("c", 0)
        assert coordinator.ask(offer(task, "collector")) == TaskStarted("c", 0)
        refused = coordinator.ask(offer(collector_task("other"), "collector"))
        assert isinstance(refused, TaskRefused) and "already runs" in refused.reason


def test_the_close_of_a_task_that_the_worker_does_not_run_is_answered():
    with connected(Collector(wait)) as coordinator:
        coordinator.link.send("worker", ResourceQuery())
        coordinator.next()
        failed = coordinator.ask(TaskClose("old", 3))
        assert isinstance(failed, TaskFailed) and (failed.task_id, failed.attempt) == ("old", 3)


def test_a_restarted_coordinator_adopts_the_task_and_hears_again_what_it_may_have_missed():
    go_on = threading.Event()

    def play(collector):
        collector.send_metadata(info(collector_done=True))
        assert go_on.wait(DEADLINE_S)
        collector.send_metadata(info(cur_step=10))
        wait(collector)

    with connected(Collector(play)) as coordinator:
        coordinator.ask(offer(collector_task(), "collector"))
        before = coordinator.next()
        coordinator.network.disconnect("main", "killed")
        go_on.set()
        successor = Coordinator(coordinator.network)
        assert successor.next(alive=True) == Joined("collector")
        adopted = successor.ask(ResourceQuery())
        messages = [adopted, successor.next(), successor.next()]
        assert Resources({"gpu": 1, "cpu": 20}, "c", 0) in messages
        infos = [one for one in messages if isinstance(one, CollectorInfo)]
        assert {one.seq for one in infos} <= {0, 1} and len(infos) == 2
        assert before in infos or infos[-1].info["cur_step"] == 10
        assert isinstance(successor.ask(TaskClose("c", 0)), TaskDone)


def test_a_restarted_coordinator_gets_the_open_demand_again():
    with connected(Learner()) as coordinator:
        coordinator.ask(offer(learner_task(), "learner"))
        demand = coordinator.next()
        coordinator.network.disconnect("main", "killed")
        successor = Coordinator(coordinator.network)
        assert successor.ask(ResourceQuery()).task_id == "l"
        assert successor.next() == demand


def test_what_a_coordinator_does_not_take_in_time_is_dropped_with_a_warning(caplog):
    network = MemoryNetwork()
    coordinator = Coordinator(network)
    worker = Collector(wait)
    link = network.connect("worker", "collector")
    with WorkerPump(worker, link, alive_s=0.01, timeout_s=0.02), worker:
        coordinator.ask(offer(collector_task(), "collector"))
        coordinator.next(alive=True)
        network.disconnect("main", "killed")
        deadline = threading.Event()
        for _ in range(300):
            if "TaskAlive was not sent" in caplog.text:
                break
            deadline.wait(0.1)
    assert "was away for" in caplog.text


def test_impossible_times_are_refused():
    with pytest.raises(ValueError, match="alive_s"):
        WorkerPump(Collector(wait), MemoryNetwork().connect("w", "collector"), alive_s=0)


def test_a_pump_can_be_closed_twice_and_started_twice():
    network = MemoryNetwork()
    pump = WorkerPump(Collector(wait), network.connect("w", "collector"))
    pump.start()
    pump.start()
    pump.close()
    pump.close()
    assert network.roles("other") == {}
