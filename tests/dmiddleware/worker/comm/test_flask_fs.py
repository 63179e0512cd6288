"""Collectors and learners over HTTP, with their files, driven by a coordinator's link."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from easydict import EasyDict

from dmiddleware.classic import create_policy
from dmiddleware.errors import ConfigError
from dmiddleware.worker import (
    FlaskFileSystemCollector,
    FlaskFileSystemLearner,
    create_comm_collector,
    create_comm_learner,
)
from dmiddleware.worker.comm.file_store import FileStore
from dmiddleware.worker.comm.http import Master
from dmiddleware.worker.comm.http_link import HttpLink
from dmiddleware.worker.coordinator.messages import (
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
from tests.dmiddleware.worker.comm.comm_workers import (
    ScriptedCollector,
    collector_task,
    info,
    learner_task,
    metadata,
    sample,
)
from tests.dmiddleware.worker.comm.talking import Talking

DEADLINE_S = 30.0


@pytest.fixture
def cfg(tmp_path: Path) -> dict[str, Any]:
    return {
        "port": 0,
        "path_data": str(tmp_path / "data"),
        "path_policy": str(tmp_path / "policy"),
        "heartbeat_span": 0.2,
        "request_retries": 1,
        "request_retry_waiting": 0.05,
    }


@pytest.fixture
def store(cfg: dict[str, Any]) -> FileStore:
    return FileStore(cfg["path_data"], cfg["path_policy"], "run")


class Scripted(FlaskFileSystemCollector):
    """A collector over HTTP whose tasks run a function."""

    def __init__(self, cfg: Any, work: Any) -> None:
        super().__init__(cfg)
        self._script = work

    def _create_collector(self, task_info: Any) -> Any:
        collector = ScriptedCollector(self._script)
        for name in ("send_metadata", "send_stepdata", "get_policy_update_info"):
            setattr(collector, name, getattr(self, name))
        return collector


class Coordinator:
    """A coordinator's end, which a test plays."""

    def __init__(self, role: str, port: int) -> None:
        self.master = Master(
            port=0, request_retries=1, request_retry_waiting=0.05, heartbeat_check_span=0.1
        )
        self.http = HttpLink(self.master, {"w": (role, "127.0.0.1", port)})
        self.link = Talking(self.http)
        assert self.link.receive(DEADLINE_S) == ("w", Joined(role))

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.link.close(DEADLINE_S)

    def send(self, message: Message) -> None:
        self.link.send("w", message)

    def next(self, *skip: type) -> Any:
        for _ in range(300):
            received = self.link.receive(DEADLINE_S)
            assert received is not None, "no message came in time"
            if not isinstance(received[1], (TaskAlive, *skip)):
                return received[1]
        raise AssertionError("only messages that are skipped came")

    def die(self) -> None:
        """Stop as if the process had been killed: nothing is released, nothing is answered."""
        self.master._server.close()
        self.http._closing.set()
        for connection in self.master._connections:
            connection.disconnect = lambda data=None: None  # type: ignore[method-assign]


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).rglob("*") if path.is_file())


def play(collector: Any) -> None:
    for index in range(3):
        ref = collector.send_stepdata(f"env_0_{index}", [{"x": torch.tensor(index)}])
        assert ref == f"run/env_0_{index}.safetensors.lz4"
        collector.send_metadata(metadata(f"env_0_{index}"))
    collector.send_metadata(info(collector_done=True))
    assert collector.end.wait(DEADLINE_S)


def wait(collector: Any) -> None:
    assert collector.end.wait(DEADLINE_S)


def crash(collector: Any) -> None:
    collector.send_stepdata("env_0_a", 1)
    collector.send_metadata(metadata("env_0_a"))
    collector.send_stepdata("env_0_b", 1)
    raise ValueError("the env broke")


