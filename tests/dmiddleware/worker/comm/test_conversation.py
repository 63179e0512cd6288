"""One conversation of a coordinator and a worker, over every link."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmiddleware.worker.comm.http import Master, Slave
from dmiddleware.worker.comm.http_link import HttpLink
from dmiddleware.worker.comm.link_server import LinkServer
from dmiddleware.worker.comm.memory_link import MemoryNetwork
from dmiddleware.worker.coordinator import conversation as conversation_module
from dmiddleware.worker.coordinator.conversation import Ask, Conversation, Conversations
from dmiddleware.worker.coordinator.messages import (
    CollectorInfo,
    DataDemand,
    Joined,
    LearnData,
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
from dmiddleware.worker.errors import TaskFail
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
from tests.dmiddleware.worker.comm.talking import Talking
from tests.middleware.classic.router_nodes import Nodes


class Coordinator:
    """The coordinator's end of a link to one worker, driven by a test."""

    def __init__(self, link, kill, **options):
        self.link = Talking(link, **options)
        self.kill = kill
        found = self.link.receive(DEADLINE_S)
        assert isinstance(found[1], Joined)
        self.worker = found[0]

    def ask(self, message):
        self.send(message)
        return self.next()

    def send(self, message):
        self.link.send(self.worker, message)

    def next(self, *skip):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            found = self.link.receive(DEADLINE_S)
            assert found is not None, "the worker says nothing"
            if not isinstance(found[1], skip or TaskAlive):
                return found[1]
        raise AssertionError("only messages that are skipped came")


class OverMemory:
    """A worker in this process, and the coordinators that ask it."""

    def __init__(self, worker, folder):
        self.network = MemoryNetwork()
        self.server = LinkServer(worker, self.network.connect("worker", worker.kind))

    def coordinator(self, **options):
        link = self.network.connect("main", "coordinator")
        kill = lambda: self.network.disconnect("main", "killed")  # noqa: E731
        return Coordinator(link, kill, **options)

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *error):
        self.server.close()


class _Passing(Slave):
    """Passes tasks to a worker."""

    def __init__(self, worker):
        super().__init__(port=0, heartbeat_span=0.2, request_retries=1, request_retry_waiting=0.05)
        self.worker = worker

    def _process_task(self, task):
        return self.worker.process_task(task)

    def _result_not_taken(self, task, result):
        self.worker.take_back()


class OverHttp:
    """A worker behind an HTTP server, and the coordinators that ask it."""

    def __init__(self, worker, folder):
        self.kind, self.slave = worker.kind, _Passing(worker)
        self.open = contextlib.ExitStack()

    def coordinator(self, **options):
        master = Master(
            port=0, request_retries=1, request_retry_waiting=0.05, heartbeat_check_span=0.1
        )
        link = HttpLink(master, {"worker": (self.kind, "127.0.0.1", self.slave.port)})

        def kill():
            """Stop as if the process had been killed: nothing is released or answered."""
            master._server.close()
            link._closing.set()
            for connection in master._connections:
                connection.disconnect = lambda data=None: None

        self.open.callback(link.close, 0.5)
        return Coordinator(link, kill, **options)

    def __enter__(self):
        self.slave.start()
        return self

    def __exit__(self, *error):
        self.open.close()
        self.slave.close()


