"""The coordinator's link over HTTP, with workers that make everything up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dmiddleware.errors import ConfigError, DeliveryTimeout
from dmiddleware.worker import NaiveCollector, NaiveLearner
from dmiddleware.worker.comm import create_coordinator_link
from dmiddleware.worker.comm.http import Master
from dmiddleware.worker.comm.http_link import HttpLink
from dmiddleware.worker.comm.store import Store
from dmiddleware.worker.coordinator.conversation import Answer, Ask
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
from dmiddleware.worker.errors import TaskRefuse
from tests.dmiddleware.worker.comm.talking import Talking

DEADLINE_S = 20.0
COLLECTOR_TASK = {"task_id": "c", "buffer_id": "b", "collector_cfg": {"collect_setting": {"e": 1}}}
LEARNER_TASK = {"task_id": "l", "buffer_id": "b"}


def next_message(link: Talking, *, skip: type = TaskAlive) -> Any:
    for _ in range(100):
        received = link.receive(DEADLINE_S)
        assert received is not None, "no message came in time"
        if not isinstance(received[1], skip):
            return received[1]
    raise AssertionError(f"only {skip.__name__} came")


def config(
    tmp_path: Path, workers: Mapping[str, Any], **coordinator: Any
) -> dict[str, dict[str, Any]]:
    return {
        "main": {},
        "system": {
            "path_data": str(tmp_path / "data"),
            "path_policy": str(tmp_path / "policy"),
            "coordinator": {"type": "flask_fs", "port": 0, **workers, **coordinator},
        },
    }


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[NaiveCollector]:
    with NaiveCollector("127.0.0.1", 0, str(tmp_path / "data")) as worker:
        yield worker


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[NaiveLearner]:
    with NaiveLearner("127.0.0.1", 0, str(tmp_path / "data")) as worker:
        yield worker


@pytest.fixture
def opened(
    tmp_path: Path, collector: NaiveCollector, learner: NaiveLearner
) -> Iterator[tuple[Talking, Store]]:
    cfg = config(
        tmp_path,
        {
            "collector": {"collector0": ["c0", "127.0.0.1", collector.port]},
            "learner": {"learner0": ["l0", "127.0.0.1", learner.port]},
        },
    )
    http, store = create_coordinator_link(cfg)
    link = Talking(http)
    yield link, store
    link.close(DEADLINE_S)
    store.clear()


def joined(link: Talking) -> None:
    came = {link.receive(DEADLINE_S) for _ in link_roles(link)}
    assert came == {(uid, Joined(role)) for uid, role in link_roles(link).items()}


def link_roles(link: Talking) -> dict[str, str]:
    return {"collector0": "collector", "learner0": "learner"}


def test_workers_join_and_state_their_resources(opened: tuple[Talking, Store]) -> None:
    link, _ = opened
    assert link.uid == "coordinator"
    joined(link)
    assert link.peers() == {"collector0": "collector", "learner0": "learner"}
    link.send("learner0", ResourceQuery())
    assert link.receive(DEADLINE_S) == ("learner0", Resources({"gpu": 1, "cpu": 20}))


def test_a_collector_task_runs_from_its_offer_to_its_end(opened: tuple[Talking, Store]) -> None:
    link, store = opened
    joined(link)
    link.send("collector0", TaskOffer("c-2", 3, "collector", COLLECTOR_TASK))
    assert next_message(link) == TaskStarted("c-2", 3)
    for number in range(19):
        message = next_message(link)
        assert isinstance(message, StepDataReady)
        assert (message.task_id, message.attempt, message.seq) == ("c-2", 3, number)
        assert message.buffer_id == "b"
        assert message.data["data_id"] == message.data_id
        [step] = store.get(message.data["object_ref"])
        assert set(step) == {"obs", "next_obs", "action", "reward", "done"}
    info = next_message(link)
    assert isinstance(info, CollectorInfo)
    assert info.seq == 19
    assert {key: info.info[key] for key in ("collector_done", "cur_episode", "cur_step")} == {
        "collector_done": True, "cur_episode": 1, "cur_step": 314,
    }  # fmt: skip
    link.send("collector0", TaskClose("c-2", 3))
    done = next_message(link, skip=TaskAlive | CollectorInfo)
    assert isinstance(done, TaskDone)
    assert done.result["task_id"] == "c-2"
    assert done.result["real_episode_count"] == 1
    assert done.result["step_count"] == done.result["sample_count"] == 314
    assert done.result["collect_setting"] == {"e": 1}


def test_a_learner_task_demands_learns_and_ends(opened: tuple[Talking, Store]) -> None:
    link, _ = opened
    joined(link)
    link.send("learner0", TaskOffer("l", 0, "learner", LEARNER_TASK))
    assert next_message(link) == TaskStarted("l", 0)
    for number in range(6):
        demand = next_message(link)
        assert demand == DataDemand("l", 0, number, "b", 2, number)
        data = tuple(
            {"data_id": f"d{i}", "replay_buffer_idx": i, "priority": 0.5 + i} for i in range(2)
        )
        link.send("learner0", LearnData("l", 0, number, data))
        info = next_message(link)
        assert isinstance(info, LearnInfo)
        assert (info.seq, info.buffer_id) == (number, "b")
        assert info.info["learner_step"] == number + 1
        assert info.info["learner_done"] == (number == 5)
        assert info.info["priority_info"] == {
            "replay_buffer_idx": [0, 1], "priority": [0.5, 1.5],
        }  # fmt: skip
    link.send("learner0", TaskClose("l", 0))
    done = next_message(link, skip=TaskAlive | DataDemand)
    assert done == TaskDone("l", 0, {"task_id": "l", "buffer_id": "b"})


def test_a_task_that_waits_for_data_is_reported_alive_and_can_be_closed(
    opened: tuple[Talking, Store],
) -> None:
    link, _ = opened
    joined(link)
    link.send("learner0", TaskOffer("l", 0, "learner", LEARNER_TASK))
    assert next_message(link) == TaskStarted("l", 0)
    assert isinstance(next_message(link), DataDemand)
    assert link.receive(DEADLINE_S) == ("learner0", TaskAlive("l", 0))
    link.send("learner0", TaskClose("l", 0))
    assert isinstance(next_message(link), TaskDone)


def test_what_does_not_fit_the_workers_task_is_answered_or_ignored(
    opened: tuple[Talking, Store],
) -> None:
    link, _ = opened
    joined(link)
    link.send("collector0", TaskOffer("l", 0, "learner", LEARNER_TASK))
    refused = next_message(link)
    assert isinstance(refused, TaskRefused)
    assert "unknown task" in refused.reason
    link.send("collector0", TaskOffer("c", 0, "collector", {"no": {1, 2}}))
    refused = next_message(link)
    assert isinstance(refused, TaskRefused)
    assert "JSON" in refused.reason
    link.send("collector0", TaskClose("other", 0))
    failed = next_message(link)
    assert isinstance(failed, TaskFailed)
    assert "does not run" in failed.message
    link.send("collector0", LearnData("other", 0, 0))
    link.send("collector0", TaskStarted("other", 0))
    link.send("collector0", ResourceQuery())
    assert isinstance(next_message(link), Resources)


def test_the_same_offer_again_is_answered_and_not_started_again(
    opened: tuple[Talking, Store],
) -> None:
    link, _ = opened
    joined(link)
    for _ in range(2):
        link.send("learner0", TaskOffer("l", 0, "learner", LEARNER_TASK))
    assert next_message(link, skip=TaskAlive | DataDemand) == TaskStarted("l", 0)
    assert next_message(link, skip=TaskAlive | DataDemand) == TaskStarted("l", 0)


def test_messages_to_workers_that_are_not_connected_are_not_sent(
    opened: tuple[Talking, Store],
) -> None:
    link, _ = opened
    joined(link)
    with pytest.raises(DeliveryTimeout, match="nobody"):
        link.link.send("nobody", Ask("1", "resource"))
    with pytest.raises(TypeError, match="requests only"):
        link.link.send("learner0", Answer("1"))
    link.close(DEADLINE_S)
    with pytest.raises(DeliveryTimeout, match="learner0"):
        link.link.send("learner0", Ask("1", "resource"))


def test_closing_delivers_what_was_sent_and_releases_the_workers(
    opened: tuple[Talking, Store], collector: NaiveCollector
) -> None:
    link, _ = opened
    joined(link)
    link.send("collector0", TaskOffer("c", 0, "collector", COLLECTOR_TASK))
    link.close(DEADLINE_S)
    link.close(DEADLINE_S)
    assert next_message(link, skip=Left) == TaskStarted("c", 0)
    assert not collector.is_connected
    assert link.peers() == {}


def test_closing_ends_the_attempts_to_connect() -> None:
    master = Master(port=0, request_retry_waiting=1000.0)
    link = HttpLink(master, {"absent": ("collector", "127.0.0.1", 9)})
    link.close(DEADLINE_S)
    assert "http-link-absent" not in [thread.name for thread in threading.enumerate()]


def quick_master() -> Master:
    return Master(port=0, request_retries=1, request_retry_waiting=0.05, heartbeat_check_span=0.1)


def test_a_worker_may_leave_and_come_back() -> None:
    with NaiveCollector("127.0.0.1", 0) as worker:
        port = worker.port
        link = Talking(HttpLink(quick_master(), {"w": ("collector", "127.0.0.1", port)}))
        assert link.receive(DEADLINE_S) == ("w", Joined("collector"))
        link.send("w", TaskOffer("c", 0, "collector", COLLECTOR_TASK))
        worker.close()
    while not isinstance(next_message(link), Left):
        pass
    assert link.peers() == {}
    with NaiveCollector("127.0.0.1", port):
        assert link.receive(DEADLINE_S) == ("w", Joined("collector"))
        link.send("w", ResourceQuery())
        assert next_message(link) == Resources({"gpu": 1, "cpu": 20})
        link.close(DEADLINE_S)


def test_a_worker_that_refuses_is_reported_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with NaiveCollector("127.0.0.1", 0, run_id="other") as worker:
        link = Talking(HttpLink(quick_master(), {"w": ("collector", "127.0.0.1", worker.port)}))
        assert link.receive(2.5) is None
        link.close(DEADLINE_S)
    assert caplog.text.count("this is the run other") == 1


def test_a_worker_that_does_not_answer_is_lost() -> None:
    class Mute(NaiveLearner):
        def _process_task(self, task: dict[str, Any]) -> Mapping[str, Any]:
            assert self._closing.wait(DEADLINE_S)
            return {}

    with Mute("127.0.0.1", 0) as worker:
        workers = {"w": ("learner", "127.0.0.1", worker.port)}
        link = Talking(HttpLink(quick_master(), workers), answer_timeout_s=0.2)
        assert link.receive(DEADLINE_S) == ("w", Joined("learner"))
        link.send("w", ResourceQuery())
        assert isinstance(next_message(link), Left)
        link.close(0.5)


class Answering(NaiveLearner):
    """Answers each task as a function says."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
        super().__init__("127.0.0.1", 0)
        self._answer = answer

    def _process_task(self, task: dict[str, Any]) -> Mapping[str, Any]:
        return self._answer(task)