def test_a_collector_reports_its_files_and_ends_in_order(
    cfg: dict[str, Any], store: FileStore
) -> None:
    with Scripted(cfg, play) as worker, Coordinator("collector", worker.port) as coordinator:
        coordinator.send(ResourceQuery())
        assert coordinator.next() == Resources({"gpu": 1, "cpu": 20})
        coordinator.send(TaskOffer("c", 1, "collector", collector_task()))
        assert coordinator.next() == TaskStarted("c", 1)
        for index in range(3):
            ready = coordinator.next()
            assert isinstance(ready, StepDataReady)
            assert (ready.seq, ready.data_id, ready.buffer_id) == (index, f"env_0_{index}", "b")
            assert store.get(ready.data["object_ref"]) == [{"x": torch.tensor(index)}]
        assert isinstance(coordinator.next(), CollectorInfo)
        coordinator.send(TaskClose("c", 1))
        done = coordinator.next()
        assert done == TaskDone("c", 1, {"collector_done": True, "step_count": 9, "task_id": "c"})
        coordinator.send(TaskOffer("c-2", 2, "collector", collector_task()))
        assert coordinator.next() == TaskStarted("c-2", 2)
        assert worker.job is not None


def test_reports_that_are_ready_travel_together(cfg: dict[str, Any]) -> None:
    sent = threading.Event()

    def flood(collector: Any) -> None:
        for index in range(8):
            collector.send_stepdata(f"d{index}", index)
            collector.send_metadata(metadata(f"d{index}"))
        sent.set()
        wait(collector)

    with Scripted(cfg, flood) as worker:
        worker.process_task({"name": "collector_start_task", "task_info": collector_task()})
        assert sent.wait(DEADLINE_S)
        answer = worker.process_task({"name": "collector_data_task", "most": 6})
        ids = [one["data_id"] for one in (answer, *answer["more"])]
        assert ids == [f"d{index}" for index in range(6)]
        answer = worker.process_task({"name": "collector_data_task"})
        assert answer["data_id"] == "d6"
        assert "more" not in answer


def test_an_error_in_a_collector_follows_its_reports_and_leaves_no_files(
    cfg: dict[str, Any], store: FileStore
) -> None:
    with Scripted(cfg, crash) as worker, Coordinator("collector", worker.port) as coordinator:
        coordinator.send(TaskOffer("c", 0, "collector", collector_task()))
        assert coordinator.next() == TaskStarted("c", 0)
        ready = coordinator.next()
        assert isinstance(ready, StepDataReady)
        failed = coordinator.next()
        assert isinstance(failed, TaskFailed)
        assert "the env broke" in failed.message
        assert files(cfg["path_data"]) == ["env_0_a.safetensors.lz4"]


def test_unusable_tasks_are_refused_with_the_reason(cfg: dict[str, Any]) -> None:
    with Scripted(cfg, wait) as worker, Coordinator("collector", worker.port) as coordinator:
        coordinator.send(TaskOffer("c", 0, "collector", {"task_id": "c"}))
        refused = coordinator.next()
        assert isinstance(refused, TaskRefused)
        assert "buffer_id" in refused.reason
        coordinator.send(TaskOffer("c", 0, "learner", learner_task()))
        refused = coordinator.next()
        assert isinstance(refused, TaskRefused)
        assert "unknown task" in refused.reason


def test_a_learner_demands_learns_and_publishes_its_policy(
    cfg: dict[str, Any], store: FileStore
) -> None:
    data = tuple(
        metadata(f"d{index}", object_ref=store.put(f"d{index}", sample(index)))
        for index in range(4)
    )
    with (
        FlaskFileSystemLearner(cfg) as worker,
        Coordinator("learner", worker.port) as coordinator,
    ):
        coordinator.send(ResourceQuery())
        assert coordinator.next() == Resources({"gpu": 1, "cpu": 0})
        coordinator.send(TaskOffer("l", 0, "learner", learner_task()))
        assert coordinator.next() == TaskStarted("l", 0)
        for number in range(3):
            demand = coordinator.next(LearnInfo)
            assert demand == DataDemand("l", 0, number, "b", 4, number)
            coordinator.send(LearnData("l", 0, number, data))
        learned = coordinator.next()
        assert isinstance(learned, LearnInfo)
        assert learned.info["learner_done"]
        assert learned.info["learner_step"] == 3
        found = store.newest("p", -1)
        assert found is not None
        assert found[0] == found[1]["iter"] == 3
        coordinator.send(TaskClose("l", 0))
        assert coordinator.next() == TaskDone("l", 0, {"task_id": "l", "buffer_id": "b"})