class OverRouter:
    """A worker behind a router, and the coordinators that ask it."""

    def __init__(self, worker, folder):
        self.worker, self.nodes = worker, Nodes(folder)

    def coordinator(self, **options):
        link = self.nodes.link(0, "coordinator")
        if not hasattr(self, "server"):
            self.server = LinkServer(self.worker, self.nodes.link(1, self.worker.kind))
            self.server.start()

        def kill():
            link._task.router.suspend()
            link._task.router.close(deadline_s=0.1, goodbye=False)

        return Coordinator(link, kill, **options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.close()
        self.nodes.close()


@pytest.fixture(params=[OverMemory, pytest.param(OverHttp, marks=pytest.mark.slow), OverRouter])
def over(request, tmp_path, monkeypatch):
    """Serve a worker over a link, and connect a coordinator to it."""
    # A worker with nothing to report says sooner that it is alive.
    monkeypatch.setattr(conversation_module, "_POLL_S", 0.1)
    with contextlib.ExitStack() as stack:

        def connected(worker, **options):
            served = stack.enter_context(request.param(worker, tmp_path))
            stack.enter_context(worker)  # which is closed first
            coordinator = served.coordinator(**options)
            coordinator.successor = served.coordinator
            return coordinator

        yield connected


def offer(task, kind, attempt=0):
    return TaskOffer(task["task_id"], attempt, kind, task)


def stay(collector):
    assert collector.end.wait(DEADLINE_S)


def play_one(collector):
    collector.send_stepdata("d", 1)
    collector.send_metadata(metadata("d"))
    collector.send_metadata(info(collector_done=True))
    stay(collector)


def test_a_collector_task_from_its_offer_to_its_result(over):
    coordinator = over(Collector(play_one))
    assert coordinator.ask(ResourceQuery()) == Resources({"gpu": 1, "cpu": 20})
    assert coordinator.ask(offer(collector_task(), "collector", 2)) == TaskStarted("c", 2)
    ready, progress = coordinator.next(), coordinator.next()
    assert isinstance(ready, StepDataReady) and isinstance(progress, CollectorInfo)
    assert (ready.task_id, ready.attempt, ready.seq, ready.data_id) == ("c", 2, 0, "d")
    assert ready.data["object_ref"] == "d" and "task_id" not in ready.data
    assert progress.seq == 1 and progress.info["collector_done"]
    done = coordinator.ask(TaskClose("c", 2))
    assert isinstance(done, TaskDone) and done.result["step_count"] == 9
    assert coordinator.ask(ResourceQuery()).task_id == ""


def test_a_learner_task_gets_its_data_and_ends_in_order(over):
    worker = Learner()
    coordinator = over(worker)
    task = learner_task(train_iterations=2)
    assert coordinator.ask(offer(task, "learner")) == TaskStarted("l", 0)
    data = tuple(put_samples(worker.memory, 4))
    for seq in range(2):
        assert coordinator.next(TaskAlive, LearnInfo) == DataDemand("l", 0, seq, "b", 4, seq)
        coordinator.send(LearnData("l", 0, seq, data))
    learned = coordinator.next()
    while not (isinstance(learned, LearnInfo) and learned.info["learner_done"]):
        learned = coordinator.next()
    assert learned.info["learner_step"] == 2
    done = coordinator.ask(TaskClose("l", 0))
    assert done == TaskDone("l", 0, {"task_id": "l", "buffer_id": "b"})


def test_a_learner_that_is_closed_early_reports_what_it_has_learned_first(over):
    coordinator = over(Learner())
    coordinator.ask(offer(learner_task(), "learner"))
    assert isinstance(coordinator.next(), DataDemand)
    learned = coordinator.ask(TaskClose("l", 0))
    assert isinstance(learned, LearnInfo) and learned.info["learner_done"]
    assert isinstance(coordinator.next(), TaskDone)


def test_a_batch_for_another_demand_is_ignored(over):
    worker = Learner()
    coordinator = over(worker)
    coordinator.ask(offer(learner_task(train_iterations=1), "learner", 2))
    data = tuple(put_samples(worker.memory, 4))
    assert coordinator.next() == DataDemand("l", 2, 0, "b", 4, 0)
    for attempt, seq, batch in ((1, 0, data[:1]), (2, 7, data[:1]), (2, 0, data), (2, 0, data)):
        coordinator.send(LearnData("l", attempt, seq, batch))
    learned = [coordinator.next()]
    while not learned[-1].info["learner_done"]:
        learned.append(coordinator.next())
    assert [one.seq for one in learned] == list(range(len(learned)))
    assert coordinator.ask(TaskClose("l", 2)) == TaskDone(
        "l", 2, {"task_id": "l", "buffer_id": "b"}
    )


def test_a_silent_task_is_reported_alive(over):
    coordinator = over(Collector(stay))
    coordinator.ask(offer(collector_task(), "collector"))
    for _ in range(2):
        assert coordinator.next(Joined) == TaskAlive("c", 0)


def test_a_task_that_takes_long_to_end_is_reported_alive(over):
    go_on = threading.Event()

    def slow(collector):
        assert go_on.wait(DEADLINE_S)

    coordinator = over(Collector(slow))
    coordinator.ask(offer(collector_task(), "collector"))
    coordinator.send(TaskClose("c", 0))
    for _ in range(3):
        assert coordinator.next(Joined) == TaskAlive("c", 0)
    go_on.set()
    assert isinstance(coordinator.next(), TaskDone)


def test_a_task_that_dies_is_reported_with_its_traceback_and_the_worker_takes_another(over):
    def crash(collector):
        raise ValueError("the env broke")

    worker = Collector(crash)
    coordinator = over(worker)
    coordinator.ask(offer(collector_task(), "collector"))
    failed = coordinator.next()
    assert isinstance(failed, TaskFailed) and failed.task_id == "c"
    assert "Traceback" in failed.message and "the env broke" in failed.message
    worker.work = stay
    assert isinstance(coordinator.ask(offer(collector_task("n"), "collector")), TaskStarted)


def test_a_task_that_fails_while_it_is_closed_is_reported(over):
    def crash(collector):
        stay(collector)
        raise ValueError("the env broke")

    coordinator = over(Collector(crash))
    coordinator.ask(offer(collector_task(), "collector"))
    failed = coordinator.ask(TaskClose("c", 0))
    assert isinstance(failed, TaskFailed) and "the env broke" in failed.message


def test_offers_that_a_worker_cannot_take_are_refused_and_repeated_ones_confirmed(over):
    coordinator = over(Collector(stay))
    refused = coordinator.ask(offer(learner_task(), "learner"))
    assert isinstance(refused, TaskRefused) and "unknown task 'learner_start" in refused.reason
    refused = coordinator.ask(TaskOffer("c", 0, "collector", {"task_id": "c"}))
    assert isinstance(refused, TaskRefused) and "buffer_id" in refused.reason
    refused = coordinator.ask(offer(collector_task(unsendable=object()), "collector"))
    assert isinstance(refused, TaskRefused) or not isinstance(coordinator.link.link, HttpLink)
    coordinator.send(TaskClose("c", 0))
    coordinator.next()
    task = collector_task()
    assert coordinator.ask(offer(task, "collector")) == TaskStarted("c", 0)
    assert coordinator.ask(offer(task, "collector")) == TaskStarted("c", 0)
    refused = coordinator.ask(offer(collector_task("other"), "collector"))
    assert isinstance(refused, TaskRefused) and "already runs" in refused.reason


def test_the_close_of_a_task_that_the_worker_does_not_run_is_answered(over):
    coordinator = over(Collector(stay))
    failed = coordinator.ask(TaskClose("old", 3))
    assert isinstance(failed, TaskFailed) and (failed.task_id, failed.attempt) == ("old", 3)


def test_a_restarted_coordinator_adopts_the_task_and_hears_again_what_it_may_have_missed(over):
    go_on = threading.Event()

    def play(collector):
        collector.send_metadata(info(collector_done=True))
        assert go_on.wait(DEADLINE_S)
        collector.send_metadata(info(cur_step=10))
        stay(collector)

    coordinator = over(Collector(play))
    coordinator.ask(offer(collector_task(), "collector"))
    before = coordinator.next()
    assert coordinator.next(Joined) == TaskAlive("c", 0), "it was asked again since"
    coordinator.kill()
    successor = coordinator.successor()
    assert successor.ask(ResourceQuery()) == Resources({"gpu": 1, "cpu": 20}, "c", 0)
    assert successor.next() == before
    go_on.set()
    later = successor.next()
    assert (later.seq, later.info["cur_step"]) == (1, 10)
    assert isinstance(successor.ask(TaskClose("c", 0)), TaskDone)


def test_a_restarted_coordinator_gets_the_open_demand_again(over):
    coordinator = over(Learner())
    coordinator.ask(offer(learner_task(), "learner"))
    demand = coordinator.next()
    coordinator.kill()
    successor = coordinator.successor()
    assert successor.ask(ResourceQuery()).task_id == "l"
    assert successor.next() == demand


def test_a_restarted_coordinator_hears_again_that_the_learner_is_done(over):
    worker = Learner()
    coordinator = over(worker)
    coordinator.ask(offer(learner_task(train_iterations=1), "learner"))
    coordinator.next()
    coordinator.send(LearnData("l", 0, 0, tuple(put_samples(worker.memory, 4))))
    while not (isinstance(found := coordinator.next(), LearnInfo) and found.info["learner_done"]):
        pass
    assert coordinator.next(Joined) == TaskAlive("l", 0), "it was asked again since"
    coordinator.kill()
    successor = coordinator.successor()
    assert successor.ask(ResourceQuery()).task_id == "l"
    again = successor.next()
    assert again.info == {**found.info, "priority_info": {}}
    assert again.seq == -1, "the core does not ignore it"


def test_what_is_said_after_a_link_is_lost_is_kept_for_the_next_coordinator(over):
    """Reports whose answer nobody received come again, once, and in their order."""
    go_on = threading.Event()

    def play(collector):
        assert go_on.wait(DEADLINE_S)
        for number in range(3):
            collector.send_stepdata(f"d{number}", number)
            collector.send_metadata(metadata(f"d{number}"))
        stay(collector)

    worker = Collector(play)
    coordinator = over(worker)
    coordinator.ask(offer(collector_task(), "collector"))
    coordinator.link.receive(0.1)  # the request for reports is with the worker
    coordinator.kill()
    go_on.set()
    successor = coordinator.successor()
    assert successor.ask(ResourceQuery()).task_id == "c"
    ready = [successor.next() for _ in range(3)]
    assert [(one.seq, one.data_id) for one in ready] == [(0, "d0"), (1, "d1"), (2, "d2")]


def test_a_worker_that_does_not_answer_has_left_and_joins_again_when_it_does(over):
    answering = threading.Event()

    class Hung(Collector):
        def deal_with_resource(self):
            assert answering.wait(DEADLINE_S)
            return super().deal_with_resource()

    coordinator = over(Hung(stay), answer_timeout_s=0.3)
    left = coordinator.ask(ResourceQuery())
    assert isinstance(left, Left) and "has not answered for 0.3 s" in left.reason
    assert coordinator.next() == Joined("collector")
    answering.set()
    coordinator.send(ResourceQuery())
    while (found := coordinator.next()) != Resources({"gpu": 1, "cpu": 20}):
        assert isinstance(found, Left | Joined)
        coordinator.send(ResourceQuery())


def test_a_worker_gets_one_request_at_a_time(over):
    """So a worker that reports a lot neither floods its coordinator nor delays the others."""
    most = threading.Semaphore(1)

    class Counting(Collector):
        def process_task(self, task):
            assert most.acquire(blocking=False), "two requests at once"
            try:
                return super().process_task(task)
            finally:
                most.release()

    def flood(collector):
        for number in range(100):
            collector.send_stepdata(f"d{number}", number)
            collector.send_metadata(metadata(f"d{number}"))
        stay(collector)

    worker = Counting(flood, {"queue_size": 4})
    coordinator = over(worker)
    coordinator.ask(offer(collector_task(), "collector"))
    ready = [coordinator.next() for _ in range(100)]
    assert [one.seq for one in ready] == list(range(100))
    assert isinstance(coordinator.ask(TaskClose("c", 0)), TaskDone)


MALFORMED = [
    ({}, "unknown task None"),
    ({"name": ["collector_data_task"]}, "unknown task"),
    ({"name": "learner_learn_task"}, "unknown task"),
    ({"name": "collector_start_task"}, "task_info"),
    ({"name": "collector_start_task", "task_info": [1]}, "task_info"),
    ({"name": "collector_start_task", "task_info": {}, "attempt": "first"}, "attempt"),
    ({"name": "collector_data_task", "most": None}, "most"),
    ({"name": "collector_data_task", "timeout_s": "soon"}, "timeout_s"),
    ({"name": "collector_close_task", "timeout_s": {}}, "timeout_s"),
]


@pytest.mark.parametrize(("task", "word"), MALFORMED)
def test_a_malformed_request_is_answered_with_its_fault_and_changes_nothing(task, word):
    with Collector(stay) as worker:
        worker.process_task({"name": "collector_start_task", "task_info": collector_task()})
        with pytest.raises(TaskFail, match=word):
            worker.process_task(task)
        assert worker.job is not None and not worker.job.closing


def test_a_malformed_batch_is_answered_with_its_fault():
    with Learner() as worker:
        worker.process_task({"name": "learner_start_task", "task_info": learner_task()})
        for data in (None, 3, ["d0"], {}):
            with pytest.raises(TaskFail, match="data"):
                worker.process_task({"name": "learner_learn_task", "data": data})


def test_a_malformed_request_over_a_link_is_answered_with_its_fault():
    network = MemoryNetwork()
    asking = network.connect("main", "coordinator")
    with LinkServer(Collector(stay), network.connect("worker", "collector")):
        asking.send("worker", Ask("1", "dance"))
        asking.send("worker", Ask("2", "collector_start_task", {"task_info": 3}))
        answers = []
        while len(answers) < 2:
            _, said = asking.receive(DEADLINE_S)
            if not isinstance(said, Joined):
                answers.append(said)
    assert [one.id for one in answers] == ["1", "2"]
    assert "unknown task 'dance'" in answers[0].failure
    assert "task_info" in answers[1].failure


def test_an_answer_that_nobody_waits_for_tells_nothing():
    conversation = Conversation("collector")
    conversation.say(ResourceQuery())
    ask = conversation.next(0.0)
    assert conversation.next(0.0) is None, "it has not answered"
    answer = Collector(stay).answer(ask)
    assert list(conversation.hear(answer, 0.0)) == [Resources({"gpu": 1, "cpu": 20})]
    assert list(conversation.hear(answer, 0.0)) == []


def begun(worker):
    """Return the conversation of a coordinator that has just started with a worker."""
    conversation = Conversation(worker.kind)
    conversation.say(ResourceQuery())
    assert [one.task_id for one in exchange(conversation, worker)] == ["c"]
    return conversation


def exchange(conversation, worker):
    """Return what the answer to the next request tells the core."""
    return list(conversation.hear(worker.answer(conversation.next(0.0)), 0.0))


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.sampled_from(["report", "ask", "lose an answer"]), max_size=30))
def test_every_report_is_heard_in_order_and_none_is_lost(steps):
    """Repeated ones have the numbers that they had, and so the core ignores them."""
    n_reports, heard = 0, []
    with (
        pytest.MonkeyPatch.context() as patch,
        Collector(stay, {"queue_size": 100}) as worker,
    ):
        patch.setattr(conversation_module, "_POLL_S", 0.0)
        worker.process_task({"name": "collector_start_task", "task_info": collector_task()})
        conversation = begun(worker)
        for step in [*steps, "ask"]:
            if step == "report":
                worker.send_metadata(metadata(f"d{n_reports}"))
                n_reports += 1
            elif step == "ask":
                told = exchange(conversation, worker)
                heard += [one.seq for one in told if isinstance(one, StepDataReady)]
            else:
                worker.answer(conversation.next(0.0))
                conversation = begun(worker)
    assert list(dict.fromkeys(heard)) == list(range(n_reports))