@pytest.mark.parametrize(
    "answer",
    [{"gpu": "many"}, {"gpu": None}, {"gpu": 1, "task_id": "a", "attempt": "first"}],
)
def test_a_worker_whose_answers_are_unusable_is_released(answer: dict[str, Any]) -> None:
    with Answering(lambda task: answer) as worker:
        link = Talking(HttpLink(quick_master(), {"w": ("learner", "127.0.0.1", worker.port)}))
        assert link.receive(DEADLINE_S) == ("w", Joined("learner"))
        link.send("w", ResourceQuery())
        left = next_message(link)
        assert isinstance(left, Left)
        assert "Error" in left.reason
        link.close(DEADLINE_S)


def test_a_task_that_fails_between_requests_is_reported() -> None:
    def answer(task: Mapping[str, Any]) -> dict[str, Any]:
        if task["name"] == "learner_get_data_task":
            raise ValueError("the env broke")
        return {}

    with Answering(answer) as worker:
        link = Talking(HttpLink(quick_master(), {"w": ("learner", "127.0.0.1", worker.port)}))
        assert link.receive(DEADLINE_S) == ("w", Joined("learner"))
        link.send("w", TaskOffer("l", 1, "learner", LEARNER_TASK))
        assert next_message(link) == TaskStarted("l", 1)
        failed = next_message(link)
        assert isinstance(failed, TaskFailed)
        assert (failed.task_id, failed.attempt) == ("l", 1)
        assert "the env broke" in failed.message
        link.close(DEADLINE_S)