def test_a_demand_is_sent_once_while_it_waits_and_names_lost_samples(
    cfg: dict[str, Any], store: FileStore
) -> None:
    kept = metadata("kept", object_ref=store.put("kept", sample()))
    lost = metadata("lost", object_ref="run/lost.safetensors.lz4")
    with (
        FlaskFileSystemLearner(cfg) as worker,
        Coordinator("learner", worker.port) as coordinator,
    ):
        coordinator.send(TaskOffer("l", 0, "learner", learner_task(batch_size=2)))
        assert coordinator.next() == TaskStarted("l", 0)
        assert isinstance(coordinator.next(), DataDemand)
        assert coordinator.link.receive(DEADLINE_S) == ("w", TaskAlive("l", 0))
        assert coordinator.link.receive(DEADLINE_S) == ("w", TaskAlive("l", 0))
        coordinator.send(LearnData("l", 0, 0, (kept, lost)))
        assert coordinator.next() == DataDemand("l", 0, 1, "b", 1, 0, ("lost",))


def test_a_running_task_is_adopted_by_the_next_coordinator_and_no_report_is_lost(
    cfg: dict[str, Any], store: FileStore
) -> None:
    may_go_on = threading.Event()

    def work(collector: Any) -> None:
        collector.send_stepdata("a", 1)
        collector.send_metadata(metadata("a"))
        assert may_go_on.wait(DEADLINE_S)
        for name in "bcd":
            collector.send_stepdata(name, 1)
            collector.send_metadata(metadata(name))
        wait(collector)

    with Scripted(cfg, work) as worker:
        first = Coordinator("collector", worker.port)
        first.send(TaskOffer("c", 4, "collector", collector_task()))
        assert first.next() == TaskStarted("c", 4)
        ready = first.next()
        assert (ready.data_id, ready.seq) == ("a", 0)
        first.die()
        may_go_on.set()
        with Coordinator("collector", worker.port) as second:
            second.send(ResourceQuery())
            assert second.next() == Resources({"gpu": 1, "cpu": 20}, "c", 4)
            later = [second.next() for _ in "bcd"]
            if later[0].seq == ready.seq:  # repeated, as no other request came after it
                assert later.pop(0) == ready
                later.append(second.next())
            assert [one.data_id for one in later] == ["b", "c", "d"]
            numbers = [one.seq for one in later]
            assert numbers == sorted(set(numbers))
            assert numbers[0] > 0
            assert store.missing([one.data["object_ref"] for one in later]) == set()
            second.send(TaskClose("c", 4))
            assert isinstance(second.next(), TaskDone)


def say_two(store: FileStore) -> Any:
    """Return the work of a collector that reports two samples."""

    def work(collector: Any) -> None:
        for name in "ab":
            collector.send_stepdata(name, 1)
            collector.send_metadata(metadata(name))
        wait(collector)

    return work


def reported(worker: Any, n: int) -> Any:
    """Return an answer with ``n`` reports."""
    answer = {"pending": True}
    while "pending" in answer or len(answer.get("more", ())) < n - 1:
        worker.take_back()
        answer = worker.process_task({"name": "collector_data_task", "most": n})
    return answer


def test_reports_that_nobody_took_are_repeated_or_deleted_with_their_task(
    cfg: dict[str, Any], store: FileStore
) -> None:
    with Scripted(cfg, say_two(store)) as worker:
        worker.process_task({"name": "collector_start_task", "task_info": collector_task()})
        result = reported(worker, 2)
        worker._slave._result_not_taken({"name": "collector_data_task"}, result)
        assert worker.process_task({"name": "collector_data_task"}) == {
            key: value for key, value in result.items() if key != "more"
        }
        worker.process_task({"name": "collector_close_task"})
        assert files(cfg["path_data"]) == ["a.safetensors.lz4"]
        worker._slave._result_not_taken({"name": "collector_close_task"}, {})
        assert files(cfg["path_data"]) == ["a.safetensors.lz4"]
        worker.process_task({"name": "collector_start_task", "task_info": collector_task("d")})
        reported(worker, 2)
        worker.deal_with_collector_close()
        worker.take_back()
        assert files(cfg["path_data"]) == []


