"""What the core answers to single messages."""

from __future__ import annotations

import pytest

from dmiddleware.worker.coordinator.actions import (
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
from dmiddleware.worker.coordinator.core import CoordinatorCore
from dmiddleware.worker.coordinator.messages import (
    COLLECTOR,
    COORDINATOR,
    LEARNER,
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
from dmiddleware.worker.coordinator.tasks import SeenNumbers
from dmiddleware.worker.errors import CoordinatorError

LEARN = {"task_id": "learn", "buffer_id": "b"}
COLLECT = {"task_id": "collect", "buffer_id": "b"}


class Driver:
    """Gives a core messages, and keeps its actions without notes."""

    def __init__(self, **options):
        self.now = 0.0
        self.core = CoordinatorCore(task_timeout_s={COLLECTOR: 30.0, LEARNER: 600.0}, **options)

    @staticmethod
    def acts(actions):
        return [one for one in actions if not isinstance(one, Note)]

    def gets(self, peer, message):
        return self.acts(self.core.handle(peer, message, self.now))

    def submit(self, kind, info):
        return self.acts(self.core.submit(kind, info, self.now))

    def after(self, seconds):
        self.now += seconds
        return self.acts(self.core.tick(self.now))

    def join(self, peer, kind):
        self.gets(peer, Joined(kind))
        return self.gets(peer, Resources({"gpu": 0, "cpu": 1}))

    def run_learner(self):
        self.join("l", LEARNER)
        self.submit(LEARNER, LEARN)
        self.gets("l", TaskStarted("learn", 1))

    def run_both(self):
        self.run_learner()
        self.join("c", COLLECTOR)
        self.submit(COLLECTOR, COLLECT)
        self.gets("c", TaskStarted("collect", 1))


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def running():
    driver = Driver()
    driver.run_both()
    return driver


def data(seq, task_id="collect"):
    return StepDataReady(task_id, 1, seq, "b", f"d{seq}", {})


def close(task_id, attempt=1):
    return TaskClose(task_id, attempt)


def test_a_worker_is_asked_for_its_resources_when_it_joins(driver):
    assert driver.gets("l", Joined(LEARNER)) == [Send("l", ResourceQuery())]
    assert driver.gets("c", Joined(COLLECTOR)) == [WorkersChanged(1), Send("c", ResourceQuery())]
    assert driver.gets("x", Joined(COORDINATOR)) == []


def test_a_worker_that_does_not_answer_is_asked_again_every_ten_seconds(driver):
    driver.gets("l", Joined(LEARNER))
    assert driver.after(9.9) == []
    assert driver.after(0.1) == [Send("l", ResourceQuery())]
    assert driver.after(9.9) == []


def test_an_idle_worker_gets_the_task(driver):
    driver.submit(LEARNER, LEARN)
    assert driver.join("l", LEARNER) == [Send("l", TaskOffer("learn", 1, LEARNER, LEARN))]


def test_a_started_learner_opens_its_buffer_and_then_collectors_get_their_tasks(driver):
    driver.join("c", COLLECTOR)
    driver.join("l", LEARNER)
    assert driver.submit(COLLECTOR, COLLECT) == []
    driver.submit(LEARNER, LEARN)
    opened, offer = driver.gets("l", TaskStarted("learn", 1))
    assert isinstance(opened, OpenBuffer)
    assert offer == Send("c", TaskOffer("collect", 1, COLLECTOR, COLLECT))


def test_a_busy_worker_gets_no_second_task(running):
    assert running.submit(COLLECTOR, {"task_id": "more", "buffer_id": "b"}) == []


def test_a_worker_gets_tasks_of_its_own_kind_only(driver):
    driver.join("c", COLLECTOR)
    assert driver.submit(LEARNER, LEARN) == []


def test_each_report_is_taken_once_in_any_order(running):
    assert running.gets("c", data(1)) == [Collected(data(1))]
    assert running.gets("c", data(0)) == [Collected(data(0))]
    assert running.gets("c", data(1)) == [Discard(data(1))]
    info = CollectorInfo("collect", 1, 2, {"x": 1})
    assert running.gets("c", info) == [CollectorReported("collect", {"x": 1})]
    assert running.gets("c", info) == []
    report = LearnInfo("learn", 1, 0, "b", {})
    assert running.gets("l", report) == [LearnerReported(report)]
    assert running.core.counters["duplicates"] == 2


def test_messages_of_another_worker_or_attempt_are_late(running):
    running.join("other", COLLECTOR)
    assert running.gets("other", data(0))[0] == Discard(data(0))
    old = StepDataReady("collect", 7, 0, "b", "d", {})
    assert running.gets("c", old)[0] == Discard(old)
    assert running.core.counters["late_messages"] == 2


def test_a_worker_with_a_task_that_is_not_its_own_is_asked_to_end_it_once(running):
    running.join("x", COLLECTOR)
    first = running.gets("x", TaskAlive("gone", 1))
    assert first == [Send("x", ResourceQuery()), Send("x", close("gone"))]
    assert running.gets("x", TaskAlive("gone", 1)) == []
    running.after(5)
    assert running.gets("x", TaskAlive("gone", 1)) == []
    running.now += 5
    assert Send("x", close("gone")) in running.gets("x", TaskAlive("gone", 1))


def test_a_worker_that_runs_something_unknown_is_not_offered_a_task(driver):
    driver.gets("l", Joined(LEARNER))
    driver.submit(LEARNER, LEARN)
    assert driver.gets("l", Resources({}, "other", 1)) == [Send("l", close("other"))]
    assert driver.gets("l", TaskDone("other", 1, {})) == [Send("l", ResourceQuery())]
    assert driver.gets("l", Resources({})) == [Send("l", TaskOffer("learn", 1, LEARNER, LEARN))]


def test_a_strangers_messages_change_nothing(running):
    for message in (TaskAlive("learn", 1), Resources({}), TaskDone("learn", 1, {}), Left("x")):
        assert running.gets("stranger", message) == []
    assert set(running.core.tasks) == {"learn", "collect"}


def test_a_lost_task_is_offered_under_a_new_id_as_the_next_attempt(running):
    running.join("c2", COLLECTOR)
    _, offer = running.gets("c", Left("killed"))
    info = {**COLLECT, "task_id": "collect-2"}
    assert offer == Send("c2", TaskOffer("collect-2", 2, COLLECTOR, info))


def test_a_refused_task_is_the_same_attempt_under_a_new_id(running):
    running.gets("c", Left("killed"))
    running.join("c2", COLLECTOR)
    running.gets("c2", TaskRefused("collect-2", 2, "busy"))
    running.join("c3", COLLECTOR)
    assert running.core.tasks["collect-3"].attempt == 2


def test_an_answer_to_a_withdrawn_offer_is_late(driver):
    driver.submit(LEARNER, LEARN)
    driver.join("l", LEARNER)
    assert driver.after(10) == [Send("l", close("learn")), Send("l", ResourceQuery())]
    assert driver.gets("l", TaskStarted("learn", 1)) == []
    assert driver.core.tasks["learn-2"].state == "queued"


def test_silence_is_measured_from_the_last_message_of_the_task(running):
    running.after(29)
    running.gets("l", TaskAlive("learn", 1))
    running.gets("c", data(0))
    assert running.after(29) == []
    running.gets("l", TaskAlive("learn", 1))
    assert Send("c", close("collect")) in running.after(1)
    assert "learn" in running.core.tasks


def test_any_report_means_that_the_task_has_begun(driver):
    driver.submit(LEARNER, LEARN)
    driver.join("l", LEARNER)
    assert isinstance(driver.gets("l", TaskAlive("learn", 1))[0], OpenBuffer)
    assert driver.core.tasks["learn"].state == "running"


def test_a_demand_ends_the_leases_of_the_batch_before(running):
    demand = DataDemand("learn", 1, 0, "b", 2, 0)
    assert running.gets("l", demand) == [Demanded("learn")]
    answer = running.core.answer("learn", 0, [{}, {}], ["x", "y"], buffer_id="b")
    assert answer == [Send("l", LearnData("learn", 1, 0, ({}, {})))]
    then = running.gets("l", DataDemand("learn", 1, 1, "b", 2, 0))
    assert then == [Release("b", ("x", "y")), Demanded("learn")]


def test_a_demand_for_a_replacement_keeps_the_rest_of_the_batch_leased(running):
    running.gets("l", DataDemand("learn", 1, 0, "b", 2, 0))
    running.core.answer("learn", 0, [{}, {}], ["x", "y"], buffer_id="b")
    then = running.gets("l", DataDemand("learn", 1, 1, "b", 1, 0, ("x",)))
    assert then == [Release("b", ("x",)), Remove("b", ("x",)), Demanded("learn")]
    assert running.core.tasks["learn"].leased == ["y"]


def test_a_repeated_demand_gets_the_same_answer_without_new_leases(running):
    demand = DataDemand("learn", 1, 0, "b", 1, 0)
    running.gets("l", demand)
    assert running.gets("l", demand) == []
    (sent,) = running.core.answer("learn", 0, [{"a": 1}], ["x"], buffer_id="b")
    assert running.gets("l", demand) == [sent]
    assert running.core.tasks["learn"].leased == ["x"]


def test_a_batch_for_a_demand_that_is_gone_is_released(running):
    assert running.core.answer("learn", 5, [{}], ["x"], buffer_id="b") == [Release("b", ("x",))]


def test_a_lost_learner_ends_its_leases_and_keeps_its_buffer(running):
    running.gets("l", DataDemand("learn", 1, 0, "b", 1, 0))
    running.core.answer("learn", 0, [{}], ["x"], buffer_id="b")
    assert running.gets("l", Left("killed")) == [Release("b", ("x",))]
    assert running.core.buffers == {"b"}
    assert running.core.tasks["collect"].state == "running"


def test_a_learner_that_fails_for_good_closes_its_buffer(running):
    for attempt in range(1, 4):
        task_id = "learn" if attempt == 1 else f"learn-{attempt}"
        running.gets("l", TaskStarted(task_id, attempt))
        actions = running.gets("l", TaskFailed(task_id, attempt, "a traceback"))
        running.after(1)
        running.gets("c", TaskAlive("collect", 1))
    assert isinstance(actions[0], Ended)
    assert actions[1:] == [CloseBuffer("b"), Send("c", close("collect"))]


def test_a_closed_buffer_ends_its_collectors_and_expires_queued_ones(running):
    running.submit(COLLECTOR, {"task_id": "more", "buffer_id": "b"})
    assert running.core.close_buffer("b", running.now) == []  # the learner still uses it
    (ended,) = running.gets("l", TaskDone("learn", 1, {"n": 1}))
    assert (ended.task.origin, ended.result) == ("learn", {"n": 1})
    actions = running.acts(running.core.close_buffer("b", running.now))
    assert actions[:2] == [CloseBuffer("b"), Send("c", close("collect"))]
    assert (actions[2].task.origin, str(actions[2].task.state)) == ("more", "expired")
    (failed,) = running.gets("c", Left("killed"))[1:]
    assert str(failed.task.state) == "failed"


def test_a_collector_ends_once_when_its_learner_expires_in_the_same_moment(driver):
    driver.submit(LEARNER, LEARN)
    driver.after(570)
    driver.submit(COLLECTOR, COLLECT)
    assert [one.task.origin for one in driver.after(30)] == ["learn", "collect"]


def test_a_worker_that_has_left_is_forgotten(running):
    running.gets("c", Left("killed"))
    assert set(running.core.workers) == {"l"}
    assert running.gets("c", Left("killed")) == []


def test_a_worker_that_joins_again_has_lost_its_task(running):
    again = running.gets("c", Joined(COLLECTOR))
    assert again == [WorkersChanged(0), WorkersChanged(1), Send("c", ResourceQuery())]
    assert running.core.tasks["collect-2"].state == "queued"


def test_a_finished_task_is_remembered_a_while():
    driver = Driver(n_historical=2)
    driver.join("l", LEARNER)
    for name in ("a", "b", "c"):
        driver.submit(LEARNER, {"task_id": name})
        driver.gets("l", TaskDone(name, 1, {}))
    assert [task.origin for task in driver.core.historical] == ["b", "c"]


def test_a_task_cannot_be_given_twice_or_without_an_id(running):
    with pytest.raises(CoordinatorError, match="has not ended"):
        running.submit(LEARNER, LEARN)
    with pytest.raises(CoordinatorError, match="without task_id"):
        running.submit(LEARNER, {})
    running.core.drain(running.now)
    with pytest.raises(CoordinatorError, match="drains"):
        running.submit(LEARNER, {"task_id": "new"})


def test_draining_asks_all_workers_to_finish_and_queues_nothing_again(running):
    running.submit(COLLECTOR, {"task_id": "more", "buffer_id": "b"})
    actions = running.acts(running.core.drain(running.now))
    assert [one.message for one in actions if isinstance(one, Send)] == [
        close("learn"),
        close("collect"),
    ]
    assert running.core.is_draining
    running.gets("c", Left("killed"))
    running.gets("l", TaskFailed("learn", 1, "it broke"))
    assert not running.core.tasks


def test_a_restored_core_adopts_a_task_by_any_message_about_it(running):
    restored = Driver()
    restored.core.load_state_dict(running.core.state_dict(), 0.0)
    restored.gets("c", Joined(COLLECTOR))
    assert restored.gets("c", data(0)) == [Collected(data(0))]
    restored.gets("l", Joined(LEARNER))
    restored.gets("l", Resources({}, "learn", 1))
    assert restored.core.counters["adopted"] == 2
    assert {task.worker for task in restored.core.tasks.values()} == {"c", "l"}


def test_a_restored_core_asks_an_ending_task_to_end_again(running):
    running.core.finish("collect", 0.0)
    restored = Driver()
    restored.core.load_state_dict(running.core.state_dict(), 0.0)
    restored.gets("c", Joined(COLLECTOR))
    assert restored.gets("c", Resources({}, "collect", 1)) == [Send("c", close("collect"))]


def test_a_task_that_another_worker_has_is_not_adopted(running):
    running.gets("x", Joined(COLLECTOR))
    assert running.gets("x", Resources({}, "collect", 1)) == [Send("x", close("collect"))]


def test_two_workers_never_get_one_id_from_two_tasks_of_one_name(driver):
    driver.join("l", LEARNER)
    driver.submit(LEARNER, LEARN)
    driver.gets("l", TaskDone("learn", 1, {}))
    (offer,) = driver.submit(LEARNER, LEARN)
    assert offer.message.task_id == "learn-2"


def test_seen_numbers_forget_gaps_that_are_too_old():
    seen = SeenNumbers()
    assert [seen.add(number) for number in (0, 2, 1, 2, 0)] == [True, True, True, False, False]
    assert seen.state() == [3]
    assert seen.add(10**12)
    for number in range(5000):
        seen.add(10**12 + 1 + number)
    assert not seen.add(5)
    assert len(seen.state()) < 10