def test_a_link_server_can_be_closed_twice_and_started_twice():
    network = MemoryNetwork()
    server = LinkServer(Collector(stay), network.connect("w", "collector"))
    server.start()
    server.start()
    server.close()
    server.close()
    assert network.roles("other") == {}


def test_an_answer_for_a_coordinator_that_is_gone_is_kept_with_a_warning(caplog):
    network = MemoryNetwork()
    asking = network.connect("main", "coordinator")
    taken_back = threading.Event()

    class Slow(Collector):
        def deal_with_resource(self):
            network.disconnect("main", "killed")
            return super().deal_with_resource()

        def take_back(self):
            super().take_back()
            if "not sent" in caplog.text:
                taken_back.set()

    with LinkServer(Slow(stay), network.connect("worker", "collector")):
        asking.send("worker", Ask("1", "resource"))
        assert taken_back.wait(DEADLINE_S)


def test_conversations_need_no_thread_and_no_time():
    clock = iter(range(10**6)).__next__
    network = MemoryNetwork()
    conversations = Conversations(network.connect("main", "coordinator"), clock=clock)
    worker, link = Collector(stay), network.connect("worker", "collector")
    began = time.monotonic()
    assert conversations.receive(0.0) == [("worker", Joined("collector"))]
    conversations.say("worker", ResourceQuery())
    conversations.say("nobody", ResourceQuery())
    assert conversations.ask() == [] == conversations.ask()
    assert link.receive(0.0)[1] == Joined("coordinator")
    link.send("main", worker.answer(link.receive(0.0)[1]))
    assert link.receive(0.0) is None, "asked once"
    assert conversations.receive(0.0) == [("worker", Resources({"gpu": 1, "cpu": 20}))]
    assert time.monotonic() - began < DEADLINE_S