def test_reports_that_nobody_took_are_deleted_with_their_worker(
    cfg: dict[str, Any], store: FileStore
) -> None:
    with Scripted(cfg, say_two(store)) as worker:
        worker.process_task({"name": "collector_start_task", "task_info": collector_task()})
        reported(worker, 2)
        worker.take_back()
        assert files(cfg["path_data"]) == ["a.safetensors.lz4", "b.safetensors.lz4"]
    assert files(cfg["path_data"]) == []


def test_progress_that_nobody_took_is_reported_again(cfg: dict[str, Any]) -> None:
    ask = {"name": "learner_get_data_task"}
    with FlaskFileSystemLearner(cfg) as worker:
        worker.process_task({"name": "learner_start_task", "task_info": learner_task()})
        assert "batch_size" in worker.process_task(ask)
        worker.send_learn_info({"learner_step": 7, "priority_info": {"priority": [1.0]}})
        assert worker.process_task(ask)["info"]["learner_step"] == 7
        worker.send_learn_info({"learner_step": 8, "priority_info": {"priority": [2.0]}})
        worker.take_back()
        info = worker.process_task(ask)["info"]
        assert (info["learner_step"], info["priority_info"]) == (8, {"priority": [1.0, 2.0]})
        assert "info" not in worker.process_task(ask)
        worker.take_back()
        assert "info" not in worker.process_task(ask)


def test_the_task_is_abandoned_if_the_coordinator_does_not_come_back(cfg: dict[str, Any]) -> None:
    def work(collector: Any) -> None:
        collector.send_stepdata("a", 1)
        wait(collector)

    with Scripted({**cfg, "timeout_s": 0.5}, work) as worker:
        coordinator = Coordinator("collector", worker.port)
        coordinator.send(TaskOffer("c", 0, "collector", collector_task()))
        assert coordinator.next() == TaskStarted("c", 0)
        coordinator.die()
        assert worker.join(DEADLINE_S)
        assert worker.job is None
        assert files(cfg["path_data"]) == []


def test_join_ends_when_the_coordinator_releases_the_worker(cfg: dict[str, Any]) -> None:
    with Scripted(cfg, wait) as worker:
        with Coordinator("collector", worker.port):
            assert not worker.join(0.01)
        assert worker.join(DEADLINE_S)


def test_a_worker_that_is_closed_leaves_its_coordinator(cfg: dict[str, Any]) -> None:
    with Scripted(cfg, play) as worker, Coordinator("collector", worker.port) as coordinator:
        coordinator.send(TaskOffer("c", 0, "collector", collector_task()))
        assert coordinator.next() == TaskStarted("c", 0)
        worker.close()
        worker.close()
        assert isinstance(coordinator.next(StepDataReady, CollectorInfo, TaskFailed), Left)


def test_a_real_collector_plays_and_stores_as_its_task_says(
    cfg: dict[str, Any], store: FileStore
) -> None:
    store.publish("policy", 7, {"iter": 7, "model": dqn().collect_mode.state_dict()["model"]})
    task = collector_task(
        collector_cfg={
            "type": "zergling",
            "compressor": "zlib",
            "env": {"id": "CartPole-v1", "env_num": 2, "manager": {"episode_num": 1}},
            "policy": DQN,
            "collect_setting": {"eps": 0.5},
            "policy_update_path": "policy",
        }
    )
    with (
        FlaskFileSystemCollector(cfg) as worker,
        Coordinator("collector", worker.port) as coordinator,
    ):
        coordinator.send(TaskOffer("c", 0, "collector", task))
        assert coordinator.next() == TaskStarted("c", 0)
        ready, done = [], False
        while not done:
            message = coordinator.next()
            if isinstance(message, StepDataReady):
                ready.append(message)
            else:
                done = message.info["collector_done"]
        coordinator.send(TaskClose("c", 0))
        result = coordinator.next().result
        assert result["real_episode_count"] == 2
        assert len(ready) == result["sample_count"] > 10
        for message in ready:
            assert message.data["policy_iter"] == 7
            assert message.data["object_ref"].endswith(".zlib")
            assert store.get(message.data["object_ref"])["obs"].shape == (4,)
        assert len(files(cfg["path_data"])) == len(ready)