def test_a_refused_task_is_reported_with_its_reason() -> None:
    class Picky(NaiveLearner):
        def _before_task(self, data: dict[str, Any]) -> None:
            raise TaskRefuse("not today")

    with Picky("127.0.0.1", 0) as worker:
        link = Talking(HttpLink(quick_master(), {"w": ("learner", "127.0.0.1", worker.port)}))
        assert link.receive(DEADLINE_S) == ("w", Joined("learner"))
        link.send("w", TaskOffer("l", 1, "learner", LEARNER_TASK))
        refused = next_message(link)
        assert isinstance(refused, TaskRefused)
        assert "not today" in refused.reason
        link.close(DEADLINE_S)


@pytest.mark.parametrize("address", ["x", ["a", "127.0.0.1"], ["a", "127.0.0.1", "80"], [1, 2, 3]])
def test_unusable_addresses_of_workers_are_refused(tmp_path: Path, address: Any) -> None:
    with pytest.raises(ConfigError, match=r"system\.coordinator\.collector\.w"):
        create_coordinator_link(config(tmp_path, {"collector": {"w": address}}))


def test_two_workers_of_one_name_are_refused(tmp_path: Path) -> None:
    workers = {role: {"w": ["w", "127.0.0.1", 1]} for role in ("collector", "learner")}
    with pytest.raises(ConfigError, match="two workers"):
        create_coordinator_link(config(tmp_path, workers))


def test_naive_workers_say_what_they_do_not_do() -> None:
    for worker in (NaiveCollector("127.0.0.1", 0), NaiveLearner("127.0.0.1", 0)):
        with pytest.raises(Exception, match="unknown task"):
            worker._process_task({"name": "dance"})
        with pytest.raises(Exception, match="runs no task"):
            worker._process_task({"name": f"{type(worker).__name__[5:].lower()}_close_task"})