DQN = {
    "type": "dqn",
    "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_sizes": [8]},
    "collect": {"n_sample": 1},
}


def dqn() -> Any:
    return create_policy(EasyDict(DQN))


def test_workers_are_created_by_name(cfg: dict[str, Any]) -> None:
    assert isinstance(create_comm_collector({"type": "flask_fs", **cfg}), FlaskFileSystemCollector)
    assert isinstance(create_comm_learner({"type": "flask_fs", **cfg}), FlaskFileSystemLearner)


def test_hosts_and_ports_are_those_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmiddleware.worker.comm.flask_fs.rank_and_world_size", lambda: (1, 2))
    assert FlaskFileSystemLearner({"port": 22333}).port == 22334
    assert FlaskFileSystemLearner({"port": [1000, 2000]}).port == 2000
    assert FlaskFileSystemLearner({"port": 0}).port == 0
    with pytest.raises(ConfigError, match="rank 1"):
        FlaskFileSystemLearner({"host": ["127.0.0.1"]})


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"host": "0.0.0.0"}, "key"),
        ({"key_file": "/nowhere"}, "key_file"),
        ({"run_id": "../x"}, "letters"),
        ({"heartbeat_span": 0.1}, "heartbeat_span"),
        ({"channel": -1}, "channel"),
        ({"prot": 1}, "port"),
    ],
)
def test_unusable_configs_are_refused(
    cfg: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        FlaskFileSystemCollector({**cfg, **changes})


def announced_files(coordinator: Coordinator, most: int | None) -> set[str]:
    """Return the files of the next messages: as many as asked for, or until it leaves."""
    names: set[str] = set()
    while most is None or len(names) < most:
        message = coordinator.next(CollectorInfo)
        if isinstance(message, Left):
            break
        if isinstance(message, StepDataReady):
            names.add(f"{message.data_id}.safetensors.lz4")
    return names


PROGRAM = """
import json, sys
import torch
from dmiddleware.worker import create_comm_collector
torch.set_num_threads(1)
with create_comm_collector(json.loads(sys.argv[1])) as worker:
    print(worker.port, flush=True)
    worker.join()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_worker_and_leaves_no_process_socket_or_file(
    cfg: dict[str, Any], number: signal.Signals
) -> None:
    task = collector_task(
        collector_cfg={
            "type": "zergling",
            "env": {
                "id": "CartPole-v1", "env_num": 2, "mode": "async",
                "manager": {"episode_num": 10**6},
            },
            "policy": DQN,
            "policy_update_path": "policy",
        }
    )  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, json.dumps({"type": "flask_fs", **cfg})]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            store = FileStore(cfg["path_data"], cfg["path_policy"], "run")
            store.publish("policy", 0, dqn().collect_mode.state_dict() | {"iter": 0})
            with Coordinator("collector", port) as coordinator:
                coordinator.send(TaskOffer("c", 0, "collector", task))
                assert coordinator.next() == TaskStarted("c", 0)
                announced = announced_files(coordinator, 20)
                children = psutil.Process(process.pid).children(recursive=True)
                assert children
                process.send_signal(number)
                _, errors = process.communicate(timeout=DEADLINE_S)
                announced |= announced_files(coordinator, None)
        finally:
            process.kill()
    assert process.returncode == (143 if number is signal.SIGTERM else -signal.SIGINT), errors
    assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    assert set(files(cfg["path_data"])) <= announced
